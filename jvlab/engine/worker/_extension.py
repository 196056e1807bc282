"""Methods that jvlab adds to every vLLM worker, called with collective_rpc: plain lists, dicts and numbers only.

vLLM imports this module in each worker before it builds the model, so patches that must come first are applied here.
"""

from __future__ import annotations

import faulthandler
import os
from typing import TYPE_CHECKING, Any

from jvlab._files import Plain
from jvlab.engine import _patches

if TYPE_CHECKING:
    from jvlab.engine.worker._rank_sync import WorkerSync

_patches.install("worker")
if os.environ.get("VLLM_TARGET_DEVICE") == "cpu":
    _patches.install("CPU worker")
# a worker that dies of a signal writes which: vLLM may ask for its exit code before there is one
if not faulthandler.is_enabled():
    faulthandler.enable(2, all_threads=False)


class WorkerExtension:
    """Mixed into vLLM's worker class; `self` is the worker. Names start with jv_ so that they can't collide."""

    if TYPE_CHECKING:  # those of CALLS, and the worker's own

        def __getattr__(self, name: str) -> Any: ...

    def _jv(self) -> WorkerSync:
        from jvlab.engine.worker._rank_sync import WorkerSync

        found = self.__dict__.get("_jv_sync")
        if found is None:
            found = self.__dict__["_jv_sync"] = WorkerSync(self)
        return found


# methods of `WorkerSync`, which says what they do: `jv_open` of a worker calls its `open`, and so on
CALLS = (
    *(
        "trace",
        "open",
        "prepare",
        "move",
        "verify",
        "commit",
        "abandon",
        "check",
        "close",
    ),
    *("peek", "begin_hidden", "hidden", "end_hidden", "capture_routes"),
    *("release_shadows", "clear_kv", "clears_new_blocks"),
)


def _forwarding(name: str) -> Any:
    def forward(self: WorkerExtension, *args: Any) -> Plain:
        return getattr(self._jv(), name)(*args)

    return forward


for _name in CALLS:
    setattr(WorkerExtension, f"jv_{_name}", _forwarding(_name))
