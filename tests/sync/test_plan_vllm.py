"""From a sharded JAX-side tree to vLLM's memory: the plan, executed, leaves what vLLM's own loader would have."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

from numpy.lib.stride_tricks import as_strided

from jvlab._errors import ConfigError, CoverageError, ModelError
from jvlab.bench import _plan as bench
from jvlab.bench._plan import DEEPSEEK_RULES, load_layouts, save_layouts
from jvlab.cli._cli import main
from jvlab.engine.tracing import _meta_model
from jvlab.engine.tracing._offline import trace_offline
from jvlab.layout._checkpoint import checkpoint_tensors
from jvlab.layout._plan import TransferPlan
from jvlab.layout._proof import prove
from jvlab.layout._tree import leaves_of
from jvlab.layout.rules._builtin import leaf_shapes_for
from jvlab.layout.rules._rules import invert_binding
from jvlab.layout.rules._ruleset import Rules
from jvlab.sync._compile_tree import (
    _quiet_vllm,
    compile_tree,
    policy_shapes,
    trace_and_compile,
)
from jvlab.sync._mapping import Mapping, add_plan_arguments, plan, run_plan
from jvlab.trainer.models import tiny
from tests.engine.tracing import trace_oracle as oracle
from tests.engine.tracing.trace_oracle_configs import OWN, TINY
from tests.layout.plan_interpreter import execute
from tests.pages import blocks

pytestmark = pytest.mark.vllm

CASES = [
    *((name, tp, mesh) for name in TINY for tp, mesh in ((2, "fsdp=3,tp=2"),)),
    ("llama", 1, "fsdp=8"),
    ("llama", 4, "dp=2,fsdp=3"),
    ("mixtral", 4, "fsdp=2,tp=2"),
    ("gpt_neox", 2, "fsdp=6"),
    ("qwen3_moe", 2, "fsdp=4"),  # a layer without experts: layers numbered
    ("qwen3_moe", 4, "dp=3"),
    ("qwen3_moe-tiny", 2, "ep=2,tp=2"),
    ("odd_vocab", 4, "fsdp=2,tp=3"),
    ("deepseek_v3", 2, "fsdp=4"),
]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            folder = tmp_path_factory.mktemp("models") / name
            own = name in OWN
            made[name] = (
                oracle.own_checkpoint(folder, OWN[name])
                if own
                else Path(tiny(name.split("-")[0], folder))
            )
        return made[name]

    return get


def shards_of(
    made: TransferPlan, values: dict[str, np.ndarray]
) -> dict[tuple[str, int], np.ndarray]:
    out = {}
    for leaf in made.leaves:
        sharding = made.shardings[leaf.sharding]
        for u in range(len(sharding.starts)):
            box = tuple(
                slice(a, b)
                for a, b in zip(sharding.starts[u], sharding.stops[u], strict=True)
            )
            for device in sharding.owners[
                sharding.owner_ptr[u] : sharding.owner_ptr[u + 1]
            ].tolist():
                out[leaf.path, device] = np.ascontiguousarray(values[leaf.path][box])
    return out


def storage_of(made: TransferPlan) -> dict[tuple[int, str], np.ndarray]:
    out = {}
    for rank, p in zip(
        made.target_rank.tolist(), made.target_parameter.tolist(), strict=True
    ):
        info = made.parameters[p]
        size = 1 + sum(
            (n - 1) * s for n, s in zip(info.shape, info.strides, strict=True)
        )
        out[rank, info.name] = np.full(
            size, oracle.MARK, oracle.numpy_dtype(info.dtype)
        )
    return out


@pytest.mark.parametrize(("name", "tp", "mesh"), CASES)
def test_executed_plan_equals_what_vllm_loads(
    name: str, tp: int, mesh: str, model_dir: Any
) -> None:
    folder = model_dir(name)
    weights = oracle.weights_of(folder)
    config = json.loads((folder / "config.json").read_text())
    tensors = checkpoint_tensors(folder)
    layouts = trace_offline(
        folder, tensor_parallel=tp, dtype="float32", tensors=tensors
    )
    rules: Any = "policy"
    shapes = policy_shapes(config, tensors) if name != "deepseek_v3" else {}
    if not shapes:
        rules = Rules.parse(DEEPSEEK_RULES)
        shapes = leaf_shapes_for(rules, tensors, config)
    tree = {p: np.zeros(s.shape, s.dtype) for p, s in shapes.items()}
    mapping = compile_tree(
        Mapping, tree, config, tensors, layouts, mesh=mesh, rules=rules
    )
    made = mapping.plan
    for b in mapping.bindings:
        invert_binding(b, oracle.as_numpy(weights[b.tensor]), tree[b.leaf])
    prove(made, mapping.bindings, layouts)
    storage = storage_of(made)
    execute(made, shards_of(made, tree), storage)
    with _meta_model.vllm_globals():
        engine = _meta_model.engine_config(folder, tp, 1, False, "float32")
        for rank, layout in enumerate(layouts):
            model = oracle.loaded_by_vllm(engine, tp, 1, rank, weights)
            live = {**dict(model.named_buffers()), **dict(model.named_parameters())}
            padding = {n.name: n.elements for n in layout.padding}
            for p in layout.parameters:
                flat = storage[rank, p.name]
                ours = as_strided(
                    flat, p.shape, tuple(s * flat.itemsize for s in p.strides)
                )
                # where nothing was written, both may hold their mark
                wrong = ours != oracle.as_numpy(live[p.name])
                assert int((wrong & (ours != oracle.MARK)).sum()) == 0, p.name
                assert int(wrong.sum()) <= padding.get(p.name, 0), p.name


def test_plan_needs_only_a_config(tmp_path: Path, model_dir: Any) -> None:
    config = json.loads((model_dir("llama") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    import jax

    tensors = checkpoint_tensors(tmp_path)
    tree = {
        p: jax.ShapeDtypeStruct(s.shape, "float32")
        for p, s in policy_shapes(config, tensors).items()
    }
    auto = plan(tree, tmp_path, tensor_parallel=2, replicas=3, mesh="fsdp=3,tp=2")
    named = plan(
        tree,
        tmp_path,
        tensor_parallel=2,
        replicas=3,
        mesh={"fsdp": 3, "tp": 2},
        rules="policy.llama",
    )
    assert auto == named
    assert auto.replicas == 3
    assert len(auto.devices) == 6
    one = plan(None, config, tensor_parallel=1, dtype="float32", link_gbps=10)
    assert one.total_bytes == sum(int(np.prod(t.shape)) for t in tensors) * 4
    assert one.predict() == pytest.approx(one.total_bytes / 10e9)
    assert one.predict(20) == pytest.approx(one.total_bytes / 20e9)
    with pytest.raises(ConfigError, match="links of 0 GB/s"):
        plan(None, config, link_gbps=0)
    with pytest.raises(ModelError, match=r"config\.json"):
        plan(None, tmp_path / "nowhere")


def test_a_tree_that_does_not_fit_is_refused(model_dir: Any) -> None:
    config = json.loads((model_dir("llama") / "config.json").read_text())
    tensors = checkpoint_tensors(model_dir("llama"))
    shapes = dict(policy_shapes(config, tensors))
    del shapes["layers.attn.k.kernel"]
    tree = {p: np.zeros(s.shape, np.float32) for p, s in shapes.items()}
    with pytest.raises(CoverageError, match=r"layers\.1\.self_attn\.k_proj"):
        plan(tree, model_dir("llama"), rules="policy.llama", mesh="fsdp=2")


def test_command(model_dir: Any, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_plan_arguments(parser)
    words = [
        "--model",
        str(model_dir("mixtral")),
        "--mesh",
        "fsdp=3,tp=2",
        "--tensor-parallel",
        "2",
        "--replicas",
        "2",
    ]
    out = run_plan(parser.parse_args([*words, "--link-gbps", "50", "400"]))
    json.dumps(out)
    text = capsys.readouterr().out
    assert "6 devices → 2 × 2 ranks" in text
    assert "at 400 GB/s" in text
    mapping = trace_and_compile(
        Mapping, None, model_dir("mixtral"), 2, 2, "fsdp=3,tp=2"
    )
    made = mapping.plan
    assert out["digest"] == made.digest
    assert out["bytes"] == made.total_bytes == 2 * mapping.summary()["bytes"]
    assert out["copies"] == made.copies * 2
    assert sum(row["bytes"] for row in out["link_table"]) == made.total_bytes
    assert {row["replica"] for row in out["link_table"]} == {0, 1}


@pytest.mark.parametrize(
    ("name", "rules"),
    [
        ("llama", "hf_flax"),
        ("llama", "checkpoint"),
        ("llama", "tunix"),
        ("llama", "auto"),
        ("llama", "policy"),
        ("llama", "policy.llama.scanned"),
        ("deepseek_v3", DEEPSEEK_RULES),
        ("deepseek_v3", "checkpoint"),
        ("phi", "checkpoint"),
        ("bloom", "checkpoint"),
    ],
)
def test_command_plans_any_tree(
    name: str, rules: str, model_dir: Any, tmp_path: Path, capsys: Any
) -> None:
    if "->" in rules:
        (tmp_path / "own.rules").write_text(rules)
        rules = str(tmp_path / "own.rules")
    parser = argparse.ArgumentParser()
    add_plan_arguments(parser)
    words = [
        "--model",
        str(model_dir(name)),
        "--mesh",
        "fsdp=2",
        "--tensor-parallel",
        "2",
        "--rules",
        rules,
    ]
    out = run_plan(parser.parse_args(words))
    assert out["mapping"]["tensors"] == len(checkpoint_tensors(model_dir(name)))
    assert "2 devices → 1 × 2 ranks" in capsys.readouterr().out


def test_the_guide_shows_what_the_command_prints(
    capsys: pytest.CaptureFixture[str],
) -> None:
    consoles = blocks("notebooks/GUIDE.md", "console")
    shown = next(text for text in consoles if text.startswith("$ jvlab plan"))
    command, lines = shown.split("\n", 1)
    assert main(command.split()[2:]) == 0
    pattern = re.escape(lines.strip()).replace("…", "(?s:.*)")
    assert re.fullmatch(pattern, capsys.readouterr().out.strip())


def test_a_dry_run_leaves_the_environment_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A lab that is made after it must not start engines that log errors only."""
    monkeypatch.delenv("VLLM_LOGGING_LEVEL", raising=False)
    before = dict(os.environ)
    with _quiet_vllm():
        assert os.environ["VLLM_LOGGING_LEVEL"] == "ERROR"
        os.environ["SET_BY_AN_IMPORT"] = "1"
    assert dict(os.environ) == before


@pytest.mark.soak
def test_a_dry_run_leaves_the_environment_alone_in_a_fresh_process() -> None:
    """Where importing vLLM sets variables of its own."""
    code = (
        "import os, sys; before = dict(os.environ); import jvlab as jv; "
        "jv.plan(None, jv.models.tiny('llama'), tensor_parallel=2, mesh='fsdp=2'); assert 'vllm' in sys.modules; "
        "print({k: v for k, v in os.environ.items() if before.get(k) != v} or 'nothing')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=400
    )
    assert done.stdout == "nothing\n", done.stdout + done.stderr[-2000:]


def test_auto_without_parameters_infers(model_dir: Any) -> None:
    mapping = trace_and_compile(Mapping, None, model_dir("llama"), rules="auto")
    reasons = {b.reason for b in mapping.bindings}
    assert any("shapes fit one way only" in r for r in reasons), reasons


def test_saved_layouts_plan_without_vllm(tmp_path: Path, model_dir: Any) -> None:
    """The bench's second step: what one process traced, another one plans, and never imports torch or jax."""
    config = json.loads((model_dir("mixtral") / "config.json").read_text())
    layouts = trace_offline(model_dir("mixtral"), tensor_parallel=2)
    save_layouts(tmp_path / "m", layouts)
    again = load_layouts(tmp_path / "m")
    assert again[1].tensors is again[0].tensors
    for a, b in zip(layouts, again, strict=True):
        assert a.parameters == b.parameters
        np.testing.assert_array_equal(a.dst_offset, b.dst_offset)
    case = {"config": config, "tensor_parallel": 2, "mesh": "fsdp=6"}
    code = (
        "import sys; from jvlab.bench._side import main; main('jvlab.bench._plan:plan_side'); "
        "assert not {'torch', 'jax', 'vllm'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps({"folder": str(tmp_path), "cases": {"m": case}}),
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])["m"]
    tensors = list(layouts[0].tensors)
    shapes = policy_shapes(config, tensors, "float32")
    mapping = compile_tree(
        Mapping,
        {p: np.zeros(s.shape, np.float32) for p, s in shapes.items()},
        config,
        tensors,
        layouts,
        mesh="fsdp=6",
        rules="policy",
        title="m",
    )
    made = mapping.plan
    assert found["total_s"] == pytest.approx(
        found["bind_s"] + found["compile_and_prove_s"], abs=0.002
    )
    assert found["copies"] == made.copies
    assert found["plan_bytes"] == len(made.to_bytes())
    assert len(leaves_of(shapes, "fsdp=6")) == found["leaves"]


def test_bench_counts_binding(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """The headline seconds are the whole way of a case."""
    asked: list[tuple[str, str]] = []

    def measured(step: str, cases: dict[str, Any], folder: str) -> dict[str, Any]:
        asked.extend((step, name) for name in cases)
        counts = dict.fromkeys(
            ("tensors", "devices", "replicas", "ranks", "copies", "boxes"), 1
        )
        seconds = {
            "total_s": 5.0,
            "bind_s": 2.0,
            "compile_and_prove_s": 3.0,
            "trace_s": 1.0,
            "import_vllm_s": 1.0,
        }
        return {name: {**counts, **seconds, "peak_gib": 0.5} for name in cases}

    monkeypatch.setattr(bench, "_measured", measured)
    found = bench.run_bench_plan()
    assert found["dense_405b_s"] == found["moe_671b_s"] == 5.0
    assert set(found["cases"]) == set(bench.CASES)
    assert {n for step, n in asked if step == "plan"} == set(found["cases"])
    assert "bind 2.00 s" in capsys.readouterr().out
