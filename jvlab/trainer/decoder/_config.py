"""What the decoder needs from a Hugging Face config.json: sizes, and how its family differs from llama."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from jvlab._errors import ModelError
from jvlab.trainer.decoder._rope import Rope

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_new": partial(jax.nn.gelu, approximate=True),
    "gelu_pytorch_tanh": partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
}
# Defaults of transformers for fields that a config may omit. Where none is listed, the field is required.
_LLAMA: dict[str, Any] = {
    "head_dim": None,
    "num_key_value_heads": None,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
}
_QWEN = _LLAMA | {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_GEMMA: dict[str, Any] = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA | {"attention_bias": False, "mlp_bias": False},
    "mistral": _LLAMA | {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
    "qwen2": _QWEN,
    "qwen3": _QWEN | {"head_dim": 128, "attention_bias": False},
    "gemma2": _GEMMA | {
        "vocab_size": 256000, "max_position_embeddings": 8192, "rope_theta": 10000.0,
        "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0,
    },
    "gemma3_text": _GEMMA | {
        "vocab_size": 262208, "max_position_embeddings": 131072, "rope_theta": 1e6, "rope_local_base_freq": 10000.0,
        "final_logit_softcapping": None, "attn_logit_softcapping": None,
    },
    "phi3": _LLAMA | {
        "max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
        "sliding_window": None,
    },
    "olmo2": _LLAMA | {"rms_norm_eps": 1e-5, "attention_bias": False},
    "mixtral": _LLAMA | {
        "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 1e6,
        "sliding_window": None, "num_local_experts": 8, "num_experts_per_tok": 2,
    },
    "qwen3_moe": _LLAMA | {
        "num_key_value_heads": 4, "max_position_embeddings": 32768, "attention_bias": False,
        "use_sliding_window": False, "sliding_window": 4096, "num_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 768, "norm_topk_prob": False, "decoder_sparse_step": 1,
    },
}  # fmt: skip

EXPERT_FAMILIES = ("mixtral", "qwen3_moe")


@dataclass(frozen=True)
class DecoderConfig:
    """A complete description of a decoder. Hashable: programs are compiled once per config."""

    family: str
    vocab: int
    width: int  # d
    inner: int  # f, of the MLP or of each expert
    heads: int  # n
    kv_heads: int  # k
    head_dim: int  # h
    ropes: tuple[Rope, ...]  # the distinct rotary embeddings
    # attention window of each layer, including the token itself; None: unbounded
    windows: tuple[int | None, ...]
    layer_ropes: tuple[int, ...]  # index into `ropes` of each layer
    activation: str
    norm_eps: float
    attention_scale: float
    tied: bool  # the output layer is the embedding
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    head_norms: bool = False  # norms of q and k per head (qwen3, gemma3)
    whole_norms: bool = False  # norms of q and k over all heads together (olmo2)
    pre_norms: bool = True  # on a block's input
    post_norms: bool = False  # on its output (gemma, olmo2)
    norm_offset: float = 0.0  # gemma scales by 1 + w
    embedding_scale: float = 1.0
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    experts: int = 0  # of each layer; 0: an MLP instead
    chosen: int = 0  # experts of each token
    renormalised: bool = False  # the weights of a token's experts sum to 1

    @property
    def layers(self) -> int:
        return len(self.windows)

    @property
    def period(self) -> int:
        """After how many layers windows and rotary embeddings repeat: 1 for most, 2 for gemma2, 6 for gemma3."""
        kinds = list(zip(self.windows, self.layer_ropes, strict=True))
        repeats = lambda p: all(kinds[i] == kinds[i - p] for i in range(p, len(kinds)))
        return next(p for p in range(1, len(kinds) + 1) if repeats(p))

    @property
    def activations(self) -> tuple[int, int, int]:
        """Values of one layer for each token: results of matrix products, everything, and what attention returns."""
        heads = self.heads * self.head_dim
        keys = 2 * self.kv_heads * self.head_dim
        inner = self.inner * max(self.chosen, 1)
        products = heads + keys + 2 * self.width + 2 * inner
        # besides: norms, rotated heads, mixed values, gate times up
        everything = products + 3 * heads + 2 * keys + 2 * inner + 6 * self.width
        # besides: scores, tokens sorted by expert, results of each expert sorted and in order
        if self.experts:
            products += self.experts + (self.chosen - 1) * self.width
            everything += 2 * self.experts + 4 * self.chosen * self.width
        return products, everything, heads

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> DecoderConfig:
        """From config.json as a mapping; for a multimodal model, from its `text_config`."""
        inner = config.get("text_config")
        if isinstance(inner, Mapping):
            config = {
                **{k: config[k] for k in ("tie_word_embeddings",) if k in config},
                **inner,
            }
        family = str(config.get("model_type"))
        if family not in DEFAULTS:
            raise ModelError(
                f"no decoder for model_type {family!r}",
                remedy=f"known: {', '.join(DEFAULTS)}; or train your own model: jv.grpo takes (params, logprobs_fn)",
                model_type=family,
            )
        return _Reader(family, config).decoder()


class _Reader:
    """One family's config with its defaults filled in."""

    def __init__(self, family: str, config: Mapping[str, Any]) -> None:
        self.family = family
        self.given = config
        self.defaults = DEFAULTS[family]

    def __call__(self, name: str, otherwise: Any = None) -> Any:
        return self.given.get(name, self.defaults.get(name, otherwise))

    def size(self, name: str) -> int:
        value = self(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ModelError(
                f"config.json of this {self.family} has {name}={value!r}",
                remedy="it must be a whole number of at least 1",
                field=name,
            )
        return value

    def decoder(self) -> DecoderConfig:
        family = self.family
        gemma = self.family.startswith("gemma")
        if self("use_bidirectional_attention"):
            raise ModelError(
                "this model attends in both directions",
                remedy="a policy is causal: use a causal checkpoint",
            )
        width = self.size("hidden_size")
        heads = self.size("num_attention_heads")
        kv_heads = (
            heads
            if self("num_key_value_heads") is None
            else self.size("num_key_value_heads")
        )
        head_dim = width // heads if self("head_dim") is None else self.size("head_dim")
        if heads % kv_heads:
            raise ModelError(
                f"{heads} heads are not a multiple of {kv_heads} key-value heads",
                remedy="correct the config",
            )
        kinds = self._layer_types()
        ropes = {kind: self._rope(kind, head_dim) for kind in dict.fromkeys(kinds)}
        unique = tuple(dict.fromkeys(ropes.values()))
        bias = bool(self("attention_bias"))
        experts, chosen = self._experts()
        return DecoderConfig(
            family=family,
            vocab=self.size("vocab_size"),
            width=width,
            inner=self.size(
                "moe_intermediate_size"
                if family == "qwen3_moe"
                else "intermediate_size"
            ),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            ropes=unique,
            windows=tuple(
                self.size("sliding_window") if kind == "sliding_attention" else None
                for kind in kinds
            ),
            layer_ropes=tuple(unique.index(ropes[kind]) for kind in kinds),
            activation=self._activation(),
            norm_eps=float(self("rms_norm_eps")),
            attention_scale=float(self("query_pre_attn_scalar") if gemma else head_dim)
            ** -0.5,
            tied=bool(self("tie_word_embeddings")),
            qkv_bias=bias or family == "qwen2",
            o_bias=bias,
            mlp_bias=bool(self("mlp_bias")),
            head_norms=family in ("qwen3", "qwen3_moe", "gemma3_text"),
            whole_norms=family == "olmo2",
            pre_norms=family != "olmo2",
            post_norms=gemma or family == "olmo2",
            norm_offset=1.0 if gemma else 0.0,
            embedding_scale=width**0.5 if gemma else 1.0,
            # gemma3 has the field too, but neither transformers nor vLLM applies it
            attention_softcap=self("attn_logit_softcapping")
            if family == "gemma2"
            else None,
            logit_softcap=self("final_logit_softcapping") if gemma else None,
            experts=experts,
            chosen=chosen,
            renormalised=family == "mixtral" or bool(self("norm_topk_prob")),
        )

    def _experts(self) -> tuple[int, int]:
        """Experts of each layer, and of each token; none in most families."""
        if self.family not in EXPERT_FAMILIES:
            return 0, 0
        if self("mlp_only_layers") or self("decoder_sparse_step", 1) != 1:
            raise ModelError(
                f"this {self.family} has layers without experts among those with them",
                remedy="a policy stacks equal layers; or train your own model: jv.grpo takes (params, logprobs_fn)",
            )
        # transformers 5 writes qwen3_moe's number of experts under either name
        name = (
            "num_experts"
            if self.family == "qwen3_moe" and "num_local_experts" not in self.given
            else "num_local_experts"
        )
        experts = self.size(name)
        chosen = self.size("num_experts_per_tok")
        if chosen > experts:
            raise ModelError(
                f"{chosen} experts per token of {experts}",
                remedy="correct num_experts_per_tok",
            )
        return experts, chosen

    def _activation(self) -> str:
        name = self("hidden_activation") or self("hidden_act")
        if name not in ACTIVATIONS:
            raise ModelError(
                f"activation {name!r} is not known",
                remedy=f"known: {', '.join(ACTIVATIONS)}",
            )
        return name

    def _layer_types(self) -> list[str]:
        """`full_attention` or `sliding_attention` for each layer."""
        count = self.size("num_hidden_layers")
        given = self.given.get("layer_types")
        window = self("sliding_window")
        # of qwen transformers then ignores the window, whatever layer_types says
        ignored = self.family.startswith("qwen") and not self("use_sliding_window")
        if ignored or self.family in ("llama", "olmo2"):
            return ["full_attention"] * count
        if self.family in ("mistral", "phi3", "mixtral", "qwen3_moe"):
            return ["full_attention" if window is None else "sliding_attention"] * count
        if given is not None:
            if len(given) != count or set(given) - {
                "full_attention",
                "sliding_attention",
            }:
                raise ModelError(
                    f"layer_types has {len(given)} entries of {sorted(set(given))} for {count} layers",
                    remedy="give full_attention or sliding_attention for each layer",
                )
            return list(given)
        match self.family:
            case "qwen2" | "qwen3":
                first = count if window is None else int(self("max_window_layers"))
                full = [i < first for i in range(count)]
            case "gemma2":
                full = [i % 2 == 1 for i in range(count)]
            case _:
                period = int(self("sliding_window_pattern", 6))
                full = [(i + 1) % period == 0 for i in range(count)]
        return ["full_attention" if f else "sliding_attention" for f in full]

    def _rope(self, kind: str, head_dim: int) -> Rope:
        """The rotary embedding of one layer type: from `rope_parameters` (transformers 5), or the older fields."""
        given = self.given.get("rope_parameters") or {}
        older = self.given.get("rope_scaling") or {}
        nested = any(isinstance(v, Mapping) for v in given.values())
        fields = dict((given.get(kind) or {}) if nested else given)
        theta = self("rope_theta")
        if self.family == "gemma3_text" and kind == "sliding_attention":
            # only full-attention layers are scaled
            older = {}
            theta = self("rope_local_base_freq")
        fields = {**fields, **older}
        fields.setdefault("rope_theta", theta)
        if fields.get("rope_theta") is None:
            fields["rope_theta"] = theta
        name = fields.get("rope_type") or fields.get("type")
        if self.family == "phi3":
            fields.setdefault("partial_rotary_factor", self("partial_rotary_factor"))
            if name in ("su", "yarn"):  # names of longrope in the first Phi-3 configs
                fields["rope_type"] = "longrope"
        elif (
            fields.get("partial_rotary_factor") or self("partial_rotary_factor") or 1.0
        ) != 1.0:
            raise ModelError(
                f"{self.family} with partial_rotary_factor",
                remedy="only phi3 supports it: correct config.json",
            )
        positions = self.size("max_position_embeddings")
        return Rope.parse(
            fields, head_dim, positions, self("original_max_position_embeddings")
        )
