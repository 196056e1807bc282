"""`jvlab bench sync`: one version of the weights from JAX into an engine, jvlab against vLLM's own reload, in one run.

Both sides are timed from the call with the trainer's arrays until the engine could generate. For vLLM's reload that
includes writing the checkpoint (to memory, not disk), because a trainer has none; the reload alone, and a load from
tensors that are already in the engine's process (the fastest possible peer), are reported too. Both kinds of CPU
engine are measured: vLLM's default, which packs linear weights, and live weights.

`move_vs_ceiling_ratio` compares the trainer's copy into the shared ring with a memcpy. The receiver's scatter and the
packing overlap it and are reported apart; `whole_move_vs_ceiling_ratio` counts all three.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from jvlab._errors import LaunchError
from jvlab.bench import _sync_peer
from jvlab.bench._plain_vllm import PlainVllm

SIZES = {  # about 500 MB of float32
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 16384,
    "head_dim": 64,
}
WAYS: dict[str, dict[str, Any]] = {
    "direct": {"mode": "direct", "verify": "off"},
    "direct_verified": {"mode": "direct", "verify": "full"},
    "staged": {"mode": "staged", "verify": "off"},
    "staged_verified": {"mode": "staged", "verify": "full"},
}
ENGINES = {"packed": {}, "live": {"JVLAB_LIVE_WEIGHTS": "1"}}


def memcpy_gbps(size: int = 256 << 20, rounds: int = 5) -> float:
    """Single-thread memcpy of this machine in GB/s; the best of a few."""
    source = np.ones(size, np.uint8)
    target = np.zeros(size, np.uint8)
    best = min(_timed(lambda: np.copyto(target, source)) for _ in range(rounds))
    return size / best / 1e9


def _timed(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def run_bench_sync(rounds: int = 5, model: str | None = None) -> dict[str, Any]:
    """Measure every way on both kinds of engine; prints a table as it goes, returns the facts."""
    import jvlab as jv
    from jvlab.engine import _defaults, _vllm_versions

    with ExitStack() as stack:
        memory = Path("/dev/shm") if shutil.disk_usage("/dev/shm").free > 3e9 else None
        folder = Path(
            stack.enter_context(
                tempfile.TemporaryDirectory(prefix="jvlab-bench-", dir=memory)
            )
        )
        path = (
            jv.models.resolve(model)
            if model
            else jv.models.tiny("llama", path=folder / "model", **SIZES)
        )
        floor = memcpy_gbps()
        print(
            f"bench sync on cpu: {Path(path).name}; memcpy {floor:.1f} GB/s; {rounds} rounds",
            flush=True,
        )
        cores = _defaults.usable_cores()
        result: dict[str, Any] = {
            "device": "cpu",
            "rounds": rounds,
            "memcpy_gbps": floor,
            "vllm": " ".join(_vllm_versions.build()),
            "checkpoint_in_memory": memory is not None,
            "engines": {},
        }
        for kind, more in ENGINES.items():
            env = {**_defaults.environment("cpu", 1, 1, 0, cores, path), **more}
            ours = _jvlab_side(path, env, rounds, folder / "written")
            theirs = _vllm_side(path, env, rounds, folder / "written")
            result["engines"][kind] = facts = _facts(ours, theirs, floor)
            print(_table(kind, facts), flush=True)
            result["bytes"] = ours["bytes"]
    return result | _claims(result["engines"])


def _jvlab_side(
    path: str, env: dict[str, str], rounds: int, written: Path
) -> dict[str, Any]:
    import jax

    import jvlab as jv
    from jvlab.trainer._policy import Policy

    policy = Policy.from_pretrained(path)
    jax.block_until_ready(policy.params)
    out: dict[str, Any] = {"reports": {way: [] for way in WAYS}, "write": []}
    with jv.Lab() as lab:
        pool = lab.launch(
            path, load="dummy", engine={"max_model_len": 256}, env=env
        ).wait()
        link = lab.connect(policy.params, pool, rules="policy")
        for turn in range(rounds + 1):  # the first one warms up and does not count
            for way, options in WAYS.items():
                report = link.sync(policy.params, progress=False, **options)
                if turn:
                    out["reports"][way].append(report)
        if not link.verify():
            raise LaunchError("the engine does not hold what was synced")
        out["bytes"] = link.plan.total_bytes
    for _ in range(max(1, rounds)):
        shutil.rmtree(written, ignore_errors=True)
        out["write"].append(_timed(lambda: policy.save_pretrained(written)))
    return out


def _vllm_side(
    path: str, env: dict[str, str], rounds: int, written: Path
) -> dict[str, list[float]]:
    from jvlab.engine import _defaults

    arguments = _defaults.engine_arguments(
        path, "cpu", 1, "auto", {"max_model_len": 256}
    )
    times: dict[str, list[float]] = {"peer_reload": [], "peer_feed": []}
    with PlainVllm(_sync_peer.serve, {"env": env, "arguments": arguments}) as plain:
        plain.wait_ready()
        for turn in range(rounds + 1):
            for method, taken in times.items():
                plain.pipe.send((method, str(written)))
                outside, inside = plain.receive()
                if turn:
                    taken.append(outside if method == "peer_reload" else inside)
    return times


def _facts(
    ours: dict[str, Any], theirs: dict[str, list[float]], floor: float
) -> dict[str, Any]:
    """Medians of everything, in milliseconds, and ratios."""
    out: dict[str, Any] = {}
    for way, reports in ours["reports"].items():
        for part in (
            "total",
            "pause",
            "pack",
            "copy",
            "move",
            "scatter",
            "digest",
            "repack",
        ):
            out[f"{way}_{part}_ms"] = 1e3 * statistics.median(
                r.seconds.get(part, 0.0) for r in reports
            )
        out[f"{way}_copy_vs_memcpy"] = (
            ours["bytes"] / out[f"{way}_copy_ms"] / 1e6 / floor
        )
        out[f"{way}_move_vs_memcpy"] = (
            ours["bytes"] / out[f"{way}_move_ms"] / 1e6 / floor
        )
    out["write_ms"] = 1e3 * statistics.median(ours["write"])
    out["reload_ms"] = 1e3 * statistics.median(theirs["peer_reload"])
    out["feed_ms"] = 1e3 * statistics.median(theirs["peer_feed"])
    out["vllm_ms"] = out["write_ms"] + out["reload_ms"]
    for way in WAYS:
        out[f"{way}_vs_vllm_ratio"] = out["vllm_ms"] / out[f"{way}_total_ms"]
        out[f"{way}_vs_reload_ratio"] = out["reload_ms"] / out[f"{way}_total_ms"]
        out[f"{way}_vs_feed_ratio"] = out["feed_ms"] / out[f"{way}_total_ms"]
    return out


def _claims(engines: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The headline numbers, for vLLM's default engine; the move is the trainer's copy into the ring alone."""
    default = engines["packed"]
    live = engines["live"]
    return {
        "vs_vllm_ratio": default["direct_vs_vllm_ratio"],
        "verified_vs_vllm_ratio": default["direct_verified_vs_vllm_ratio"],
        "live_vs_vllm_ratio": live["direct_vs_vllm_ratio"],
        "live_verified_vs_vllm_ratio": live["direct_verified_vs_vllm_ratio"],
        "move_vs_ceiling_ratio": default["direct_copy_vs_memcpy"],
        "whole_move_vs_ceiling_ratio": default["direct_move_vs_memcpy"],
        "staged_pause_ms": default["staged_verified_pause_ms"],
        "direct_ms": default["direct_verified_total_ms"],
        "staged_ms": default["staged_verified_total_ms"],
        "staged_pause_vs_direct_ratio": default["staged_pause_ms"]
        / default["direct_total_ms"],
    }


def _table(kind: str, f: dict[str, Any]) -> str:
    lines = [f"{kind} weights:"]
    for way in WAYS:
        lines.append(
            f"  jvlab {way:16} total {f[f'{way}_total_ms']:7.1f} ms, pause {f[f'{way}_pause_ms']:6.1f}, move "
            f"{f[f'{way}_move_ms']:6.1f}, scatter {f[f'{way}_scatter_ms']:6.1f}, digest {f[f'{way}_digest_ms']:6.1f}, "
            f"repack {f[f'{way}_repack_ms']:6.1f}; {f[f'{way}_vs_vllm_ratio']:.1f}× vLLM, "
            f"{f[f'{way}_vs_reload_ratio']:.1f}× its reload alone"
        )
    lines.append(
        f"  vLLM: write {f['write_ms']:.1f} + reload {f['reload_ms']:.1f} ms; fed in process {f['feed_ms']:.1f} ms"
    )
    return "\n".join(lines)
