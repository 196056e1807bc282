"""`jvlab ps` and `jvlab stop`."""

from __future__ import annotations

from typing import Any

from jvlab.wire.processes._labs import list_labs, stop_lab


def run_ps(arguments: Any) -> dict[str, Any]:
    """The body of `jvlab ps`."""
    labs = list_labs()
    width = max((len(info.name) for info in labs), default=0)
    if not arguments.json:
        for info in labs:
            print(f"{info.name.ljust(width)}  {info.state.ljust(8)}  {info.words}")
        if not labs:
            print("no lab is running")
    return {"labs": [info.plain() for info in labs]}


def run_stop(arguments: Any) -> dict[str, Any]:
    """The body of `jvlab stop`."""
    done = stop_lab(arguments.name, arguments.timeout)
    if not arguments.json:
        how = f", {len(done['killed'])} of them killed" if done["killed"] else ""
        print(f"{done['stopped']} ended in {done['seconds']:.1f} s: {done['processes']} processes{how}, none is left")
    return done
