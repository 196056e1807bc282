"""Rotary embeddings and their scalings, numerically as in transformers: linear, dynamic, llama3, yarn, longrope."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jvlab._errors import ModelError

KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


@dataclass(frozen=True)
class Rope:
    """How positions become angles. The first `dim` elements of each head are rotated."""

    dim: int
    theta: float
    kind: str = "default"
    factor: float = 1.0
    attention_factor: float = 1.0  # multiplies cos and sin
    length: int = 0  # the original context length, before scaling
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0
    truncate: bool = True
    # longrope: up to `length` positions, and beyond
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    @classmethod
    def parse(
        cls,
        given: Mapping[str, Any],
        head_dim: int,
        max_positions: int,
        original: int | None,
    ) -> Rope:
        """From the `rope_parameters` of a config (its older `rope_scaling` has the same fields) with `rope_theta`."""
        kind = str(given.get("rope_type") or given.get("type") or "default")
        if kind not in KINDS:
            raise ModelError(
                f"rotary positions of type {kind!r} are not known",
                remedy=f"known: {', '.join(KINDS)}",
                rope_type=kind,
            )
        needs = {
            "linear": ("factor",),
            "dynamic": ("factor",),
            "yarn": ("factor",),
            "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
            "longrope": ("short_factor", "long_factor"),
        }.get(kind, ())
        if missing := [name for name in needs if given.get(name) is None]:
            raise ModelError(
                f"rotary positions of type {kind!r} lack {', '.join(missing)}",
                remedy="complete rope_parameters (or rope_scaling) in config.json",
                rope_type=kind,
            )
        dim = int(head_dim * float(given.get("partial_rotary_factor") or 1.0))
        length = max_positions
        if kind in ("llama3", "yarn", "longrope"):
            length = int(
                original
                or given.get("original_max_position_embeddings")
                or max_positions
            )
        # a longrope config may omit the factor; it then follows from the two lengths
        factor = float(
            given.get("factor")
            or (max_positions / length if kind == "longrope" else 1.0)
        )
        extras = {
            "llama3": ("low_freq_factor", "high_freq_factor"),
            "yarn": ("beta_fast", "beta_slow"),
        }.get(kind, ())
        return cls(
            dim=dim,
            theta=float(given["rope_theta"]),
            kind=kind,
            factor=factor,
            attention_factor=_attention_factor(kind, given, factor, length),
            length=length,
            truncate=bool(given.get("truncate", True)),
            short_factor=_factors(given, "short_factor", kind, dim),
            long_factor=_factors(given, "long_factor", kind, dim),
            **{name: float(given[name]) for name in extras if given.get(name)},
        )

    def frequencies(self) -> np.ndarray:
        """Angle per position of each rotated pair, within the original context length: float32 [dim / 2]."""
        base = self.unscaled()
        match self.kind:
            case "linear":
                return base / np.float32(self.factor)
            case "llama3":
                return self._llama3(base)
            case "yarn":
                return self._yarn(base)
            case "longrope":
                return base / np.asarray(self.short_factor, np.float32)
            case _:
                return base

    def unscaled(self) -> np.ndarray:
        return np.float32(1) / np.float32(self.theta) ** (
            np.arange(0, self.dim, 2, dtype=np.float32) / self.dim
        )

    def _llama3(self, base: np.ndarray) -> np.ndarray:
        """Long wavelengths are stretched by the factor, short ones are not, and those between are interpolated."""
        waves = 2 * math.pi / base
        low = self.low_freq_factor
        high = self.high_freq_factor
        blend = (self.length / waves - low) / (high - low)
        between = (1 - blend) * base / self.factor + blend * base
        stretched = np.where(waves > self.length / low, base / self.factor, base)
        middle = (waves >= self.length / high) & (waves <= self.length / low)
        return np.where(middle, between, stretched).astype(np.float32)

    def _yarn(self, base: np.ndarray) -> np.ndarray:
        """Like llama3, but interpolated over the pair's index, between two rotation counts over the original length."""

        def index_of(rotations: float) -> float:
            return (
                self.dim
                * math.log(self.length / (rotations * 2 * math.pi))
                / (2 * math.log(self.theta))
            )

        low = index_of(self.beta_fast)
        high = index_of(self.beta_slow)
        if self.truncate:
            low = math.floor(low)
            high = math.ceil(high)
        low = max(low, 0)
        high = min(high, self.dim - 1)
        ramp = np.clip((np.arange(self.dim // 2) - low) / (high - low or 0.001), 0, 1)
        return (base / self.factor * ramp + base * (1 - ramp)).astype(np.float32)


def _attention_factor(
    kind: str, given: Mapping[str, Any], factor: float, length: int
) -> float:
    if kind not in ("yarn", "longrope"):
        return 1.0
    if given.get("attention_factor") is not None:
        return float(given["attention_factor"])
    if factor <= 1:
        return 1.0
    if kind == "longrope":
        return math.sqrt(1 + math.log(factor) / math.log(length))
    scale = given.get("mscale")
    over = given.get("mscale_all_dim")
    if scale and over:
        return (0.1 * scale * math.log(factor) + 1) / (
            0.1 * over * math.log(factor) + 1
        )
    return 0.1 * math.log(factor) + 1


def _factors(
    given: Mapping[str, Any], name: str, kind: str, dim: int
) -> tuple[float, ...]:
    if kind != "longrope":
        return ()
    found = tuple(map(float, given[name]))
    if len(found) != dim // 2:
        raise ModelError(
            f"{name} has {len(found)} numbers for {dim // 2} rotated pairs",
            remedy="correct rope_parameters (or rope_scaling) in config.json",
        )
    return found


def tables(
    rope: Rope, positions: jax.Array | np.ndarray
) -> tuple[jax.Array, jax.Array]:
    """cos and sin of every position [B, T]: float32 [B, T, dim / 2].

    Scalings that depend on the length use each row's own, so that a sequence never depends on its batch.
    """
    frequencies = jnp.asarray(rope.frequencies())
    if rope.kind in ("longrope", "dynamic"):
        length = jnp.max(positions, axis=-1)[:, None, None] + 1
        if rope.kind == "longrope":
            long = jnp.asarray(
                rope.unscaled() / np.asarray(rope.long_factor, np.float32)
            )
            frequencies = jnp.where(length > rope.length, long, frequencies)
        else:
            grown = rope.factor * jnp.maximum(length, rope.length) / rope.length - (
                rope.factor - 1
            )
            theta = rope.theta * grown.astype(jnp.float32) ** (
                rope.dim / (rope.dim - 2)
            )
            frequencies = 1 / theta ** (
                jnp.arange(0, rope.dim, 2, dtype=jnp.float32) / rope.dim
            )
    angles = positions[..., None].astype(jnp.float32) * frequencies
    return jnp.cos(angles) * rope.attention_factor, jnp.sin(
        angles
    ) * rope.attention_factor


def rotate(x: jax.Array, table: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates heads [B, T, n, h] by their positions; pairs are (i, i + dim / 2), as in Hugging Face checkpoints."""
    cos, sin = (t[:, :, None, :].astype(x.dtype) for t in table)
    half = cos.shape[-1]
    first = x[..., :half]
    second = x[..., half : 2 * half]
    rest = x[..., 2 * half :]
    return jnp.concatenate(
        [first * cos - second * sin, second * cos + first * sin, rest], axis=-1
    )
