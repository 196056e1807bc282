"""The policy-gradient loss, its options with their formulas, and the metrics of one step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from jvlab._errors import ConfigError

if TYPE_CHECKING:
    import jax
    from jax.typing import ArrayLike


# Advantages from rewards, and which groups carry a learning signal. numpy only.

ADVANTAGES = ("group", "mean", "rloo", "reinforce++")


def advantages(
    rewards: Sequence[float] | np.ndarray,
    group_ids: Sequence[int] | np.ndarray,
    kind: str = "group",
    eps: float = 1e-4,
) -> np.ndarray:
    """One advantage per sample, float32. With r the rewards, G the group of sample i (its n samples of one prompt):

    | kind | advantage of sample i |
    | --- | --- |
    | "group" | (r_i − mean(G)) / (std(G) + eps), GRPO; std divides by n |
    | "mean" | r_i − mean(G), Dr. GRPO |
    | "rloo" | r_i − mean of the other rewards of G = n / (n − 1) · (r_i − mean(G)) |
    | "reinforce++" | (r_i − mean(batch)) / (std(batch) + eps), REINFORCE++ |

    A group of one sample has no baseline: its advantage is 0, except for "reinforce++".
    """
    values = np.asarray(rewards, np.float64)
    groups = np.asarray(group_ids)
    match kind:
        case "group":
            out = _centred(values, groups) / (_per_sample(values, groups, np.std) + eps)
        case "mean":
            out = _centred(values, groups)
        case "rloo":
            size = _per_sample(values, groups, len)
            out = _centred(values, groups) * size / np.maximum(size - 1, 1)
        case _:
            out = values
            if len(values):
                out = (values - values.mean()) / (values.std() + eps)
    return out.astype(np.float32)


def groups_with_spread(
    rewards: Sequence[float] | np.ndarray,
    group_ids: Sequence[int] | np.ndarray,
) -> np.ndarray:
    """Dynamic sampling (DAPO): True for each sample whose group has different rewards.

    A group whose rewards are all equal has zero advantages: it costs a forward and a backward pass for no gradient.
    """
    values = np.asarray(rewards, np.float64)
    return _per_sample(values, np.asarray(group_ids), np.ptp) > 0


def _centred(values: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Reward minus its group's mean; exactly 0 where the rewards are equal, whatever the mean's rounding."""
    centred = values - _per_sample(values, groups, np.mean)
    return np.where(_per_sample(values, groups, np.ptp) == 0, 0.0, centred)


def _per_sample(values: np.ndarray, groups: np.ndarray, statistic) -> np.ndarray:
    """A statistic of each group, broadcast to its samples."""
    out = np.zeros(len(values))
    for group in np.unique(groups):
        at = groups == group
        out[at] = statistic(values[at])
    return out


# ----------------------------------------------------------------------------------------------------

# log-ratios are clipped to ±20 before exp: e²⁰ is far outside of any clip range, e⁸⁹ is inf in float32
LIMIT = 20.0
QUANTILES = (0.01, 0.5, 0.99)  # of ratios, in the metrics

_CHOICES = {
    "advantages": ADVANTAGES,
    "level": ("token", "sequence", "constant"),
    "kl": ("k1", "k2", "k3"),
    "kl_placement": ("auto", "loss", "reward"),
    "importance": ("none", "tis", "mask"),
    "importance_level": ("token", "sequence", "geometric"),
    "sample_mask": ("none", "sequence", "geometric"),
}
_PRESETS: dict[str, dict[str, Any]] = {
    "grpo": {"advantages": "group", "level": "sequence"},
    "dr_grpo": {"advantages": "mean", "level": "constant"},
    "dapo": {"advantages": "group", "level": "token", "clip_high": 0.28, "dynamic_sampling": True},
    "rloo": {
        "advantages": "rloo", "level": "constant", "constant_length": 1, "clip_low": math.inf, "clip_high": math.inf,
        "kl": "k1",
    },
    "reinforce++": {"advantages": "reinforce++", "level": "token", "kl": "k1"},
    "ppo_clip": {"advantages": "rloo", "level": "token"},
}  # fmt: skip


@dataclass(frozen=True)
class Algorithm:
    """The options of a policy-gradient algorithm. `Algorithm.named("grpo", clip_high=0.28)` starts from a preset.

    >>> jv.Algorithm.named("grpo", clip_high=0.28).clip_high
    0.28

    Each completion token t of sample i has three log-probabilities: b, the engine's (it sampled the token); o, the
    trainer's old one (at the version that starts the step); c, the trainer's current one. f is the reference policy's.
    With ρ = exp(c − o), w the importance weight and A the advantage, the loss is Σ_i z_i Σ_t ℓ_t over completion tokens:

        ℓ = − w · min(ρ · A, clip(ρ, 1 − clip_low, 1 + clip_high) · A)  +  kl_coef · k(c − f)  −  entropy_coef · H

    | option | formula |
    | --- | --- |
    | advantages | A of a sample: "group" (GRPO), "mean" (Dr. GRPO), "rloo", "reinforce++"; see `advantages()` |
    | level | z: "token" 1 / Σ_i |i| (tokens weigh the same), "sequence" 1 / (N · |i|) (samples weigh the same), "constant" 1 / (N · constant_length) (Dr. GRPO; use the maximum completion length) |
    | clip_low, clip_high | the PPO clip; clip_high > clip_low is DAPO's clip-higher; inf disables a side |
    | dynamic_sampling | DAPO: groups whose rewards are all equal are dropped before the step |
    | kl | with d = log π − log reference: "k1" d, "k2" d² / 2, "k3" exp(−d) − 1 + d |
    | kl_placement | "loss": as in ℓ. "reward": A_t = A − kl_coef · k(o − f), no gradient through k. "auto": k1 in the reward (as a loss its expected gradient is zero), k2 and k3 in the loss |
    | entropy_coef | H, the entropy of the distribution that token t was drawn from, nats |
    | importance_level | r, the importance ratio of a token: "token" exp(o − b); of its whole sample, the same for all of its tokens: "sequence" exp(Σ_t (o − b)), "geometric" exp(1 / |i| · Σ_t (o − b)) |
    | importance | w, no gradient: "none" 1; "tis" min(r, importance_cap); "mask" r inside [importance_low, importance_high], 0 outside |
    | sample_mask | w = 0 for all tokens of a sample whose own ratio, "sequence" or "geometric" as above, is outside [sample_mask_low, sample_mask_high]; combines with any importance |

    w corrects for the difference between engine and trainer: arithmetic, and an older version. Per token it is biased
    with low variance; per sequence it is unbiased, with a variance that grows with the length; the geometric mean does
    not grow with the length, so that it suits a mask. `importance_ess` in the metrics is the effective sample size
    (Σw)² / (n Σw²) over the n tokens, 1 if all weigh the same; `masked_fraction` is the share of tokens with w = 0.
    """  # noqa: E501

    advantages: str = "group"
    advantage_eps: float = 1e-4
    level: str = "sequence"
    constant_length: int | None = None
    clip_low: float = 0.2
    clip_high: float = 0.2
    dynamic_sampling: bool = False
    kl: str = "k3"
    kl_coef: float = 0.0
    kl_placement: str = "auto"
    entropy_coef: float = 0.0
    importance: str = "tis"
    importance_cap: float = 2.0
    importance_low: float = 0.5
    importance_high: float = 2.0
    importance_level: str = "token"
    sample_mask: str = "none"
    sample_mask_low: float = 0.5
    sample_mask_high: float = 2.0

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ConfigError(
                    f"{name}={getattr(self, name)!r}",
                    remedy=f"one of {', '.join(choices)}",
                    option=name,
                )
        checks = [
            (
                "clip_low",
                "0 to 1, or inf",
                0 <= self.clip_low <= 1 or self.clip_low == math.inf,
            ),
            ("clip_high", "0 or more", self.clip_high >= 0),
            ("advantage_eps", "0 or more", self.advantage_eps >= 0),
            ("kl_coef", "0 or more, finite", 0 <= self.kl_coef < math.inf),
            ("entropy_coef", "finite", math.isfinite(self.entropy_coef)),
            ("importance_cap", "above 0", self.importance_cap > 0),
            (
                "importance_low",
                "0 to importance_high",
                0 <= self.importance_low <= self.importance_high,
            ),
            (
                "sample_mask_low",
                "0 to sample_mask_high",
                0 <= self.sample_mask_low <= self.sample_mask_high,
            ),
            (
                "constant_length",
                "1 or more",
                self.constant_length is None or self.constant_length >= 1,
            ),
        ]
        for name, allowed, good in checks:
            if not good:
                raise ConfigError(
                    f"{name}={getattr(self, name)!r}",
                    remedy=f"{name} must be {allowed}",
                    option=name,
                )

    @classmethod
    def named(cls, name: str, **options: Any) -> Algorithm:
        """A preset with some options overridden: grpo, dr_grpo, dapo, rloo, reinforce++ or ppo_clip.

        None has a KL term unless `kl_coef` is given, since that needs a reference. "dr_grpo" needs `constant_length`;
        "rloo" is REINFORCE (no clip, log-probabilities summed over a completion); "ppo_clip" has no critic: the other
        samples of the prompt are the baseline.
        """
        if not isinstance(name, str) or name not in _PRESETS:
            raise ConfigError(
                f"no algorithm {name!r}",
                remedy=f"one of {', '.join(_PRESETS)}",
                algorithm=name,
            )
        known = [field.name for field in fields(cls)]
        for option in options:
            if option not in known:
                raise ConfigError(
                    f"an algorithm has no option {option!r}",
                    remedy=f"options: {', '.join(known)}",
                    option=option,
                )
        return replace(cls(**_PRESETS[name]), **options)

    @property
    def needs_reference(self) -> bool:
        """Whether the loss reads the reference policy's log-probabilities."""
        return self.kl_coef > 0

    @property
    def kl_in_reward(self) -> bool:
        """Whether the KL term is in the reward, with "auto" resolved."""
        return self.kl_placement == "reward" or (
            self.kl_placement == "auto" and self.kl == "k1"
        )


def row_weights(algorithm: Algorithm, mask: np.ndarray, samples: int) -> np.ndarray:
    """z of each row (see `Algorithm`), float32. Computed for the whole batch, before it is split into micro-batches.

    `mask` [rows, T] says which tokens count, `samples` how many of the rows are samples and not padding.
    """
    lengths = mask.sum(axis=1).astype(np.float64)
    match algorithm.level:
        case "token":
            weights = np.full(len(mask), 1 / max(lengths.sum(), 1))
        case "sequence":
            weights = 1 / (max(samples, 1) * np.maximum(lengths, 1))
        case _:
            if algorithm.constant_length is None:
                raise ConfigError(
                    'level="constant" needs constant_length',
                    remedy="give the maximum completion length: Algorithm.named('dr_grpo', constant_length=max_tokens)",
                )
            weights = np.full(
                len(mask), 1 / (max(samples, 1) * algorithm.constant_length)
            )
    return weights.astype(np.float32)


def kl_estimate(kind: str, delta: Any) -> Any:
    """k1, k2 or k3 of delta = log π − log reference; numpy or jax."""
    match kind:
        case "k1":
            return delta
        case "k2":
            return delta * delta / 2
        case _:
            exp = np.exp if isinstance(delta, np.ndarray) else _jnp().exp
            return exp((-delta).clip(-LIMIT, LIMIT)) - 1 + delta


def importance_ratio(level: str, old: Any, engine: Any, mask: Any) -> Any:
    """r of each token [B, T] (see `Algorithm`), one sample per row; numpy or jax."""
    xp = np if isinstance(old, np.ndarray) else _jnp()
    delta = xp.where(mask, old - engine, 0.0)  # values of padding are arbitrary
    match level:
        case "sequence":
            delta = delta.sum(axis=1, keepdims=True) + xp.zeros_like(delta)
        case "geometric":
            length = xp.maximum(xp.asarray(mask).sum(axis=1, keepdims=True), 1)
            delta = delta.sum(axis=1, keepdims=True) / length + xp.zeros_like(delta)
    return xp.exp(delta.clip(-LIMIT, LIMIT))


def importance_weight(
    algorithm: Algorithm, old: Any, engine: Any, mask: Any, ratio: Any = None
) -> Any:
    """w of each token [B, T], one sample per row; numpy or jax. `ratio`: r, if already known."""
    xp = np if isinstance(old, np.ndarray) else _jnp()
    if ratio is None:
        ratio = importance_ratio(algorithm.importance_level, old, engine, mask)
    match algorithm.importance:
        case "none":
            weight = xp.ones_like(ratio)
        case "tis":
            weight = xp.minimum(ratio, algorithm.importance_cap)
        case _:
            inside = (ratio >= algorithm.importance_low) & (
                ratio <= algorithm.importance_high
            )
            weight = xp.where(inside, ratio, 0.0)
    if algorithm.sample_mask == "none":
        return weight
    sample_ratio = importance_ratio(algorithm.sample_mask, old, engine, mask)
    inside = (sample_ratio >= algorithm.sample_mask_low) & (
        sample_ratio <= algorithm.sample_mask_high
    )
    return xp.where(inside, weight, 0.0)


def policy_loss(
    algorithm: Algorithm,
    current: ArrayLike,
    old: ArrayLike,
    engine: ArrayLike,
    advantages: ArrayLike,
    mask: ArrayLike,
    weights: ArrayLike,
    reference: ArrayLike | None = None,
    entropy: ArrayLike | None = None,
) -> jax.Array:
    """The loss of `Algorithm`'s docstring, a scalar. All [B, T], except advantages and weights (z): [B]."""
    import jax

    jnp = _jnp()
    # Padding may hold -inf or NaN: cleared before use, since 0 · NaN is NaN.
    clear = lambda x: jnp.where(mask, x, 0.0)
    now = clear(current)
    before = jax.lax.stop_gradient(clear(old))
    sampled = clear(engine)
    advantage = jnp.broadcast_to(jnp.asarray(advantages)[:, None], now.shape)
    penalty = jnp.zeros_like(now)
    if algorithm.needs_reference:
        assert reference is not None
        if algorithm.kl_in_reward:
            advantage = advantage - algorithm.kl_coef * kl_estimate(
                algorithm.kl, before - clear(reference)
            )
        else:
            penalty = algorithm.kl_coef * kl_estimate(
                algorithm.kl, now - clear(reference)
            )
    ratio = jnp.exp((now - before).clip(-LIMIT, LIMIT))
    clipped = jnp.clip(ratio, 1 - algorithm.clip_low, 1 + algorithm.clip_high)
    weight = importance_weight(algorithm, before, sampled, mask)
    gain = weight * jnp.minimum(ratio * advantage, clipped * advantage)
    loss = penalty - gain
    if algorithm.entropy_coef:
        assert entropy is not None
        loss = loss - algorithm.entropy_coef * clear(entropy)
    return jnp.sum(weights * jnp.sum(clear(loss), axis=1))


def token_metrics(
    algorithm: Algorithm,
    *,
    current: np.ndarray,
    old: np.ndarray,
    engine: np.ndarray,
    advantages: np.ndarray,
    mask: np.ndarray,
    reference: np.ndarray | None = None,
    entropy: np.ndarray | None = None,
    staleness: np.ndarray | None = None,
) -> tuple[dict[str, float], dict[int, dict[str, float]]]:
    """Metrics over the tokens in `mask`: for all of them, and by staleness (trainer version − token version).

    `ratio_*` is exp(c − o), `importance_*` is exp(o − b) of a token before cap and mask, `importance_ess` and
    `masked_fraction` describe the weights w that the loss uses, `logprob_gap_*` is |o − b| over tokens of the current
    version only: there both sides hold the same weights, so that it checks the sync. NaN: no token.
    """
    advantage = np.broadcast_to(np.asarray(advantages)[:, None], mask.shape)[mask]
    before = np.asarray(old, np.float64)
    sampled = np.asarray(engine, np.float64)
    ratio = importance_ratio(algorithm.importance_level, before, sampled, mask)
    flat = {
        "current": current[mask],
        "old": old[mask],
        "engine": engine[mask],
        "advantage": advantage,
    }
    flat["weight"] = importance_weight(algorithm, before, sampled, mask, ratio)[mask]
    flat["level_ratio"] = ratio[mask]
    if reference is not None:
        flat["reference"] = reference[mask]
    if entropy is not None:
        flat["entropy"] = entropy[mask]
    flat = {name: values.astype(np.float64) for name, values in flat.items()}
    age = np.zeros(len(advantage), np.int64) if staleness is None else staleness[mask]
    overall = _summary(algorithm, flat)
    ages = [] if staleness is None else np.unique(age).tolist()
    one = dict(overall)  # of the only age there is, as in an on-policy step
    by_staleness = {
        int(s): one
        if len(ages) == 1
        else _summary(algorithm, {k: v[age == s] for k, v in flat.items()})
        for s in ages
    }
    fresh = np.abs(flat["old"] - flat["engine"])[age == 0]
    overall["logprob_gap_max"] = float(fresh.max()) if len(fresh) else math.nan
    overall["logprob_gap_mean"] = float(fresh.mean()) if len(fresh) else math.nan
    if staleness is not None and len(age):
        overall["staleness_mean"], overall["staleness_max"] = (
            float(age.mean()),
            float(age.max()),
        )
    return overall, by_staleness


def _summary(algorithm: Algorithm, flat: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Metrics of some tokens, given as flat arrays."""
    old = flat["old"]
    advantage = flat["advantage"]
    out: dict[str, float] = {"tokens": float(len(old))}
    ratio = np.exp(np.clip(flat["current"] - old, -LIMIT, LIMIT))
    importance = np.exp(np.clip(old - flat["engine"], -LIMIT, LIMIT))
    for name, values in (("ratio", ratio), ("importance", importance)):
        out[f"{name}_mean"] = _mean(values)
        found = (
            np.quantile(values, QUANTILES).tolist()
            if len(old)
            else [math.nan] * len(QUANTILES)
        )
        out |= {
            f"{name}_p{round(q * 100):02d}": value
            for q, value in zip(QUANTILES, found, strict=True)
        }
        out[f"{name}_min"] = float(values.min()) if len(old) else math.nan
        out[f"{name}_max"] = float(values.max()) if len(old) else math.nan
    out["clip_low_fraction"] = _mean((ratio < 1 - algorithm.clip_low) & (advantage < 0))
    out["clip_high_fraction"] = _mean(
        (ratio > 1 + algorithm.clip_high) & (advantage > 0)
    )
    weight = flat["weight"]
    level_ratio = flat["level_ratio"]
    match algorithm.importance:
        case "tis":
            out["importance_cut_fraction"] = _mean(
                level_ratio > algorithm.importance_cap
            )
        case "mask":
            inside = (level_ratio >= algorithm.importance_low) & (
                level_ratio <= algorithm.importance_high
            )
            out["importance_cut_fraction"] = _mean(~inside)
    squares = float((weight**2).sum())
    out["importance_ess"] = (
        float(weight.sum()) ** 2 / (len(weight) * squares) if squares else math.nan
    )
    out["masked_fraction"] = _mean(weight == 0)
    # KL(engine ‖ trainer): the engine sampled them
    out["kl_engine"] = _mean(kl_estimate("k3", flat["engine"] - old))
    if "reference" in flat:
        out["kl_reference"] = _mean(
            kl_estimate(algorithm.kl, flat["current"] - flat["reference"])
        )
    if "entropy" in flat:
        out["entropy"] = _mean(flat["entropy"])
    # estimates the entropy where no exact one is given
    out["surprise"] = _mean(-flat["current"])
    return out


def _mean(values: np.ndarray) -> float:
    return float(np.mean(values)) if len(values) else math.nan


def _jnp() -> Any:
    import jax.numpy as jnp

    return jnp
