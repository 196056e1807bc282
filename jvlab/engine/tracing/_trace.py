"""The tracer: runs a vLLM model's own load_weights on meta tensors and records every copy; moves no data."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from jvlab._errors import TraceError
from jvlab.engine.tracing import _vllm_model
from jvlab.engine.tracing._bare_model import bare_model
from jvlab.engine.tracing._formats import Formats, find_formats
from jvlab.engine.tracing._strided_boxes import Row, covered, joined, runs
from jvlab.engine.tracing._write_recorder import Recorder, Target, ValueRead
from jvlab.layout._layout_codec import layout_to_plain
from jvlab.layout._types import RELOADED, CheckpointTensor, Note, Parameter, RankLayout

Coords = Sequence[tuple[str, int]]


def trace_model(
    model: torch.nn.Module, tensors: Sequence[CheckpointTensor], rank: int = 0, coords: Coords = (("tp", 0),)
) -> RankLayout:
    """Where this model's own loader puts every element of `tensors` on this rank. Leaves the model as it was.

    The model may be on any device or on meta. Layers that were re-packed after loading are traced in the format their
    loader writes, and listed in `staged` with the reason.
    """
    if len({t.name for t in tensors}) != len(tensors):
        twice = sorted({t.name for t in tensors if sum(o.name == t.name for o in tensors) > 1})
        raise TraceError(
            f"checkpoint tensors listed twice: {', '.join(twice[:5])}", remedy="list each name once", tensors=twice
        )
    formats = find_formats(model)
    staged = _staged(model, formats)
    opaque: dict[str, str] = {}
    with _vllm_model.loader_format(model, formats.strides):
        targets = _targets(model)
        while True:  # retry without tensors whose *values* the loader reads: meta tensors have none
            fed = [t for t in tensors if t.name not in opaque]
            try:
                recorder = _run(model, fed, targets)
                break
            except ValueRead as read:
                opaque |= {n: f"the loader reads its values ({read.operation})" for n in read.names if n not in opaque}
    return _with_formats(_layout(recorder, tensors, rank, coords, opaque, staged), formats)


def _staged(model: torch.nn.Module, formats: Formats) -> dict[str, tuple[str, str]]:
    """Parameters whose memory the engine does not compute with: full name -> why, kind. Empty for a model on meta."""
    found: dict[str, tuple[str, str]] = {}
    for item in _vllm_model.staged_layers(model):
        if item.parameter not in formats.kernel and item.parameter not in formats.others:
            why = formats.refused.get(item.parameter.rpartition(".")[0], item.why)
            reloaded = f"{why}; each sync runs vLLM's own reload of this layer", RELOADED
            found.setdefault(item.parameter, reloaded if item.kind == "reloaded" else (why, ""))
    return found


def _with_formats(layout: RankLayout, formats: Formats) -> RankLayout:
    """The layout with quantised parameters as the engine holds them, and their scales, which no tensor fills."""
    if not formats.found:
        return layout
    parameters = [formats.kernel.get(p.name, p) for p in layout.parameters]
    parameters += [formats.kernel[f.scale] for f in formats.found]
    return replace(
        layout,
        parameters=tuple(parameters),
        padding=(*layout.padding, *formats.padding),
        formats=tuple(formats.found),
    )


def trace_worker(worker: Any, tensors: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """`trace_model` inside a vLLM worker: [name, shape, dtype] lists in, `layout_to_plain` values out."""
    wanted = [CheckpointTensor(str(n), tuple(int(i) for i in shape), str(dtype)) for n, shape, dtype in tensors]
    model = bare_model(_vllm_model.worker_model(worker))
    with _vllm_model.current_config(worker):
        rank, coords = _vllm_model.coordinates()
        plain = layout_to_plain(trace_model(model, wanted, rank, coords))
    plain["aliases"] = [list(pair) for pair in parameter_aliases(model)]
    return plain


def parameter_aliases(model: torch.nn.Module) -> list[tuple[str, str]]:
    """(other name, name it is reported under) for parameters that share memory, e.g. tied embeddings."""
    first: dict[tuple[int, int, tuple[int, ...]], str] = {}
    pairs = []
    for name, p in model.named_parameters(remove_duplicate=False):
        if p.numel():
            canonical = first.setdefault((p.untyped_storage()._cdata, int(p.storage_offset()), tuple(p.shape)), name)
            if canonical != name:
                pairs.append((name, canonical))
    return pairs


def model_digest(model: torch.nn.Module) -> str:
    """A digest of every parameter and buffer: names, shapes, strides, dtypes, and values where they are not on meta."""
    state = hashlib.sha256()
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, t in named:
        state.update(repr((name, type(t).__name__, tuple(t.shape), t.stride(), t.dtype, t.device.type)).encode())
        if not t.is_meta:
            state.update(t.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes())
    return state.hexdigest()


def dtype_name(dtype: torch.dtype) -> str:
    """`bfloat16` for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def torch_dtype(name: str, tensor: str) -> torch.dtype:
    """The torch dtype of that name, or a TraceError that names the tensor."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise TraceError(
            f"checkpoint tensor {tensor} has dtype {name!r}, which torch does not have",
            remedy="give dtypes by torch's names, e.g. bfloat16, float32, float8_e4m3fn",
            tensor=tensor,
        )
    return found


def _targets(model: torch.nn.Module) -> list[Target]:
    targets, seen = [], set()
    for kind, named in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, t in named:
            if isinstance(t, torch.nn.parameter.UninitializedParameter):
                raise TraceError(
                    f"parameter {name} gets its shape only while loading (UninitializedParameter)",
                    remedy="this quantisation cannot be traced; launch the engine without it",
                    parameter=name,
                )
            key = (t.untyped_storage()._cdata, t.storage_offset(), tuple(t.shape), t.stride())
            if t.numel() and key not in seen:
                seen.add(key)
                targets.append(Target(len(targets), name, kind == "buffer", t))
    return targets


def _run(model: torch.nn.Module, tensors: Sequence[CheckpointTensor], targets: list[Target]) -> Recorder:
    sources = [torch.empty(t.shape, dtype=torch_dtype(t.dtype, t.name), device="meta") for t in tensors]
    recorder = Recorder([t.name for t in tensors], sources, targets)
    last: list[CheckpointTensor] = []

    def feed() -> Iterator[tuple[str, torch.Tensor]]:
        for tensor, source in zip(tensors, sources, strict=True):
            last[:] = [tensor]
            yield tensor.name, source

    loader: Any = model.load_weights
    try:
        with torch.no_grad(), _vllm_model.loader_state(model), recorder:
            loader(feed())
            recorder.adopt(model.named_parameters())
    except (ValueRead, TraceError):
        raise
    except Exception as error:  # vLLM's loaders raise anything; report the tensor that they refused
        at = f"{last[0].name} {last[0].shape}" if last else "the first tensor"
        raise TraceError(
            f"vLLM's loader of {type(model).__name__} refused checkpoint tensor {at}: {type(error).__name__}: {error}",
            remedy="check that the tensor belongs to this model and has the shape that its config implies",
            tensor=last[0].name if last else None,
        ) from error
    finally:
        recorder.check_memory()
    return recorder


def _layout(
    recorder: Recorder,
    tensors: Sequence[CheckpointTensor],
    rank: int,
    coords: Coords,
    opaque: dict[str, str],
    staged: dict[str, tuple[str, str]],
) -> RankLayout:
    opaque = {**opaque, **recorder.opaque}
    rows = _last_writes(recorder, opaque)
    for target, reason in recorder.computed.items():
        for name in {recorder.names[r.source] for r in rows if r.target == target}:
            opaque.setdefault(name, reason)
    for r in recorder.rows:  # opaque tensors are opaque as a whole, their plain copies included
        if recorder.names[r.source] in opaque:
            place = runs(r.dst_offset, r.shape, r.dst_strides)
            recorder.opaque_writes.setdefault(r.target, []).append(({recorder.names[r.source]}, place))
    rows = joined(r for r in rows if recorder.names[r.source] not in opaque)
    rows.sort(key=lambda r: r.source)  # independent of the loader's order
    filled = {r.target for r in rows}
    kept = [t for t in recorder.targets if not t.buffer or t.number in filled]
    place = {t.number: i for i, t in enumerate(kept)}
    index = {t.name: i for i, t in enumerate(tensors)}
    used = {recorder.names[r.source] for r in rows}
    width = max((len(r.shape) for r in rows), default=1)

    def padded(values: list[tuple[int, ...]], fill: int) -> np.ndarray:
        return np.array([(*v, *(fill,) * (width - len(v))) for v in values], np.int64).reshape(len(rows), width)

    return RankLayout(
        rank=rank,
        coords=tuple((str(axis), int(at)) for axis, at in coords),
        tensors=tuple(tensors),
        parameters=tuple(Parameter(t.name, t.shape, dtype_name(t.dtype), t.strides) for t in kept),
        tensor=np.array([index[recorder.names[r.source]] for r in rows], np.int32),
        parameter=np.array([place[r.target] for r in rows], np.int32),
        shape=padded([r.shape for r in rows], 1),
        src_offset=np.array([r.src_offset for r in rows], np.int64),
        src_strides=padded([r.src_strides for r in rows], 0),
        dst_offset=np.array([r.dst_offset for r in rows], np.int64),
        dst_strides=padded([r.dst_strides for r in rows], 0),
        padding=_padding(recorder, kept, rows, opaque),
        opaque=tuple(Note(t.name, opaque[t.name], int(np.prod(t.shape))) for t in tensors if t.name in opaque),
        staged=tuple(_staged_note(t, *staged[t.name]) for t in kept if t.name in staged),
        unused=tuple(t.name for t in tensors if t.name not in used and t.name not in opaque),
    )


def _staged_note(target: Target, why: str, kind: str) -> Note:
    return Note(target.name, why, target.elements, kind)


def _last_writes(recorder: Recorder, opaque: dict[str, str]) -> list[Row]:
    """The rows whose elements remain: a later copy to the same elements wins; a partial overlap is opaque."""
    by_target: dict[int, list[Row]] = defaultdict(list)
    for r in recorder.rows:
        by_target[r.target].append(r)
    dropped: set[int] = set()
    for target, group in by_target.items():
        pieces = [runs(r.dst_offset, r.shape, r.dst_strides) for r in group]
        if covered(pieces)[1] == 0:
            continue
        for i, (r, mine) in enumerate(zip(group, pieces, strict=True)):
            later = [p for p in pieces[i + 1 :] if covered([mine, p])[1]]
            if not later:
                continue
            union, _ = covered(later)
            if covered([mine, *later])[0] == union:
                dropped.add(id(r))
            else:
                name = recorder.targets[target].name
                opaque.setdefault(recorder.names[r.source], f"part of it is overwritten by a later copy into {name}")
    return [r for r in recorder.rows if id(r) not in dropped]


def _padding(recorder: Recorder, kept: list[Target], rows: list[Row], opaque: dict[str, str]) -> tuple[Note, ...]:
    """Elements that no row fills, by what does: an opaque tensor, the loader itself, or nothing."""
    pieces: dict[int, list[np.ndarray]] = defaultdict(list)
    for r in rows:
        pieces[r.target].append(runs(r.dst_offset, r.shape, r.dst_strides))
    unseen = sorted(
        set(opaque) - set(recorder.names)
    )  # not traced, since the loader reads their values: they may go anywhere
    notes = []
    for t in kept:
        mine = list(pieces[t.number])
        have = covered(mine)[0]
        if have == t.elements:
            continue
        fed = [(names & set(opaque), place) for names, place in recorder.opaque_writes.get(t.number, ())]
        own = recorder.loader_filled.get(t.number, [])
        unfilled = not (mine or fed or own)
        for kind, who, places in (
            ("opaque", f"filled by the opaque {_first_names(set().union(*(n for n, _ in fed)))}", [p for _, p in fed]),
            ("constant", f"the loader fills them with {_first_names({what for what, _ in own})}", [p for _, p in own]),
        ):
            mine += places
            more = min(covered(mine)[0], t.elements) - have
            if more:
                notes.append(Note(t.name, who, more, kind))
                have += more
        if have == t.elements:
            continue
        if unseen and unfilled:
            notes.append(Note(t.name, f"filled by the opaque {_first_names(unseen)}", t.elements, "opaque"))
        else:
            what = "this parameter" if unfilled else "them"
            notes.append(Note(t.name, f"no checkpoint tensor given fills {what}", t.elements - have, "gap"))
    return tuple(notes)


def _first_names(names: Iterable[str]) -> str:
    names = sorted(names)
    return ", ".join(names[:3]) + (" …" if len(names) > 3 else "")
