"""The loss against its formula in plain Python, its gradient against finite differences, presets, metrics."""

from __future__ import annotations

import itertools
import math

import jax
import numpy as np
import pytest

from jvlab._errors import ConfigError
from jvlab.trainer._losses import (
    Algorithm,
    importance_weight,
    policy_loss,
    row_weights,
    token_metrics,
)


def case(
    seed: int = 0, rows: int = 4, width: int = 6, spread: float = 0.5
) -> dict[str, np.ndarray]:
    """Log-probabilities that differ enough to hit both sides of each clip; the last row is padding."""
    rng = np.random.default_rng(seed)
    draw = lambda: rng.normal(-2, spread, (rows, width)).astype(np.float32)
    lengths = np.array([6, 3, 4, 0])
    at = np.arange(width)[None]
    return {
        "current": draw(),
        "old": draw(),
        "engine": draw(),
        "reference": draw(),
        "entropy": np.abs(draw()),
        "advantages": np.array([1.0, -0.7, 0.4, 0.0], np.float32),
        "mask": (at >= 1) & (at < lengths[:, None]),
    }


def by_hand(a: Algorithm, x: dict[str, np.ndarray], samples: int) -> float:
    """The formulas of Algorithm's docstring, one token at a time."""
    kl = {
        "k1": lambda d: d,
        "k2": lambda d: d * d / 2,
        "k3": lambda d: math.exp(-d) - 1 + d,
    }[a.kl]
    total, tokens = 0.0, int(x["mask"].sum())
    for i, t in itertools.product(*map(range, x["mask"].shape)):
        if not x["mask"][i, t]:
            continue
        c, o, b, f = (
            float(x[name][i, t]) for name in ("current", "old", "engine", "reference")
        )
        advantage = float(x["advantages"][i])
        in_reward = a.kl_placement == "reward" or (
            a.kl_placement == "auto" and a.kl == "k1"
        )
        if in_reward:
            advantage -= a.kl_coef * kl(o - f)
        ratio = math.exp(c - o)
        rows = [u for u in range(x["mask"].shape[1]) if x["mask"][i, u]]
        apart = [float(x["old"][i, u]) - float(x["engine"][i, u]) for u in rows]
        of_sample = {
            "sequence": math.exp(sum(apart)),
            "geometric": math.exp(sum(apart) / len(apart)),
        }
        w = of_sample.get(a.importance_level, math.exp(o - b))
        if a.importance == "none":
            w = 1.0
        elif a.importance == "tis":
            w = min(w, a.importance_cap)
        elif not a.importance_low <= w <= a.importance_high:
            w = 0.0
        if (
            a.sample_mask != "none"
            and not a.sample_mask_low <= of_sample[a.sample_mask] <= a.sample_mask_high
        ):
            w = 0.0
        cut = min(max(ratio, 1 - a.clip_low), 1 + a.clip_high)
        loss = -w * min(ratio * advantage, cut * advantage)
        loss += 0.0 if in_reward else a.kl_coef * kl(c - f)
        loss -= a.entropy_coef * float(x["entropy"][i, t])
        z = {
            "token": 1 / tokens,
            "sequence": 1 / (samples * int(x["mask"][i].sum())),
            "constant": 1 / (samples * (a.constant_length or 1)),
        }[a.level]
        total += z * loss
    return total


def ours(a: Algorithm, x: dict[str, np.ndarray], samples: int = 3) -> float:
    weights = row_weights(a, x["mask"], samples)
    return float(
        policy_loss(
            a,
            jax.numpy.asarray(x["current"]),
            x["old"],
            x["engine"],
            x["advantages"],
            x["mask"],
            weights,
            x["reference"],
            x["entropy"],
        )
    )


OPTIONS = [
    *({"level": v, "constant_length": 9} for v in ("token", "sequence", "constant")),
    {"clip_low": 0.1, "clip_high": 0.4},
    {"clip_low": math.inf, "clip_high": math.inf},
    *(
        {"kl": k, "kl_coef": 0.3, "kl_placement": p}
        for k in ("k1", "k2", "k3")
        for p in ("auto", "loss", "reward")
    ),
    {"entropy_coef": 0.2},
    {"importance": "none"},
    {"importance": "tis", "importance_cap": 1.1},
    {"importance": "mask", "importance_low": 0.8, "importance_high": 1.3},
    *(
        {"importance": i, "importance_level": v}
        for i in ("tis", "mask")
        for v in ("sequence", "geometric")
    ),
    {
        "importance": "none",
        "sample_mask": "geometric",
        "sample_mask_low": 0.8,
        "sample_mask_high": 1.2,
    },
    {
        "importance": "tis",
        "sample_mask": "sequence",
        "sample_mask_low": 0.3,
        "sample_mask_high": 3.0,
    },
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_each_option(options):
    algorithm = Algorithm(**options)
    for seed in range(3):
        x = case(seed)
        assert ours(algorithm, x) == pytest.approx(
            by_hand(algorithm, x, 3), rel=1e-5, abs=1e-6
        )


@pytest.mark.parametrize(
    "name", ["grpo", "dr_grpo", "dapo", "rloo", "reinforce++", "ppo_clip"]
)
def test_presets(name: str):
    algorithm = Algorithm.named(
        name, kl_coef=0.1, **({"constant_length": 7} if name == "dr_grpo" else {})
    )
    x = case(5)
    assert ours(algorithm, x) == pytest.approx(by_hand(algorithm, x, 3), rel=1e-5)


def test_presets_are_the_papers():
    dapo, rloo = Algorithm.named("dapo"), Algorithm.named("rloo")
    assert (dapo.clip_low, dapo.clip_high, dapo.level, dapo.dynamic_sampling) == (
        0.2,
        0.28,
        "token",
        True,
    )
    assert (Algorithm.named("grpo").advantages, Algorithm.named("grpo").level) == (
        "group",
        "sequence",
    )
    assert (
        Algorithm.named("dr_grpo").advantages,
        Algorithm.named("dr_grpo").level,
    ) == ("mean", "constant")
    assert rloo.clip_high == math.inf
    assert rloo.constant_length == 1
    assert Algorithm.named("reinforce++").kl_in_reward


def gradient(a: Algorithm, x: dict[str, np.ndarray]) -> np.ndarray:
    weights = row_weights(a, x["mask"], 3)
    return np.asarray(
        jax.grad(
            lambda c: policy_loss(
                a,
                c,
                x["old"],
                x["engine"],
                x["advantages"],
                x["mask"],
                weights,
                x["reference"],
                x["entropy"],
            )
        )(jax.numpy.asarray(x["current"]))
    )


@pytest.mark.parametrize(
    "options",
    [{}, {"kl_coef": 0.2}, {"kl_coef": 0.2, "kl": "k1"}, {"level": "token"}],
    ids=str,
)
def test_gradient_against_finite_differences(options):
    algorithm, x = Algorithm(**options), case(1)
    found = gradient(algorithm, x)
    for i, t in itertools.product(*map(range, x["mask"].shape)):
        up, down = (
            {**x, "current": x["current"].astype(np.float64).copy()} for _ in range(2)
        )
        up["current"][i, t] += 1e-5
        down["current"][i, t] -= 1e-5
        expected = (by_hand(algorithm, up, 3) - by_hand(algorithm, down, 3)) / 2e-5
        assert found[i, t] == pytest.approx(expected, rel=1e-3, abs=1e-5), (i, t)


def test_on_policy_gradient_is_reinforce():
    """With c = o = b the gradient of each token is − z · A, whatever the clip."""
    x = case(2)
    x["old"] = x["engine"] = x["current"]
    found = gradient(Algorithm.named("dapo"), x)
    np.testing.assert_allclose(
        found, -x["advantages"][:, None] * x["mask"] / x["mask"].sum(), rtol=1e-6
    )


def test_padding_may_hold_anything():
    algorithm, x = Algorithm(kl_coef=0.1, entropy_coef=0.1), case(3)
    dirty = {
        k: np.where(x["mask"], v, np.nan) if k not in ("mask", "advantages") else v
        for k, v in x.items()
    }
    assert ours(algorithm, dirty) == ours(algorithm, x)
    np.testing.assert_array_equal(gradient(algorithm, dirty), gradient(algorithm, x))


def test_extreme_ratios_stay_finite():
    x = case(4)
    x["current"], x["engine"] = x["current"] + 300, x["engine"] - 300
    for importance, level in itertools.product(
        ("none", "tis", "mask"), ("token", "sequence", "geometric")
    ):
        algorithm = Algorithm(
            importance=importance,
            importance_level=level,
            sample_mask="geometric",
            kl_coef=0.1,
        )
        assert math.isfinite(ours(algorithm, x))
        assert np.isfinite(gradient(algorithm, x)).all()


def test_each_level_sees_what_the_others_do_not():
    """One token far off: by token it alone is cut; by geometric mean its sample stays; by sequence its sample goes."""
    mask = np.ones((2, 10), bool)
    engine = np.full((2, 10), -2.0)
    old = engine.copy()
    old[0, 3] += 1.5
    cut = lambda **options: (
        importance_weight(Algorithm(importance="mask", **options), old, engine, mask)
        == 0
    )
    assert cut().sum() == 1
    assert cut(importance_level="sequence").sum(axis=1).tolist() == [10, 0]
    assert cut(importance_level="geometric").sum() == 0
    # every token a little off: calm by token and by mean, e¹ = 2.7 by sequence
    drift = engine + 0.1
    weight = lambda level: importance_weight(
        Algorithm(importance="tis", importance_cap=9, importance_level=level),
        drift,
        engine,
        mask,
    )
    assert weight("token")[0, 0] == pytest.approx(math.exp(0.1))
    assert weight("geometric")[0, 0] == pytest.approx(math.exp(0.1))
    assert weight("sequence")[0, 0] == pytest.approx(math.exp(1.0))


def test_effective_samples_and_the_share_masked():
    x = {name: np.zeros((2, 5)) for name in ("current", "old", "engine")}
    x |= {"advantages": np.ones(2), "mask": np.ones((2, 5), bool)}
    whole, _ = token_metrics(Algorithm(), **x)
    assert (whole["importance_ess"], whole["masked_fraction"]) == (1.0, 0.0)
    x["old"] = x["old"].copy()
    x["old"][0] = np.log(3.0)  # a sample that the trainer finds three times as likely
    whole, _ = token_metrics(Algorithm(importance="tis", importance_cap=10), **x)
    assert whole["importance_ess"] == pytest.approx(
        (5 * 3 + 5) ** 2 / (10 * (5 * 9 + 5))
    )
    whole, _ = token_metrics(Algorithm(importance="none", sample_mask="geometric"), **x)
    assert (whole["importance_ess"], whole["masked_fraction"]) == (0.5, 0.5)
    whole, _ = token_metrics(
        Algorithm(importance="mask", importance_low=5, importance_high=6), **x
    )
    assert math.isnan(whole["importance_ess"]), "nothing is left to count"
    assert whole["masked_fraction"] == 1.0


def test_metrics_against_numpy():
    x = case(0)
    algorithm = Algorithm(importance_cap=1.2)
    age = np.where(np.arange(6)[None] < 3, 0, 2) * np.ones((4, 1), int)
    names = ("current", "old", "engine", "advantages", "mask", "reference", "entropy")
    whole, parts = token_metrics(algorithm, **{n: x[n] for n in names}, staleness=age)
    m = x["mask"]
    ratio, importance = (
        np.exp(x["current"] - x["old"])[m],
        np.exp(x["old"] - x["engine"])[m],
    )
    advantage = np.repeat(x["advantages"], m.sum(1))
    gap = np.abs(x["old"] - x["engine"])
    expected = {
        "tokens": m.sum(),
        "ratio_mean": ratio.mean(),
        "ratio_max": ratio.max(),
        "ratio_p50": np.median(ratio),
        "importance_p99": np.quantile(importance, 0.99),
        "importance_min": importance.min(),
        "clip_low_fraction": ((ratio < 0.8) & (advantage < 0)).mean(),
        "clip_high_fraction": ((ratio > 1.2) & (advantage > 0)).mean(),
        "importance_cut_fraction": (importance > 1.2).mean(),
        "entropy": x["entropy"][m].mean(),
        "kl_engine": (importance - 1 - np.log(importance)).mean(),
        "kl_reference": (
            np.exp(x["reference"] - x["current"]) - 1 + x["current"] - x["reference"]
        )[m].mean(),
        "logprob_gap_max": gap[m & (age == 0)].max(),
        "logprob_gap_mean": gap[m & (age == 0)].mean(),
        "staleness_mean": age[m].mean(),
        "staleness_max": 2,
        "surprise": -x["current"][m].mean(),
    }
    assert {k: whole[k] for k in expected} == pytest.approx(expected, rel=1e-5)
    assert set(parts) == {0, 2}
    assert sum(p["tokens"] for p in parts.values()) == m.sum()
    old = np.exp(x["old"] - x["engine"])[m & (age == 2)]
    assert parts[2]["importance_mean"] == pytest.approx(old.mean(), rel=1e-5)


def test_gap_without_a_current_token_is_nan_not_zero():
    x = case(0)
    whole, _ = token_metrics(
        Algorithm(),
        **{n: x[n] for n in ("current", "old", "engine", "advantages", "mask")},
        staleness=np.ones((4, 6)),
    )
    assert math.isnan(whole["logprob_gap_max"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"advantages": "best"},
            r"(?s)advantages='best'.*group, mean, rloo, reinforce\+\+",
        ),
        ({"level": "word"}, "(?s)level='word'.*token, sequence, constant"),
        ({"kl": "k4"}, "(?s)kl='k4'.*k1, k2, k3"),
        ({"importance": "yes"}, "(?s)importance='yes'.*none, tis, mask"),
        ({"clip_low": -0.1}, "clip_low=-0.1"),
        ({"importance_low": 3.0}, "importance_low=3.0"),
        (
            {"importance_level": "row"},
            "(?s)importance_level='row'.*token, sequence, geometric",
        ),
        ({"sample_mask": "yes"}, "(?s)sample_mask='yes'.*none, sequence, geometric"),
        ({"sample_mask_low": 3.0}, "sample_mask_low=3.0"),
    ],
)
def test_unknown_choice_lists_the_choices(options, message: str):
    with pytest.raises(ConfigError, match=message):
        Algorithm(**options)


def test_unknown_names_list_the_known_ones():
    with pytest.raises(ConfigError, match=r"(?s)'gpro'.*grpo, dr_grpo, dapo"):
        Algorithm.named("gpro")
    with pytest.raises(ConfigError, match=r"(?s)'clip'.*clip_low, clip_high"):
        Algorithm.named("grpo", clip=0.2)
    with pytest.raises(ConfigError, match="constant_length"):
        row_weights(Algorithm.named("dr_grpo"), np.ones((1, 1), bool), 1)
