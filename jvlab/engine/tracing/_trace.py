"""The tracer: runs a vLLM model's own load_weights on meta tensors and records every copy; moves no data."""

from __future__ import annotations

import copy
import math
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from jvlab._errors import TraceError
from jvlab.engine import _modules
from jvlab.engine._modules import (
    dtype_name,
    format_of,
    held_parameters,
    memory_of,
    own_parameters,
)
from jvlab.engine.tracing import _vllm_model
from jvlab.engine.tracing._vllm_model import bare_model
from jvlab.engine.tracing._write_recorder import (
    Recorder,
    Row,
    Target,
    ValueRead,
    covered,
    joined,
    runs,
)
from jvlab.layout._layout_codec import layout_to_plain
from jvlab.layout._plan_types import FP8_MAX
from jvlab.layout._types import (
    RELOADED,
    CheckpointTensor,
    Format,
    Note,
    Parameter,
    RankLayout,
)

# Finds how vLLM's online quantisation holds each layer: its own post-load step runs once, on known values.
#     known values ──vLLM's process_weights_after_loading, on a stand-in──▶ kernel tensors  =?  format(known values)
#
# A layer has a format only if every byte of every kernel tensor is what the format says; else it is named, and goes
# through vLLM's own reload (`engine/worker/_reload.py`). The live layer is not changed. Checked against vLLM 0.32.0.

# known values repeat after so many elements, a prime: no row of a matrix equals its neighbour
PATTERN = 65521
_MOE_SCALES = {
    f"{w}_weight_scale{end}": f"w{k}_scale"
    for k, w in ((1, "w13"), (2, "w2"))
    for end in ("", "_inv")
}
_DONE = "_already_called_process_weights_after_loading"


@dataclass
class Formats:
    """The formats of a model's quantised layers."""

    found: list[Format] = field(default_factory=list)
    # as the engine holds them, scales included
    kernel: dict[str, Parameter] = field(default_factory=dict)
    # of loaded elements
    strides: dict[tuple[torch.nn.Module, str], tuple[int, ...]] = field(
        default_factory=dict
    )
    padding: list[Note] = field(default_factory=list)
    # of the same layers, held as loaded: biases
    others: set[str] = field(default_factory=set)
    # layers without a format, and why
    refused: dict[str, str] = field(default_factory=dict)

    def add(self, other: Formats) -> None:
        """Take in the formats of one more layer."""
        self.found += other.found
        self.kernel |= other.kernel
        self.strides |= other.strides
        self.padding += other.padding
        self.others |= other.others


class _NoFormat(Exception):
    """Why a layer's kernel tensors are no known function of the loaded ones."""


def find_formats(model: torch.nn.Module) -> Formats:
    """The formats of a live model, or of one on meta that was processed by `_patches.card_kernels`; none of any other.

    On meta there are no values to compare: shapes and strides are vLLM's, the arithmetic is taken for known.
    """
    out = Formats()
    device = None
    for prefix, layer in model.named_modules():
        blocks = _vllm_model.block_method(layer) is not None
        if _vllm_model.online_method(layer) is None and not blocks:
            continue
        repacked, added = _vllm_model.changed_later(layer)
        held = list(held_parameters(layer).values())
        on_meta = [p.is_meta for p in held]
        if not (repacked or blocks) or (any(on_meta) and (blocks or not all(on_meta))):
            continue
        device = held[0].device
        try:
            out.add(
                _as_loaded(prefix, layer)
                if blocks
                else _formats(prefix, layer, repacked, added)
            )
        except _NoFormat as why:
            out.refused[prefix] = (
                f"jvlab has no format for what {type(layer.quant_method).__name__} makes of it: {why}"
            )
            if device.type == "meta":
                raise TraceError(
                    f"{prefix}: {out.refused[prefix]}",
                    remedy="plan with a running pool, jv.plan(params, pool): it reloads such a layer in each sync",
                    layer=prefix,
                ) from None
        except torch.OutOfMemoryError as error:
            raise TraceError(
                f"{prefix}: no memory to run its quantisation once on known values ({error})",
                remedy="launch with a smaller gpu_memory_utilization",
                layer=prefix,
            ) from error
    if device is not None and device.type == "cuda":
        torch.cuda.empty_cache()
    return out


def _formats(prefix: str, layer: Any, repacked: list[str], added: list[str]) -> Formats:
    """The formats of one layer."""
    out = Formats()
    built = _vllm_model.as_built(layer)
    own = own_parameters(layer)
    if gone := [n for n in repacked if own.get(n) is None]:
        raise _NoFormat(f"it removes {', '.join(gone)}")
    place, size = _vllm_model.ranks_sharing(layer)
    devices = {n: own[n].device for n in repacked}
    on_meta = any(device.type == "meta" for device in devices.values())
    known = {
        n: known_values(tuple(built[n].shape), built[n].dtype, devices[n], place)
        for n in repacked
    }
    made = (
        {n: own[n] for n in (*repacked, *added)}
        if on_meta
        else _processed(layer, known)
    )
    pairs = {n: f"{n}_scale" for n in repacked}
    _check_alike(layer, made, set(pairs.values()), set(added))
    out.others |= {f"{prefix}.{n}" for n in own if n not in known and n not in added}
    for name, scale in pairs.items():
        loaded = built[name]
        live = own[name]
        view, how = _placed(live, tuple(loaded.shape))
        values = made[name]
        scales = made[scale]
        if view is None:
            raise _NoFormat(f"{name} {tuple(loaded.shape)} became {_form(live)}")
        blocks = scales.numel()
        if blocks not in (1, loaded.shape[0]) or (blocks > 1 and loaded.dim() < 3):
            raise _NoFormat(f"{name} has {blocks} scales")
        got = torch.as_strided(values, loaded.shape, view, values.storage_offset())
        if not on_meta and not _equal(
            known[name], got, scales, blocks, 2 ** (size - 1 - place)
        ):
            raise _NoFormat(
                f"its {name} is not max|w| / {FP8_MAX:g}, one scale over {_over(blocks)}"
            )
        full = [f"{prefix}.{n}" if prefix else n for n in (name, scale)]
        block = (live.untyped_storage().nbytes() - live.storage_offset()) // blocks
        text = f"fp8, one scale per {_over(blocks)}{how}"
        out.found.append(Format(full[0], full[1], dtype_name(loaded), block, text))
        for one, tensor in zip(full, (live, own[scale]), strict=True):
            out.kernel[one] = Parameter(one, *format_of(tensor))
        out.strides[layer, name] = view
        if extra := live.numel() - loaded.numel():
            out.padding.append(
                Note(full[0], "zeros that the kernel's tiles need", extra, "constant")
            )
        out.padding.append(
            Note(full[1], f"computed from {full[0]} ({text})", blocks, "scale")
        )
    return out


def _as_loaded(prefix: str, layer: Any) -> Formats:
    """A layer of a block-scaled checkpoint, if processing leaves every bit of values and scales as it was loaded.

    Some kernels round scales to powers of two and quantise again, in the same memory: only values show it.
    """
    built = {**own_parameters(layer), **_vllm_model.as_built(layer)}
    device = next(p.device for p in held_parameters(layer).values())
    known = {}
    for name in _vllm_model.loaded_names(layer):
        t = built[name]
        wide = known_values(
            tuple(t.shape) if t.dim() > 1 else (1, *t.shape), torch.float32, device
        ).view(t.shape)
        known[name] = (wide * 64 if t.element_size() == 1 else wide.abs() + 0.01).to(
            t.dtype
        )
    made = _processed(layer, {n: t.clone() for n, t in known.items()})
    _check_alike(layer, made, set(), set(_vllm_model.changed_later(layer)[1]))
    for name, tensor in known.items():
        held = made.get(name)
        if held is None or _form(held) != _form(tensor):
            raise _NoFormat(
                f"{name} {_form(tensor)} became {'nothing' if held is None else _form(held)}"
            )
        if not torch.equal(
            held.contiguous().view(torch.uint8), tensor.contiguous().view(torch.uint8)
        ):
            raise _NoFormat(
                f"it changes values of {name} (a kernel of DeepGEMM makes scales powers of two)"
            )
    return Formats(others={f"{prefix}.{n}" for n in known})


def _over(blocks: int) -> str:
    return "fused parameter" if blocks == 1 else "expert and part"


def _form(t: torch.Tensor) -> str:
    shape, dtype, strides = format_of(t)
    return f"{shape} {dtype} strides {strides}"


def _check_alike(
    layer: Any, made: dict[str, torch.Tensor], scales: set[str], added: set[str]
) -> None:
    """Raise unless the kernel's tensors are weights with a scale tensor each, held alike in the live layer."""
    if added != scales:
        raise _NoFormat(f"it adds {', '.join(sorted(added)) or 'no scales'}")
    own = own_parameters(layer)
    for name, tensor in made.items():
        live = own.get(name)
        if live is None or _form(live) != _form(tensor):
            raise _NoFormat(
                f"{name} is {_form(tensor)} for known values, and {_form(live) if live is not None else 'gone'} live"
            )
    kernel = getattr(layer.quant_method, "moe_quant_config", None)
    for name, of in _MOE_SCALES.items():
        held = getattr(kernel, of, None)
        if name in made and (held is None or held.data_ptr() != own[name].data_ptr()):
            raise _NoFormat(f"its kernel computes with a copy of {name}")


def _placed(
    live: torch.Tensor, shape: tuple[int, ...]
) -> tuple[tuple[int, ...] | None, str]:
    """Strides of the loader's elements in the kernel's storage, and how that differs from the loader's, in words."""
    if live.dtype != torch.float8_e4m3fn or live.storage_offset():
        return None, ""
    if tuple(live.shape) == shape and live.is_contiguous():
        return tuple(live.stride()), ""
    if (
        live.dim() == 2
        and live.t().is_contiguous()
        and all(a >= b for a, b in zip(live.t().shape, shape, strict=True))
    ):
        padded = "" if tuple(live.t().shape) == shape else ", padded with zeros"
        return tuple(live.t().stride()), f", transposed{padded}"
    return None, ""


def known_values(
    shape: tuple[int, ...], dtype: torch.dtype, device: Any, place: int = 0
) -> torch.Tensor:
    """Values whose largest differs from row to row, from expert to expert and, by powers of two, from rank to rank."""
    count = math.prod(shape)
    pattern = torch.arange(PATTERN, device=device, dtype=torch.int64)
    base = (((pattern * 7919 + 13) % 2003 - 1001).float() / 40000).to(dtype)
    out = base.repeat(-(-count // PATTERN))[:count].view(shape)
    rows = torch.arange(shape[-2], device=device) * 3 // shape[-2] + 1
    # thirds: q, k, v or gate, up have maxima of their own
    out *= rows[:, None].to(dtype)
    if len(shape) > 2:
        first = torch.arange(shape[0], device=device) % 5 + 1
        out *= first.view(-1, *(1 for _ in shape[1:])).to(dtype)
    return out * 2**place


def _processed(layer: Any, known: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """vLLM's own step after loading, on a stand-in for the layer that holds known values."""
    beside = _modules.stand_in(layer)
    beside.__dict__.pop(_DONE, None)
    own = own_parameters(beside)
    _, added = _vllm_model.changed_later(layer)
    for name in added:
        del own[name]
    for name, tensor in known.items():
        own[name] = torch.nn.Parameter(tensor, requires_grad=False)
    # a method may be a module; its copy must not write the original's
    method = _modules.stand_in(layer.quant_method)
    if "fp8_linear" in method.__dict__:
        method.fp8_linear = copy.copy(method.fp8_linear)
    _modules.put(beside, "quant_method", method)
    with torch.no_grad():
        method.process_weights_after_loading(beside)
    made = held_parameters(beside)
    return {n: made[n].data for n in (*known, *added) if n in made}


def quantise(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """What vLLM's kernel makes of values and a scale: multiplied by the rounded reciprocal; NaN is the largest."""
    scaled = values.float() * (torch.ones_like(scale) / scale)
    return (
        torch.nan_to_num(scaled, nan=FP8_MAX)
        .clamp(-FP8_MAX, FP8_MAX)
        .to(torch.float8_e4m3fn)
    )


def _equal(
    known: torch.Tensor,
    got: torch.Tensor,
    scales: torch.Tensor,
    blocks: int,
    others: int,
) -> bool:
    """Whether every block holds what the format says; `others`: how much larger the last rank's known values are."""
    limit = torch.tensor(FP8_MAX, device=known.device, dtype=torch.float32)
    if scales.dtype != torch.float32 or not scales.is_contiguous():
        return False
    for k in range(blocks):
        part, held = (known, got) if blocks == 1 else (known[k], got[k])
        scale = part.abs().max().float() * others / limit
        if scale.item() != scales.reshape(-1)[k].item():
            return False
        if not torch.equal(
            quantise(part, scale).view(torch.uint8), held.contiguous().view(torch.uint8)
        ):
            return False
    return True


# ----------------------------------------------------------------------------------------------------

Coords = Sequence[tuple[str, int]]


def trace_model(
    model: torch.nn.Module,
    tensors: Sequence[CheckpointTensor],
    rank: int = 0,
    coords: Coords = (("tp", 0),),
    without: Container[str] = (),
) -> RankLayout:
    """Where this model's own loader puts every element of `tensors` on this rank. Leaves the model as it was.

    `without`: parameters that are left out, with what goes there.
    The model may be on any device or on meta. Layers that were re-packed after loading are traced in the format their
    loader writes, and listed in `repacked` with the reason.
    """
    counts = Counter(t.name for t in tensors)
    if twice := sorted(name for name, count in counts.items() if count > 1):
        raise TraceError(
            f"checkpoint tensors listed twice: {', '.join(twice[:5])}",
            remedy="list each name once",
            tensors=twice,
        )
    formats = find_formats(model)
    formats.found = [f for f in formats.found if f.parameter not in without]
    formats.padding = [n for n in formats.padding if n.name not in without]
    repacked = _repacked(model, formats)
    opaque: dict[str, str] = {}
    with _vllm_model.loader_format(model, formats.strides):
        targets = _targets(model)
        # retry without tensors whose *values* the loader reads: meta tensors have none
        while True:
            fed = [t for t in tensors if t.name not in opaque]
            try:
                recorder = _run(model, fed, targets)
                break
            except ValueRead as read:
                opaque |= {
                    n: f"the loader reads its values ({read.operation})"
                    for n in read.names
                    if n not in opaque
                }
    return _with_formats(
        _layout(recorder, tensors, rank, coords, opaque, repacked, without), formats
    )


def _repacked(model: torch.nn.Module, formats: Formats) -> dict[str, tuple[str, str]]:
    """Parameters whose memory the engine does not compute with: full name -> why, kind. Empty for a model on meta."""
    found: dict[str, tuple[str, str]] = {}
    for item in _vllm_model.repacked_layers(model):
        if (
            item.parameter not in formats.kernel
            and item.parameter not in formats.others
        ):
            why = formats.refused.get(item.parameter.rpartition(".")[0], item.why)
            reloaded = (
                f"{why}; each sync runs vLLM's own reload of this layer",
                RELOADED,
            )
            found.setdefault(
                item.parameter, reloaded if item.kind == "reloaded" else (why, "")
            )
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


def tensors_of(plain: Sequence[Sequence[Any]]) -> list[CheckpointTensor]:
    """Of [name, shape, dtype] lists."""
    return [CheckpointTensor(n, tuple(shape), dtype) for n, shape, dtype in plain]


def meta_tensors(tensors: Sequence[CheckpointTensor]) -> list[torch.Tensor]:
    """Such tensors without memory."""
    return [
        torch.empty(t.shape, dtype=torch_dtype(t.dtype, t.name), device="meta")
        for t in tensors
    ]


def trace_worker(worker: Any, tensors: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """`trace_model` inside a vLLM worker: [name, shape, dtype] lists in, `layout_to_plain` values out.

    Of the draft model, if the names have the prefix `draft.`: then tensors have its own names, parameters that prefix.
    What it shares with the model, as heads on top of one do, is the model's: no sync of drafts writes it.
    """
    prefix = _vllm_model.DRAFT
    wanted = tensors_of(tensors)
    whole = _vllm_model.worker_model(worker)
    model = bare_model(whole)
    shared: set[str] = set()
    if wanted and all(t.name.startswith(prefix) for t in wanted):
        wanted = [replace(t, name=t.name.removeprefix(prefix)) for t in wanted]
        model = _vllm_model.DraftWeights(_vllm_model.draft_model(worker))
        theirs = {memory_of(p) for p in whole.parameters()}
        named = model.named_parameters()
        shared = {n for n, p in named if p.numel() and memory_of(p) in theirs}
    with _vllm_model.current_config(worker):
        rank, coords = _vllm_model.coordinates()
        plain = layout_to_plain(trace_model(model, wanted, rank, coords, shared))
    pairs = parameter_aliases(model)
    plain["aliases"] = [list(pair) for pair in pairs if pair[1] not in shared]
    return plain


def parameter_aliases(model: torch.nn.Module) -> list[tuple[str, str]]:
    """(other name, name it is reported under) for parameters that share memory, e.g. tied embeddings."""
    first: dict[tuple[int, int, tuple[int, ...]], str] = {}
    pairs = []
    for name, p in model.named_parameters(remove_duplicate=False):
        if p.numel():
            canonical = first.setdefault(
                (memory_of(p), int(p.storage_offset()), tuple(p.shape)),
                name,
            )
            if canonical != name:
                pairs.append((name, canonical))
    return pairs


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
    targets = []
    seen = set()
    for kind, named in (
        ("parameter", model.named_parameters()),
        ("buffer", model.named_buffers()),
    ):
        for name, t in named:
            if isinstance(t, torch.nn.parameter.UninitializedParameter):
                raise TraceError(
                    f"parameter {name} gets its shape only while loading (UninitializedParameter)",
                    remedy="this quantisation cannot be traced; launch the engine without it",
                    parameter=name,
                )
            key = (
                memory_of(t),
                t.storage_offset(),
                tuple(t.shape),
                t.stride(),
            )
            if t.numel() and key not in seen:
                seen.add(key)
                targets.append(Target(len(targets), name, kind == "buffer", t))
    return targets


def _run(
    model: torch.nn.Module, tensors: Sequence[CheckpointTensor], targets: list[Target]
) -> Recorder:
    sources = meta_tensors(tensors)
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
    # vLLM's loaders raise anything; report the tensor that they refused
    except Exception as error:
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
    repacked: dict[str, tuple[str, str]],
    without: Container[str] = (),
) -> RankLayout:
    opaque = {**opaque, **recorder.opaque}
    rows = _last_writes(recorder, opaque)
    for target, reason in recorder.computed.items():
        for name in {recorder.names[r.source] for r in rows if r.target == target}:
            opaque.setdefault(name, reason)
    # opaque tensors are opaque as a whole, their plain copies included
    for r in recorder.rows:
        if recorder.names[r.source] in opaque:
            place = runs(r.dst_offset, r.shape, r.dst_strides)
            recorder.opaque_writes.setdefault(r.target, []).append(
                ({recorder.names[r.source]}, place)
            )
    kept = [t for t in recorder.targets if t.name not in without]
    numbers = {t.number for t in kept}
    rows = joined(
        r
        for r in rows
        if recorder.names[r.source] not in opaque and r.target in numbers
    )
    rows.sort(key=lambda r: r.source)  # independent of the loader's order
    filled = {r.target for r in rows}
    kept = [t for t in kept if not t.buffer or t.number in filled]
    place = {t.number: i for i, t in enumerate(kept)}
    index = {t.name: i for i, t in enumerate(tensors)}
    used = {recorder.names[r.source] for r in rows}
    width = max((len(r.shape) for r in rows), default=1)

    def padded(values: list[tuple[int, ...]], fill: int) -> np.ndarray:
        return np.array(
            [(*v, *(fill,) * (width - len(v))) for v in values], np.int64
        ).reshape(len(rows), width)

    return RankLayout(
        rank=rank,
        coords=tuple(coords),
        tensors=tuple(tensors),
        parameters=tuple(
            Parameter(t.name, t.shape, dtype_name(t), t.strides) for t in kept
        ),
        tensor=np.array([index[recorder.names[r.source]] for r in rows], np.int32),
        parameter=np.array([place[r.target] for r in rows], np.int32),
        shape=padded([r.shape for r in rows], 1),
        src_offset=np.array([r.src_offset for r in rows], np.int64),
        src_strides=padded([r.src_strides for r in rows], 0),
        dst_offset=np.array([r.dst_offset for r in rows], np.int64),
        dst_strides=padded([r.dst_strides for r in rows], 0),
        padding=_padding(recorder, kept, rows, opaque),
        opaque=tuple(
            Note(t.name, opaque[t.name], int(np.prod(t.shape)))
            for t in tensors
            if t.name in opaque
        ),
        repacked=tuple(
            Note(t.name, repacked[t.name][0], t.elements, repacked[t.name][1])
            for t in kept
            if t.name in repacked
        ),
        unused=tuple(
            t.name for t in tensors if t.name not in used and t.name not in opaque
        ),
    )


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
                opaque.setdefault(
                    recorder.names[r.source],
                    f"part of it is overwritten by a later copy into {name}",
                )
    return [r for r in recorder.rows if id(r) not in dropped]


def _padding(
    recorder: Recorder, kept: list[Target], rows: list[Row], opaque: dict[str, str]
) -> tuple[Note, ...]:
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
        fed = [
            (names & set(opaque), place)
            for names, place in recorder.opaque_writes.get(t.number, ())
        ]
        own = recorder.loader_filled.get(t.number, [])
        unfilled = not (mine or fed or own)
        for kind, who, places in (
            (
                "opaque",
                f"filled by the opaque {_first_names(set().union(*(n for n, _ in fed)))}",
                [p for _, p in fed],
            ),
            (
                "constant",
                f"the loader fills them with {_first_names({what for what, _ in own})}",
                [p for _, p in own],
            ),
        ):
            mine += places
            more = min(covered(mine)[0], t.elements) - have
            if more:
                notes.append(Note(t.name, who, more, kind))
                have += more
        if have == t.elements:
            continue
        if unseen and unfilled:
            notes.append(
                Note(
                    t.name,
                    f"filled by the opaque {_first_names(unseen)}",
                    t.elements,
                    "opaque",
                )
            )
        else:
            what = "this parameter" if unfilled else "them"
            notes.append(
                Note(
                    t.name,
                    f"no checkpoint tensor given fills {what}",
                    t.elements - have,
                    "gap",
                )
            )
    return tuple(notes)


def _first_names(names: Iterable[str]) -> str:
    names = sorted(names)
    return ", ".join(names[:3]) + (" …" if len(names) > 3 else "")
