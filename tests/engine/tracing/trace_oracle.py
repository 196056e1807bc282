"""The oracle of the tracer's tests: real tiny checkpoints, rows applied by numpy, and what vLLM's loader does."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided
from safetensors.torch import load_file, save_file

from jvlab.engine.tracing import _meta_model
from jvlab.engine.tracing._offline import build_rank
from jvlab.layout._checkpoint import checkpoint_tensors
from jvlab.layout._types import RankLayout

MARK = 7.0  # what every parameter holds before loading; no random weight is just this


def own_checkpoint(
    folder: Path, config: dict[str, Any], dtype: str = "float32"
) -> Path:
    """A random checkpoint of this config, with on-disk names, in one safetensors file."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {**config, "dtype": dtype}
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)
    weights = {
        t.name: torch.randn(t.shape, generator=generator).to(getattr(torch, t.dtype))
        for t in checkpoint_tensors(config)
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def as_numpy(tensor: torch.Tensor) -> np.ndarray:
    if tensor.dtype == torch.bfloat16:
        return (
            tensor.detach()
            .contiguous()
            .view(torch.int16)
            .numpy()
            .view(ml_dtypes.bfloat16)
        )
    return tensor.detach().contiguous().numpy()


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def numpy_dtype(name: str) -> np.dtype:
    return (
        np.dtype(getattr(ml_dtypes, name))
        if hasattr(ml_dtypes, name)
        else np.dtype(name)
    )


def inside(
    offset: int, shape: tuple[int, ...], strides: np.ndarray, size: int, where: str
) -> None:
    """as_strided would read and write anywhere: a row that leaves its tensor must fail, not crash."""
    last = int(offset) + sum(
        (n - 1) * int(s) for n, s in zip(shape, strides, strict=True)
    )
    assert int(offset) >= 0, f"{where} begins at {offset}"
    assert last < size, f"{where} ends at {last} of {size}"


def apply_rows(
    layout: RankLayout, weights: Mapping[str, torch.Tensor]
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Per parameter its contents after all rows, and which elements were written how often: plain numpy, row by row."""
    contents, counts = [], []
    for p in layout.parameters:
        size = 1 + sum((n - 1) * s for n, s in zip(p.shape, p.strides, strict=True))
        contents.append(np.full(size, MARK, numpy_dtype(p.dtype)))
        counts.append(np.zeros(size, np.int32))
    for r in range(len(layout.tensor)):
        t, p = layout.tensors[layout.tensor[r]], layout.parameter[r]
        source = as_numpy(weights[t.name]).reshape(-1)
        shape = tuple(layout.shape[r])
        for buffer, add in ((contents[p], False), (counts[p], True)):
            width = buffer.itemsize
            inside(
                layout.dst_offset[r],
                shape,
                layout.dst_strides[r],
                buffer.size,
                f"row {r} in {layout.parameters[p].name}",
            )
            box = as_strided(
                buffer[layout.dst_offset[r] :],
                shape,
                tuple(layout.dst_strides[r] * width),
            )
            if add:
                box += 1
            else:
                inside(
                    layout.src_offset[r],
                    shape,
                    layout.src_strides[r],
                    source.size,
                    f"row {r} in {t.name}",
                )
                strides = tuple(layout.src_strides[r] * source.itemsize)
                box[...] = as_strided(
                    source[layout.src_offset[r] :], shape, strides
                ).astype(buffer.dtype)
    views = [
        tuple(
            as_strided(b, p.shape, tuple(s * b.itemsize for s in p.strides))
            for b in (c, n)
        )
        for p, c, n in zip(layout.parameters, contents, counts, strict=True)
    ]
    return [v[0] for v in views], [v[1] for v in views]


def loaded_by_vllm(
    config: Any, tp: int, pp: int, rank: int, weights: Mapping[str, torch.Tensor]
) -> torch.nn.Module:
    """A model on the CPU for this rank, loaded by vLLM's own loader with real tensors."""
    model = build_rank(config, rank, device="cpu")
    with torch.no_grad(), _meta_model.config_in_force(config):
        for p in model.parameters():
            p.data.fill_(MARK)
        model.load_weights(iter((n, w.clone()) for n, w in weights.items()))  # pyright: ignore[reportCallIssue]
    return model


def differences(
    layout: RankLayout, model: torch.nn.Module, weights: Mapping[str, torch.Tensor]
) -> list[str]:
    """Every way in which the layout does not say what the loaded model holds, in words; empty where it does."""
    problems = []
    live = {**dict(model.named_buffers()), **dict(model.named_parameters())}
    contents, counts = apply_rows(layout, weights)
    padding: dict[str, int] = {}
    for note in layout.padding:  # a parameter may have several, of different kinds
        padding[note.name] = padding.get(note.name, 0) + note.elements
    names = {p.name for p in layout.parameters}
    problems += [
        f"{n} is not in the layout"
        for n, p in model.named_parameters()
        if n not in names and p.numel()
    ]
    for p, content, count in zip(layout.parameters, contents, counts, strict=True):
        real = as_numpy(live[p.name])
        if (
            real.shape != p.shape
            or str(live[p.name].dtype) != f"torch.{p.dtype}"
            or live[p.name].stride() != p.strides
        ):
            problems.append(
                f"{p.name} is {live[p.name].shape} {live[p.name].dtype}, the layout says {p}"
            )
            continue
        if int((count > 1).sum()):
            problems.append(
                f"{p.name}: {int((count > 1).sum())} elements written twice"
            )
        if int((count == 0).sum()) != padding.get(p.name, 0):
            problems.append(
                f"{p.name}: {int((count == 0).sum())} unfilled, padding says {padding.get(p.name, 0)}"
            )
        kind = np.dtype(f"u{real.itemsize}")
        wrong = (
            (real.view(kind) != content.view(kind)) & (count > 0)
            if real.ndim
            else np.array(real != content)
        )
        if wrong.any():
            problems.append(
                f"{p.name}: {int(wrong.sum())} of {wrong.size} elements differ"
            )
        left = real[count == 0]
        if not np.isin(left, [0.0, MARK]).all():
            problems.append(
                f"{p.name}: vLLM put numbers into what the layout calls padding"
            )
    return problems
