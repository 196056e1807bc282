"""How the decoder computes: dtypes, sharding, what is kept for the gradient; its parameters and linear maps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jvlab.trainer.decoder import _attention
from jvlab.trainer.decoder._attention import Choice, ScoreForm
from jvlab.trainer.decoder._config import DecoderConfig
from jvlab.trainer.decoder._lora import LoraSpec
from jvlab.trainer.decoder._sharding import Layout

# What is kept of a layer's activations for its gradient: all, the results of matrix products, only its input. With the
# last two, also what a fused attention kernel returned: as small as the input, and costly to compute again.
REMAT = ("none", "dots", "full")
_FUSED = "dot_product_attention_fwd"  # JAX's name for it


@dataclass(frozen=True)
class Runtime:
    """How the decoder computes: dtype of activations, sharding, rematerialisation."""

    dtype: str = "float32"
    layout: Layout | None = None
    # or "auto": the first of REMAT whose activations fit into `room`
    remat: str = "none"
    # of the output head; None: weights in `dtype`, logits summed and kept in float32
    head_dtype: str | None = None
    room: int = 0  # bytes
    lora: LoraSpec | None = None  # the linear maps that have adapters

    @property
    def precision(self) -> jax.lax.Precision:
        """Full float32: accelerators default to fewer bits for it."""
        return (
            jax.lax.Precision.HIGHEST
            if self.dtype == "float32"
            else jax.lax.Precision.DEFAULT
        )

    def weight(self, parameter: nnx.Param, dtype: str | None = None) -> jax.Array:
        value = jnp.asarray(parameter[...])
        dtype = dtype or self.dtype
        if self.layout is None:
            return value.astype(dtype)
        letters = parameter.get_metadata()["letters"]
        # one of stacked layers: no l
        return self.layout.gathered(value, letters[len(letters) - value.ndim :], dtype)

    def attention(
        self, config: DecoderConfig, window: int | None, tokens: int
    ) -> tuple[Choice, ScoreForm]:
        """The form of attention over rows of this many tokens."""
        scores = ScoreForm(
            config.attention_scale, config.attention_softcap, window, self.precision
        )
        devices = self.layout.mesh.size if self.layout else 1
        of = self.dtype, scores, config.head_dim, config.heads, tokens, devices
        return _attention.choose(self.platform, *of), scores

    @property
    def platform(self) -> str:
        return (
            self.layout.mesh.devices.flat[0].platform
            if self.layout
            else jax.default_backend()
        )

    def kept_bytes(
        self, config: DecoderConfig, rows: int, tokens: int, remat: str
    ) -> int:
        """Bytes of activations that wait for their gradient on one device, of `rows` rows of `tokens` tokens."""
        products, everything, one = config.activations
        of = {"none": everything, "dots": products + one, "full": config.width + one}[
            remat
        ]
        shards = self.layout.mesh.size if self.layout else 1
        here = -(-rows // min(rows, shards)) * tokens
        scores = 0
        if remat == "none" and self.attention(config, None, tokens)[0].form == "plain":
            scores = 8 * config.heads * tokens * here * config.layers
        return jnp.dtype(self.dtype).itemsize * of * here * config.layers + scores

    def remat_of(self, config: DecoderConfig, rows: int, tokens: int) -> str:
        """One of REMAT, for so many rows of so many tokens."""
        if self.remat != "auto":
            return self.remat
        # Keeping everything is slower than "dots" on a GPU: it takes longer to write and read than to compute again.
        kinds = REMAT if self.platform == "cpu" else REMAT[1:]
        fits = (
            r for r in kinds if self.kept_bytes(config, rows, tokens, r) <= self.room
        )
        return next(fits, REMAT[-1])

    def rematerialised(
        self, step: Callable[..., Any], remat: str
    ) -> Callable[..., Any]:
        """A layer that keeps for its gradient what `remat` says."""
        if remat == "none":
            return step
        dots = jax.checkpoint_policies.dots_with_no_batch_dims_saveable

        def kept(primitive: Any, *of: Any, **parameters: Any) -> Any:
            if primitive.name.startswith(_FUSED):
                return True
            return remat == "dots" and (
                dots(primitive, *of, **parameters)
                or primitive.name.startswith("ragged_dot")
            )

        return jax.checkpoint(step, policy=kept, prevent_cse=False)

    def place(self, value: jax.Array, letters: str) -> jax.Array:
        return self.layout.activation(value, letters) if self.layout else value


def parameter(shape: tuple[int, ...], letters: str, layers: int = 0) -> nnx.Param:
    """A parameter; with `layers`, that of so many layers, stacked."""
    return nnx.Param(
        jnp.zeros((layers, *shape) if layers else shape),
        letters="l" * bool(layers) + letters,
    )


class Linear(nnx.Module):
    """An einsum with a kernel, `"btd,dnh->btnh"`; the kernel's letters name its axes."""

    def __init__(
        self,
        equation: str,
        shape: tuple[int, ...],
        runtime: Runtime,
        bias: bool = False,
        layers: int = 0,
        name: str = "",
    ) -> None:
        self.equation = equation
        self.runtime = runtime
        self.out = equation.partition("->")[2]
        letters = equation.partition("->")[0].partition(",")[2]
        self.kernel = parameter(shape, letters, layers)
        self.lora = None
        if runtime.lora is not None and name in runtime.lora.names:
            self.lora = runtime.lora
            given = equation.partition(",")[0]
            # x is [b, t, *what is summed over]
            self.shrink = f"{given},{letters[: len(given) - 2]}r->btr"
            self.expand = f"btr,r{self.out[2:]}->{self.out}"
            cut = len(given) - 2
            rank = self.lora.rank
            self.lora_a = parameter((*shape[:cut], rank), f"{letters[:cut]}r", layers)
            self.lora_b = parameter((rank, *shape[cut:]), f"r{letters[cut:]}", layers)
        if bias:
            sizes = dict(zip(letters, shape, strict=True))
            self.bias = parameter(
                tuple(sizes[c] for c in self.out[2:]), self.out[2:], layers
            )
        self.biased = bias

    def __call__(self, x: jax.Array) -> jax.Array:
        weight = self.runtime.weight
        product = partial(jnp.einsum, precision=self.runtime.precision)
        y = product(self.equation, x, weight(self.kernel))
        if self.biased:
            y = y + weight(self.bias)
        if self.lora is not None:
            low = product(self.shrink, x, weight(self.lora_a))
            more = product(self.expand, low, weight(self.lora_b))
            y = y + more * jnp.asarray(self.lora.scale, y.dtype)
        return self.runtime.place(y, self.out)
