"""`jv.plan`: a transfer plan with no GPU, pool or weights; and the body of the `jvlab plan` command."""

from __future__ import annotations

import argparse
import json
import logging
import os
import time
from collections.abc import Mapping as Dict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jvlab._errors import ConfigError, ModelError

if TYPE_CHECKING:
    from jvlab._pool import Pool
    from jvlab.layout._mapping import Mapping
    from jvlab.layout._plan import TransferPlan
    from jvlab.layout._ruleset import Rules
    from jvlab.layout._types import Binding, CheckpointTensor, RankLayout

MAX_LINKS = 1024  # rows of the link table in the command's JSON
LINK_GBPS = 50.0  # GB/s each way per device: a 400 Gb/s network port
RULES_HELP = (
    "the trainer's tree, by the rules it is written in: policy, hf_flax, checkpoint, tunix, maxtext, gemma, "
    "policy.<family>.scanned, or a file of rules; auto (the default) infers the rules of jvlab's own Policy tree"
)


def plan(
    params: Any,
    model: str | os.PathLike[str] | Dict[str, Any] | Pool,
    tensor_parallel: int = 1,
    replicas: int = 1,
    mesh: object = None,
    rules: Any = "auto",
    link_gbps: float = LINK_GBPS,
    bucket_mib: float = 64,
    pipeline_parallel: int = 1,
    expert_parallel: bool = False,
    dtype: str = "auto",
) -> TransferPlan:
    """The proven plan from a tree of arrays or shapes to a vLLM engine that need not exist.

    `model` is a model folder, a config, or a running pool (whose engine is then asked, and whose parallelism counts).
    `params` is any pytree of arrays or ShapeDtypeStructs, or None: then the tree is the one that `rules` ask for, and
    for "auto" jvlab's own Policy layout of the model, whose rules are inferred all the same. `mesh` (`"fsdp=4,tp=2"`,
    a dict, a jax Mesh) describes how they would be sharded; without it their own shardings are read.
    `rules` is "auto", the name of a rule set, a file, rule text, a `jv.Rules`, or ("auto", rules): those, and the rest
    inferred. Where `params` hold numbers and the model folder holds weights, "auto" may compare them as evidence.
    `link_gbps` (GB/s each way, per device and rank) is what `plan.predict()` reckons with.

    >>> jv.plan(None, model, tensor_parallel=2, mesh="fsdp=3")
    TransferPlan(llama-...: 3 devices → 1 × 2 ranks, ...)
    """
    options = {"bucket_mib": bucket_mib, "link_gbps": link_gbps}
    parallel = {"pipeline_parallel": pipeline_parallel, "expert_parallel": expert_parallel}
    return plan_and_mapping(params, model, tensor_parallel, replicas, mesh, rules, dtype=dtype, **options, **parallel)[
        0
    ]


def plan_and_mapping(
    params: Any,
    model: str | os.PathLike[str] | Dict[str, Any] | Pool,
    tensor_parallel: int = 1,
    replicas: int = 1,
    mesh: object = None,
    rules: Any = "auto",
    bucket_mib: float = 64,
    link_gbps: float = LINK_GBPS,
    pipeline_parallel: int = 1,
    expert_parallel: bool = False,
    dtype: str = "auto",
    timing: dict[str, float] | None = None,
) -> tuple[TransferPlan, Mapping]:
    """The plan and the mapping it follows, traced offline. `timing` takes the seconds of each step."""
    from jvlab.rollout._checkpoint import checkpoint_tensors
    from jvlab.rollout._checkpoint_values import CheckpointValues

    clock = _Clock(timing)
    if not isinstance(model, (str, os.PathLike, Dict)):  # a running pool: ask its engine instead of building one here
        return _onto_pool(model, params, mesh, rules, bucket_mib, link_gbps, clock)
    config = read_config(model)
    tensors = checkpoint_tensors(model)
    clock.lap("checkpoint_s")
    trace_offline = _import_tracer()
    clock.lap("import_vllm_s")
    layouts = trace_offline(
        model,
        tensor_parallel=tensor_parallel,
        pipeline_parallel=pipeline_parallel,
        expert_parallel=expert_parallel,
        dtype=_engine_dtype(dtype, config),
        tensors=tensors,
    )
    clock.lap("trace_s")
    title = Path(str(model)).name if not isinstance(model, Dict) else str(config.get("model_type", ""))
    return compile_from(
        params, config, tensors, layouts, replicas, mesh, rules, bucket_mib, link_gbps, title, clock,
        checkpoint=CheckpointValues.of(model),
    )  # fmt: skip


def _onto_pool(
    pool: Any, params: Any, mesh: object, rules: Any, bucket_mib: float, link_gbps: float, clock: _Clock
) -> tuple[TransferPlan, Mapping]:
    """The same for a running pool, whose ranks are traced where they live; its parallelism is the engine's own."""
    from jvlab.rollout._checkpoint import checkpoint_tensors
    from jvlab.rollout._checkpoint_values import CheckpointValues

    if not hasattr(pool, "trace"):
        raise ConfigError(
            f"model must be a model folder, a config or a pool, not {type(pool).__name__}",
            remedy="pass a path, a dict, or what lab.launch returned",
        )
    config, tensors = read_config(pool.model), checkpoint_tensors(pool.model)
    layouts = pool.trace(tensors)
    clock.lap("trace_s")
    return compile_from(
        params, config, tensors, layouts, pool.replicas, mesh, rules, bucket_mib, link_gbps,
        Path(pool.model).name, clock, checkpoint=CheckpointValues.of(pool.model),
    )  # fmt: skip


def _import_tracer() -> Any:
    """`trace_offline`, with vLLM's log quiet: a dry run prints a plan, not the making of an engine."""
    from jvlab.rollout import _vllm

    _vllm.build()  # says what to install where there is no vLLM
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    logging.getLogger("torch._library.triton").setLevel(logging.ERROR)  # no Triton on a CPU is no news
    from jvlab.rollout._offline import trace_offline

    return trace_offline


def _engine_dtype(dtype: str, config: Dict[str, Any]) -> str:
    """As `lab.launch` chooses it: a float32 checkpoint stays float32, everything else is vLLM's choice."""
    given = config.get("dtype") or config.get("torch_dtype")
    return "float32" if dtype == "auto" and given == "float32" else dtype


def compile_from(
    params: Any,
    config: Dict[str, Any],
    tensors: list[CheckpointTensor],
    layouts: list[RankLayout],
    replicas: int = 1,
    mesh: object = None,
    rules: Any = "auto",
    bucket_mib: float = 64,
    link_gbps: float = LINK_GBPS,
    title: str = "",
    clock: _Clock | None = None,
    checkpoint: Dict[str, Any] | None = None,
) -> tuple[TransferPlan, Mapping]:
    """Rules bound, plan compiled and proven, for ranks that were traced already (offline or in a live engine)."""
    from jvlab.layout._compile import compile_plan
    from jvlab.layout._mapping import Mapping
    from jvlab.layout._rebind import Origin
    from jvlab.layout._shards import device_processes, leaves_of, mesh_processes
    from jvlab.layout._torch_leaf import checkpoint_names
    from jvlab.layout._tree import FlatTree, flatten

    clock = clock or _Clock(None)
    if params is None:
        flat = FlatTree(shapes_for(rules, config, tensors))
        mesh = mesh or "fsdp=1"
    else:
        flat = flatten(params)
    kept, tied, rules = checkpoint_names(flat.arrays, rules, tensors)
    flat = FlatTree(kept, (*flat.skipped, *tied))
    if params is not None and not flat.arrays:
        raise ConfigError("the tree holds no array", remedy="pass the parameters, e.g. policy.params")
    values = flat.arrays if checkpoint is not None and all(map(_at_hand, flat.arrays.values())) else None
    in_force, bindings = bind_rules(rules, flat.shapes, tensors, config, values, checkpoint)
    clock.lap("bind_s")
    leaves = leaves_of(flat.arrays, mesh)
    shapes, skipped = flat.shapes, flat.skipped
    processes = device_processes(flat.arrays) if mesh is None else mesh_processes(mesh)

    def make(in_force: Rules, bindings: list[Binding]) -> Mapping:
        bound = {b.leaf for b in bindings}
        made = compile_plan(
            leaves, bindings, layouts, replicas=replicas, bucket_mib=bucket_mib, link_gbps=link_gbps,
            device_process=processes, title=title,
            ignored_leaves=[x.path for x in leaves if x.path not in bound],  # `bind` refuses those no rule ignores
        )  # fmt: skip
        return Mapping(made, bindings, layouts, skipped, Origin(in_force, shapes, tuple(tensors), config, make))

    mapping = make(in_force, bindings)
    clock.lap("compile_and_prove_s")
    return mapping.plan, mapping


def _at_hand(array: Any) -> bool:
    """Can this process read all of it? Of an array that spans processes it holds a part only."""
    return hasattr(array, "__array__") and bool(getattr(array, "is_fully_addressable", True))


def bind(
    rules: Any,
    shapes: Dict[str, Any],
    tensors: list[CheckpointTensor],
    config: Dict[str, Any],
    values: Dict[str, Any] | None = None,
    checkpoint: Dict[str, Any] | None = None,
) -> list[Binding]:
    """Bindings by `rules`, as `plan` takes them; `values` and `checkpoint` together are evidence for "auto"."""
    return bind_rules(rules, shapes, tensors, config, values, checkpoint)[1]


def bind_rules(
    rules: Any,
    shapes: Dict[str, Any],
    tensors: list[CheckpointTensor],
    config: Dict[str, Any],
    values: Dict[str, Any] | None = None,
    checkpoint: Dict[str, Any] | None = None,
) -> tuple[Rules, list[Binding]]:
    """The rules that are in force, declared or inferred, and what they bind."""
    from jvlab.layout._auto import infer

    given = None
    if isinstance(rules, (tuple, list)) and len(rules) == 2 and rules[0] == "auto":
        rules, given = "auto", rules_of(rules[1], tensors, config)
    if isinstance(rules, str) and rules == "auto":
        return infer(shapes, tensors, config, values, checkpoint, given)
    declared = rules_of(rules, tensors, config)
    return declared, declared.bind(shapes, tensors, config)


def rules_of(rules: Any, tensors: list[CheckpointTensor], config: Dict[str, Any]) -> Rules:
    """Declared rules: "policy", the name of a set, a file, rule text, or a Rules object."""
    from jvlab.layout._builtin import policy_rules
    from jvlab.layout._ruleset import Rules

    if isinstance(rules, Rules):
        return rules
    if not isinstance(rules, str):
        raise ConfigError(
            f"rules must be text or Rules, not {type(rules).__name__}",
            remedy='pass "auto", a name, a file, rule text, jv.Rules, or ("auto", rules)',
        )
    if rules == "policy":
        return policy_rules(config, [t.name for t in tensors])
    if "->" in rules:
        return Rules.parse(rules)
    return Rules.load(rules) if Path(rules).is_file() else Rules.named(rules)


def shapes_for(rules: Any, config: Dict[str, Any], tensors: list[CheckpointTensor]) -> Dict[str, Any]:
    """Leaf shapes for a plan without parameters: those that declared rules ask for; for "auto", the Policy's."""
    from jvlab.layout._policy_shapes import leaf_shapes_for

    auto = rules == "auto" if isinstance(rules, str) else isinstance(rules, (tuple, list))
    if auto:
        return policy_shapes(config, tensors)
    return leaf_shapes_for(rules_of(rules, tensors, config), tensors, config)


def policy_shapes(config: Dict[str, Any], tensors: list[CheckpointTensor], dtype: str | None = None) -> Dict[str, Any]:
    """Leaf shapes of jvlab's own Policy for a model, from its config and tensors alone."""
    from jvlab.layout._builtin import policy_rules
    from jvlab.layout._policy_shapes import leaf_shapes_for

    return leaf_shapes_for(policy_rules(config, [t.name for t in tensors]), tensors, config, dtype)


def read_config(model: str | os.PathLike[str] | Dict[str, Any]) -> Dict[str, Any]:
    """A model's config.json, or the mapping itself."""
    if isinstance(model, Dict):
        return model
    file = Path(model) / "config.json"
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as e:
        raise ModelError(
            f"{str(model)!r} has no readable config.json: {e}",
            remedy="give the directory of a Hugging Face checkpoint; config.json alone is enough",
            model=str(model),
        ) from e


class _Clock:
    """Seconds of each step, by name."""

    def __init__(self, out: dict[str, float] | None) -> None:
        self.out, self.at = out if out is not None else {}, time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.out[name] = round(now - self.at, 4)
        self.at = now


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `jvlab plan`."""
    parser.add_argument("--model", required=True, help="directory with a config.json; weights are not needed")
    parser.add_argument("--mesh", default="fsdp=1", help="trainer mesh, e.g. fsdp=3,tp=2")
    parser.add_argument("--tensor-parallel", type=int, default=1, metavar="N")
    parser.add_argument("--pipeline-parallel", type=int, default=1, metavar="N")
    parser.add_argument("--expert-parallel", action="store_true")
    parser.add_argument("--replicas", type=int, default=1, metavar="N")
    parser.add_argument("--rules", default="auto", help=RULES_HELP)
    parser.add_argument("--dtype", default="auto", help="the engine's dtype")
    parser.add_argument("--bucket-mib", type=float, default=64.0)
    parser.add_argument("--link-gbps", type=float, nargs="+", default=[LINK_GBPS], help="GB/s per device, each way")


def run_plan(args: argparse.Namespace) -> dict[str, Any]:
    """`jvlab plan`: prints the plan from the tree that --rules describe, returns it as plain values."""
    from jvlab.views._plan_view import plan_lines, plan_summary

    timing: dict[str, float] = {}
    made, mapping = plan_and_mapping(
        None,
        args.model,
        tensor_parallel=args.tensor_parallel,
        replicas=args.replicas,
        mesh=args.mesh,
        rules=args.rules,
        bucket_mib=args.bucket_mib,
        link_gbps=args.link_gbps[0],
        pipeline_parallel=args.pipeline_parallel,
        expert_parallel=args.expert_parallel,
        dtype=args.dtype,
        timing=timing,
    )
    print("\n".join(plan_lines(made, args.link_gbps)))
    table = made.all_links
    names = ("replica", "device", "process", "rank", "nbytes", "copies", "contiguous_bytes")
    columns = [getattr(table, n).tolist()[:MAX_LINKS] for n in names]
    keys = [n.replace("nbytes", "bytes") for n in names]
    return plan_summary(made) | {
        "mapping": mapping.summary(),
        "timing": timing,
        "predicted_s_by_gbps": {f"{g:g}": made.predict(g) for g in args.link_gbps},
        "link_table": [dict(zip(keys, row, strict=True)) for row in zip(*columns, strict=True)],
    }
