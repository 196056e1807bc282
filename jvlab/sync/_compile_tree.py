"""Traces a model or pool, binds a tree to it, and compiles a mapping and its plan."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Mapping as Dict
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jvlab._errors import ConfigError, CoverageError
from jvlab._names import model_words
from jvlab._progress import importing
from jvlab.layout._checkpoint import (
    CheckpointValues,
    checkpoint_tensors,
    read_config,
)
from jvlab.layout._compile import compile_plan
from jvlab.layout._formats import (
    before_blocks,
    block_scales,
    expand_blocks,
    expand_formats,
    with_block_scales,
)
from jvlab.layout._tree import (
    FlatTree,
    MeshSpec,
    checkpoint_names,
    device_processes,
    flatten,
    leaves_of,
    mesh_processes,
)
from jvlab.layout._types import Binding, CheckpointTensor
from jvlab.layout.rules._auto import infer
from jvlab.layout.rules._builtin import (
    fit_leaves,
    leaf_shapes_for,
    numbers_layers,
    policy_rules,
    preset_rules,
)
from jvlab.layout.rules._rules import HasShape, RuleProblem
from jvlab.layout.rules._ruleset import Rules
from jvlab.layout.rules._syntax import Rule, name_text

if TYPE_CHECKING:
    from jvlab.layout._types import RankLayout
    from jvlab.sync._mapping import Mapping
    from jvlab.wire._pool_view import PoolView

ByName = Dict[str, Any]

# Binds rules, declared or inferred, to a tree: what `rules=` accepts, and the leaf shapes that rules imply.


def bind_rules(
    rules: Any,
    shapes: ByName,
    tensors: list[CheckpointTensor],
    config: ByName,
    values: ByName | None = None,
    checkpoint: ByName | None = None,
) -> tuple[Rules, list[Binding]]:
    """The rules in force, declared or inferred, and their bindings; "auto" compares `values` with `checkpoint`."""
    auto, listed = _listed(rules)
    given = Rules(())
    for part in listed:
        found = rules_of(part, tensors, config, shapes)
        if _is_set(part):  # of a set for many models, what concerns this one
            found = found.effective(shapes, [t.name for t in tensors])
        given = given + found
    if auto:
        return infer(shapes, tensors, config, values, checkpoint, given)
    return given, given.bind(shapes, tensors, config, all_of_them=True)


def _listed(rules: Any) -> tuple[bool, list[Any]]:
    """Whether "auto" is among the rules, and the others; lines of a list are one text, so that they have numbers."""
    parts = list(rules) if isinstance(rules, (tuple, list)) else [rules]
    parts = [
        x
        for part in parts
        for x in (part if isinstance(part, (tuple, list)) else [part])
    ]
    auto = any(isinstance(part, str) and part == "auto" for part in parts)
    lines = [part for part in parts if isinstance(part, str) and "->" in part]
    others = [
        part
        for part in parts
        if not (isinstance(part, str) and (part == "auto" or "->" in part))
    ]
    return auto, [*others, *(["\n".join(lines)] if lines else [])]


def _is_set(rules: Any) -> bool:
    """Is it the name of a set for many models, or one of these sets? Not all of its rules concern every model."""
    if isinstance(rules, str):
        return "->" not in rules and not _is_file(rules)
    return any(rules is Rules.named(name) for name in Rules.names())


def rules_of(
    rules: Any,
    tensors: list[CheckpointTensor],
    config: ByName,
    leaves: ByName | None = None,
) -> Rules:
    """Declared rules: "policy", the name of a set, a file, rule text, or a Rules object; or a list of these.

    A named set is adapted to the model's family and to the prefixes of the checkpoint and the `leaves`.
    """
    if isinstance(rules, Rules):
        return rules
    if isinstance(rules, (tuple, list)):
        return sum(
            (rules_of(part, tensors, config, leaves) for part in _listed(rules)[1]),
            Rules(()),
        )
    if not isinstance(rules, str):
        raise ConfigError(
            f"rules must be text, a list of lines, or jv.Rules, not {type(rules).__name__}",
            remedy='pass "auto", a name, a file, lines such as "leaf -> tensor", jv.Rules; or ("auto", line, line, …)',
        )
    if rules == "policy":
        found = policy_rules(
            config,
            [t.name for t in tensors],
            scanned=False if numbers_layers(leaves or ()) else None,
        )
        return fit_leaves(found, leaves or {})
    if "->" in rules:
        return Rules.parse(rules)
    if _is_file(rules):
        return Rules.load(rules)
    if (
        rules.startswith("policy.")
        and leaves
        and not numbers_layers(leaves)
        and f"{rules}.scanned" in Rules.names()
    ):
        # the same layout with stacked layers, as jv.Policy has them
        rules = f"{rules}.scanned"
    return preset_rules(rules, config, tensors, leaves)


def _is_file(path: str) -> bool:
    try:
        return Path(path).is_file()
    except (OSError, ValueError):  # for example, too long for a file name
        return False


def shapes_for(rules: Any, config: ByName, tensors: list[CheckpointTensor]) -> ByName:
    """Leaf shapes for a plan without parameters: those that declared rules imply; for "auto", the Policy's."""
    if _listed(rules)[0]:
        try:
            return policy_shapes(config, tensors)
        except ConfigError as e:
            raise ConfigError(
                f"{e.message}, so there is no tree to plan for",
                remedy='plan for the checkpoint\'s own tree, --rules checkpoint (rules="checkpoint"), which works for '
                f"every family; or pass parameters; {e.remedy}",
            ) from e
    return leaf_shapes_for(rules_of(rules, tensors, config), tensors, config)


def policy_shapes(
    config: ByName,
    tensors: list[CheckpointTensor],
    dtype: str | None = None,
    scanned: bool | None = None,
) -> ByName:
    """Leaf shapes of jvlab's own Policy for a model, from its config and tensors alone."""
    return leaf_shapes_for(
        policy_rules(config, [t.name for t in tensors], scanned), tensors, config, dtype
    )


# ----------------------------------------------------------------------------------------------------

MakeMapping = Callable[..., "Mapping"]
LINK_GBPS = 50.0  # GB/s each way per device: a 400 Gb/s network port
# into an engine on a CPU, packing and digests included, as seen with shm on two cores
CPU_GBPS = 2.0


def trace_and_compile(
    into: MakeMapping,
    params: Any,
    model: str | os.PathLike[str] | ByName | PoolView,
    tensor_parallel: int = 1,
    replicas: int = 1,
    mesh: object = None,
    rules: Any = "auto",
    bucket_mib: float = 64,
    link_gbps: float | None = None,
    pipeline_parallel: int = 1,
    expert_parallel: bool = False,
    dtype: str = "auto",
    quantization: str | None = None,
    timing: dict[str, float] | None = None,
) -> Mapping:
    """The mapping and its plan, traced offline or in a running pool; `into` is the mapping's class.

    The seconds of each step are written into `timing`.
    """
    clock = _Clock(timing)
    is_folder = isinstance(model, (str, os.PathLike))
    # else it is a running pool, whose ranks are traced in place, with the engine's own parallelism
    pool: Any = None if is_folder or isinstance(model, Dict) else model
    if pool is not None and not hasattr(pool, "trace"):
        raise ConfigError(
            f"model must be a model folder, a config or a pool, not {type(pool).__name__}",
            remedy="pass a path, a dict, or what lab.launch returned",
        )
    folder: Any = model if pool is None else pool.model
    config = read_config(folder)
    tensors = checkpoint_tensors(folder)
    if pool is not None:
        layouts = pool.trace(tensors)
        replicas = pool.replicas
        if link_gbps is None and pool.snapshot.device == "cpu":
            link_gbps = CPU_GBPS
    else:
        if params is None:
            # raises before tracing if there is no tree to plan for
            shapes_for(rules, config, before_blocks(tensors, config))
        if mesh is not None:
            MeshSpec.of(mesh)
        clock.lap("checkpoint_s")
        from jvlab.engine import _vllm_versions

        with _quiet_vllm():
            _vllm_versions.build()  # raises with the install command if vLLM is missing
            with importing("vLLM"):
                from jvlab.engine.tracing._offline import trace_offline
            clock.lap("import_vllm_s")
            options = {
                "tensor_parallel": tensor_parallel,
                "pipeline_parallel": pipeline_parallel,
                "expert_parallel": expert_parallel,
                "dtype": _engine_dtype(dtype, config),
                "quantization": quantization,
            }
            layouts = trace_offline(folder, tensors=tensors, **options)
            # from config.json alone
            if (in_blocks := with_block_scales(tensors, config, layouts)) != tensors:
                tensors = in_blocks
                layouts = trace_offline(folder, tensors=tensors, **options)
    clock.lap("trace_s")
    of_config = str(config.get("model_type", ""))
    return compile_tree(
        into,
        params,
        config,
        tensors,
        layouts,
        replicas=replicas,
        mesh=mesh,
        rules=rules,
        bucket_mib=bucket_mib,
        link_gbps=link_gbps,
        title=of_config if isinstance(folder, Dict) else model_words(str(folder)),
        clock=clock,
        checkpoint=CheckpointValues.of(folder),
    )


@contextlib.contextmanager
def _quiet_vllm() -> Iterator[None]:
    """vLLM logs errors only: a dry run should print only the plan.

    The environment is as before afterwards, without what vLLM's imports set: later labs must not inherit any of it.
    """
    from jvlab.engine._defaults import variables

    level = os.environ.get("VLLM_LOGGING_LEVEL", "ERROR")
    # vLLM applies the variable too late for a warning of its own imports
    logging.getLogger("vllm").setLevel(level)
    # it warns about missing Triton on a CPU
    logging.getLogger("torch._library.triton").setLevel(logging.ERROR)
    with variables({"VLLM_LOGGING_LEVEL": level}):
        yield


def _engine_dtype(dtype: str, config: ByName) -> str:
    """The dtype as `lab.launch` chooses it: a float32 checkpoint stays float32, the rest is vLLM's choice."""
    given = config.get("dtype") or config.get("torch_dtype")
    return "float32" if dtype == "auto" and given == "float32" else dtype


def compile_tree(
    into: MakeMapping,
    params: Any,
    config: ByName,
    tensors: list[CheckpointTensor],
    layouts: list[RankLayout],
    *,
    replicas: int = 1,
    mesh: object = None,
    rules: Any = "auto",
    bucket_mib: float = 64,
    link_gbps: float | None = None,
    title: str = "",
    clock: _Clock | None = None,
    checkpoint: ByName | None = None,
) -> Mapping:
    """Bind rules, compile and prove the plan, for ranks that were traced already (offline or in a live engine)."""
    clock = clock or _Clock(None)
    if params is None:
        flat = FlatTree(shapes_for(rules, config, before_blocks(tensors, config)))
        mesh = mesh or "fsdp=1"
    else:
        flat = flatten(params)
    paths = flat.arrays.keys()
    kept, tied, rules = checkpoint_names(flat.arrays, rules, tensors)
    flat = FlatTree(kept, (*flat.skipped, *tied))
    if params is not None and not flat.arrays:
        raise ConfigError(
            "the tree holds no array", remedy="pass the parameters, e.g. policy.params"
        )
    dtypes = [str(getattr(x, "dtype", "")) for x in flat.arrays.values()]
    # a tree that holds fp8 values already has their scales, as the checkpoint does
    has_scales = any(dtype.endswith("float8_e4m3fn") for dtype in dtypes)
    scales = {} if has_scales else block_scales(tensors, config)
    # filled by the scales that quantising makes
    hidden = {scale.tensor.name for scale in scales.values()}
    tensors = [t for t in tensors if t.name not in hidden]
    values = (
        flat.arrays
        if checkpoint is not None and all(map(_readable, flat.arrays.values()))
        else None
    )
    in_force, bindings = bind_rules(
        rules, flat.shapes, tensors, config, values, checkpoint
    )
    if params is None:  # the tree is derived from the rules, so nothing was assumed
        in_force = replace(in_force, warnings={})
        bindings = [replace(b, warning="") for b in bindings]
    clock.lap("bind_s")
    leaves = leaves_of(flat.arrays, mesh)
    shapes = flat.shapes
    skipped = flat.skipped
    processes = device_processes(flat.arrays) if mesh is None else mesh_processes(mesh)

    def make(in_force: Rules, bindings: list[Binding]) -> Mapping:
        bound = {b.leaf for b in bindings}
        sent, sent_bindings, in_blocks = expand_blocks(leaves, bindings, scales)
        sent, sent_bindings, sent_layouts, quantised = expand_formats(
            sent, sent_bindings, layouts
        )
        made = compile_plan(
            sent,
            sent_bindings,
            sent_layouts,
            replicas=replicas,
            bucket_mib=bucket_mib,
            link_gbps=LINK_GBPS if link_gbps is None else link_gbps,
            device_process=processes,
            title=title,
            # `bind` raises unless a rule ignores them
            ignored_leaves=[x.path for x in leaves if x.path not in bound],
        )
        made = replace(made, quantised=(*in_blocks, *quantised))
        made._connected.update(paths)
        return into(
            made,
            bindings,
            layouts,
            skipped,
            Origin(in_force, shapes, tuple(tensors), config, make),
        )

    mapping = make(in_force, bindings)
    clock.lap("compile_and_prove_s")
    return mapping


def _readable(array: Any) -> bool:
    """Can this process read the whole array? It may span processes."""
    return hasattr(array, "__array__") and bool(
        getattr(array, "is_fully_addressable", True)
    )


class _Clock:
    """Seconds of each step, by name."""

    def __init__(self, out: dict[str, float] | None) -> None:
        self.out, self.at = out if out is not None else {}, time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.out[name] = round(now - self.at, 4)
        self.at = now


# What edited rules would cover ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MappingRow:
    """A leaf, the checkpoint tensor it corresponds to, the parameter it fills, and the ranks where it does."""

    leaf: str
    rule: str
    reason: str
    confidence: float
    tensor: str
    parameter: str
    ranks: tuple[int, ...]
    leaf_dtype: str
    dtype: str
    nbytes: int  # on the wire, over all its ranks
    status: str  # direct, cast, quantised, staged, opaque, unused
    warning: str = ""  # what was assumed without evidence
    part: str = ""  # the slice of a stacked leaf, `[1]`
    # the same slice named as a layer of its own, `layers.1.attn.q.kernel`
    numbered: str = ""

    @property
    def name(self) -> str:
        """The leaf, with its slice where layers are stacked: `layers.attn.q.kernel[1]`."""
        return self.leaf + self.part

    @property
    def rank_text(self) -> str:
        """The ranks with runs shortened: 0-3, 6."""
        return rank_runs(self.ranks)


def rank_runs(ranks: Sequence[int]) -> str:
    """0, 1, 2, 5 → `0-2, 5`."""
    runs: list[list[int]] = []
    for r in sorted(ranks):
        if runs and r == runs[-1][1] + 1:
            runs[-1][1] = r
        else:
            runs.append([r, r])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


# Edited rules ---------------------------------------------------------------------------------------------------------


PROBLEM = "problem"  # the status of a row for something that is not covered


@dataclass(frozen=True)
class Origin:
    """The inputs of a mapping; shapes and names only, so that it keeps no parameter alive."""

    rules: Rules
    shapes: Dict[str, HasShape] = field(repr=False)
    tensors: Sequence[CheckpointTensor] = field(repr=False)
    config: ByName = field(repr=False)
    # compiles and proves
    make: Callable[[Rules, list[Binding]], Mapping] = field(repr=False)


@dataclass(frozen=True, eq=False)
class Coverage:
    """What a set of rules covers: complete, or with its problems. Made by `mapping.edit(rule)`."""

    rules: Rules
    leaves: int
    leaves_bound: int
    tensors: int
    tensors_filled: int
    problems: tuple[str, ...]
    rows: tuple[MappingRow, ...] = field(repr=False)
    made: Mapping | None = field(repr=False)
    tried_on: Mapping = field(repr=False)

    @property
    def complete(self) -> bool:
        """Is every leaf used, and every element of every tensor and parameter written once? Not: is the value right?"""
        return self.made is not None

    @property
    def mapping(self) -> Mapping:
        """The mapping that these rules make; a CoverageError if they do not cover the model."""
        if self.made is None:
            raise CoverageError(
                f"these rules leave {len(self.problems)} problems: {'; '.join(self.problems[:3])}",
                remedy="edit another rule with coverage.edit(rule); coverage.problems lists all",
                problems=self.problems,
            )
        return self.made

    def edit(self, rule: str, *, replace: str = "") -> Coverage:
        """Edit another rule on top of this one: rules are often wrong in pairs."""
        return coverage_of(self.tried_on, changed_rules(self.rules, rule, replace))

    def save_rules(self, path: str | Path) -> Path:
        """Write these rules, complete or not, to a file for `rules=path`."""
        self.rules.save(path)
        return Path(path)

    @property
    def line(self) -> str:
        """The coverage in one line."""
        state = (
            "complete"
            if self.complete
            else f"{len(self.problems)} problem{'s' * (len(self.problems) != 1)}"
        )
        return f"{self.leaves_bound}/{self.leaves} leaves, {self.tensors_filled}/{self.tensors} tensors, {state}"

    def __repr__(self) -> str:
        return f"Coverage({self.line})"


def changed_rules(rules: Rules, text: str, replaced: str = "") -> Rules:
    """The rules with one added, replaced or removed; the notes of the others are kept."""
    old = _find(rules, replaced) if replaced.strip() else None
    parsed = Rules.parse(text).rules
    if len(parsed) > 1:
        raise ConfigError(
            f"edit takes one rule, not {len(parsed)}",
            remedy="call it per rule, or use jv.Rules.parse",
        )
    if not parsed:
        if old is None:
            raise ConfigError(
                "an empty rule removes one, but none is named",
                remedy="pass the text of the old rule as replace=",
            )
        kept = [r for r in rules if r is not old]
    else:
        new = parsed[0]
        leaf = new.leaf and name_text(new.leaf)
        same = (r for r in rules if leaf and r.leaf and name_text(r.leaf) == leaf)
        old = old or next(same, None)
        kept = [replace(new, line=r.line) if r is old else r for r in rules]
        if old is None:
            kept.append(new)
    texts = {str(r) for r in kept}
    notes = {k: v for k, v in rules.notes.items() if k in texts}
    return Rules(
        tuple(kept), notes, {k: v for k, v in rules.warnings.items() if k in texts}
    )


def _find(rules: Rules, text: str) -> Rule:
    wanted = str(Rules.parse(text).rules[0])
    found = next((r for r in rules if str(r) == wanted), None)
    if found is None:
        raise ConfigError(
            f"no rule in force reads `{wanted}`",
            remedy="print(mapping.rules) shows them",
        )
    return found


def coverage_of(mapping: Mapping, rules: Rules) -> Coverage:
    """What `rules` would cover, applied to the inputs of `mapping`."""
    origin = mapping._source()
    bindings, problems = rules.attempt(origin.shapes, origin.tensors, origin.config)
    texts = [p.what for p in problems]
    made = None
    if not problems:
        try:
            made = origin.make(rules, bindings)
            made._link = mapping._link
        # the rules bind, but some elements on a rank would not be written
        except CoverageError as error:
            texts = list(error.problems) or [error.message]
    trouble = {p.leaf for p in problems} - {""}
    bound = {b.leaf for b in bindings} - trouble
    # `leaf -> ~` leaves no trace
    ignored = {p for p in origin.shapes if p not in bound and p not in trouble}
    unfilled = {p.tensor for p in problems} - {""}
    rows = (
        made.rows
        if made is not None
        else (*_rows_of(problems, texts), *mapping._rows_of(bindings))
    )
    return Coverage(
        rules,
        len(origin.shapes),
        len(bound) + len(ignored),
        len(origin.tensors),
        len(origin.tensors) - len(unfilled),
        tuple(texts),
        rows,
        made,
        mapping,
    )


def _rows_of(
    problems: Sequence[RuleProblem], texts: Sequence[str]
) -> tuple[MappingRow, ...]:
    """One table row per problem."""
    if not problems:
        return tuple(
            MappingRow("", "", text, 0.0, "", "", (), "", "", 0, PROBLEM)
            for text in texts
        )
    return tuple(
        MappingRow(p.leaf, p.rule, p.what, 0.0, p.tensor, "", (), "", "", 0, PROBLEM)
        for p in problems
    )
