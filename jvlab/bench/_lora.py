"""`jvlab bench lora`: a new version of a rank-16 adapter into an engine, in memory and through files, in one run.

    sync_ms     `link.sync(policy.lora)`: verified, and every later token is computed with it
    files_ms    the way through the disk: `policy.save_pretrained` in PEFT's format, then vLLM's own `add_lora` of that
                folder, and the old version removed; save_ms and load_ms are its parts

Both go into the same engine, in turn, from the call with the trainer's arrays until requests can use the version. With
`--shape` the base has random weights, which are drawn on the device and synced into the engine first.
Ratios are the files' time over ours: above 1 ours is faster. Adapters are of every linear map of the model.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from jvlab._errors import ConfigError, LaunchError
from jvlab._files import Plain
from jvlab.bench._shapes import shaped, size_of
from jvlab.bench._side import median_ms, model_of, timed
from jvlab.bench._sync import SIZES

RANK = 16


def run_bench_lora(
    rounds: int = 5,
    model: str | None = None,
    device: str = "auto",
    shape: str | None = None,
) -> Plain:
    """Measure both ways; prints a line for each, returns the facts."""
    if shape is not None and (model is not None or device != "cuda"):
        remedy = "--device cuda --shape qwen3-1.7b, or --model DIR"
        raise ConfigError(
            f"shape={shape!r}, model={model!r}, device={device!r}", remedy=remedy
        )
    if device == "cuda":
        # the engine needs the rest of the GPU
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax

    import jvlab as jv

    times: dict[str, list[float]] = {
        name: [] for name in ("direct", "staged", "pause", "save", "load")
    }
    with tempfile.TemporaryDirectory(prefix="jvlab-bench-") as folder, jv.Lab() as lab:
        pool, base = _engine_and_base(lab, Path(folder) / "model", model, device, shape)
        policy = base.with_lora(rank=RANK)
        link = lab.connect(policy.lora, pool)
        plain = _tokens(pool)
        for turn in range(rounds + 1):  # the first one warms up and does not count
            policy.lora = jax.block_until_ready(
                jax.tree.map(lambda x: x + 0.002, policy.lora)
            )
            taken: dict[str, float] = {}
            for mode in ("direct", "staged"):
                taken[mode], report = timed(
                    link.sync, policy.lora, mode=mode, progress=False
                )
                if not report.verified:
                    raise LaunchError("the engine does not hold what was synced")
            taken["pause"] = report.seconds.get("pause", 0.0)
            target = Path(folder) / f"adapter-{turn}"
            taken["save"], _ = timed(policy.save_pretrained, target)
            taken["load"], _ = timed(pool.load_adapter, "file", target)
            for name, seconds in taken.items():
                times[name] += [seconds] * bool(turn)
        ours = _tokens(pool)
        theirs = _tokens(pool, adapter="file")
        facts = _facts(times, link.plan.total_bytes) | {
            "transport": link.transport,
            "meaning": link.meaning.text,
        }
    same = {"same_tokens": ours == theirs, "tokens_moved": ours != plain}
    out = {
        "rounds": rounds,
        "rank": RANK,
        "base": shape or model or "500 MB",
        **same,
        **facts,
    }
    print(_table(out), flush=True)
    return out


def _engine_and_base(
    lab: Any, folder: Path, model: str | None, device: str, shape: str | None
) -> tuple[Any, Any]:
    """An engine with slots for adapters, and the policy that it serves."""
    import jvlab as jv

    engine = {
        "max_model_len": 256,
        "enable_lora": True,
        "max_loras": 3,
        "max_lora_rank": RANK,
    }
    if shape is None:
        path = model_of(model, path=folder, **SIZES)
        return lab.launch(
            path, engine=engine, device=device
        ).wait(), jv.Policy.from_pretrained(path)
    folder.mkdir()
    base = shaped(folder, size_of(shape))
    engine |= {
        "gpu_memory_utilization": 0.2,
        "kv_cache_memory_bytes": 4 << 30,
        "max_num_seqs": 32,
    }
    engine |= {"dtype": "bfloat16", "skip_tokenizer_init": True}
    pool = lab.launch(str(folder), load="dummy", engine=engine, device=device).wait(500)
    with lab.connect(base.params, pool, rules="policy") as link:
        link.sync(base.params, progress=False)
    return pool, base


def _tokens(pool: Any, **more: Any) -> list[list[int]]:
    greedy = {
        "temperature": 0.0,
        "max_tokens": 16,
        "ignore_eos": True,
        "progress": False,
    }
    return [
        s.token_ids.tolist() for s in pool.generate([[5, 6, 7, 8]], **greedy, **more)
    ]


def _facts(times: dict[str, list[float]], size: int) -> Plain:
    middle = {name: median_ms(values) for name, values in times.items()}
    files = middle["save"] + middle["load"]
    return {
        "bytes": size,
        "sync_ms": middle["direct"],
        "staged_ms": middle["staged"],
        "staged_pause_ms": middle["pause"],
        "save_ms": middle["save"],
        "load_ms": middle["load"],
        "files_ms": files,
        "vs_files_ratio": files / middle["direct"],
        "staged_vs_files_ratio": files / middle["staged"],
    }


def _table(f: Plain) -> str:
    return (
        f"bench lora: rank {f['rank']}, {f['bytes'] / 1e6:.1f} MB, {f['rounds']} rounds, medians\n"
        f"  in memory    direct {f['sync_ms']:.1f} ms, staged {f['staged_ms']:.1f} ms (pause "
        f"{f['staged_pause_ms']:.1f}), verified\n"
        f"  with files   {f['files_ms']:.1f} ms: save {f['save_ms']:.1f}, load {f['load_ms']:.1f}\n"
        f"  {f['vs_files_ratio']:.1f}× faster in memory; tokens by both ways equal: {f['same_tokens']}"
    )
