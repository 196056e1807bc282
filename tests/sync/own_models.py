"""Three Flax language models as their authors wrote them: own names, own layouts, and a loader for each.

None of them follows jvlab's names. An `Author` knows what each leaf holds, which nobody else can, and so can choose
among the lines that an error offers.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import load_file

import jvlab as jv
from jvlab.layout._checkpoint import checkpoint_tensors
from jvlab.layout._tree import FlatTree, flatten
from jvlab.layout._types import Binding
from jvlab.layout.rules._rules import apply_binding
from jvlab.layout.rules._ruleset import Rules
from jvlab.sync._compile_tree import bind_rules

Weights = dict[str, np.ndarray]
Forward = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class OwnModel:
    """One model: its tree with a checkpoint's values, and its logits."""

    family: str  # for `jv.models.tiny`
    load: Callable[[dict[str, Any], Weights], Any]
    # config, params, tokens (T,) -> logits (T, vocabulary)
    forward: Callable[[dict[str, Any], Any, Any], Any]


def rms(x: Any, scale: Any, eps: float) -> Any:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + eps) * scale


def rotate(x: Any, theta: float) -> Any:
    """Rotary positions of x (T, heads, head size), in halves."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[0])[:, None] * theta ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def attend(q: Any, k: Any, v: Any) -> Any:
    """Causal attention of q (T, n, h) over k and v (T, k, h)."""
    k, v = (jnp.repeat(x, q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = jnp.einsum("tnh,snh->nts", q, k) / q.shape[-1] ** 0.5
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[1:], bool)), scores, -jnp.inf)
    return jnp.einsum("nts,snh->tnh", jax.nn.softmax(scores), v)


def theta_of(config: dict[str, Any]) -> float:
    found = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
    return float(found)


# ------------------------------------------------------------------------------- 1. linen, Flax's automatic names


class Tower(nn.Module):
    """A block: query, key and value in one tensor with the heads first, the MLP's two inputs in another."""

    sizes: tuple[int, int, int, int, int]  # d, n, k, h, f
    eps: float
    theta: float

    @nn.compact
    def __call__(self, x: Any) -> Any:
        d, n, k, h, f = self.sizes
        init = nn.initializers.normal()
        y = rms(x, self.param("first", init, (d,)), self.eps)
        found = jnp.einsum(
            "td,nhd->tnh", y, self.param("looking", init, (n + 2 * k, h, d))
        )
        q, kk, v = (
            rotate(found[:, :n], self.theta),
            rotate(found[:, n : n + k], self.theta),
            found[:, n + k :],
        )
        x = x + jnp.einsum(
            "tnh,ndh->td", attend(q, kk, v), self.param("joining", init, (n, d, h))
        )
        y = rms(x, self.param("second", init, (d,)), self.eps)
        wide = jnp.einsum("td,dpf->tpf", y, self.param("thinking", init, (d, 2, f)))
        return x + (jax.nn.silu(wide[:, 0]) * wide[:, 1]) @ self.param(
            "saying", init, (f, d)
        )


class Towers(nn.Module):
    """Llama with names that say nothing."""

    config: dict[str, Any]

    @nn.compact
    def __call__(self, tokens: Any) -> Any:
        c = self.config
        d, n, k = c["hidden_size"], c["num_attention_heads"], c["num_key_value_heads"]
        h, v, f = c.get("head_dim") or d // n, c["vocab_size"], c["intermediate_size"]
        init = nn.initializers.normal()
        x = self.param("words", init, (v, d))[tokens]
        for _ in range(c["num_hidden_layers"]):
            x = Tower((d, n, k, h, f), c["rms_norm_eps"], theta_of(c))(x)
        return rms(x, self.param("last", init, (d,)), c["rms_norm_eps"]) @ self.param(
            "speech", init, (d, v)
        )


def load_towers(config: dict[str, Any], w: Weights) -> Any:
    d, n = config["hidden_size"], config["num_attention_heads"]
    h = config.get("head_dim") or d // n
    out: dict[str, Any] = {
        "words": w["model.embed_tokens.weight"],
        "last": w["model.norm.weight"],
        "speech": w["lm_head.weight"].T,
    }
    for i in range(config["num_hidden_layers"]):
        at = lambda name, i=i: w[f"model.layers.{i}.{name}.weight"]
        out[f"Tower_{i}"] = {
            "first": at("input_layernorm"),
            "looking": np.concatenate(
                [at(f"self_attn.{x}_proj").reshape(-1, h, d) for x in "qkv"]
            ),
            "joining": at("self_attn.o_proj").T.reshape(n, h, d).swapaxes(1, 2),
            "second": at("post_attention_layernorm"),
            "thinking": np.stack([at("mlp.gate_proj").T, at("mlp.up_proj").T], 1),
            "saying": at("mlp.down_proj").T,
        }
    return {"params": out}


def run_towers(config: dict[str, Any], params: Any, tokens: Any) -> Any:
    return Towers(config).apply(params, tokens)


# ------------------------------------------------------------------------------- 2. nnx, scanned, out × in


class Body(nnx.Module):
    """All layers of a Qwen 3 in one scan; every matrix is out × in, and layers are the second axis of matrices."""

    def __init__(self, config: dict[str, Any], w: Weights) -> None:
        layers = range(config["num_hidden_layers"])
        stack = lambda name, axis: nnx.Param(
            jnp.stack([w[f"model.layers.{i}.{name}.weight"] for i in layers], axis)
        )
        self.asks = stack("self_attn.q_proj", 1)
        self.answers = stack("self_attn.k_proj", 1)
        self.carries = stack("self_attn.v_proj", 1)
        self.returns = stack("self_attn.o_proj", 1)
        self.opens = stack("mlp.gate_proj", 1)
        self.holds = stack("mlp.up_proj", 1)
        self.closes = stack("mlp.down_proj", 1)
        self.alpha = stack("input_layernorm", 0)
        self.beta = stack("post_attention_layernorm", 0)
        self.ask_size = stack("self_attn.q_norm", 0)
        self.answer_size = stack("self_attn.k_norm", 0)


class Scanned(nnx.Module):
    """Qwen 3: the body, and what is around it."""

    def __init__(self, config: dict[str, Any], w: Weights) -> None:
        self.body = Body(config, w)
        self.lexicon = nnx.Param(jnp.asarray(w["model.embed_tokens.weight"]))
        self.omega = nnx.Param(jnp.asarray(w["model.norm.weight"]))
        if "lm_head.weight" in w:
            self.choice = nnx.Param(jnp.asarray(w["lm_head.weight"]))


def run_scanned(config: dict[str, Any], model: Scanned, tokens: Any) -> Any:
    eps, theta, h = config["rms_norm_eps"], theta_of(config), config["head_dim"]
    body = nnx.to_pure_dict(nnx.state(model.body))
    rows = {
        name: jnp.moveaxis(x, 1, 0) if x.ndim == 3 else x for name, x in body.items()
    }

    def layer(x: Any, p: Any) -> tuple[Any, None]:
        heads = lambda y, name: (y @ p[name].T).reshape(len(tokens), -1, h)
        y = rms(x, p["alpha"], eps)
        q = rotate(rms(heads(y, "asks"), p["ask_size"], eps), theta)
        k = rotate(rms(heads(y, "answers"), p["answer_size"], eps), theta)
        x = (
            x
            + attend(q, k, heads(y, "carries")).reshape(len(tokens), -1)
            @ p["returns"].T
        )
        y = rms(x, p["beta"], eps)
        return x + (jax.nn.silu(y @ p["opens"].T) * (y @ p["holds"].T)) @ p[
            "closes"
        ].T, None

    x, _ = jax.lax.scan(layer, model.lexicon[...][tokens], rows)
    head = model.choice if hasattr(model, "choice") else model.lexicon
    return rms(x, model.omega[...], eps) @ head[...].T


# ------------------------------------------------------------------------------- 3. linen, GPT-2, parts apart


class Station(nn.Module):
    """A block of GPT-2 from linen's own layers, where the checkpoint has query, key and value in one tensor."""

    heads: int
    eps: float

    @nn.compact
    def __call__(self, x: Any) -> Any:
        d = x.shape[-1]
        y = nn.LayerNorm(epsilon=self.eps, name="calm")(x)
        dense = lambda name: nn.DenseGeneral((self.heads, d // self.heads), name=name)
        found = attend(dense("seek")(y), dense("match")(y), dense("bring")(y))
        x = x + nn.DenseGeneral(d, axis=(-2, -1), name="collect")(found)
        y = nn.LayerNorm(epsilon=self.eps, name="settle")(x)
        return x + nn.Dense(d, name="shrink")(
            jax.nn.gelu(nn.Dense(4 * d, name="grow")(y), approximate=True)
        )


class Line(nn.Module):
    """GPT-2; the output is the embedding again."""

    config: dict[str, Any]

    @nn.compact
    def __call__(self, tokens: Any) -> Any:
        c = self.config
        d = c.get("n_embd") or c["hidden_size"]
        heads = c.get("n_head") or c["num_attention_heads"]
        eps = c.get("layer_norm_epsilon", 1e-5)
        lexemes = nn.Embed(c["vocab_size"], d, name="lexemes")
        x = lexemes(tokens) + nn.Embed(c.get("n_positions") or 1024, d, name="clock")(
            jnp.arange(len(tokens))
        )
        for i in range(c.get("n_layer") or c["num_hidden_layers"]):
            x = Station(heads, eps, name=f"station{i}")(x)
        return lexemes.attend(nn.LayerNorm(epsilon=eps, name="rest")(x))


def load_line(config: dict[str, Any], w: Weights) -> Any:
    n = config.get("n_head") or config["num_attention_heads"]
    root = "transformer." if "transformer.wte.weight" in w else ""
    d = w[f"{root}wte.weight"].shape[1]
    norm = lambda name: {
        "scale": w[f"{root}{name}.weight"],
        "bias": w[f"{root}{name}.bias"],
    }
    out: dict[str, Any] = {
        "lexemes": {"embedding": w[f"{root}wte.weight"]},
        "clock": {"embedding": w[f"{root}wpe.weight"]},
        "rest": norm("ln_f"),
    }
    for i in range(config.get("n_layer") or config["num_hidden_layers"]):
        at = f"{root}h.{i}."
        dense = lambda name, at=at: {
            "kernel": w[f"{at}{name}.weight"],
            "bias": w[f"{at}{name}.bias"],
        }
        kernels = np.split(w[f"{at}attn.c_attn.weight"], 3, 1)
        biases = np.split(w[f"{at}attn.c_attn.bias"], 3)
        block: dict[str, Any] = {
            name: {
                "kernel": kernels[j].reshape(d, n, -1),
                "bias": biases[j].reshape(n, -1),
            }
            for j, name in enumerate(("seek", "match", "bring"))
        }
        block["collect"] = {
            "kernel": w[f"{at}attn.c_proj.weight"].reshape(n, d // n, d),
            "bias": w[f"{at}attn.c_proj.bias"],
        }
        block |= {"calm": norm(f"h.{i}.ln_1"), "settle": norm(f"h.{i}.ln_2")}
        block |= {"grow": dense("mlp.c_fc"), "shrink": dense("mlp.c_proj")}
        out[f"station{i}"] = block
    return {"params": out}


MODELS = {
    "towers": OwnModel("llama", load_towers, run_towers),
    "scanned": OwnModel("qwen3", Scanned, run_scanned),
    "line": OwnModel(
        "gpt2",
        load_line,
        lambda config, params, tokens: Line(config).apply(params, tokens),
    ),
}


# ------------------------------------------------------------------------------- who connects them


class Author:
    """Who wrote a model: knows what each leaf holds, reads error messages, and copies lines from them."""

    def __init__(self, name: str, folder: str | None = None) -> None:
        self.model = MODELS[name]
        self.folder = Path(folder or jv.models.tiny(self.model.family))
        self.config: dict[str, Any] = json.loads(
            (self.folder / "config.json").read_text()
        )
        self.weights = load_file(self.folder / "model.safetensors")
        self.params = self.model.load(self.config, self.weights)
        self.flat: FlatTree = flatten(self.params)
        self.tensors = checkpoint_tensors(self.folder)

    def auto(self, lines: list[str]) -> list[Binding]:
        return bind_rules(
            ("auto", *lines), self.flat.shapes, self.tensors, self.config
        )[1]

    def holds(self, bindings: list[Binding]) -> bool:
        """Whether the leaves hold what the checkpoint has, where these bindings put it."""
        out = {b.tensor: np.full(b.tensor_shape, np.nan, np.float32) for b in bindings}
        for b in bindings:
            apply_binding(b, np.asarray(self.flat.arrays[b.leaf]), out[b.tensor])
        return all(
            np.array_equal(array, self.weights[name]) for name, array in out.items()
        )

    def choose(self, offered: list[str]) -> list[str]:
        """The right lines among those offered, one for each leaf."""
        right: dict[str, str] = {}
        for line in offered:
            bindings, _ = Rules.parse(line).attempt(
                self.flat.shapes, self.tensors, self.config
            )
            if self.holds(bindings):
                right.setdefault(bindings[0].leaf, line)
        return list(right.values())


def offered_by(message: str) -> list[str]:
    """The lines of a message that can be copied, as they stand there."""
    return [
        line
        for line in message.splitlines()
        if line.startswith("    ") and " -> " in line and "~" not in line
    ]
