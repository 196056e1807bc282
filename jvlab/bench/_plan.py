"""`jvlab bench plan`: seconds and peak memory to plan a dense 405B and a 671B mixture of experts, each by itself."""

from __future__ import annotations

import importlib
import os
import resource
import tempfile
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from jvlab._files import Plain
from jvlab.bench._side import Lines, Side, timed

if TYPE_CHECKING:
    from jvlab.layout._types import RankLayout

LLAMA_405B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_hidden_layers": 126,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
}
DEEPSEEK_671B = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": 7168,
    "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128,
    "num_key_value_heads": 128, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8,
    "topk_group": 4, "first_k_dense_replace": 3, "moe_layer_freq": 1, "q_lora_rank": 1536, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 129280,
    "max_position_embeddings": 163840, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "hidden_act": "silu", "routed_scaling_factor": 2.5, "norm_topk_prob": True,
    "scoring_func": "sigmoid", "topk_method": "noaux_tc",
}  # fmt: skip
DEEPSEEK_RULES = """
embed.embedding -> model.embed_tokens.weight
lm_head.kernel -> lm_head.weight : d v -> v d
final_norm.scale -> model.norm.weight
layers.{i}.[attn|mlp]_norm.scale -> model.layers.{i}.[input|post_attention]_layernorm.weight
layers.{i}.attn.[q_a|kv_a]_norm.scale -> model.layers.{i}.self_attn.[q_a|kv_a]_layernorm.weight
layers.{i}.attn.[q_a|q_b|kv_b|o].kernel -> model.layers.{i}.self_attn.[q_a|q_b|kv_b|o]_proj.weight : a b -> b a
layers.{i}.attn.kv_a.kernel -> model.layers.{i}.self_attn.kv_a_proj_with_mqa.weight : a b -> b a
layers.{i}.mlp.[gate|up|down].kernel -> model.layers.{i}.mlp.[gate|up|down]_proj.weight : a b -> b a
layers.{i}.shared.[gate|up|down].kernel -> model.layers.{i}.mlp.shared_experts.[gate|up|down]_proj.weight : a b -> b a
layers.{i}.moe.[gate|up|down].kernel -> model.layers.{i}.mlp.experts.{e}.[gate|up|down]_proj.weight : e a b -> b a
layers.{i}.moe.router.kernel -> model.layers.{i}.mlp.gate.weight : d e -> e d
layers.{i}.moe.router.bias -> model.layers.{i}.mlp.gate.e_score_correction_bias
"""


@dataclass(frozen=True)
class PlanCase:
    """One planning job."""

    config: Plain = field(repr=False)
    tensor_parallel: int
    mesh: str
    replicas: int = 1
    rules: str = "policy"


CASES = {
    "dense_405b": PlanCase(LLAMA_405B, 8, "fsdp=256", 4),
    "moe_671b": PlanCase(DEEPSEEK_671B, 16, "fsdp=512", 1, DEEPSEEK_RULES),
}


def run_bench_plan() -> Plain:
    """`jvlab bench plan`. The seconds run from leaves, tensors and traced layouts to a proven plan.

    The parts (bind; compile and prove) are in `cases`; tracing and vLLM's import are reported apart.
    """
    done: dict[str, Plain] = {}
    with tempfile.TemporaryDirectory(prefix="jvlab-plan-") as folder:
        traced = _measured("trace", CASES, folder)
        for name, case in CASES.items():
            r = _measured("plan", {name: case}, folder)[name]
            done[name] = r
            print(
                f"{name}: {r['total_s']:.2f} s ({r['tensors']:,} tensors, {r['devices']} devices → "
                f"{r['replicas']} × {r['ranks']} ranks, {r['copies']:,} copies), "
                f"peak {r['peak_gib']:.2f} GiB; bind {r['bind_s']:.2f} s, compile and prove "
                f"{r['compile_and_prove_s']:.2f} s"
            )
    return {
        "dense_405b_s": done["dense_405b"]["total_s"],
        "moe_671b_s": done["moe_671b"]["total_s"],
        "peak_gib": max(r["peak_gib"] for r in done.values()),
        "trace_s": {n: r["trace_s"] for n, r in traced.items()},
        "import_vllm_s": max(r["import_vllm_s"] for r in traced.values()),
        "cases": done,
    }


def _measured(step: str, cases: dict[str, PlanCase], folder: str) -> dict[str, Plain]:
    """One step in a new process, to measure its peak memory."""
    order = {"folder": folder, "cases": {n: asdict(c) for n, c in cases.items()}}
    quiet = {"VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR")}
    with Side(f"jvlab.bench._plan:{step}_side", order, quiet) as side:
        return side.receive()


# ---- the two steps, each in a process of its own -------------------------------------------------------------


def trace_side(order: Plain, lines: Lines) -> None:
    """Traces with vLLM, and writes the ranks' layouts."""
    place = "jvlab.engine.tracing._offline"
    imported, tracing = timed(importlib.import_module, place)
    out = {}
    for name, case in _cases(order).items():
        parts = case.tensor_parallel
        seconds, layouts = timed(
            tracing.trace_offline, case.config, tensor_parallel=parts
        )
        out[name] = {
            "trace_s": round(seconds, 3),
            "import_vllm_s": round(imported, 3),
        }
        save_layouts(Path(order["folder"]) / name, layouts)
    lines.send(out)


def plan_side(order: Plain, lines: Lines) -> None:
    """Reads the layouts; binds, compiles, proves."""
    folder = Path(order["folder"])
    lines.send({name: _plan(name, c, folder) for name, c in _cases(order).items()})


def _cases(order: Plain) -> dict[str, PlanCase]:
    return {name: PlanCase(**spec) for name, spec in order["cases"].items()}


def _plan(name: str, case: PlanCase, folder: Path) -> Plain:
    from jvlab.layout._compile import compile_plan
    from jvlab.layout._tree import leaves_of
    from jvlab.layout.rules._builtin import leaf_shapes_for
    from jvlab.layout.rules._ruleset import Rules
    from jvlab.sync._compile_tree import bind_rules, policy_shapes

    layouts = load_layouts(folder / name)
    tensors = list(layouts[0].tensors)
    if case.rules == "policy":
        shapes = policy_shapes(case.config, tensors, "float32")
    else:
        shapes = leaf_shapes_for(
            Rules.parse(case.rules), tensors, case.config, "float32"
        )
    # after the shapes: a real trainer has its tree already
    started = time.perf_counter()
    _, bindings = bind_rules(case.rules, shapes, tensors, case.config)
    leaves = leaves_of(shapes, case.mesh)
    bound = time.perf_counter()
    plan = compile_plan(leaves, bindings, layouts, replicas=case.replicas, title=name)
    compiled = time.perf_counter()
    return {
        "total_s": round(compiled - started, 3),
        "bind_s": round(bound - started, 3),
        "compile_and_prove_s": round(compiled - bound, 3),
        "peak_gib": round(
            resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20), 3
        ),
        "tensors": len(tensors),
        "leaves": len(leaves),
        "devices": len(plan.devices),
        "ranks": plan.ranks,
        "replicas": plan.replicas,
        "copies": plan.copies,
        "plan_bytes": len(plan.to_bytes()),
    }


def save_layouts(file: Path, layouts: list[RankLayout]) -> None:
    """Layouts of all ranks in one file, a line for each."""
    from jvlab.layout._layout_codec import layout_to_plain, plain_to_bytes

    with file.open("wb") as out:
        for layout in layouts:
            out.write(plain_to_bytes(layout_to_plain(layout)) + b"\n")


def load_layouts(file: Path) -> list[RankLayout]:
    """What `save_layouts` wrote; ranks share one tuple of tensors where they are equal."""
    from jvlab.layout._layout_codec import layout_from_bytes

    layouts: list[RankLayout] = []
    with file.open("rb") as lines:
        for line in lines:
            layout = layout_from_bytes(line)
            if layouts and layout.tensors == layouts[0].tensors:
                layout = replace(layout, tensors=layouts[0].tensors)
            layouts.append(layout)
    return layouts
