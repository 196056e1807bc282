"""`jvlab bench train`: one forward and backward pass of a policy, against transformers with SDPA on the same rows.

Each side runs in a process of its own, one after the other, over rows of growing length: as many of them as hold
`TOKENS` tokens. A share of the peak counts 6 flops for each parameter and token, and causal attention once.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jvlab._errors import ConfigError
from jvlab._files import Plain
from jvlab.bench._side import Lines, Side, median_ms, seconds_of, timed

TOKENS = {"cuda": 8192, "cpu": 1024}
LENGTHS = {"cuda": (1024, 4096, 16384, 32768), "cpu": (256, 1024)}
# bfloat16 without sparsity, by what the driver calls the GPU
PEAKS = {
    "H200": 989e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "RTX 4090": 165e12,
}
QWEN3_1_7B: Plain = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 32768,
    "max_position_embeddings": 32768,
    "dtype": "bfloat16",
    "tie_word_embeddings": False,
}
SMALL: Plain = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 8,
    "vocab_size": 4096,
}
REPEAT = 4


def run_bench_train(
    model: str | None = None,
    lengths: Sequence[int] | None = None,
    device: str = "auto",
) -> Plain:
    """Measure; prints a line for each shape and side, returns the facts."""
    import jvlab as jv
    from jvlab.lab._launch_settings import resolve_device

    device = resolve_device(device) if device == "auto" else device
    lengths = tuple(lengths or LENGTHS[device])
    if any(n < 8 for n in lengths):
        raise ConfigError(
            f"lengths {lengths}",
            remedy="tokens of a row, at least 8 each: --lengths 1024,4096",
        )
    with tempfile.TemporaryDirectory(prefix="jvbench-") as scratch:
        sizes = QWEN3_1_7B if device == "cuda" else SMALL
        path = (
            jv.models.resolve(model)
            if model
            else jv.models.tiny("qwen3", f"{scratch}/model", **sizes)
        )
        shapes = [(max(TOKENS[device] // n, 1), n) for n in lengths]
        order = {"model": path, "shapes": shapes, "device": device}
        print(f"bench train on {device}: {path}", flush=True)
        found = {
            side: {tuple(r["shape"]): r for r in _rows(side, order, scratch)}
            for side in ("jax", "torch")
        }
        return _facts(found, shapes, device, path)


def _rows(side: str, order: Plain, scratch: str) -> Iterator[Plain]:
    """The results of one side, printed as they come."""
    # an empty compilation cache: the seconds to compile are one of the results
    environment = {
        "JVLAB_COMPILE_CACHE": f"{scratch}/xla",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92",
    }
    with Side(f"jvlab.bench._train:{side}_side", order, environment) as process:
        for rows, tokens in order["shapes"]:
            row = process.receive()
            said = row.get("error") or f"{row['ms']:.0f} ms"
            if "compile_s" in row:
                said += f", compiled in {row['compile_s']:.1f} s"
            print(f"{side} {rows} × {tokens}: {said}", flush=True)
            yield row


def _facts(
    found: dict[str, dict[Any, Plain]],
    shapes: list[tuple[int, int]],
    device: str,
    path: str,
) -> Plain:
    # the first shape that could be computed knows the device
    known = next(row for row in found["jax"].values() if "peak" in row)
    peak = known["peak"]
    flops = _flops_per_pass(path)
    out: Plain = {
        "device": device,
        "model": path,
        "remat": "chosen by length",
        "peak_flops": peak,
        "peak_from": known["peak_from"],
        "shapes": [],
    }
    ratios = []
    checkpointed = []
    for shape in shapes:
        ours = found["jax"][shape]
        theirs = found["torch"][shape]
        share = lambda side, shape=shape: (
            flops(*shape) / (side["ms"] / 1e3) / peak if "ms" in side else None
        )
        row: Plain = {"rows": shape[0], "tokens": shape[1]}
        for name in ("ms", "compile_s", "remat", "error"):
            row[name] = ours.get(name)
        for name in ("ms", "checkpointing", "also_ms", "error"):
            row[f"torch_{name}"] = theirs.get(name)
        row["mfu"] = share(ours)
        row["torch_mfu"] = share(theirs)
        out["shapes"].append(row)
        length = f"{shape[1] // 1024}k" if shape[1] >= 1024 else shape[1]
        out[f"mfu_{length}"] = row["mfu"]
        if row["ms"] is None or row["torch_ms"] is None:
            continue
        ratios.append(row["torch_ms"] / row["ms"])
        if row["torch_also_ms"] is not None:
            with_it = "torch_ms" if row["torch_checkpointing"] else "torch_also_ms"
            checkpointed.append(row[with_it] / row["ms"])
        print(
            f"{shape[0]} × {shape[1]}: {ratios[-1]:.2f} × transformers, {row['mfu']:.2f} of the peak, "
            f"transformers {row['torch_mfu']:.2f}"
        )
    compiled = [row["compile_s"] for row in out["shapes"] if row["compile_s"]]
    return out | {
        "vs_torch_ratio": min(ratios, default=None),
        "vs_torch_checkpointing_ratio": min(checkpointed, default=None),
        "compile_s": max(compiled, default=None),
        "padding": drawn_padding(),
    }


def drawn_padding() -> float:
    """The share of padding when answers as a reasoning model gives them are packed, over several steps."""
    import numpy as np

    from jvlab.trainer._micro_batches import Packer

    rng = np.random.default_rng(0)
    packer = Packer(16384)
    tokens = 0
    computed = 0
    for _ in range(8):
        answers = np.minimum(rng.lognormal(7.2, 0.7, 256).astype(int) + 1, 4096)
        lengths = answers + np.repeat(rng.integers(60, 300, 32), 8)
        tokens += int(lengths.sum())
        computed += sum(part.tokens for part in packer.parts(lengths))
    return 1 - tokens / computed


def _flops_per_pass(path: str) -> Callable[[int, int], float]:
    """Flops of a forward and backward pass over (rows, tokens)."""
    from jvlab.layout._checkpoint import read_config
    from jvlab.trainer.decoder._config import DecoderConfig

    c = DecoderConfig.from_hf(read_config(path))
    heads = c.head_dim * (2 * c.heads + 2 * c.kv_heads)
    parameters = (
        c.layers * (c.width * heads + 3 * c.width * c.inner) + c.width * c.vocab
    )
    attention = c.layers * c.heads * c.head_dim
    return lambda rows, tokens: (
        6.0 * parameters * rows * tokens + 6.0 * attention * rows * tokens * tokens
    )


# The two sides, each in its own process -------------------------------------------------------------------------------


def jax_side(order: Plain, lines: Lines) -> None:
    import jax
    import numpy as np

    import jvlab as jv

    dtype = "bfloat16" if order["device"] == "cuda" else "float32"
    policy = jv.Policy.from_pretrained(order["model"], dtype=dtype)
    step = jax.jit(
        jax.value_and_grad(lambda p, x, m: -policy.logprobs_fn(p, x, m).mean())
    )
    first = True
    for shape in order["shapes"]:
        row: Plain = {"shape": shape}
        try:
            tokens = (
                np.random.default_rng(0)
                .integers(5, policy.config.vocab, shape)
                .astype(np.int32)
            )
            mask = np.ones(shape, bool)
            row["remat"] = policy.memory(*shape).remat
            row["compile_s"], compiled = timed(
                lambda x=(tokens, mask): step.lower(policy.params, *x).compile()
            )
            one = lambda run=compiled, x=(tokens, mask): jax.block_until_ready(
                run(policy.params, *x)
            )
            row["ms"] = median_ms(seconds_of(one, REPEAT))
            if first:
                row["peak"], row["peak_from"] = _peak(dtype)
                first = False
        except Exception as error:  # out of memory is a result
            row["error"] = f"{type(error).__name__}: {str(error)[:200]}"
        lines.send(row)


def _peak(dtype: str) -> tuple[float, str]:
    """Flops a second that the device can reach: as its maker says, else as a large matrix product does here."""
    import jax
    import jax.numpy as jnp

    kind = jax.devices()[0].device_kind
    for name, peak in PEAKS.items():
        if name in kind:
            return peak, f"the maker's figure for {kind}"
    size = 2048
    x = jnp.ones((size, size), dtype)
    product = jax.jit(lambda a: a @ a)
    ms = median_ms(seconds_of(lambda: product(x).block_until_ready(), REPEAT))
    return 2 * size**3 / (
        ms / 1e3
    ), f"a product of {size} × {size} matrices in {dtype}, in the same run"


def torch_side(order: Plain, lines: Lines) -> None:
    import torch
    from torch.utils.checkpoint import checkpoint
    from transformers import AutoModelForCausalLM

    cuda = order["device"] == "cuda"
    dtype = torch.bfloat16 if cuda else torch.float32
    model: Any = AutoModelForCausalLM.from_pretrained(
        order["model"], dtype=dtype, attn_implementation="sdpa"
    )
    model = (model.cuda() if cuda else model).train()
    vocabulary = int(model.config.vocab_size)

    def loss(hidden: Any, targets: Any) -> Any:
        scores = model.lm_head(hidden).float().flatten(0, 1)
        return torch.nn.functional.cross_entropy(
            scores, targets.flatten(), reduction="sum"
        )

    def one(tokens: Any) -> None:
        model.zero_grad(set_to_none=True)
        hidden = model.model(tokens).last_hidden_state[:, :-1]
        total: Any = 0.0
        for at in range(0, hidden.shape[1], 1024):
            part = hidden[:, at : at + 1024]
            targets = tokens[:, 1:][:, at : at + 1024]
            total = total + checkpoint(loss, part, targets, use_reentrant=False)
        (total / tokens.numel()).backward()
        if cuda:
            torch.cuda.synchronize()

    for shape in order["shapes"]:
        row: Plain = {"shape": shape}
        try:
            tokens = torch.randint(
                5, vocabulary, tuple(shape), device="cuda" if cuda else "cpu"
            )
            found = {
                kept: _torch_pass(model, kept, lambda tokens=tokens: one(tokens))
                for kept in (False, True)
            }
            best = min(
                (r for r in found.values() if "ms" in r),
                key=lambda r: r["ms"],
                default=found[True],
            )
            row |= best | {
                "also_ms": next(
                    (r.get("ms") for r in found.values() if r is not best), None
                )
            }
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {str(error)[:200]}"
        lines.send(row)


def _torch_pass(model: Any, checkpointing: bool, one: Callable[[], None]) -> Plain:
    """One shape with or without gradient checkpointing: the peer may have whichever is faster."""
    import torch

    model.gradient_checkpointing_enable() if checkpointing else model.gradient_checkpointing_disable()
    try:
        ms = median_ms(seconds_of(one, REPEAT))
    except torch.OutOfMemoryError as error:  # a result
        model.zero_grad(set_to_none=True)
        return {"error": f"{type(error).__name__}: {str(error)[:200]}"}
    return {"ms": ms, "checkpointing": checkpointing}
