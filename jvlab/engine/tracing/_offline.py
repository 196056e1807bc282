"""Traces a model on meta tensors for any parallelism: no engine, no weights, no GPU; rank by rank."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from jvlab._errors import ConfigError, TraceError
from jvlab.engine import _patches
from jvlab.engine.tracing import _meta_model
from jvlab.engine.tracing._trace import trace_model
from jvlab.layout._checkpoint import checkpoint_tensors
from jvlab.layout._types import CheckpointTensor, Format, Note, Parameter, RankLayout

_BUILD_REMEDY = "choose sizes that divide the model's heads, experts and widths"
# splits at the first numeric part of a name
_LAYER = re.compile(r"^((?:[^.]*[^.\d][^.]*\.)*)(\d+)\.(.+)$")


def trace_offline(
    model: str | os.PathLike[str] | Mapping[str, Any],
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    expert_parallel: bool = False,
    dtype: str = "auto",
    tensors: Sequence[CheckpointTensor] | None = None,
    expand: bool = True,
    quantization: str | None = None,
) -> list[RankLayout]:
    """The layout of every rank of such an engine, in rank order (tensor-parallel rank fastest).

    `model` is a directory (config.json is enough) or a config as a dict. With `expand`, two layers of each kind are
    traced on the first rank of a pipeline stage, one on its other ranks, and the others follow that pattern; where the
    pattern does not hold, every layer is traced. `quantization="fp8"`, and a checkpoint's fp8 in blocks, are as an
    engine on a GPU holds them (`_patches.card_kernels`).
    """
    if quantization not in (None, *_meta_model.ONLINE):
        raise ConfigError(
            f"quantization={quantization!r} is not known without an engine",
            remedy=f"pass one of {', '.join(_meta_model.ONLINE)}, or plan with a running pool: jv.plan(params, pool)",
        )
    for name, value in (
        ("tensor_parallel", tensor_parallel),
        ("pipeline_parallel", pipeline_parallel),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(
                f"{name}={value!r} is not a whole number from 1 up",
                remedy=f"pass e.g. {name}=1",
            )
    wanted = tuple(checkpoint_tensors(model) if tensors is None else tensors)
    with ExitStack() as stack:
        stack.enter_context(_meta_model.vllm_globals())
        folder = (
            stack.enter_context(_meta_model.config_directory(dict(model)))
            if isinstance(model, Mapping)
            else Path(model)
        )
        config = _engine_config(
            folder,
            tensor_parallel,
            pipeline_parallel,
            expert_parallel,
            dtype,
            quantization,
        )
        if config.quant_config is not None:
            _meta_model.check_known(config.quant_config)
            stack.enter_context(_patches.card_kernels())
        names = _Layers.of(wanted, config.model_config.hf_text_config.num_hidden_layers)
        layouts = []
        layers = None
        for rank in range(tensor_parallel * pipeline_parallel):
            # the first rank of a stage verifies that layers of a kind are alike
            first = rank % tensor_parallel == 0
            if first and expand:
                layers = names
            short = None
            if layers is not None:
                times = 2 if first else 1
                short = _from_pattern(config, wanted, layers, rank, times)
            if short is None:
                layers = None
                short = _loaded(config, build_rank(config, rank), wanted, rank)
            layouts.append(short)
        return layouts


def _engine_config(
    folder: Path, tp: int, pp: int, ep: bool, dtype: str, quantization: str | None
) -> Any:
    try:
        return _meta_model.engine_config(folder, tp, pp, ep, dtype, quantization)
    # pydantic, ValueError, OSError, …: pass on vLLM's message
    except Exception as error:
        raise TraceError(
            f"vLLM refuses this model at tensor_parallel={tp}, pipeline_parallel={pp}: {error}",
            remedy="choose a tensor_parallel that divides the model's heads, and a dtype (fp8: bfloat16) and "
            "architecture that vLLM has",
            tensor_parallel=tp,
            pipeline_parallel=pp,
            model=str(folder),
        ) from error


def build_rank(config: Any, rank: int, device: str = "meta") -> torch.nn.Module:
    """The model of one rank, built by vLLM; call inside `_meta_model.vllm_globals()`."""
    tp = config.parallel_config.tensor_parallel_size
    pp = config.parallel_config.pipeline_parallel_size
    _meta_model.stand_in(tp, pp, rank)
    try:
        return _meta_model.build(config, device)
    except Exception as error:  # vLLM's constructors raise anything
        raise TraceError(
            f"vLLM cannot build rank {rank} of tensor_parallel={tp}, pipeline_parallel={pp}: "
            f"{type(error).__name__}: {error}",
            remedy=_BUILD_REMEDY,
            rank=rank,
            tensor_parallel=tp,
            pipeline_parallel=pp,
        ) from error


def _coords(config: Any, rank: int) -> tuple[tuple[str, int], ...]:
    """(("tp", …), ("pp", …), ("ep", …)) of a global rank; without expert parallelism every rank is expert rank 0."""
    stage, place = divmod(rank, config.parallel_config.tensor_parallel_size)
    return (
        ("tp", place),
        ("pp", stage),
        ("ep", place if config.parallel_config.enable_expert_parallel else 0),
    )


@dataclass(frozen=True)
class _Layers:
    """The checkpoint's tensors by decoder layer: for each layer its tensors sorted by suffix."""

    count: int
    # layer -> indices into the tensors, sorted by suffix
    members: dict[int, np.ndarray]
    kinds: dict[int, int]  # layer -> number of its kind: same suffixes, shapes, dtypes
    layer: np.ndarray  # tensor -> layer, -1 for none

    @classmethod
    def of(cls, tensors: Sequence[CheckpointTensor], count: int) -> _Layers | None:
        """None if the names do not form one list of `count` layers."""
        found: dict[str, dict[int, list[tuple[str, int]]]] = defaultdict(
            lambda: defaultdict(list)
        )
        for i, t in enumerate(tensors):
            if match := _LAYER.match(t.name):
                found[match[1]][int(match[2])].append((match[3], i))
        if len(found) != 1:
            return None
        (layers,) = found.values()
        if not all(i in layers for i in range(count)):
            return None
        members = {}
        kinds = {}
        known = {}
        layer = np.full(len(tensors), -1, np.int64)
        # later ones are not decoder layers (DeepSeek's MTP module)
        for number in range(count):
            suffixes = sorted(layers[number])
            members[number] = np.array([i for _, i in suffixes], np.int64)
            layer[members[number]] = number
            kind = tuple((s, tensors[i].shape, tensors[i].dtype) for s, i in suffixes)
            kinds[number] = known.setdefault(kind, len(known))
        return cls(count, members, kinds, layer)

    def layers_needed(self, start: int, end: int, times: int) -> int:
        """How many layers from `start` contain each kind of the stage `times` times, or as often as it occurs."""
        seen: dict[int, int] = defaultdict(int)
        last = start
        for number in range(start, end):
            seen[self.kinds[number]] += 1
            if seen[self.kinds[number]] <= times:
                last = number
        return last - start + 1


def _from_pattern(
    config: Any,
    tensors: tuple[CheckpointTensor, ...],
    layers: _Layers,
    rank: int,
    times: int,
) -> RankLayout | None:
    """The layout of a rank from a few of its layers; None if that saves nothing or no pattern holds."""
    parallel = config.parallel_config
    stage = rank // parallel.tensor_parallel_size
    start, end = _meta_model.stage_layers(
        layers.count, stage, parallel.pipeline_parallel_size
    )
    count = layers.layers_needed(start, end, times)
    if count >= end - start:
        return None
    with _patches.only_layers(stage, count):
        model = build_rank(config, rank)
    if _built(model) != set(range(start, start + count)):
        return None  # the model does not use vLLM's make_layers
    in_stage = (layers.layer < 0) | (
        (layers.layer >= start) & (layers.layer < start + count)
    )
    chosen = np.flatnonzero(in_stage)
    short = _loaded(config, model, [tensors[i] for i in chosen], rank)
    return _expanded(short, tensors, chosen, layers, range(start, end), count)


def _loaded(
    config: Any,
    model: torch.nn.Module,
    tensors: Sequence[CheckpointTensor],
    rank: int,
) -> RankLayout:
    with _meta_model.config_in_force(config):
        if config.quant_config is not None:
            _meta_model.process(model)
        return trace_model(model, tensors, rank, _coords(config, rank))


def _built(model: torch.nn.Module) -> set[int]:
    return {
        int(m[2]) for name, _ in model.named_parameters() if (m := _LAYER.match(name))
    }


def _expanded(
    short: RankLayout,
    tensors: tuple[CheckpointTensor, ...],
    chosen: np.ndarray,
    layers: _Layers,
    stage: range,
    count: int,
) -> RankLayout | None:
    """The layout of all of a stage's layers from that of its first `count`; None if the pattern does not hold."""
    # no row fills one
    scales = {
        p.name: p
        for p in short.parameters
        if p.name in {f.scale for f in short.formats}
    }
    short = replace(
        short, parameters=tuple(p for p in short.parameters if p.name not in scales)
    )
    patterns = _patterns(short, chosen, layers, range(stage.start, stage.start + count))
    if patterns is None:
        return None
    parameters, first = _parameters(short, stage, count, layers, patterns)
    of_layer = layers.layer[chosen[short.tensor]]
    loose = np.flatnonzero(of_layer < 0)
    at = {p.name: i for i, p in enumerate(parameters)}
    again = _Renamed(stage, layers, patterns)
    formats = again.formats(short.formats, at)
    parameters += [replace(scales[was.scale], name=f.scale) for f, was in formats]
    at |= {p.name: i for i, p in enumerate(parameters)}
    moved = np.array([at[p.name] for p in short.parameters], np.int64)
    columns: dict[str, list[np.ndarray]] = defaultdict(list)

    def add(rows: np.ndarray, tensor: np.ndarray, parameter: np.ndarray) -> None:
        columns["tensor"].append(tensor)
        columns["parameter"].append(parameter)
        for name in _COMPARED:
            columns[name].append(getattr(short, name)[rows])

    add(loose, chosen[short.tensor[loose]], moved[short.parameter[loose]])
    for number in stage:
        p = patterns[layers.kinds[number]]
        add(p.rows, layers.members[number][p.member], first[number] + p.slot)
    order = np.argsort(np.concatenate(columns["tensor"]), kind="stable")
    table = {name: np.concatenate(values)[order] for name, values in columns.items()}
    opaque = again.tensors(short.opaque, tensors)
    filled = np.zeros(len(tensors), bool)
    filled[table["tensor"]] = True
    names = {n.name for n in opaque}
    return replace(
        short,
        tensors=tensors,
        parameters=tuple(parameters),
        tensor=table["tensor"].astype(np.int32),
        parameter=table["parameter"].astype(np.int32),
        padding=again.parameters(short.padding, at),
        repacked=again.parameters(short.repacked, at),
        opaque=opaque,
        formats=tuple(f for f, _ in formats),
        unused=tuple(
            tensors[i].name
            for i in np.flatnonzero(~filled)
            if tensors[i].name not in names
        ),
        **{name: table[name] for name in _COMPARED},
    )


@dataclass(frozen=True)
class _NamePattern:
    """One traced layer as a template for others of its kind."""

    layer: int
    rows: np.ndarray  # rows of the short layout
    member: np.ndarray  # per row: which of the layer's tensors
    slot: np.ndarray  # per row: which of the layer's parameters
    parameters: tuple[Parameter, ...]

    def matches(self, other: _NamePattern, layout: RankLayout) -> bool:
        """Whether renumbering this layer gives the other."""
        same = [
            np.array_equal(
                getattr(layout, c)[self.rows], getattr(layout, c)[other.rows]
            )
            for c in _COMPARED
        ]
        names = [_renumbered(p.name, other.layer) for p in self.parameters]
        return (
            all(same)
            and np.array_equal(self.member, other.member)
            and np.array_equal(self.slot, other.slot)
            and names == [p.name for p in other.parameters]
            and [(p.shape, p.dtype, p.strides) for p in self.parameters]
            == [(p.shape, p.dtype, p.strides) for p in other.parameters]
        )


_COMPARED = ("shape", "src_offset", "src_strides", "dst_offset", "dst_strides")


def _renumbered(name: str, layer: int) -> str:
    match = _LAYER.match(name)
    return f"{match[1]}{layer}.{match[3]}" if match else name


def _patterns(
    short: RankLayout, chosen: np.ndarray, layers: _Layers, built: range
) -> dict[int, _NamePattern] | None:
    owner = np.array(
        [int(m[2]) if (m := _LAYER.match(p.name)) else -1 for p in short.parameters],
        np.int64,
    )
    of_tensor = layers.layer[chosen[short.tensor]]
    of_parameter = owner[short.parameter]
    if not np.array_equal(of_tensor, of_parameter):
        return None  # a tensor of one layer is loaded into another, or outside
    found: dict[int, _NamePattern] = {}
    for number in built:
        rows = np.flatnonzero(of_tensor == number)
        place = np.full(len(layers.layer), -1, np.int64)
        place[layers.members[number]] = np.arange(len(layers.members[number]))
        slots = np.flatnonzero(owner == number)
        if len(slots) and not np.array_equal(
            slots, np.arange(slots[0], slots[0] + len(slots))
        ):
            return None
        pattern = _NamePattern(
            number,
            rows,
            place[chosen[short.tensor[rows]]],
            short.parameter[rows].astype(np.int64) - (slots[0] if len(slots) else 0),
            tuple(short.parameters[i] for i in slots),
        )
        before = found.setdefault(layers.kinds[number], pattern)
        if not before.matches(pattern, short) or _notes(short, before.layer) != _notes(
            short, number
        ):
            return None
    return found


def _notes(layout: RankLayout, layer: int) -> list[Any]:
    """A layer's notes and formats without its number, for comparison."""
    found: list[Any] = []
    for f in layout.formats:
        match = _LAYER.match(f.parameter)
        if match and int(match[2]) == layer:
            found.append(_of_layer(f, 0))
    for note in (*layout.padding, *layout.opaque, *layout.repacked):
        match = _LAYER.match(note.name)
        if match and int(match[2]) == layer:
            found.append((match[3], _reason(note, match, 0), note.elements))
    return found


def _parameters(
    short: RankLayout,
    stage: range,
    count: int,
    layers: _Layers,
    patterns: dict[int, _NamePattern],
) -> tuple[list[Parameter], dict[int, int]]:
    """All parameters in the order vLLM would list them, and where each layer's start."""
    out: list[Parameter] = []
    first: dict[int, int] = {}
    for p in short.parameters:
        match = _LAYER.match(p.name)
        if match is None:
            out.append(p)
        elif not first:
            for number in stage:
                first[number] = len(out)
                out += [
                    replace(q, name=_renumbered(q.name, number))
                    for q in patterns[layers.kinds[number]].parameters
                ]
    return out, first


def _of_layer(f: Format, layer: int) -> Format:
    return replace(
        f, parameter=_renumbered(f.parameter, layer), scale=_renumbered(f.scale, layer)
    )


class _Renamed:
    """Notes and formats of the traced layers, repeated for the layers of their kind."""

    def __init__(
        self, stage: range, layers: _Layers, patterns: dict[int, _NamePattern]
    ) -> None:
        self.alike = {
            p.layer: [n for n in stage if layers.kinds[n] == kind]
            for kind, p in patterns.items()
        }

    def _repeat(self, notes: tuple[Note, ...]) -> list[Note]:
        out = []
        for note in notes:
            match = _LAYER.match(note.name)
            if match is None:
                out.append(note)
            else:
                out += [
                    replace(
                        note,
                        name=_renumbered(note.name, n),
                        reason=_reason(note, match, n),
                    )
                    for n in self.alike.get(int(match[2]), ())
                ]
        return out

    def formats(
        self, formats: tuple[Format, ...], at: Mapping[str, int]
    ) -> list[tuple[Format, Format]]:
        """Every layer's formats in the order of parameters, each with the one that it repeats."""
        out = []
        for f in formats:
            match = _LAYER.match(f.parameter)
            alike = self.alike.get(int(match[2]), []) if match else []
            out += [(_of_layer(f, n), f) for n in alike] if match else [(f, f)]
        return sorted(out, key=lambda pair: at[pair[0].parameter])

    def parameters(
        self, notes: tuple[Note, ...], at: Mapping[str, int]
    ) -> tuple[Note, ...]:
        return tuple(sorted(self._repeat(notes), key=lambda n: at[n.name]))

    def tensors(
        self, notes: tuple[Note, ...], tensors: tuple[CheckpointTensor, ...]
    ) -> tuple[Note, ...]:
        at = {t.name: i for i, t in enumerate(tensors)}
        return tuple(sorted(self._repeat(notes), key=lambda n: at.get(n.name, len(at))))


def _reason(note: Note, match: re.Match[str], layer: int) -> str:
    """The reason with the layer's own number in the names it mentions."""
    return re.sub(rf"\.{match[2]}\.", f".{layer}.", note.reason)
