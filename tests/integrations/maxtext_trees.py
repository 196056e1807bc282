"""MaxText's own trees of a tiny Qwen3, as facts for tests: `python tests/integrations/maxtext_trees.py FOLDER`.

FOLDER is a checkpoint: `jv.models.tiny("qwen3", **SIZES)`. MaxText needs Python 3.12, so this runs in an environment of
its own: `pip install --no-deps maxtext==0.2.5`, then "jax<0.12" flax optax orbax-checkpoint omegaconf pathwaysutils
jinja2 qwix aqtp tokamax grain drjax pillow tiktoken sentencepiece sympy transformers safetensors.

MaxText builds its model three times: layers scanned, not scanned, and scanned in the adapter that its RL trains. The
checkpoint is put in by MaxText's own converter tables. maxtext_trees.json gets the path and shape of each leaf, the
tensors it is made of, a checksum of its values, and the log-probabilities that MaxText computes with them. With Tunix
and what jvlab imports there too, `jv.integrations.tunix.Rollout` gets that adapter as MaxText's RL gives it to its own.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

FACTS = Path(__file__).with_suffix(".json")
SIZES: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,  # vLLM on a CPU has none smaller
    "vocab_size": 288,
    "tie_word_embeddings": False,
    "rope_theta": 1_000_000.0,
    "rms_norm_eps": 1e-6,
}
TOKENS = [5, 17, 250, 3, 99, 42, 8, 133]


def checksum(values: np.ndarray) -> float:
    """Of values and their places."""
    flat = np.asarray(values, np.float64).reshape(-1)
    return float(flat @ np.cos(np.arange(flat.size)))


def config_of(scan: bool) -> Any:
    import maxtext
    from maxtext.configs import pyconfig

    base = Path(next(iter(maxtext.__path__)), "configs", "base.yml")
    return pyconfig.initialize(
        ["", str(base)],
        run_name="trees",
        model_name="qwen3-0.6b",
        override_model_config=True,
        base_emb_dim=SIZES["hidden_size"],
        base_mlp_dim=SIZES["intermediate_size"],
        base_num_decoder_layers=SIZES["num_hidden_layers"],
        base_num_query_heads=SIZES["num_attention_heads"],
        base_num_kv_heads=SIZES["num_key_value_heads"],
        head_dim=SIZES["head_dim"],
        vocab_size=SIZES["vocab_size"],
        logits_via_embedding=False,
        max_target_length=len(TOKENS),
        per_device_batch_size=1,
        dtype="float32",
        weight_dtype="float32",
        matmul_precision="highest",
        enable_checkpointing=False,
        hardware="cpu",
        attention="dot_product",
        scan_layers=scan,
        base_output_directory=tempfile.mkdtemp(),
        skip_jax_distributed_system=True,
        log_config=False,
    )


def filled(model: Any, config: Any, tensors: dict[str, np.ndarray]) -> dict[str, Any]:
    """Puts a checkpoint into a model by MaxText's own tables; for each leaf, what it was made of."""
    import jax.numpy as jnp
    from flax import nnx
    from maxtext.checkpoint_conversion.utils import param_mapping as tables

    scan = config.scan_layers
    hf = {"num_hidden_layers": SIZES["num_hidden_layers"]}
    names = tables.QWEN_MAXTEXT_TO_HF_PARAM_MAPPING(hf, config, scan)
    hooks = tables.QWEN_MAXTEXT_TO_HF_PARAM_HOOK_FN(hf, config, scan)
    state = nnx.state(model, nnx.Param)
    facts: dict[str, Any] = {}
    for path, leaf in nnx.to_flat_state(state):
        parts = [str(part) for part in path]
        key = "-".join(["params", *(part for part in parts if part != "base")])
        made_of = names[key]
        shape = leaf.get_value().shape
        axis = config.param_scan_axis
        listed = [made_of] if isinstance(made_of, str) else made_of
        one = shape if isinstance(made_of, str) else shape[:axis] + shape[axis + 1 :]
        hook = hooks.get(key, lambda value, _: value)
        values = [hook(tensors[name], one) for name in listed]
        whole = values[0] if isinstance(made_of, str) else np.stack(values, axis)
        leaf.set_value(jnp.asarray(whole, jnp.float32))
        facts[".".join(parts)] = {
            "shape": list(shape),
            "of": made_of,
            "checksum": checksum(whole),
        }
    nnx.update(model, state)
    return facts


def rollout(adapter: Any, config: Any, mesh: Any, folder: str) -> dict[str, Any]:
    """What a rollout made as in MaxText's `create_rl_components` is given and answers, over a pool without engine."""
    from flax import nnx
    from transformers import AutoTokenizer
    from tunix.generate.tokenizer_adapter import TokenizerAdapter
    from tunix.rl.rollout.base_rollout import RolloutConfig

    import jvlab as jv

    sys.path.insert(0, str(FACTS.parents[2]))
    from tests.integrations.fake_pool import FakePool

    pool = FakePool(max_model_len=256)
    ours = functools.partial(jv.integrations.tunix.Rollout, pool=pool)
    asked = RolloutConfig(max_tokens_to_generate=8, max_prompt_length=16)
    made = functools.partial(ours, maxtext_config=config)(
        rollout_actor=adapter,
        tokenizer=TokenizerAdapter(AutoTokenizer.from_pretrained(folder)),
        mesh=mesh,
        rollout_config=asked,
    )
    # as MaxText does before an evaluation
    made.update_params(nnx.state(adapter, nnx.Param))
    out = made.generate(["ab", "ab", "c"], asked)
    actor = pool.links[-1].trainer
    logprobs = actor.logprobs(actor.params, np.array([TOKENS]))
    held = pool.links[-1].held
    return {
        "checksums": {path: checksum(values) for path, values in held.items()},
        "syncs": len(made.reports),
        "samples": len(out.tokens),
        "logprobs": np.asarray(logprobs)[0, 1:].tolist(),
    }


def main(folder: str) -> None:
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["DECOUPLE_GCLOUD"] = "TRUE"
    import jax
    import jax.numpy as jnp
    from flax import nnx
    from maxtext.integration.tunix.tunix_adapter import TunixMaxTextAdapter
    from maxtext.utils import maxtext_utils, model_creation_utils
    from safetensors.numpy import load_file

    tensors = load_file(Path(folder, "model.safetensors"))
    found: dict[str, Any] = {"tokens": TOKENS, "trees": {}}
    for name, scan in (("scanned", True), ("unscanned", False), ("base", True)):
        config = config_of(scan)
        mesh = jax.sharding.Mesh(
            maxtext_utils.create_device_mesh(config), config.mesh_axes
        )
        rngs = nnx.Rngs(0)
        inner = model_creation_utils.from_config(config, mesh=mesh, rngs=rngs)
        adapter = TunixMaxTextAdapter(inner)
        facts = filled(adapter if name == "base" else inner, config, tensors)
        tokens = jnp.asarray([TOKENS])
        with mesh:
            logits, _ = adapter(tokens, jnp.arange(len(TOKENS))[None], None, None)
        steps = jax.nn.log_softmax(logits[0, :-1].astype(jnp.float32))
        logprobs = steps[jnp.arange(len(TOKENS) - 1), tokens[0, 1:]]
        found["trees"][name] = {"leaves": facts, "logprobs": logprobs.tolist()}
        if name == "base":
            found["rollout"] = rollout(adapter, config, mesh, folder)
        print(name, len(facts), "leaves", flush=True)
    FACTS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
