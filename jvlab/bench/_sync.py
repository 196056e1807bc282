"""`jvlab bench sync`: one version of the weights from JAX into an engine, jvlab against vLLM's own reload, in one run.

Both sides are timed from the call with the trainer's arrays until the engine could generate. For vLLM's reload that
includes writing the checkpoint (to memory, not disk), because a trainer has none; the reload alone is reported too. The
engine is vLLM's default, which packs linear weights.

`move_vs_ceiling_ratio` compares the trainer's copy into the shared ring with a memcpy. The receiver's scatter and the
packing overlap it and are reported apart. `--transport` takes another way than shared memory.
"""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from jvlab._errors import LaunchError
from jvlab._files import Plain
from jvlab.bench._side import (
    Lines,
    Side,
    folder_for,
    median_ms,
    model_of,
    seconds_of,
    timed,
    vllm_build,
)
from jvlab.engine.worker._extension import WorkerExtension

SIZES = {  # about 500 MB of float32
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 16384,
    "head_dim": 64,
}
WAYS: dict[str, Plain] = {
    "direct": {"mode": "direct", "verify": "off"},
    "direct_verified": {"mode": "direct", "verify": "full"},
    "staged": {"mode": "staged", "verify": "off"},
    "staged_verified": {"mode": "staged", "verify": "full"},
}
PARTS = ("total", "pause", "pack", "copy", "move", "scatter", "digest", "repack")


class VllmPeer(WorkerExtension):
    """vLLM's own way to load new weights, timed in its worker."""

    def peer_reload(self, folder: str) -> float:
        """vLLM's layerwise reload of a checkpoint; the seconds it took."""
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        return timed(runner.reload_weights, weights_path=folder)[0]


def vllm_side(order: Plain, lines: Lines) -> None:
    """Plain vLLM, which reloads as it is told, until it is killed."""
    from vllm import LLM

    own = {"worker_extension_cls": "jvlab.bench._sync.VllmPeer"}
    llm = LLM(**{**order, **own})
    lines.send("ready")
    while True:
        folder = lines.receive()
        lines.send(timed(llm.collective_rpc, "peer_reload", args=(folder,))[0])


def memcpy_gbps() -> float:
    """Single-thread memcpy of this machine in GB/s; the best of a few."""
    source = np.ones(256 << 20, np.uint8)
    target = np.zeros_like(source)
    best = min(seconds_of(lambda: np.copyto(target, source), 5))
    return source.nbytes / best / 1e9


def run_bench_sync(
    rounds: int = 5, model: str | None = None, transport: str = "auto"
) -> Plain:
    """Measure every way on both kinds of engine; prints a table as it goes, returns the facts."""
    from jvlab.engine import _defaults

    with ExitStack() as stack:
        folder, in_memory = folder_for(3e9, stack)
        path = model_of(model, path=folder / "model", **SIZES)
        floor = memcpy_gbps()
        print(
            f"bench sync on cpu: {Path(path).name}; memcpy {floor:.1f} GB/s; {rounds} rounds",
            flush=True,
        )
        cores = _defaults.usable_cores()
        options = {"max_model_len": 256}
        arguments = _defaults.engine_arguments(path, "cpu", 1, "auto", options)
        env = _defaults.environment("cpu", 1, 1, 0, cores, path)
        ours = _jvlab_times(path, env, rounds, folder / "written", transport)
        reloads = _vllm_times(arguments, env, rounds, folder / "written")
        facts = _facts(ours, reloads, floor)
        print(_table(facts), flush=True)
        return {
            "device": "cpu",
            "rounds": rounds,
            "memcpy_gbps": floor,
            "vllm": vllm_build(),
            "checkpoint_in_memory": in_memory,
            "bytes": ours["bytes"],
            "transport": ours["transport"],
            **facts,
            **_claims(facts),
        }


def _jvlab_times(
    path: str, env: dict[str, str], rounds: int, written: Path, transport: str
) -> Plain:
    import jax

    import jvlab as jv
    from jvlab.trainer._policy import Policy

    policy = Policy.from_pretrained(path)
    jax.block_until_ready(policy.params)
    out: Plain = {"reports": {way: [] for way in WAYS}, "write": []}
    with jv.Lab() as lab:
        pool = lab.launch(
            path, load="dummy", engine={"max_model_len": 256}, env=env
        ).wait()
        link = lab.connect(policy.params, pool, rules="policy", transport=transport)
        out["transport"] = link.transport
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
        out["write"].append(timed(policy.save_pretrained, written)[0])
    return out


def _vllm_times(
    arguments: Plain, env: dict[str, str], rounds: int, written: Path
) -> list[float]:
    with Side("jvlab.bench._sync:vllm_side", arguments, env) as plain:
        plain.receive()
        # the first one warms up and does not count
        return [plain.ask(str(written)) for _ in range(rounds + 1)][1:]


def _facts(ours: Plain, reloads: list[float], floor: float) -> Plain:
    """Medians of everything, in milliseconds, and ratios."""
    out: Plain = {}
    for way, reports in ours["reports"].items():
        for part in PARTS:
            out[f"{way}_{part}_ms"] = median_ms(
                report.seconds.get(part, 0.0) for report in reports
            )
        for part in ("copy", "move"):
            rate = ours["bytes"] / out[f"{way}_{part}_ms"] / 1e6
            out[f"{way}_{part}_vs_memcpy"] = rate / floor
    out["write_ms"] = median_ms(ours["write"])
    out["reload_ms"] = median_ms(reloads)
    out["vllm_ms"] = out["write_ms"] + out["reload_ms"]
    for way in WAYS:
        for peer in ("vllm", "reload"):
            out[f"{way}_vs_{peer}_ratio"] = out[f"{peer}_ms"] / out[f"{way}_total_ms"]
    return out


def _claims(facts: Plain) -> Plain:
    """The headline numbers; the move is the trainer's copy into the ring alone."""
    return {
        "vs_vllm_ratio": facts["direct_vs_vllm_ratio"],
        "verified_vs_vllm_ratio": facts["direct_verified_vs_vllm_ratio"],
        "move_vs_ceiling_ratio": facts["direct_copy_vs_memcpy"],
        "staged_pause_ms": facts["staged_verified_pause_ms"],
        "direct_ms": facts["direct_verified_total_ms"],
        "staged_ms": facts["staged_verified_total_ms"],
    }


def _table(f: Plain) -> str:
    lines = []
    for way in WAYS:
        lines.append(
            f"  jvlab {way:16} total {f[f'{way}_total_ms']:7.1f} ms, pause {f[f'{way}_pause_ms']:6.1f}, move "
            f"{f[f'{way}_move_ms']:6.1f}, scatter {f[f'{way}_scatter_ms']:6.1f}, digest {f[f'{way}_digest_ms']:6.1f}, "
            f"repack {f[f'{way}_repack_ms']:6.1f}; {f[f'{way}_vs_vllm_ratio']:.1f}× vLLM, "
            f"{f[f'{way}_vs_reload_ratio']:.1f}× its reload alone"
        )
    lines.append(f"  vLLM: write {f['write_ms']:.1f} + reload {f['reload_ms']:.1f} ms")
    return "\n".join(lines)
