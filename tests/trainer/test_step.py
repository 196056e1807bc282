"""One optimiser step: accumulation, the NaN guard, compilations, shardings, schedules."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jvlab._errors import ConfigError
from jvlab.record._sample import Sample
from jvlab.trainer._batching import Buckets, TrainBatch, train_batch
from jvlab.trainer._losses import Algorithm
from jvlab.trainer._step import TrainStep, schedule

pytestmark = pytest.mark.slow

VOCAB, WIDTH = 12, 16


def toy(params, tokens, mask, with_entropy: bool = False):
    """A causal model: the mean of the embeddings so far, through one layer."""
    embedded = params["embed"][tokens] * mask[..., None]
    counts = jnp.maximum(jnp.cumsum(mask, axis=1), 1)[..., None]
    hidden = jnp.tanh((jnp.cumsum(embedded, axis=1) / counts) @ params["hidden"])
    # position t: made from those before it
    logits = jax.nn.log_softmax(jnp.roll(hidden @ params["out"], 1, axis=1))
    logprobs = jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
    return (logprobs, -(jnp.exp(logits) * logits).sum(-1)) if with_entropy else logprobs


def plain(params, tokens, mask):
    return toy(params, tokens, mask)


def toy_params(seed: int = 0):
    rng = np.random.default_rng(seed)
    draw = lambda *shape: jnp.asarray(rng.normal(0, 0.5, shape), jnp.float32)
    return {
        "embed": draw(VOCAB, WIDTH),
        "hidden": draw(WIDTH, WIDTH),
        "out": draw(WIDTH, VOCAB),
    }


def toy_batch(
    seed: int = 0,
    groups: int = 3,
    algorithm: Algorithm | None = None,
    longest: int = 12,
    rows: int = 4,
):
    rng = np.random.default_rng(seed)
    samples = []
    for g in range(groups):
        for i in range(4):
            n = int(rng.integers(1, longest))
            samples.append(
                Sample(
                    prompt_index=g,
                    sample_index=i,
                    prompt_token_ids=rng.integers(0, VOCAB, 3),
                    token_ids=rng.integers(0, VOCAB, n),
                    logprobs=rng.normal(-2.5, 0.2, n),
                    versions=((1, 0, n),),
                )
            )
    buckets = Buckets(rows)
    return train_batch(samples, rng.random(len(samples)), algorithm, buckets)


@functools.cache
def adamw_step(donate: bool = True) -> TrainStep:
    """One for all tests that want the default: compiling is what takes time here."""
    return TrainStep(toy, learning_rate=1e-2, donate=donate)


def copied(tree):
    return jax.tree.map(np.array, tree)


def close(a, b, **tolerance) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **tolerance), a, b)


LEVELS = [
    Algorithm(level="token"),
    Algorithm(level="sequence"),
    Algorithm.named("dr_grpo", constant_length=16),
]


@pytest.mark.parametrize("algorithm", LEVELS, ids=lambda a: a.level)
def test_micro_batches_add_up_to_the_whole_batch(algorithm: Algorithm):
    """Same gradient norm, loss and parameters for 12 and 5 rows at a time; plain SGD, so that nothing is scaled."""
    results = []
    for rows in (12, 5):  # 5 leaves a last micro-batch that is not full
        step = TrainStep(toy, algorithm, optimizer=optax.sgd(1.0), max_grad_norm=None)
        state, report = step(
            step.init(toy_params()), toy_batch(algorithm=algorithm, rows=rows)
        )
        assert report.micro_batches == math.ceil(12 / rows)
        results.append((state.params, report.loss, report.grad_norm))
    for params, loss, norm in results[1:]:
        close(params, results[0][0], rtol=1e-5, atol=1e-6)
        assert (loss, norm) == pytest.approx(results[0][1:], rel=1e-4)


def test_gradient_against_finite_differences_through_a_model():
    algorithm = Algorithm(kl_coef=0.3, entropy_coef=0.1)
    batch, params = toy_batch(algorithm=algorithm), toy_params()
    step = TrainStep(
        toy, algorithm, optimizer=optax.sgd(1.0), max_grad_norm=None, donate=False
    )
    batch = batch.with_logprobs(
        old=step.score(params, batch), reference=step.score(toy_params(1), batch)
    )
    start = step.init(params)
    moved, report = step(start, batch)
    gradient = jax.tree.map(
        lambda before, after: np.array(before - after), params, moved.params
    )
    norm = math.sqrt(sum((g**2).sum() for g in jax.tree.leaves(gradient)))
    assert report.grad_norm == pytest.approx(norm, rel=1e-4)
    rng = np.random.default_rng(3)
    for _ in range(3):
        way = jax.tree.map(
            lambda p: rng.normal(size=p.shape).astype(np.float32), params
        )

        def loss(size: float, way: Any = way) -> float:
            moved = jax.tree.map(lambda p, w: p + size * w, params, way)
            return step(step.init(moved), batch)[1].loss

        slope = (loss(1e-2) - loss(-1e-2)) / 2e-2
        expected = sum(
            (g * d).sum()
            for g, d in zip(
                jax.tree.leaves(gradient), jax.tree.leaves(way), strict=True
            )
        )
        assert slope == pytest.approx(expected, rel=2e-2, abs=2e-3)


def test_nothing_compiles_after_warm_up():
    """Batches of other lengths and sizes, once each bucket was seen; JAX's own events are counted too."""
    step = TrainStep(toy, learning_rate=1e-2)
    state, events = step.init(toy_params()), []

    def on_event(event: str, duration_secs: float, **_: str | int) -> None:
        if "compile" in event:
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(on_event)
    try:
        for seed in range(6):
            state, report = step(state, toy_batch(seed, groups=5, longest=40))
            step.score(state.params, toy_batch(seed, groups=5, longest=40))
        warm = step.compilations
        # zeros and apply; accumulate and score for each of two widths
        assert warm == 2 + 2 * 2
        assert events
        events.clear()
        for seed in range(20, 26):
            batch = toy_batch(seed, groups=2 + seed % 4, longest=40)
            state, report = step(state, batch, version=1)
            step.score(state.params, batch)
            assert report.compiled == 0
    finally:
        jax.monitoring.unregister_event_duration_listener(on_event)
    assert step.compilations == warm
    assert not events


def poisoned(batch: TrainBatch) -> TrainBatch:
    batch.advantages[1] = np.nan
    return batch


@pytest.mark.parametrize("donate", [True, False])
def test_nan_changes_nothing_and_is_counted(donate: bool):
    step = adamw_step(donate)
    state, _ = step(step.init(toy_params()), toy_batch())
    before = copied((state.params, state.opt_state))
    state, report = step(state, poisoned(toy_batch(1)))
    assert "nan" in report.skipped
    assert (state.updates, state.skipped) == (1, 1)
    jax.tree.map(np.testing.assert_array_equal, (state.params, state.opt_state), before)
    state, report = step(state, toy_batch(1))
    assert (report.skipped, state.updates, state.skipped) == ("", 2, 1)
    assert not np.array_equal(state.params["out"], before[0]["out"])


def test_a_launched_step_can_be_used_before_its_numbers_are_known():
    step, batches = adamw_step(), [toy_batch(), poisoned(toy_batch(1)), toy_batch(2)]
    one, two = step.init(toy_params()), step.init(toy_params())
    for batch in batches:
        one, expected = step(one, batch, version=1)
        pending = step.launch(two, batch, version=1)
        jax.tree.map(np.testing.assert_array_equal, pending.state.params, one.params)
        assert (pending.state.updates, pending.state.skipped) == (
            two.updates,
            two.skipped,
        ), "counted later"
        pending.wait()
        two, report = pending.finish()
        assert (two.updates, two.skipped) == (one.updates, one.skipped)
        assert (report.skipped, report.tokens, report.padding) == (
            expected.skipped,
            expected.tokens,
            expected.padding,
        )
        np.testing.assert_array_equal(
            (report.loss, report.grad_norm), (expected.loss, expected.grad_norm)
        )
        np.testing.assert_array_equal(report.logprobs, expected.logprobs)
    assert (two.updates, two.skipped) == (2, 1)


def test_a_launch_waits_for_nothing(monkeypatch: pytest.MonkeyPatch):
    """Neither a number nor an array is fetched between micro-batches, also with a schedule."""
    step = TrainStep(toy, learning_rate=schedule(1e-2, "cosine", steps=9))
    state, _ = step(step.init(toy_params()), toy_batch())
    fetched = []
    array = type(state.params["out"])
    for name in ("__float__", "__array__", "block_until_ready", "item", "tolist"):
        inner = getattr(array, name)
        note = lambda self, *a, inner=inner, name=name, **k: (
            fetched.append(name),
            inner(self, *a, **k),
        )[1]
        monkeypatch.setattr(array, name, note)
    pending = step.launch(state, toy_batch(1), version=1)
    assert not fetched
    _, report = pending.finish()
    assert fetched
    assert report.micro_batches == 3


def test_infinite_gradient_of_a_finite_loss_is_skipped():
    # slope at 0: infinite
    spiky = lambda params, tokens, mask: (
        jnp.sqrt(jnp.abs(params["w"])) * jnp.ones(tokens.shape)
    )
    step = TrainStep(spiky, Algorithm(importance="none"))
    state, report = step(step.init({"w": jnp.zeros(())}), toy_batch())
    assert math.isfinite(report.loss)
    assert report.skipped
    assert float(state.params["w"]) == 0


def test_clipping_bounds_the_update():
    runs = {}
    for limit in (None, 1e-3):
        step = TrainStep(plain, optimizer=optax.sgd(1.0), max_grad_norm=limit)
        state, report = step(step.init(toy_params()), toy_batch())
        moved = jax.tree.map(lambda a, b: a - b, state.params, toy_params())
        runs[limit] = float(optax.global_norm(moved)), report.grad_norm
    assert runs[None][0] == pytest.approx(runs[None][1], rel=1e-3)
    assert runs[1e-3][0] == pytest.approx(1e-3, rel=2e-2)
    # reported before clipping
    assert runs[1e-3][1] == pytest.approx(runs[None][1], rel=1e-5)


def test_same_bits_twice():
    def run():
        step = adamw_step()
        state, losses = step.init(toy_params()), []
        for seed in range(4):
            state, report = step(state, toy_batch(seed))
            losses.append(report.loss)
        return copied(state.params), losses

    (a, la), (b, lb) = run(), run()
    jax.tree.map(np.testing.assert_array_equal, a, b)
    assert la == lb


def test_sharded_parameters_keep_their_place():
    if len(jax.devices()) < 4:
        pytest.skip("needs XLA_FLAGS=--xla_force_host_platform_device_count=4 or more")
    P, named = jax.sharding.PartitionSpec, jax.sharding.NamedSharding
    mesh = jax.make_mesh(
        (2, 2), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2
    )
    spec = {"embed": P(None, "fsdp"), "hidden": P("fsdp", "tp"), "out": P("tp", None)}
    where = {k: named(mesh, s) for k, s in spec.items()}
    single = adamw_step()
    many = TrainStep(toy, learning_rate=1e-2)
    one, two = single.init(toy_params()), many.init(jax.device_put(toy_params(), where))
    for seed in range(3):
        one, first = single(one, toy_batch(seed))
        two, second = many(two, toy_batch(seed))
        assert second.loss == pytest.approx(first.loss, rel=1e-4, abs=1e-6)
        for tree in (two.params, two.opt_state[1][0].mu, two.opt_state[1][0].nu):
            for name, leaf in tree.items():
                assert leaf.sharding.is_equivalent_to(where[name], leaf.ndim), name
    for one_moment, two_moment in zip(
        one.opt_state[1][0][1:], two.opt_state[1][0][1:], strict=True
    ):
        close(copied(one_moment), copied(two_moment), rtol=1e-3, atol=1e-6)
    # AdamW divides by a root: where a gradient is near zero its rounding decides the step, a part of 3 × 1e-2
    close(copied(one.params), copied(two.params), rtol=1e-3, atol=2e-4)
    _, report = many(two, toy_batch(0))
    assert report.compiled == 0


def test_metrics_split_by_staleness():
    batch = toy_batch()
    batch.versions[batch.loss_mask & (np.arange(batch.tokens.shape[1]) >= 6)[None]] = 3
    step = adamw_step()
    _, report = step(step.init(toy_params()), batch, version=3)
    assert set(report.by_staleness) == {0, 2}
    fresh = batch.loss_mask & (batch.versions == 3)
    scored = step.score(toy_params(), batch)
    gap = np.abs(scored - batch.engine_logprobs)[fresh]
    assert report.metrics["logprob_gap_max"] == pytest.approx(gap.max(), rel=1e-4)
    # the first forward pass is the old policy
    assert report.metrics["ratio_max"] == report.metrics["ratio_min"] == 1.0
    assert 0 < report.metrics["entropy"] < math.log(VOCAB)


def test_several_updates_on_one_batch_leave_the_old_policy():
    step = adamw_step()
    state, batch = step.init(toy_params()), toy_batch()
    batch = batch.with_logprobs(old=step.score(state.params, batch))
    spread = []
    for _ in range(4):
        state, report = step(state, batch)
        spread.append(report.metrics["ratio_max"])
    assert spread[0] == pytest.approx(1.0, abs=1e-5)
    assert spread[-1] > 1.02


def test_learns_a_toy_task():
    """REINFORCE on samples of the model itself: the share of token 0 rises."""
    step = TrainStep(toy, Algorithm.named("grpo"), learning_rate=3e-2, donate=False)
    state, rng = step.init(toy_params()), np.random.default_rng(0)
    score = jax.jit(
        lambda p, t: jax.nn.log_softmax(
            jnp.tanh(p["embed"][t].mean(1) @ p["hidden"]) @ p["out"]
        )
    )
    shares = []
    for _ in range(25):
        tokens, logprobs = np.full((32, 1), 5), []
        for _ in range(6):
            table = np.array(score(state.params, tokens), np.float64)
            drawn = (table + rng.gumbel(size=table.shape)).argmax(1)
            logprobs.append(table[np.arange(32), drawn])
            tokens = np.concatenate([tokens, drawn[:, None]], axis=1)
        samples = [
            Sample(
                prompt_index=i // 8,
                sample_index=i % 8,
                prompt_token_ids=tokens[i, :1],
                token_ids=tokens[i, 1:],
                logprobs=np.stack(logprobs)[:, i],
                versions=((0, 0, 6),),
            )
            for i in range(32)
        ]
        rewards = [(s.token_ids == 0).mean() for s in samples]
        shares.append(np.mean(rewards))
        state, report = step(
            state,
            train_batch(samples, rewards, step.algorithm, Buckets(rows=32)),
            version=0,
        )
        assert report.metrics["logprob_gap_max"] < 1e-4
    assert shares[0] < 0.3
    assert shares[-1] > 0.8


def test_schedules():
    rates = [float(schedule(1.0, "linear", warmup=2, steps=6)(i)) for i in range(7)]
    assert rates == pytest.approx([0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0])
    assert float(schedule(1.0, "cosine", steps=10)(5)) == pytest.approx(0.5)
    assert float(schedule(0.3)(1000)) == pytest.approx(0.3)
    with pytest.raises(ConfigError, match="'constant', 'linear', 'cosine'"):
        schedule(1.0, "square")
    with pytest.raises(ConfigError, match="give steps above warmup=5"):
        schedule(1.0, "cosine", warmup=5, steps=5)
    step = TrainStep(toy, learning_rate=schedule(1e-2, warmup=2))
    state, first = step(step.init(toy_params()), toy_batch())
    _, second = step(state, toy_batch())
    assert (first.learning_rate, second.learning_rate) == pytest.approx((5e-3, 1e-2))


def test_errors():
    with pytest.raises(ConfigError, match="entropy bonus needs"):
        TrainStep(plain, Algorithm(entropy_coef=0.1))
    with pytest.raises(ConfigError, match="constant_length"):
        TrainStep(toy, Algorithm.named("dr_grpo"))
    step = TrainStep(toy, Algorithm(kl_coef=0.1))
    with pytest.raises(ConfigError, match="needs the reference"):
        step(step.init(toy_params()), toy_batch())
    with pytest.raises(ConfigError, match="nothing to train on"):
        step(step.init(toy_params()), train_batch([], []))
    with pytest.raises(ConfigError, match=r"no gradient: \['n'\] \(int32\)"):
        step.init({"n": jnp.zeros(3, jnp.int32)})
