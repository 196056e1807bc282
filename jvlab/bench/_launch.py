"""`jvlab bench launch`: from `lab.launch` to a pool that is ready, against `vllm.LLM(...)` with the same arguments.

    cold_s    the first launch of a lab: vLLM is imported (also if `jvlab warm` runs)
    warm_s    the median of later ones in the same lab: the warm process forks (JVLAB_WARM=0: same as cold)
    vllm_s    `vllm.LLM(...)` in a Python that has imported vLLM; the import is `vllm_import_s`

Run one after another. Ratios are vLLM's seconds over ours: above 1 ours is faster.
"""

from __future__ import annotations

import importlib
import os
import statistics
import time
from typing import Any

from jvlab.bench._side import Lines, Side, model_of, timed, vllm_build


def plain_side(order: dict[str, Any], lines: Lines) -> None:
    """Import vLLM, start one engine, report how long each took."""
    imported, make = timed(lambda: importlib.import_module("vllm").LLM)
    started, llm = timed(make, **order)
    lines.send((imported, started))
    lines.receive()  # until it is killed
    del llm


def run_bench_launch(
    rounds: int = 5, model: str | None = None, device: str = "auto", eager: bool = False
) -> dict[str, Any]:
    """Measure; prints a line for each launch, returns the facts."""
    import jvlab as jv
    from jvlab.engine import _defaults
    from jvlab.lab._launch_settings import resolve_device

    device = resolve_device(device)
    path = model_of(model)
    engine: dict[str, Any] = {"max_model_len": 512} | (
        {"enforce_eager": True} if eager else {}
    )
    print(f"bench launch on {device}: {path}", flush=True)
    seconds = []
    if os.environ.get("JVLAB_WARM") != "0":
        os.environ["JVLAB_WARM"] = "lab"
    with jv.Lab() as lab:
        for number in range(rounds + 1):
            start = time.perf_counter()
            with lab.launch(
                path, name=f"launch{number}", engine=engine, device=device
            ).wait(progress=False):
                seconds.append(time.perf_counter() - start)
            print(f"{'warm' if number else 'cold'}: {seconds[-1]:.2f} s", flush=True)
    env = _defaults.environment(device, 1, 1, 0, _defaults.usable_cores(), path)
    arguments = _defaults.engine_arguments(path, device, 1, "auto", engine)
    with Side("jvlab.bench._launch:plain_side", arguments, env) as plain:
        imported, started = plain.receive()
    warm = statistics.median(seconds[1:])
    print(
        f"vllm.LLM: {started:.2f} s, after {imported:.2f} s of imports; {started / warm:.2f} × a warm launch"
    )
    return {
        "device": device,
        "eager": eager or device == "cpu",
        "model": path,
        "vllm": vllm_build(),
        "cold_s": seconds[0],
        "warm_s": warm,
        "warm_samples": seconds[1:],
        "vllm_s": started,
        "vllm_import_s": imported,
        "vs_vllm_ratio": started / warm,
        "cold_vs_vllm_ratio": (imported + started) / seconds[0],
    }
