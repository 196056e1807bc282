"""`jv.plan`: a transfer plan with no GPU, pool or weights; and the body of the `jvlab plan` command."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping as Dict
from typing import TYPE_CHECKING, Any

from jvlab._tracebacks import brief
from jvlab.sync._compile_tree import LINK_GBPS
from jvlab.sync._mapping import Mapping

if TYPE_CHECKING:
    from jvlab.layout._plan import TransferPlan
    from jvlab.wire._pool_view import PoolView

MAX_LINKS = 1024  # rows of the link table in the command's JSON
RULES_HELP = (
    "the trainer's tree, by the rules it is written in: policy, hf_flax, checkpoint, tunix, maxtext, gemma, "
    "policy.<family>.scanned, or a file of rules; auto (the default) infers the rules of jvlab's own Policy tree"
)


@brief
def plan(
    params: Any,
    model: str | os.PathLike[str] | Dict[str, Any] | PoolView,
    tensor_parallel: int = 1,
    replicas: int = 1,
    mesh: object = None,
    rules: Any = "auto",
    link_gbps: float | None = None,
    bucket_mib: float = 64,
    pipeline_parallel: int = 1,
    expert_parallel: bool = False,
    dtype: str = "auto",
    quantization: str | None = None,
) -> TransferPlan:
    """The plan from a tree of arrays or shapes to a vLLM engine that need not exist: every element is written once.

    `model` is a model folder, "tiny:llama", "smollm2", a config, or a running pool (whose engine is traced, with its
    own options).
    `params` is any pytree of arrays or ShapeDtypeStructs; with None the tree is the one that `rules` imply, for "auto"
    that of jvlab's own Policy. `mesh` (`"fsdp=4,tp=2"`, a dict, a jax Mesh) says how they would be sharded; without it
    their own shardings are used. `rules` is "auto", the name of a rule set, a file, rule text, a `jv.Rules`, a list of
    lines, or ("auto", line, line, …), which infers the remaining ones; `help(jv.Rules)` explains the lines. If `params`
    hold values and the model folder holds weights, "auto" may compare them as evidence.
    `quantization="fp8"` plans for an engine that quantises while loading; a model whose config.json says that it is fp8
    in blocks needs no option. Both as an H200 was seen to hold them; connecting finds what the engine really does.
    `link_gbps` (GB/s each way, per device and rank) is the bandwidth that `plan.predict()` assumes; without it 50, a
    400 Gb/s port, or 2 for a pool on a CPU.

    >>> jv.plan(None, model, tensor_parallel=2, mesh="fsdp=3")
    TransferPlan(llama: 3 devices → 1 × 2 ranks, ...)
    """
    return Mapping.of(
        params,
        model,
        tensor_parallel=tensor_parallel,
        replicas=replicas,
        mesh=mesh,
        rules=rules,
        dtype=dtype,
        quantization=quantization,
        bucket_mib=bucket_mib,
        link_gbps=link_gbps,
        pipeline_parallel=pipeline_parallel,
        expert_parallel=expert_parallel,
    ).plan


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `jvlab plan`."""
    parser.add_argument(
        "--model",
        required=True,
        help="directory with a config.json (weights are not needed), or tiny:llama",
    )
    parser.add_argument(
        "--mesh", default="fsdp=1", help="trainer mesh, e.g. fsdp=3,tp=2"
    )
    parser.add_argument("--tensor-parallel", type=int, default=1, metavar="N")
    parser.add_argument("--pipeline-parallel", type=int, default=1, metavar="N")
    parser.add_argument("--expert-parallel", action="store_true")
    parser.add_argument("--replicas", type=int, default=1, metavar="N")
    parser.add_argument("--rules", default="auto", help=RULES_HELP)
    parser.add_argument("--dtype", default="auto", help="the engine's dtype")
    parser.add_argument(
        "--quantization", help="fp8: the engine quantises while loading, per tensor"
    )
    parser.add_argument("--bucket-mib", type=float, default=64.0)
    parser.add_argument(
        "--link-gbps",
        type=float,
        nargs="+",
        default=[LINK_GBPS],
        help="GB/s per device, each way",
    )


def run_plan(args: argparse.Namespace) -> dict[str, Any]:
    """`jvlab plan`: prints the plan from the tree that --rules describe, returns it as plain values."""
    from jvlab.views._plan_view import plan_lines, plan_summary

    timing: dict[str, float] = {}
    mapping = Mapping.of(
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
        quantization=args.quantization,
        timing=timing,
    )
    made = mapping.plan
    print("\n".join(plan_lines(made, args.link_gbps)))
    for warning in mapping.warnings:
        print(f"warning: {warning}")
    table = made.all_links
    names = (
        "replica",
        "device",
        "process",
        "rank",
        "nbytes",
        "copies",
        "contiguous_bytes",
    )
    columns = [getattr(table, n).tolist()[:MAX_LINKS] for n in names]
    keys = [n.replace("nbytes", "bytes") for n in names]
    return plan_summary(made) | {
        "mapping": mapping.summary(),
        "warnings": list(mapping.warnings),
        "timing": timing,
        "predicted_s_by_gbps": {f"{g:g}": made.predict(g) for g in args.link_gbps},
        "link_table": [
            dict(zip(keys, row, strict=True)) for row in zip(*columns, strict=True)
        ],
    }
