"""What is read of a config: the defaults and the rotary positions of transformers, and clear errors."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jvlab._errors import ModelError
from jvlab.trainer.decoder._config import DEFAULTS, DecoderConfig
from jvlab.trainer.decoder._rope import Rope, tables
from tests.trainer.decoder.policy_reference import SMALL, config_of

SIZES = {
    k: SMALL[k]
    for k in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
} | {"num_attention_heads": 4}


@pytest.mark.parametrize("family", DEFAULTS)
def test_fields_left_out_are_those_of_transformers(family: str) -> None:
    made = config_of(family.removesuffix("_text"))
    for name, value in DEFAULTS[family].items():
        if name in ("rope_theta", "rope_local_base_freq"):
            kind = "sliding_attention" if "local" in name else "full_attention"
            theirs = made.rope_parameters.get(kind, made.rope_parameters)["rope_theta"]
        elif name == "head_dim" and value is None:
            theirs = None
            assert getattr(made, name, None) in (
                None,
                made.hidden_size // made.num_attention_heads,
            )
        elif name == "num_key_value_heads" and value is None:
            theirs = None
            assert made.num_key_value_heads == made.num_attention_heads
        elif name == "sliding_window" and family.startswith("qwen"):
            theirs = type(made)(use_sliding_window=True).sliding_window
        else:
            theirs = getattr(made, name)
        assert value == theirs, name


@pytest.mark.parametrize("family", DEFAULTS)
def test_a_config_of_sizes_alone(family: str) -> None:
    ours = DecoderConfig.from_hf(
        {"model_type": family, **SIZES, "num_key_value_heads": 2}
    )
    theirs = config_of(family.removesuffix("_text"), **SIZES, num_key_value_heads=2)
    kinds = getattr(theirs, "layer_types", None)
    window = getattr(theirs, "sliding_window", None)
    sliding = (
        [k == "sliding_attention" for k in kinds] if kinds else [window is not None] * 3
    )
    assert ours.windows == tuple(window if s else None for s in sliding)
    assert ours.tied == theirs.tie_word_embeddings
    assert ours.norm_eps == theirs.rms_norm_eps


def test_the_text_half_of_a_multimodal_config() -> None:
    text = {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "num_hidden_layers": 7,
        "sliding_window": 1024,
    }
    text["rope_scaling"] = {"factor": 8.0, "rope_type": "linear"}
    config = DecoderConfig.from_hf(
        {"model_type": "gemma3", "text_config": text, "vision_config": {}}
    )
    assert (config.width, config.heads, config.head_dim, config.tied) == (
        2560,
        8,
        256,
        True,
    )
    assert config.windows == (1024,) * 5 + (None, 1024)
    full, local = (config.ropes[config.layer_ropes[i]] for i in (5, 0))
    assert (full.kind, full.factor, full.theta) == ("linear", 8.0, 1e6)
    assert (local.kind, local.theta) == ("default", 10000.0)


KINDS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "llama3": {
        "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 512},
    "longrope": {
        "short_factor": [1 + i / 32 for i in range(32)], "long_factor": [1 + i for i in range(32)],
        "original_max_position_embeddings": 512,
    },
}  # fmt: skip


@pytest.mark.parametrize("length", [300, 4000])
@pytest.mark.parametrize("kind", KINDS)
def test_rotary_frequencies_are_those_of_transformers(kind: str, length: int) -> None:
    """At a length the model was trained on, and far beyond it."""
    given = {"rope_type": kind, "rope_theta": 500000.0, **KINDS[kind]}
    import torch
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = config_of(
        "llama",
        hidden_size=256,
        num_attention_heads=4,
        rope_parameters=dict(given),
    )
    theirs, factor = ROPE_INIT_FUNCTIONS[kind](
        config, torch.device("cpu"), seq_len=length
    )
    rope = Rope.parse(given, 64, config.max_position_embeddings, None)
    cos, sin = tables(rope, jnp.arange(length)[None])
    angles = np.arange(length, dtype=np.float32)[:, None] * theirs.numpy()
    # an angle that large is known to so much in float32
    atol = 2 * np.spacing(np.float32(length))
    np.testing.assert_allclose(cos[0], np.cos(angles) * factor, atol=atol)
    np.testing.assert_allclose(sin[0], np.sin(angles) * factor, atol=atol)


def test_a_row_does_not_depend_on_its_batch() -> None:
    rope = Rope.parse(
        {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, 16, 32, None
    )
    short, long = jnp.arange(64) % 32, jnp.arange(64)
    both = tables(rope, jnp.stack([short, long]))[0]
    np.testing.assert_array_equal(both[0], tables(rope, short[None])[0][0])
    np.testing.assert_array_equal(both[1], tables(rope, long[None])[0][0])
    assert not np.allclose(both[0][:32], both[1][:32])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "mamba"}, "no decoder for model_type 'mamba'"),
        ({"hidden_size": None}, "hidden_size=None"),
        ({"num_key_value_heads": 3}, "4 heads are not a multiple of 3"),
        ({"hidden_act": "swish7"}, "activation 'swish7'"),
        ({"rope_scaling": {"type": "ntk"}}, "type 'ntk' are not known"),
        (
            {"rope_scaling": {"type": "llama3", "factor": 8.0}},
            "lack low_freq_factor, high_freq_factor",
        ),
        ({"partial_rotary_factor": 0.5}, "llama with partial_rotary_factor"),
        (
            {
                "model_type": "phi3",
                "rope_scaling": {"type": "su", "short_factor": [1], "long_factor": [1]},
            },
            "1 numbers",
        ),
        (
            {"model_type": "gemma3_text", "use_bidirectional_attention": True},
            "both directions",
        ),
        ({"model_type": "gemma2", "layer_types": ["full_attention"]}, "1 entries of"),
        (
            {"model_type": "qwen3_moe", "mlp_only_layers": [0]},
            "layers without experts among those with them",
        ),
        (
            {"model_type": "qwen3_moe", "decoder_sparse_step": 2},
            "layers without experts among those with them",
        ),
        (
            {
                "model_type": "mixtral",
                "num_key_value_heads": 2,
                "num_experts_per_tok": 9,
            },
            "9 experts per token of 8",
        ),
    ],
)
def test_wrong_configs(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        DecoderConfig.from_hf({"model_type": "llama", **SIZES, **fields})
    assert caught.value.remedy
