"""Trees that Tunix' own loaders make, mapped without a rule: each value is where the checkpoint has it. LoRA on top."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jvlab as jv
from jvlab import errors
from jvlab.layout._checkpoint import CheckpointValues, checkpoint_tensors, read_config
from jvlab.layout._tree import flatten
from jvlab.layout._types import Binding
from jvlab.sync._compile_tree import bind_rules
from jvlab.sync._value_samples import sample

pytest.importorskip("tunix", reason="google-tunix is not installed")

import jax
import jax.numpy as jnp
import qwix
from flax import nnx
from tunix.models.gemma3 import model as gemma3
from tunix.models.gemma3 import params_safetensors as gemma3_params
from tunix.models.llama3 import model as llama3
from tunix.models.llama3 import params as llama3_params
from tunix.models.qwen3 import model as qwen3
from tunix.models.qwen3 import params as qwen3_params

from jvlab.integrations._tunix_lora import PREFIX, Adapters
from tests.fuzzing import soak_but
from tests.integrations.tunix_world import mesh

pytestmark = [pytest.mark.slow, pytest.mark.vllm]
# of Gemma with as many key heads as two, shapes do not tell heads from key and value
FAMILIES = ("qwen3", "llama", "gemma3", "gemma3-1")
LAYERS = ".*(q_proj|kv_einsum|q_einsum|k_proj|v_proj|o_proj|attn_vec_einsum|gate_proj|up_proj|down_proj)"


def loaded(family: str, folder: str) -> Any:
    """The model of a checkpoint, by Tunix."""
    c = json.loads(Path(folder, "config.json").read_text())
    shared = {
        "num_layers": c["num_hidden_layers"],
        "embed_dim": c["hidden_size"],
        "hidden_dim": c["intermediate_size"],
        "num_heads": c["num_attention_heads"],
        "head_dim": c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"],
        "num_kv_heads": c["num_key_value_heads"],
    }
    own = {"rope_theta": int(c["rope_theta"]), "norm_eps": c["rms_norm_eps"]}
    vocabulary = c["vocab_size"]
    match family:
        case "qwen3":
            tied = c["tie_word_embeddings"]
            config: Any = qwen3.ModelConfig(
                vocab_size=vocabulary, use_tied_embedding=tied, **shared, **own
            )
            load: Any = qwen3_params
        case "llama":
            tied = c["tie_word_embeddings"]
            config = llama3.ModelConfig(
                vocab_size=vocabulary, weight_tying=tied, **shared, **own
            )
            load = llama3_params
        case _:
            config = gemma3.ModelConfig(
                num_embed=vocabulary, sliding_window_size=c["sliding_window"], **shared
            )
            load = gemma3_params
    return load.create_model_from_safe_tensors(folder, config, mesh(), jnp.float32)


def bound(params: Any, folder: str) -> list[Binding]:
    """As `Rollout` connects: what shapes leave open, Tunix' own names decide."""
    sides = flatten(params).shapes, checkpoint_tensors(folder), read_config(folder)
    try:
        return list(bind_rules("auto", *sides)[1])
    except errors.MatchError:
        return list(bind_rules("tunix", *sides)[1])


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> tuple[str, str, Any]:
    name, _, heads = request.param.partition("-")
    more: dict[str, Any] = {"num_key_value_heads": int(heads)} if heads else {}
    folder = jv.models.tiny(name, num_hidden_layers=2, **more)
    return name, folder, loaded(name, folder)


def test_every_value_goes_where_the_checkpoint_has_it(family: tuple[str, str, Any]):
    _, folder, model = family
    params = nnx.state(model, nnx.Param)
    bindings = bound(params, folder)
    files = CheckpointValues.of(folder)
    assert files is not None
    seen = sample(bindings, flatten(params).arrays, files).seen
    assert seen
    assert all(s.fits for s in seen.values()), {
        k: s.text for k, s in seen.items() if not s.fits
    }
    # tensors of the checkpoint that nothing fills: none but a tied head
    left = {t.name for t in checkpoint_tensors(folder)} - {b.tensor for b in bindings}
    assert left <= {"lm_head.weight"}


@pytest.mark.parametrize(
    "family", soak_but(["llama", "gemma3-1"], FAMILIES), indirect=True
)
def test_lora_becomes_pefts_tensors_and_back(family: tuple[str, str, Any]):
    name, folder, model = family
    provider = qwix.LoraProvider(module_path=LAYERS, rank=4, alpha=6.0)
    with mesh():
        actor = qwix.apply_lora_to_model(
            model, provider, rngs=nnx.Rngs(1), **model.get_model_input()
        )
    lora = nnx.state(actor, nnx.LoRAParam)
    keys = iter(jax.random.split(jax.random.key(0), 1000))
    lora = jax.tree.map(lambda a: jax.random.normal(next(keys), a.shape), lora)
    base = nnx.state(actor, nnx.All(nnx.Param, nnx.Not(nnx.LoRAParam)))
    adapters = Adapters(actor, bound(base, folder), None)
    adapter = adapters.adapter(lora)
    kinds = {key.split(".")[-3] for key in adapter}
    assert kinds == {
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("gate_proj", "up_proj", "down_proj"),
    }
    # the product that each layer adds, written out by hand
    arrays = flatten(lora).arrays
    scale = 6.0 / 4
    for projection, (weight, product, parts) in BY_HAND[name].items():
        path = f"layers.1.{weight}"
        change = scale * jnp.einsum(
            product, arrays[f"{path}_lora_a"], arrays[f"{path}_lora_b"]
        )
        change = change if parts is None else change[parts]
        block = "mlp" if projection in ("gate_proj", "down_proj") else "self_attn"
        module = f"{PREFIX}model.layers.1.{block}.{projection}"
        b, a = adapter[f"{module}.lora_B.weight"], adapter[f"{module}.lora_A.weight"]
        np.testing.assert_allclose(
            b @ a, change.reshape(b.shape[0], -1), rtol=1e-4, atol=1e-4
        )
    again = adapters.adapter(adapters.put(lora, adapter))
    for key, value in adapter.items():
        np.testing.assert_allclose(again[key], value, rtol=1e-5, atol=1e-6)
    assert not adapter.is_zero()
    assert adapter.spec.rank == 4
    explicit = Adapters(actor, bound(base, folder), 12.0).adapter(lora)
    key = next(k for k in adapter if ".lora_B." in k)
    np.testing.assert_allclose(explicit[key], 2 * adapter[key], rtol=1e-5)
    with pytest.raises(errors.ConfigError, match="lack"):
        adapters.adapter(base)


# projection -> weight, product of a and b as [outputs…, inputs…], the part of it that is this projection
_PROJECTIONS: dict[str, tuple[str, str, int | None]] = {
    "q_proj": ("attn.q_proj.w", "dr,rnh->nhd", None),
    "k_proj": ("attn.k_proj.w", "dr,rkh->khd", None),
    "o_proj": ("attn.o_proj.w", "nhr,rd->dnh", None),
    "gate_proj": ("mlp.gate_proj.kernel", "dr,rf->fd", None),
    "down_proj": ("mlp.down_proj.kernel", "fr,rd->df", None),
}
BY_HAND: dict[str, dict[str, tuple[str, str, int | None]]] = {
    "qwen3": _PROJECTIONS,
    "llama": _PROJECTIONS,
    "gemma3": {
        "q_proj": ("attn.q_einsum.w", "dr,rnh->nhd", None),
        "k_proj": ("attn.kv_einsum.w", "dr,rckh->ckhd", 0),
        "v_proj": ("attn.kv_einsum.w", "dr,rckh->ckhd", 1),
        "o_proj": ("attn.attn_vec_einsum.w", "nhr,rd->dnh", None),
        "gate_proj": ("mlp.gate_proj.kernel", "dr,rf->fd", None),
        "down_proj": ("mlp.down_proj.kernel", "fr,rd->df", None),
    },
}
