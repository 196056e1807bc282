"""Reads a few values of every leaf, and the same ones from the checkpoint's files."""

from __future__ import annotations

import inspect
import math
import re
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from jvlab._deadline import Deadline
from jvlab._errors import JvlabError, LayoutError
from jvlab._units import how_many
from jvlab.layout._checkpoint import CheckpointValues
from jvlab.layout._plan_types import numpy_dtype
from jvlab.layout._slices import layer_number, slice_name, stacked_dims, without_slice
from jvlab.layout._tree import flatten, leaf_from_array
from jvlab.layout._types import Binding
from jvlab.layout.rules._alternatives import (
    Alternative,
    alternatives_of,
    joint,
    reread,
)
from jvlab.layout.rules._roles import classify, templates
from jvlab.sync._value_check import (
    COLUMNS,
    ENOUGH,
    MAX_ROWS,
    ONE_NUMBER,
    ROWS,
    SAME_NUMBERS,
    SLIGHT,
    Arrays,
    Known,
    LeafEvidence,
    chosen,
    close_to,
    in_words,
    is_flat,
    judge,
    needs_more,
    points,
    under_its_name,
)
from jvlab.wire import jvlab_pb2 as pb

if TYPE_CHECKING:
    from jvlab.sync._meaning import Scorer
    from jvlab.wire._pool_view import PoolView


# Checks a mapping by function: engine and trainer score the same few tokens after the first sync.

SCORED_ROWS = 2
TOKENS = 24
# a replica may take this long to report that it resumed after a sync
HEARTBEAT_SECONDS = 3.0
# an engine that takes longer for so few tokens is busy with something else
SCORE_SECONDS = 30.0
# In nats: the two agree up to the first number and disagree beyond the second; in between, rounding can't be told from
# a wrong mapping. The largest difference for float32, the mean for 16-bit floats, where single tokens vary more.
FULL = (1e-3, 0.05)
HALF = (0.1, 0.5)
# perturbing a leaf must change the log-probabilities by this multiple of the gap to count as checked
SENSITIVE = 10.0
# alternatives are tried after a failure for parameters up to this size
MAX_EXPLAIN_BYTES = 2**30
MANY = 2000  # leaves; with more, exchanging each pair would take minutes
# leaves of one kind are perturbed together up to this size, else a single one
MAX_PERTURB_BYTES = 256 * 2**20


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
    options: dict[str, Any] = (
        {"temperature": 1.0} if "temperature" in _parameters(function) else {}
    )

    def score(params: Any, tokens: np.ndarray) -> np.ndarray:
        import jax
        import jax.numpy as jnp

        program = jax.jit(lambda p, t, m: function(p, t, m, **options))
        return np.asarray(
            program(params, jnp.asarray(tokens), jnp.ones(tokens.shape, bool)),
            np.float64,
        )

    return score


def _parameters(function: Callable[..., Any]) -> Mapping[str, Any]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}


def compare(
    pool: PoolView,
    params: Any,
    scorer: Scorer,
    known: Known,
    mapping: Any,
    seconds: float,
) -> ScoreGap:
    """Score the same tokens on both sides; if they differ, look for an alternative rule under which they agree."""
    until = Deadline(max(0.1, min(seconds, SCORE_SECONDS)))
    try:
        facts = pool.facts(until)
    except JvlabError as error:
        return ScoreGap("unchecked", f"no replica could be asked: {error.message}")
    if _is_paused(pool, until):
        return ScoreGap(
            "unchecked", "the pool is paused or asleep, so no token could be scored"
        )
    tokens = _tokens(int(facts.vocab_size), int(facts.max_model_len))
    try:
        scored = pool.score(tokens.tolist(), timeout=until)
    except JvlabError as error:
        return ScoreGap("unchecked", f"the engine scored no token: {error.message}")
    engine = np.stack([np.asarray(row, np.float64) for row in scored.logprobs])[:, 1:]
    ask = lambda tree: np.asarray(scorer(tree, tokens))[:, 1:]
    try:
        trainer = ask(params)
    # a user's function: whatever it raises must not fail a sync that arrived
    except Exception as error:
        return ScoreGap(
            "unchecked", f"the trainer scored no token: {type(error).__name__}: {error}"
        )
    kinds = [np.dtype(a.dtype).name for a in flatten(params).arrays.values()]
    # are 16-bit floats involved on either side?
    half = not {"bfloat16", "float16"}.isdisjoint([str(facts.dtype), *kinds])
    found = judge_scores(engine, trainer, half, known, params, ask)
    if found.state == "failed":
        return explain(found, engine, half, params, ask, mapping, until)
    if found.state == "checked":
        gap = max(gap_of(engine, trainer, half), (HALF if half else FULL)[0] / 10)
        blind = blind_spots(
            params, mapping, lambda tree: gap_of(ask(tree), trainer, half), gap, until
        )
        return replace(found, ambiguous={**blind, **found.ambiguous})
    return found


def _is_paused(pool: PoolView, until: Deadline) -> bool:
    """Is the pool paused or asleep, even after the next heartbeat? The last one may have come during the sync."""
    until = Deadline(until.within(HEARTBEAT_SECONDS))
    while any(
        r.stats.paused or r.stats.sleeping
        for r in pool.snapshot.replicas
        if r.state == pb.READY
    ):
        if until.over:
            return True
        time.sleep(0.1)
        pool.status()
    return False


def judge_scores(
    engine: np.ndarray,
    trainer: np.ndarray,
    half: bool,
    known: Known,
    params: Any,
    ask: Callable[[Any], np.ndarray],
) -> ScoreGap:
    """Compare two sets of log-probabilities; `ask` scores another tree with the trainer."""
    if not np.isfinite(trainer).all():
        return ScoreGap(
            "unchecked", "the trainer's own log-probabilities are not finite"
        )
    gap = gap_of(engine, trainer, half)
    fine, bad = HALF if half else FULL
    measure = "mean" if half else "largest"
    text = (
        f"{gap:.2g} nats apart ({measure} of {engine.size} tokens scored on both sides)"
    )
    everything = in_words(known)
    if not gap <= bad:
        # leaves with the most alternatives first
        suspects = sorted(known, key=lambda leaf: -len(known[leaf]))
        return ScoreGap("failed", text, everything, tuple(suspects))
    if gap > fine:
        return ScoreGap(
            "unchecked",
            f"{text}: too much to call it equal, too little to call it wrong",
        )
    missed = insensitive(
        params,
        known,
        lambda tree: gap_of(ask(tree), trainer, half),
        max(gap, fine / 10),
    )
    left = {
        leaf: f"{everything[leaf]}; log-probabilities hardly depend on it"
        for leaf in missed
    }
    if known and len(missed) == len(known):
        return ScoreGap(
            "unchecked",
            f"{text}, but these log-probabilities hardly depend on what is ambiguous",
        )
    rest = f"; they hardly depend on {len(missed)} ambiguous leaves" if missed else ""
    return ScoreGap("checked", text + rest, left)


def gap_of(one: np.ndarray, other: np.ndarray, half: bool) -> float:
    apart = np.abs(one - other)
    return (
        float(np.mean(apart) if half else np.max(apart))
        if np.isfinite(apart).all()
        else float("inf")
    )


def _tokens(vocabulary: int, longest: int) -> np.ndarray:
    """Token ids from the middle of the vocabulary: special tokens are at its ends."""
    low = vocabulary // 8
    high = max(vocabulary * 7 // 8, vocabulary // 8 + 2)
    shape = (SCORED_ROWS, max(2, min(TOKENS, longest - 1 if longest else TOKENS)))
    return np.random.default_rng(0).integers(low, min(high, vocabulary), shape)


def explain(
    found: ScoreGap,
    engine: np.ndarray,
    half: bool,
    params: Any,
    ask: Callable[[Any], np.ndarray],
    mapping: Any,
    until: Deadline,
) -> ScoreGap:
    """Look for an alternative rule under which the trainer computes what the engine does, while time is left."""
    arrays = flatten(params).arrays
    if sum(a.nbytes for a in arrays.values()) > MAX_EXPLAIN_BYTES:
        return found
    single = alternatives_of(mapping)
    for other in [*single, *joint(single)]:
        if until.over:
            break
        tree = read_by(other, params, arrays)
        near = (HALF if half else FULL)[0]
        if tree is not None and gap_of(ask(tree), engine, half) <= near:
            return replace(found, suspects=other.leaves, rule=other.rule_text)
    return found


# Which leaves the log-probabilities depend on ---------------------------------------------------------------------


def blind_spots(
    params: Any,
    mapping: Any,
    moved: Callable[[Any], float],
    gap: float,
    until: Deadline,
) -> dict[str, str]:
    """Leaf -> why log-probabilities cannot tell it from another: its values show no order, or both compute the same.

    That they depend on a leaf is not enough: two leaves that are nearly equal can still be exchanged.
    """
    arrays = flatten(params).arrays
    out = untold(mapping.bindings, arrays)
    same = "exchanged with a leaf of its shape, it computes nearly the same"
    for other in alternatives_of(mapping) if len(arrays) < MANY else ():
        leaves = [leaf for leaf in other.leaves if leaf not in out]
        if other.kind != "swapped" or not leaves or until.over:
            continue
        if sum(arrays[leaf].nbytes for leaf in other.leaves) > MAX_PERTURB_BYTES:
            continue
        try:
            tree = read_by(other, params, arrays)
            seen = tree is None or moved(tree) >= SENSITIVE * gap
        except Exception:  # as for `insensitive`
            seen = False
        if not seen:
            out |= dict.fromkeys(leaves, same)
    return out


def insensitive(
    params: Any,
    known: Known,
    moved: Callable[[Any], float],
    gap: float,
) -> list[str]:
    """Ambiguous leaves on which the log-probabilities hardly depend; each group is perturbed to find out."""
    groups: dict[tuple[Any, ...], list[str]] = defaultdict(list)
    for leaf, reasons in known.items():
        groups[re.sub(r"\d+", "#", leaf), tuple(kind for kind, _ in reasons)].append(
            leaf
        )
    out: list[str] = []
    for (_, kinds), leaves in groups.items():
        try:
            tree = perturb(params, leaves, offset=kinds == ("offset",))
            seen = tree is not None and moved(tree) >= SENSITIVE * gap
        # a copy of a stacked leaf may not fit beside the engine: a sync that arrived must not fail
        except Exception:
            seen = False
        out += [] if seen else leaves
    return out


def perturb(params: Any, leaves: list[str], offset: bool) -> Any:
    """The same tree with these leaves flipped, or plus one; None if it is not a JAX pytree."""
    import jax.numpy as jnp

    arrays = flatten(params).arrays
    if sum(arrays[leaf].nbytes for leaf in leaves) > MAX_PERTURB_BYTES:
        leaves = [leaves[len(leaves) // 2]]
    change = lambda a: a + 1 if offset else jnp.flip(a)
    return replace_leaves(
        params, {leaf: change(arrays[leaf]) for leaf in leaves}, arrays
    )


def read_by(other: Alternative, params: Any, arrays: Arrays) -> Any:
    """The tree that the engine's values amount to if the alternative is right; None as for `replace_leaves`."""
    return replace_leaves(params, reread(other, arrays), arrays)


def replace_leaves(params: Any, given: Mapping[str, Any], arrays: Arrays) -> Any:
    """The same tree with some of its `arrays` replaced; None if these are not leaves of the JAX pytree."""
    import jax

    flat, tree = jax.tree.flatten(params)
    new = {id(arrays[leaf]): value for leaf, value in given.items()}
    if not new.keys() <= {id(a) for a in flat}:
        return None
    like = lambda a, b: jax.device_put(b, a.sharding) if hasattr(a, "sharding") else b
    return jax.tree.unflatten(
        tree, [like(a, new[id(a)]) if id(a) in new else a for a in flat]
    )


# ----------------------------------------------------------------------------------------------------

# rows of an embedding that are looked at closely, and how many values of each
ODD_ROWS = 1024
WIDE = 64
# of the rows of an embedding: if more hold other numbers, it is another embedding
FEW = 1 / 8
# a tensor with more rows or columns is not searched for its rows in another order
MANY_ROWS = 2**15
# relative error of a row that was trained at most; beyond it, the row holds other numbers
MOVED = 0.5


@dataclass(frozen=True)
class Sampled:
    """The evidence for every leaf, and the leaves whose checkpoint values equal another leaf's.

    A stacked leaf has evidence for each of its slices, named `leaf[1]`: one layer in the wrong place must not hide
    behind the others.
    """

    seen: Mapping[str, LeafEvidence] = field(default_factory=dict)
    alike: frozenset[str] = frozenset()  # by the same names


def sample(
    bindings: Sequence[Binding],
    arrays: Arrays,
    checkpoint: CheckpointValues,
) -> Sampled:
    """Sample every leaf that `bindings` name, and compare with the checkpoint."""
    tables = _tables(bindings)
    seen: dict[str, LeafEvidence] = {}
    prints: Prints = defaultdict(set)
    for name, bound in _by_name(bindings).items():
        array = arrays.get(bound[0].leaf)
        got, want, dtypes = both_sides(bound, array, checkpoint)
        found = judge(got, want, dtypes, bound[0].rule)
        mostly = found.agrees or (
            2 * found.equal >= found.compared > 0 and not found.fits
        )
        # tied: of two
        table = next(
            (b for b in bound if b.tensor in tables and b.tensor in checkpoint), None
        )
        if mostly and table is not None:
            found = every_row(found, table, array, checkpoint, dtypes)
        elif needs_more(found):
            more, theirs, _ = both_sides(bound, array, checkpoint, times=4)
            found = judge(more, theirs, dtypes, bound[0].rule)
        # an exact multiple is no other weight, whatever its name
        if found.kind == "different" and under_its_name(bound):
            found = replace(found, kind="named")
        seen[name] = found
        if len(want):
            prints[bound[0].tensor_shape, want.tobytes()].add(name)
    return Sampled(seen, _doubles(prints))


# shape and values -> who has them
Prints = dict[tuple[tuple[int, ...], bytes], set[str]]


def _doubles(prints: Prints) -> frozenset[str]:
    return frozenset().union(*(names for names in prints.values() if len(names) > 1))


def _by_name(bindings: Sequence[Binding]) -> dict[str, list[Binding]]:
    """The bindings of each leaf, or of each slice of a stacked one."""
    stacked = stacked_dims(bindings)
    out: dict[str, list[Binding]] = defaultdict(list)
    for b in bindings:
        out[slice_name(b, stacked)].append(b)
    return out


def _tables(bindings: Sequence[Binding]) -> set[str]:
    """Tensors with a row for each token: embeddings and output heads."""
    # not in a layer
    flat = [
        b
        for b in bindings
        if len(b.tensor_shape) == 2 and layer_number(b.tensor) is None
    ]
    shapes = {b.tensor: b.tensor_shape for b in flat}
    roles = classify(templates(shapes))
    return {
        name
        for t, role in roles.items()
        if role.base in ("embed", "head")
        for name in t.members.values()
    }


def every_row(
    found: LeafEvidence,
    b: Binding,
    array: Any,
    checkpoint: CheckpointValues,
    dtypes: list[str],
) -> LeafEvidence:
    """The evidence for an embedding from every row of it: two rows that are exchanged are in no small sample."""
    tall = math.prod(a.size for a in b.axes if a.tensor_dim != len(b.tensor_shape) - 1)
    whole = math.prod(a.size for a in b.axes) == math.prod(b.tensor_shape)
    if tall <= ROWS or not whole:
        return found
    rows = min(tall, MAX_ROWS)
    columns = COLUMNS if rows <= MANY_ROWS else COLUMNS // 2
    at, where = points(b, rows, columns)
    got, want = _values_at(b, at, where, array, checkpoint)
    good = np.isfinite(got) & np.isfinite(want)
    close = close_to(got, want, dtypes)
    seen = replace(found, compared=int(good.sum()), equal=int((good & close).sum()))
    apart = np.where(good & ~close, np.abs(got - want), 0.0)
    if not apart.any():
        return replace(seen, kind="equal", r=None)
    changed, place = np.unique(where[apart > 0, 0], return_inverse=True)
    worst = np.zeros(len(changed))
    np.maximum.at(worst, place.reshape(-1), apart[apart > 0])
    odd = np.sort(changed[np.argsort(-worst, kind="stable")[:ODD_ROWS]]).tolist()
    return _odd_rows(seen, odd, len(changed) > FEW * rows, b, array, checkpoint)


def _odd_rows(
    seen: LeafEvidence,
    odd: list[int],
    many: bool,
    b: Binding,
    array: Any,
    checkpoint: CheckpointValues,
) -> LeafEvidence:
    """Whether rows that are not the checkpoint's were trained, hold other numbers, or each other's."""
    where = _grid(np.asarray(odd), _some(b.tensor_shape[1]))
    got, want = _values_at(b, _leaf_index(b, where), where, array, checkpoint)
    here = np.isfinite(got) & np.isfinite(want)  # another process may hold some columns
    got, want = (
        np.where(here, side, 0.0).reshape(len(odd), -1) for side in (got, want)
    )
    # A row that was exchanged is nearer to another odd row of the checkpoint than to its own, trained since or not. A
    # copy of a row that stayed where it was is no exchange: new tokens are often made so.
    distance = np.sqrt(
        np.maximum((got**2).sum(1)[:, None] + (want**2).sum(1) - 2 * got @ want.T, 0.0)
    )
    own = np.linalg.norm(got - want, axis=1)
    near = distance < MOVED * own[:, None]
    np.fill_diagonal(near, False)
    moved = [odd[i] for i in np.flatnonzero(near.any(axis=1) & near.any(axis=0))]
    if len(moved) > 1:
        names = ", ".join(map(str, moved[:4])) + (" …" if len(moved) > 4 else "")
        return replace(
            seen, kind="exchanged", note=f"rows {names} hold each other's numbers"
        )
    other = int((~(own <= MOVED * np.linalg.norm(want, axis=1))).sum())
    if not other and seen.agrees:
        return seen
    if not other:
        return replace(seen, kind="correlated", r=_correlation(got, want))
    if other == len(odd) and many:
        return replace(seen, kind="different", r=_correlation(got, want))
    rows = how_many(other, "row holds", "rows hold")
    return replace(
        seen, kind="partly", note=f"{rows} other numbers: no evidence for them"
    )


def rearranged(
    name: str,
    bindings: Sequence[Binding],
    arrays: Arrays,
    checkpoint: CheckpointValues,
) -> bool:
    """Does this leaf, which is a tensor by name, hold the tensor's rows or columns in another order?"""
    bound = [b for b in bindings if b.leaf == name and b.tensor in checkpoint]
    array = arrays.get(name)
    if (
        len(bound) != 1
        or len(bound[0].tensor_shape) != 2
        or array is None
        or max(bound[0].tensor_shape) > MANY_ROWS
    ):
        return False
    b = bound[0]
    for dim in (0, 1):
        lines = b.tensor_shape[dim]
        across = b.tensor_shape[1 - dim]
        columns = _some(across)
        grid = _grid(np.arange(lines), columns)
        where = grid if dim == 0 else grid[:, ::-1]
        got, want = _values_at(b, _leaf_index(b, where), where, array, checkpoint)
        got = got.reshape(lines, -1)
        want = want.reshape(lines, -1)
        picked = _some(lines)
        size = (want**2).sum(1)
        distance = (got[picked] ** 2).sum(1)[:, None] + size - 2 * got[picked] @ want.T
        if (
            len(columns) >= ENOUGH
            and (distance <= SLIGHT**2 * size).any(axis=1).mean() > MOVED
        ):
            return True
    return False


def _some(size: int) -> np.ndarray:
    """Up to `WIDE` indices, evenly spread."""
    return np.unique(np.linspace(0, size - 1, WIDE).round().astype(np.int64))


def _grid(rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """The indices [n, 2] of every column in every row."""
    both = np.meshgrid(rows, columns, indexing="ij")
    return np.stack(both, axis=-1).reshape(-1, 2)


def _correlation(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.corrcoef(got.reshape(-1), want.reshape(-1))[0, 1])


def _leaf_index(b: Binding, tensor: np.ndarray) -> np.ndarray:
    """The leaf's indices [n, d] of these elements of a tensor, which one axis each leads to."""
    leaf = np.tile(np.asarray(b.leaf_start, np.int64), (len(tensor), 1))
    left = tensor - np.asarray(b.tensor_start, np.int64)
    for axis in sorted(b.axes, key=lambda a: -a.tensor_step):
        step = left[:, axis.tensor_dim] // axis.tensor_step
        left[:, axis.tensor_dim] -= step * axis.tensor_step
        leaf[:, axis.leaf_dim] += step * axis.leaf_step
    return leaf


def _values_at(
    b: Binding,
    leaf: np.ndarray,
    tensor: np.ndarray,
    array: Any,
    checkpoint: CheckpointValues,
) -> tuple[np.ndarray, np.ndarray]:
    """The leaf's values under its binding, and the checkpoint's, at these indices of leaf and tensor."""
    return _bound(b, leaf_values(array, leaf)), checkpoint.at(b.tensor, tensor)


def _bound(b: Binding, values: np.ndarray) -> np.ndarray:
    """A leaf's values as its binding sends them."""
    values = values + b.add
    if b.cast:
        values = values.astype(numpy_dtype(b.cast)).astype(np.float64)
    return values


def untold(bindings: Sequence[Binding], arrays: Arrays) -> dict[str, str]:
    """Leaf → why its values cannot be told from others': one number everywhere, or the same as another leaf's."""
    out: dict[str, str] = {}
    prints: Prints = defaultdict(set)
    for name, bound in _by_name(bindings).items():
        found = _sampled(chosen(bound), arrays.get(bound[0].leaf))
        if found is None:
            continue
        values = found[0]
        if is_flat(values[np.isfinite(values)]):
            out.setdefault(bound[0].leaf, ONE_NUMBER)
        else:
            prints[bound[0].tensor_shape, values.tobytes()].add(name)
    for name in sorted(_doubles(prints)):
        out.setdefault(name if name in arrays else without_slice(name), SAME_NUMBERS)
    return out


Places = list[tuple[np.ndarray, np.ndarray]]  # indices in the leaf, in the tensor


def _sampled(
    picked: list[Binding], array: Any, times: int = 1
) -> tuple[np.ndarray, Places] | None:
    """A leaf's values at points of these bindings of it; None if it has none that can be read."""
    if (
        array is None
        or not picked
        or not _has_numbers(array)
        or tuple(array.shape) != tuple(picked[0].leaf_shape)
    ):
        return None
    rows = max(8, ROWS // len(picked))
    places = [points(b, times * rows, times * COLUMNS) for b in picked]
    try:
        values = leaf_values(array, np.concatenate([leaf for leaf, _ in places]))
    except LayoutError:  # torch's meta device: a shape without values
        return None
    return values, places


def slice_order(
    bound: list[Binding], array: Any, checkpoint: CheckpointValues, dim: int
) -> dict[int, int]:
    """Index of a stacked leaf → the index whose layer's values it holds, where the slices are in another order.

    Empty unless each slice holds the values of exactly one layer.
    """
    first: dict[int, Binding] = {}
    for b in bound:
        if b.tensor in checkpoint:
            first.setdefault(b.leaf_start[dim], b)
    if len(first) < 2 or array is None or not _has_numbers(array):
        return {}
    indices = sorted(first)
    sides = [both_sides([first[i]], array, checkpoint)[:2] for i in indices]
    if len({len(side) for pair in sides for side in pair}) != 1:
        return {}
    dtypes = [np.dtype(array.dtype).name]
    close = np.array(
        [
            [judge(mine, theirs, dtypes).agrees for _, theirs in sides]
            for mine, _ in sides
        ]
    )
    if not (close.sum(axis=1) == 1).all() or not (close.sum(axis=0) == 1).all():
        return {}
    return {
        indices[i]: indices[int(j)]
        for i, j in enumerate(close.argmax(axis=1))
        if i != j
    }


def both_sides(
    bound: list[Binding], array: Any, checkpoint: CheckpointValues, times: int = 1
) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """One leaf's values under its bindings, the checkpoint's at the same indices, and the dtypes they were cast to."""
    picked = chosen([b for b in bound if b.tensor in checkpoint])
    found = _sampled(picked, array, times)
    if found is None:
        return np.zeros(0), np.zeros(0), []
    values, places = found
    parts = np.split(values, np.cumsum([len(leaf) for leaf, _ in places])[:-1])
    tensors = [
        checkpoint.at(b.tensor, tensor)
        for b, (_, tensor) in zip(picked, places, strict=True)
    ]
    dtypes = {np.dtype(array.dtype).name, *(b.cast or "" for b in picked)}
    got = [_bound(b, part) for b, part in zip(picked, parts, strict=True)]
    return np.concatenate(got), np.concatenate(tensors), sorted(dtypes)


def _has_numbers(array: Any) -> bool:
    if getattr(array, "is_deleted", bool)():
        return False
    return hasattr(array, "addressable_shards") or hasattr(array, "__array__")


def leaf_values(array: Any, index: np.ndarray) -> np.ndarray:
    """The elements at `index` [n, dimensions] as float64; NaN where another process holds them."""
    pieces = getattr(array, "addressable_shards", None)
    if pieces is None:
        return _take(array, index)
    leaf = leaf_from_array("", array)
    boxes = {
        int(d): (a, b)
        for d, a, b in zip(leaf.devices, leaf.starts, leaf.stops, strict=True)
    }
    out = np.full(len(index), np.nan)
    open_ = np.ones(len(index), bool)
    for piece in pieces:
        start, stop = boxes[int(piece.device.id)]
        inside = open_ & ((index >= start) & (index < stop)).all(axis=1)
        if inside.any():
            # clip instead of selecting: a fixed index shape compiles to one program per device
            local = np.clip(index - start, 0, np.asarray(stop) - start - 1)
            out[inside] = _take(piece.data, local)[inside]
            open_ &= ~inside
        if not open_.any():
            break
    return out


def _take(data: Any, index: np.ndarray) -> np.ndarray:
    """Index in host memory without copying the rest; gather on the device otherwise."""
    if any(d.platform != "cpu" for d in getattr(data, "devices", set)()):
        index = index.astype(np.int32)
    else:
        data = np.asarray(data)
    return np.asarray(data[tuple(index.T)]).astype(np.float64)
