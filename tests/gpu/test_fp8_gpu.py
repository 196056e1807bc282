"""fp8 engines on a card, CUDA graphs on: bytes, scales and tokens of vLLM's own load, faults, time against bf16.

pytest -m gpu tests/gpu/test_fp8_gpu.py -s
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jvlab as jv
from jvlab import _errors as errors
from tests.gpu.card import device_used, ending_lab, greedy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.engine,
    pytest.mark.skipif(
        not os.path.exists("/dev/nvidia0"), reason="no NVIDIA GPU on this machine"
    ),
]
ENGINE: dict[str, Any] = {
    "gpu_memory_utilization": 0.2,
    "kv_cache_memory_bytes": 2 << 30,
    "dtype": "bfloat16",
    "max_model_len": 512,
    "max_num_seqs": 32,
}
FP8 = {**ENGINE, "quantization": "fp8"}
SIZES = {"head_dim": 64, "tie_word_embeddings": False, "dtype": "bfloat16"}
ROUNDS = 20


@pytest.fixture(scope="module")
def lab() -> Iterator[jv.Lab]:
    with ending_lab(40) as made:
        yield made


@pytest.fixture(scope="module")
def fault(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fault") / "order.json"


@pytest.fixture(scope="module")
def folder() -> str:
    # 344 inputs are padded to 352
    return str(jv.models.tiny("llama", seed=0, intermediate_size=344, **SIZES))


@pytest.fixture(scope="module")
def pool(lab: jv.Lab, folder: str, fault: Path) -> jv.Pool:
    """An fp8 engine that loaded and quantised the checkpoint itself, and captured CUDA graphs."""
    return lab.launch(
        folder, name="fp8", engine=FP8, env={"JVLAB_FAULT": str(fault)}
    ).wait(400)


def doubled(params: Any) -> Any:
    """Other values with other scales: 3 w + 1/64 is no multiple, so the fp8 bytes change too."""
    import jax

    return jax.tree.map(lambda x: x * 3 + x.dtype.type(1 / 64), params)


def test_bytes_scales_and_tokens_are_those_of_a_load(
    lab: jv.Lab, pool: jv.Pool, folder: str
) -> None:
    """Before any sync the digests of what vLLM quantised are ours; after others and back, the same, and its tokens."""
    wanted = greedy(pool)
    for dtype in ("bfloat16", "float32"):
        params = jv.Policy.from_pretrained(folder, dtype=dtype).params
        link = lab.connect(params, pool, rules="policy")
        assert link.transport == "ipc", link.reason
        if dtype == "bfloat16":
            found = link.verify(params)
            assert found, f"vLLM's own bytes and scales: {found}"
            names = [p.name for p in link.plan.parameters]
            layers = sum(name.endswith("qkv_proj.weight") for name in names)
            assert (
                sum(name.endswith("weight_scale") for name in names) == 4 * layers > 0
            ), names
            print(
                "formats:",
                sorted(
                    {
                        note
                        for note in link.mapping.notes.values()
                        if note.startswith("format")
                    }
                ),
            )
        for mode in ("direct", "staged"):
            link.sync(doubled(params), mode=mode)
            assert not link.verify(params)
            assert greedy(pool) != wanted
            report = link.sync(params, mode=mode)
            assert report.verified
            assert link.verify()
            assert link.verify(params)
            assert greedy(pool) == wanted, (dtype, mode)
        link.close()


@pytest.mark.parametrize(
    "name", ["self_attn.qkv_proj.weight", "mlp.down_proj.weight_scale"]
)
def test_one_flipped_bit_is_found(
    lab: jv.Lab, pool: jv.Pool, folder: str, fault: Path, name: str
) -> None:
    """In a weight and in a scale: `link.verify` names the parameter; flipped back, it agrees again."""
    params = jv.Policy.from_pretrained(folder, dtype="bfloat16").params
    link = lab.connect(params, pool, rules="policy")
    assert link.sync(params).verified
    full = f"model.layers.1.{name}"
    order = {"who": "worker", "phase": "check", "do": "flip", "parameter": full}
    fault.write_text(json.dumps(order))
    found = link.verify(params)
    assert not found
    assert [n for n in found.differing if name in n], found.differing
    assert len(found.differing) == 1
    fault.write_text(json.dumps(order))
    assert link.verify(params)
    link.close()


def test_nan_is_refused_and_named(lab: jv.Lab, pool: jv.Pool, folder: str) -> None:
    """fp8 has no bytes for the NaN that a quantised leaf held: its scale shows it, and the error names the leaf."""
    import jax

    params = jv.Policy.from_pretrained(folder, dtype="bfloat16").params
    link = lab.connect(params, pool, rules="policy")
    link.sync(params, mode="staged")
    wanted = greedy(pool)
    broken = jax.tree.map(lambda x: x, params)
    broken["layers"]["mlp"]["up"]["kernel"] = (
        params["layers"]["mlp"]["up"]["kernel"].at[1, 2, 3].set(np.nan)
    )
    with pytest.raises(errors.NonFiniteError, match=r"layers\.mlp\.up\.kernel\[1\]"):
        link.sync(broken, mode="staged")
    assert greedy(pool) == wanted
    assert link.sync(params, mode="direct").verified
    link.close()


def test_experts(lab: jv.Lab) -> None:
    """One scale per expert and part; a router of few experts is padded. Triton, from live memory."""
    sizes = {
        "num_hidden_layers": 2,
        "head_dim": 64,
        "dtype": "bfloat16",
        "hidden_size": 128,
    }
    folder = str(
        jv.models.tiny("qwen3_moe", seed=0, moe_intermediate_size=128, **sizes)
    )
    pool = lab.launch(
        folder,
        name="moe8",
        engine={**FP8, "enforce_eager": True, "moe_backend": "triton"},
    ).wait(400)
    params = jv.Policy.from_pretrained(folder, dtype="bfloat16").params
    link = lab.connect(params, pool, rules="policy")
    wanted = greedy(pool)
    assert link.verify(params), "vLLM's own bytes and scales"
    print(
        "formats:",
        sorted(
            {note for note in link.mapping.notes.values() if note.startswith("format")}
        ),
    )
    for mode in ("direct", "staged"):
        link.sync(doubled(params), mode=mode)
        assert not link.verify(params)
        assert link.sync(params, mode=mode).verified
        assert greedy(pool) == wanted, mode
    link.close()
    pool.close()


def test_an_fp8_kv_cache_stays_as_it_is(lab: jv.Lab, folder: str) -> None:
    """`kv_cache_dtype` passes through, and a sync changes neither its scales nor what the engine then says."""
    engine = {**FP8, "kv_cache_dtype": "fp8", "enforce_eager": True}
    pool = lab.launch(folder, name="kv8", engine=engine).wait(400)
    wanted = greedy(pool)
    params = jv.Policy.from_pretrained(folder, dtype="bfloat16").params
    link = lab.connect(params, pool, rules="policy")
    assert link.verify(params)
    link.sync(doubled(params))
    assert greedy(pool) != wanted
    assert link.sync(params).verified
    assert greedy(pool) == wanted
    link.close()
    pool.close()


def test_other_formats_are_refused_by_name_over_ipc(lab: jv.Lab, folder: str) -> None:
    """They go through vLLM's own reload, which needs buckets: see test_nccl_engine_gpu.py."""
    pool = lab.launch(
        folder,
        name="ptpc",
        engine={**ENGINE, "quantization": "fp8_per_channel", "enforce_eager": True},
    )
    pool.wait(400)
    params = jv.Policy.from_pretrained(folder, dtype="bfloat16").params
    with pytest.raises(
        errors.JvlabError, match="is not kept as the loader writes it"
    ) as caught:
        lab.connect(params, pool, rules="policy")
    assert "nccl" in str(caught.value)
    assert "unused" not in str(caught.value)
    pool.close()


def block_checkpoint(folder: str, into: Path) -> str:
    """The checkpoint with linear layers in fp8 and a scale per block of 128 × 128, by vLLM's function on the CPU."""
    import torch
    from safetensors.torch import load_file, save_file

    from tests.engine.tracing.fp8_model import block_checkpoint as quantised
    from tests.engine.tracing.fp8_model import block_settings

    into.mkdir()
    weights = {
        k: v
        for file in sorted(Path(folder).glob("*.safetensors"))
        for k, v in load_file(file).items()
    }
    made = quantised(
        {k: v.to(torch.bfloat16) for k, v in weights.items()}, 128, "bfloat16"
    )
    save_file(
        {k: v.contiguous() for k, v in made.items()},
        into / "model.safetensors",
        {"format": "pt"},
    )
    for file in Path(folder).iterdir():
        if file.suffix != ".safetensors" and "index" not in file.name:
            (into / file.name).write_bytes(file.read_bytes())
    config = json.loads((into / "config.json").read_text())
    config["quantization_config"] = block_settings(made, 128)
    (into / "config.json").write_text(json.dumps(config))
    return str(into)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_block_scaled_checkpoints(lab: jv.Lab, family: str, tmp_path: Path) -> None:
    """What vLLM loaded from the fp8 checkpoint is what the trainer quantises; other values and back, CUDA graphs on."""
    sizes = {**SIZES, "hidden_size": 256, "num_hidden_layers": 2}
    sizes |= (
        {"intermediate_size": 384}
        if family == "llama"
        else {"moe_intermediate_size": 128}
    )
    plain = str(jv.models.tiny(family, seed=0, **{**sizes, "head_dim": 128}))
    engine = {**ENGINE, "moe_backend": "triton"} if family == "qwen3_moe" else ENGINE
    # DeepGEMM makes scales powers of two after loading
    env = {"VLLM_USE_DEEP_GEMM": "0"}
    pool = lab.launch(
        block_checkpoint(plain, tmp_path / "fp8"),
        name=f"block-{family}",
        engine=engine,
        env=env,
    ).wait(500)
    params = jv.Policy.from_pretrained(plain, dtype="bfloat16").params
    link = lab.connect(params, pool, rules="policy")
    assert link.transport == "ipc", link.reason
    print(
        "formats:",
        sorted(
            {note for note in link.mapping.notes.values() if note.startswith("format")}
        ),
    )
    wanted = greedy(pool)
    assert link.verify(params), "the bytes and scales that vLLM loaded"
    for mode in ("direct", "staged"):
        link.sync(doubled(params), mode=mode)
        assert not link.verify(params)
        assert link.sync(params, mode=mode).verified
        assert link.verify(params)
        assert greedy(pool) == wanted, mode
    link.close()
    pool.close()


def test_milliseconds_against_bf16(lab: jv.Lab, tmp_path: Path) -> None:
    """Qwen3-1.7B's shapes, 4 GB of bf16: direct, verified syncs into both engines in turn, and memory."""
    import jax

    from jvlab.bench._shapes import config_of, policy_of

    (tmp_path / "config.json").write_text(json.dumps(config_of("4")))
    options = {"skip_tokenizer_init": True}
    pools = {
        name: lab.launch(
            str(tmp_path), name=name, engine={**engine, **options}, load="dummy"
        )
        for name, engine in (("sixteen", ENGINE), ("eight", FP8))
    }
    policy = policy_of(tmp_path)
    links = {
        name: lab.connect(policy.params, pool.wait(500), rules="policy", meaning="off")
        for name, pool in pools.items()
    }
    trees = [policy.params, jax.tree.map(lambda x: x * 2, policy.params)]
    jax.block_until_ready(trees)
    stats = lambda: jax.devices()[0].memory_stats() or {}
    used = stats().get("bytes_in_use", 0)
    facts: dict[str, Any] = {}
    for mode in ("direct", "staged"):
        for link in links.values():
            for k in range(3):
                link.sync(trees[k % 2], mode=mode, progress=False)
        before = device_used()
        times: dict[str, list[float]] = {name: [] for name in links}
        for k in range(ROUNDS):
            for name, link in links.items():
                start = time.perf_counter()
                assert link.sync(trees[k % 2], mode=mode, progress=False).verified
                times[name].append((time.perf_counter() - start) * 1e3)
        after = device_used()
        facts[mode] = {
            name: round(float(np.median(of)), 2) for name, of in times.items()
        }
        facts[mode] |= {
            "ratio": round(facts[mode]["eight"] / facts[mode]["sixteen"], 2)
        }
        facts[mode] |= {"device_growth_mib": round((after - before) / 2**20, 1)}
        assert after - before < 64 << 20, facts
    for name, link in links.items():
        facts[f"{name}_bytes"] = link.plan.total_bytes
        assert link.verify(trees[(ROUNDS - 1) % 2])
    facts["trainer_kept_mib"] = round(
        (stats().get("bytes_in_use", 0) - used) / 2**20, 1
    )
    facts["trainer_peak_mib"] = round(
        (stats().get("peak_bytes_in_use", 0) - used) / 2**20, 1
    )
    print("fp8 against bf16:", json.dumps(facts))
    assert facts["trainer_kept_mib"] < 64, "the fp8 values of a sync are freed with it"
    assert facts["direct"]["ratio"] <= 2.0, facts
    for link in links.values():
        link.close()
