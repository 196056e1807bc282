"""Models of known shapes for benches on a GPU: a config, and a Policy with random parameters drawn on the device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jvlab._errors import ConfigError
from jvlab._files import Plain

# GB of bfloat16 -> layers, hidden, intermediate, heads, key-value heads, vocabulary
SHAPES = {
    "1": (7, 2048, 6144, 16, 8, 32768),
    "4": (28, 2048, 6144, 16, 8, 151936),
    "16": (35, 4096, 12288, 32, 8, 151936),
    "32": (44, 5120, 17408, 40, 8, 151936),
}
EXPERTS = {  # the same of mixtures of experts, and last the experts of a layer
    "moe-4": (2, 2048, 768, 32, 4, 151936, 128),
    "moe-16": (12, 2048, 768, 32, 4, 151936, 128),
}
NAMES = {"qwen3-1.7b": "4", "qwen3-moe": "moe-16"}  # what `--shape` takes -> the size


def size_of(shape: str | None) -> str:
    """The size that a shape's name on the command line stands for."""
    if shape is None:
        return "4"
    if shape not in NAMES:
        raise ConfigError(f"shape={shape!r}", remedy=f"one of {', '.join(NAMES)}")
    return NAMES[shape]


def config_of(size: str) -> Plain:
    """The config of an untied Qwen3-like model of about `size` GB.

    "4" has Qwen3-1.7B's shapes; "moe-16" is 12 of the 48 layers of Qwen3-30B-A3B.
    """
    layers, hidden, intermediate, heads, kv, vocabulary, *experts = {
        **SHAPES,
        **EXPERTS,
    }[size]
    return {
        "architectures": ["Qwen3MoeForCausalLM" if experts else "Qwen3ForCausalLM"],
        "model_type": "qwen3_moe" if experts else "qwen3",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": 128,
        "vocab_size": vocabulary,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        **(_experts(experts[0], intermediate) if experts else {}),
    }


def _experts(count: int, width: int) -> Plain:
    return {
        "num_experts": count,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": width,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def shaped(folder: Path, size: str, dtype: str = "bfloat16") -> Any:
    """A Policy of this size with random parameters, whose config.json is written into `folder`."""
    (folder / "config.json").write_text(json.dumps(config_of(size)))
    return policy_of(folder, dtype)


def policy_of(folder: Path, dtype: str = "bfloat16") -> Any:
    """A Policy that computes in bfloat16, with random parameters, from the config.json of `folder` alone."""
    import jax
    import jax.numpy as jnp

    from jvlab.layout._checkpoint import checkpoint_tensors, read_config
    from jvlab.trainer._policy import Policy, bind
    from jvlab.trainer.decoder import _model, _sharding
    from jvlab.trainer.decoder._config import DecoderConfig
    from jvlab.trainer.decoder._runtime import Runtime

    hf_config = read_config(folder)
    config = DecoderConfig.from_hf(hf_config)
    tensors = tuple(checkpoint_tensors(folder))
    mesh = _sharding.mesh(fsdp=1)
    layout = _sharding.Layout(mesh)
    params: Plain = {}
    key = jax.random.key(0)
    draw = jax.jit(
        lambda k, shape: 0.02 * jax.random.normal(k, shape, dtype), static_argnums=1
    )
    for number, (path, (letters, shape)) in enumerate(
        _model.parameter_letters(config).items()
    ):
        where, _ = layout.parameter(letters, shape)
        node = params
        for part in path[:-1]:
            node = node.setdefault(part, {})
        # a norm's, also those of stacked layers
        scale = len(letters.removeprefix("l")) == 1
        value = (
            jnp.ones(shape, dtype)
            if scale
            else draw(jax.random.fold_in(key, number), shape)
        )
        node[path[-1]] = jax.device_put(value, where)
    jax.block_until_ready(params)
    bindings = tuple(bind(config, hf_config, tensors, dtype, folder))
    return Policy(
        params,
        Runtime("bfloat16", layout, "none"),
        config=config,
        mesh=mesh,
        source=folder,
        hf_config=hf_config,
        tensors=tensors,
        bindings=bindings,
    )
