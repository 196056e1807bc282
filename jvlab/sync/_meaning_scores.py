"""Checks a mapping by function: engine and trainer score the same few tokens after the first sync."""

from __future__ import annotations

import inspect
import re
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from jvlab._errors import JvlabError
from jvlab.wire import jvlab_pb2 as pb

if TYPE_CHECKING:
    from jvlab.lab._pool import Pool
    from jvlab.sync._meaning import Scorer

ROWS, TOKENS = 2, 24
HEARTBEAT_SECONDS = 3.0  # a replica may take this long to report that it resumed after a sync
SCORE_SECONDS = 30.0  # an engine that takes longer for so few tokens is busy with something else
# In nats: the two agree up to the first number and disagree beyond the second; in between, rounding can't be told from
# a wrong mapping. The largest difference for float32, the mean for 16-bit floats, where single tokens vary more.
FULL, HALF = (1e-3, 0.05), (0.1, 0.5)
SENSITIVE = 10.0  # perturbing a leaf must change the log-probabilities by this multiple of the gap to count as checked
MAX_EXPLAIN_BYTES = 2**30  # alternatives are tried after a failure for parameters up to this size
MANY = 2000  # leaves; with more, exchanging each pair would take minutes
MAX_PERTURB_BYTES = 256 * 2**20  # leaves of one kind are perturbed together up to this size, else a single one


@dataclass(frozen=True)
class ScoreGap:
    """What the comparison showed; `state` as in `Meaning`."""

    state: str
    why: str
    ambiguous: Mapping[str, str] = field(default_factory=dict)
    suspects: tuple[str, ...] = ()
    rule: str = ""  # under which the two would agree, if one was found


def by_policy(policy: Callable[[], Any]) -> Scorer:
    """Score with a Policy, given as a weak reference."""

    def score(params: Any, tokens: np.ndarray) -> np.ndarray:
        alive = policy()
        if alive is None:
            raise LookupError("the policy no longer exists")
        return np.asarray(alive.logprobs(params, tokens), np.float64)

    return score


def by_function_of(function: Callable[..., Any]) -> Scorer:
    """Score with a trainer's `logprobs_fn(params, tokens, mask)`, at temperature 1."""
    options: dict[str, Any] = {"temperature": 1.0} if "temperature" in _parameters(function) else {}

    def score(params: Any, tokens: np.ndarray) -> np.ndarray:
        import jax
        import jax.numpy as jnp

        program = jax.jit(lambda p, t, m: function(p, t, m, **options))
        return np.asarray(program(params, jnp.asarray(tokens), jnp.ones(tokens.shape, bool)), np.float64)

    return score


def _parameters(function: Callable[..., Any]) -> Mapping[str, Any]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}


def compare(
    pool: Pool,
    params: Any,
    scorer: Scorer,
    known: Mapping[str, tuple[tuple[str, str], ...]],
    mapping: Any,
    seconds: float,
) -> ScoreGap:
    """Score the same tokens on both sides; if they differ, look for an alternative rule under which they agree."""
    until = time.monotonic() + max(0.1, min(seconds, SCORE_SECONDS))
    try:
        facts = pool._facts(max(0.1, until - time.monotonic()))
    except JvlabError as error:
        return ScoreGap("unchecked", f"no replica could be asked: {error.message}")
    if _is_paused(pool, until):
        return ScoreGap("unchecked", "the pool is paused or asleep, so no token could be scored")
    tokens = _tokens(int(facts.vocab_size), int(facts.max_model_len))
    try:
        scored = pool.score(tokens.tolist(), timeout=max(0.1, until - time.monotonic()))
    except JvlabError as error:
        return ScoreGap("unchecked", f"the engine scored no token: {error.message}")
    engine = np.stack([np.asarray(row, np.float64) for row in scored.logprobs])[:, 1:]
    ask = lambda tree: np.asarray(scorer(tree, tokens))[:, 1:]
    try:
        trainer = ask(params)
    except Exception as error:  # a user's function: whatever it raises must not fail a sync that arrived
        return ScoreGap("unchecked", f"the trainer scored no token: {type(error).__name__}: {error}")
    half = _half(str(facts.dtype), params)
    found = judge_scores(engine, trainer, half, known, params, ask)
    if found.state == "checked":
        gap = max(gap_of(engine, trainer, half), (HALF if half else FULL)[0] / 10)
        blind = blind_spots(params, mapping, lambda tree: gap_of(ask(tree), trainer, half), gap, until)
        return replace(found, ambiguous={**blind, **found.ambiguous})
    return explain(found, engine, half, params, ask, mapping, until) if found.state == "failed" else found


def _is_paused(pool: Pool, until: float) -> bool:
    """Is the pool paused or asleep, even after the next heartbeat? The last one may have come during the sync."""
    until = min(until, time.monotonic() + HEARTBEAT_SECONDS)
    while any(r.stats.paused or r.stats.sleeping for r in pool._snapshot.replicas if r.state == pb.READY):
        if time.monotonic() > until:
            return True
        time.sleep(0.1)
        pool.status()
    return False


def judge_scores(
    engine: np.ndarray,
    trainer: np.ndarray,
    half: bool,
    known: Mapping[str, tuple[tuple[str, str], ...]],
    params: Any,
    ask: Callable[[Any], np.ndarray],
) -> ScoreGap:
    """Compare two sets of log-probabilities; `ask` scores another tree with the trainer."""
    if not np.isfinite(trainer).all():
        return ScoreGap("unchecked", "the trainer's own log-probabilities are not finite")
    gap = gap_of(engine, trainer, half)
    fine, bad = HALF if half else FULL
    measure = "mean" if half else "largest"
    text = f"{gap:.2g} nats apart ({measure} of {engine.size} tokens scored on both sides)"
    everything = {leaf: "; ".join(reason for _, reason in reasons) for leaf, reasons in known.items()}
    if not gap <= bad:
        return ScoreGap("failed", text, everything, tuple(_most_ambiguous(known)))
    if gap > fine:
        return ScoreGap("unchecked", f"{text}: too much to call it equal, too little to call it wrong")
    missed = insensitive(params, known, lambda tree: gap_of(ask(tree), trainer, half), max(gap, fine / 10))
    left = {leaf: f"{everything[leaf]}; log-probabilities hardly depend on it" for leaf in missed}
    if known and len(missed) == len(known):
        return ScoreGap("unchecked", f"{text}, but these log-probabilities hardly depend on what is ambiguous")
    rest = f"; they hardly depend on {len(missed)} ambiguous leaves" if missed else ""
    return ScoreGap("checked", text + rest, left)


def gap_of(one: np.ndarray, other: np.ndarray, half: bool) -> float:
    apart = np.abs(one - other)
    return float(np.mean(apart) if half else np.max(apart)) if np.isfinite(apart).all() else float("inf")


def _half(engine: str, params: Any) -> bool:
    """Are 16-bit floats involved on either side?"""
    from jvlab.layout._tree import flatten

    kinds = {engine, *(np.dtype(a.dtype).name for a in flatten(params).arrays.values())}
    return bool(kinds & {"bfloat16", "float16"})


def _tokens(vocabulary: int, longest: int) -> np.ndarray:
    """Token ids from the middle of the vocabulary: special tokens are at its ends."""
    low, high = vocabulary // 8, max(vocabulary * 7 // 8, vocabulary // 8 + 2)
    shape = (ROWS, max(2, min(TOKENS, longest - 1 if longest else TOKENS)))
    return np.random.default_rng(0).integers(low, min(high, vocabulary), shape)


def _most_ambiguous(known: Mapping[str, tuple[tuple[str, str], ...]]) -> list[str]:
    """Leaves with the most alternatives first."""
    return sorted(known, key=lambda leaf: -len(known[leaf]))


def explain(
    found: ScoreGap,
    engine: np.ndarray,
    half: bool,
    params: Any,
    ask: Callable[[Any], np.ndarray],
    mapping: Any,
    until: float,
) -> ScoreGap:
    """Look for an alternative rule under which the trainer computes what the engine does, while time is left."""
    from jvlab.layout._tree import flatten
    from jvlab.layout.rules._alternatives import alternatives_of, joint
    from jvlab.layout.rules._evidence import reread

    arrays = flatten(params).arrays
    if sum(a.nbytes for a in arrays.values()) > MAX_EXPLAIN_BYTES:
        return found
    single = alternatives_of(mapping)
    for other in [*single, *joint(single)]:
        if time.monotonic() > until:
            break
        tree = replace_leaves(params, {id(arrays[leaf]): value for leaf, value in reread(other, arrays).items()})
        if tree is not None and gap_of(ask(tree), engine, half) <= (HALF if half else FULL)[0]:
            return replace(found, suspects=other.leaves, rule=other.rule_text)
    return found


# Which leaves the log-probabilities depend on ---------------------------------------------------------------------


def blind_spots(params: Any, mapping: Any, moved: Callable[[Any], float], gap: float, until: float) -> dict[str, str]:
    """Leaf -> why log-probabilities cannot tell it from another: its values show no order, or both compute the same.

    That they depend on a leaf is not enough: two leaves that are nearly equal can still be exchanged.
    """
    from jvlab.layout._tree import flatten
    from jvlab.layout.rules._alternatives import alternatives_of
    from jvlab.layout.rules._evidence import reread
    from jvlab.sync._value_samples import untold

    arrays = flatten(params).arrays
    out = untold(mapping.bindings, arrays)
    swaps = [other for other in alternatives_of(mapping) if other.kind == "swapped"] if len(arrays) < MANY else []
    for other in swaps:
        leaves = [leaf for leaf in other.leaves if leaf not in out]
        size = sum(arrays[leaf].nbytes for leaf in other.leaves if leaf in arrays)
        if not leaves or size > MAX_PERTURB_BYTES or time.monotonic() > until:
            continue
        try:
            new = {id(arrays[leaf]): value for leaf, value in reread(other, arrays).items()}
            tree = replace_leaves(params, new)
            seen = tree is None or moved(tree) >= SENSITIVE * gap
        except Exception:  # as for `insensitive`
            seen = False
        out |= {} if seen else dict.fromkeys(leaves, "exchanged with a leaf of its shape, it computes nearly the same")
    return out


def insensitive(
    params: Any, known: Mapping[str, tuple[tuple[str, str], ...]], moved: Callable[[Any], float], gap: float
) -> list[str]:
    """Ambiguous leaves on which the log-probabilities hardly depend; each group is perturbed to find out."""
    groups: dict[tuple[Any, ...], list[str]] = defaultdict(list)
    for leaf, reasons in known.items():
        groups[re.sub(r"\d+", "#", leaf), tuple(kind for kind, _ in reasons)].append(leaf)
    out: list[str] = []
    for (_, kinds), leaves in groups.items():
        try:
            tree = perturb(params, leaves, offset=kinds == ("offset",))
            seen = tree is not None and moved(tree) >= SENSITIVE * gap
        except Exception:  # a copy of a stacked leaf may not fit beside the engine: a sync that arrived must not fail
            seen = False
        out += [] if seen else leaves
    return out


def perturb(params: Any, leaves: list[str], offset: bool) -> Any:
    """The same tree with these leaves flipped, or plus one; None if it is not a JAX pytree."""
    import jax.numpy as jnp

    from jvlab.layout._tree import flatten

    arrays = flatten(params).arrays
    wanted = {id(arrays[leaf]) for leaf in leaves if leaf in arrays}
    if sum(arrays[leaf].nbytes for leaf in leaves if leaf in arrays) > MAX_PERTURB_BYTES:
        wanted = {id(arrays[leaves[len(leaves) // 2]])}
    change = lambda a: a + 1 if offset else jnp.flip(a)
    return replace_leaves(params, {id(a): change(a) for a in arrays.values() if id(a) in wanted})


def replace_leaves(params: Any, new: Mapping[int, Any]) -> Any:
    """The same tree with arrays replaced by id; None if these ids are not leaves of the JAX pytree."""
    import jax

    flat, tree = jax.tree.flatten(params)
    if not new.keys() <= {id(a) for a in flat}:
        return None
    like = lambda a, b: jax.device_put(b, a.sharding) if hasattr(a, "sharding") else b
    return jax.tree.unflatten(tree, [like(a, new[id(a)]) if id(a) in new else a for a in flat])
