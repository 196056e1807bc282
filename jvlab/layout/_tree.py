"""Any pytree of parameters as flat paths: dicts, nnx modules and states, linen variables, abstract arrays, torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, compress
from operator import itemgetter
from typing import Any

from jvlab._errors import LayoutError
from jvlab.layout._torch_leaf import adopt, is_module
from jvlab.layout._types import Note


@dataclass(frozen=True)
class LeafShape:
    """A leaf as the rules see it."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class FlatTree:
    """The arrays of a tree by dotted path, and what was left out and why."""

    arrays: Mapping[str, Any]
    skipped: tuple[Note, ...] = ()

    @property
    def shapes(self) -> dict[str, LeafShape]:
        """What `Rules.bind` and `infer` take."""
        return {path: LeafShape(tuple(a.shape), str(a.dtype)) for path, a in self.arrays.items()}


_TREES = "a pytree of arrays: nnx.state(model, nnx.Param), variables['params'], or a dict of arrays"


def flatten(tree: Any) -> FlatTree:
    """Flattens a tree of arrays (jax, numpy, ShapeDtypeStruct; torch as `TorchLeaf`) to dotted paths.

    Skipped, and listed in `skipped`: nnx RNG state, PRNG keys, None. A leaf of any other kind is an error. A single
    top-level `params` collection, as linen's `init` returns it, is entered without a prefix.
    """
    arrays: dict[str, Any] = {}
    skipped: list[Note] = []
    tree = _plain(tree)
    if isinstance(tree, Mapping) and "params" in tree and isinstance(_plain(tree["params"]), Mapping):
        for collection in tree:
            if collection != "params":
                skipped.append(Note(str(collection), "a collection beside `params`: no parameters"))
        tree = tree["params"]
    for path, leaf in _walk(tree, ()):
        name = ".".join(path)
        reason = _skip_reason(leaf)
        if reason:
            skipped.append(Note(name, reason))
            continue
        leaf = _value(leaf)
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            whole = "its parameters: policy.params" if not name and hasattr(leaf, "params") else ""
            raise LayoutError(
                f"leaf {name or '(the tree itself)'} is of type {type(leaf).__name__}, not an array",
                remedy=f"pass {whole or _TREES}",
                leaf=name,
            )
        if str(leaf.dtype).startswith("key<"):
            skipped.append(Note(name, "a PRNG key"))
            continue
        if name in arrays:
            raise LayoutError(
                f"two leaves have the path {name}",
                remedy="keys that contain '.' collide with nesting: rename one",
                leaf=name,
            )
        arrays[name] = leaf
    return FlatTree(adopt(arrays), tuple(skipped))


def as_sent(tree: Any) -> Any:
    """The tree whose values engines get. An adapter's differ from what is trained: its scale is multiplied in."""
    method = getattr(tree, "as_sent", None)
    return tree if method is None else method()


class Flattener:
    """`flatten` for repeated trees of one structure: after the first, only the leaves are extracted."""

    def __init__(self) -> None:
        self._kind: Any = None
        self._places: dict[str, int] = {}
        self._paths: list[str] = []
        self._levels: Levels | None = None  # for a tree of plain dicts, which needs no jax

    def arrays(self, tree: Any) -> dict[str, Any]:
        """The arrays by dotted path, as `flatten(tree).arrays`."""
        if self._levels is not None and (found := self._levels.leaves(tree)) is not None:
            return dict(zip(self._paths, found, strict=True))
        import jax

        leaves, kind = jax.tree_util.tree_flatten(tree)
        if self._kind is None or kind != self._kind or self._levels is not None:
            arrays = flatten(tree).arrays
            where = {id(leaf): k for k, leaf in enumerate(leaves)}
            plain = len(where) == len(leaves) and all(id(a) in where for a in arrays.values())
            self._kind = kind if plain else None  # else a leaf occurs twice, or differs from jax's
            self._places = {path: where[id(a)] for path, a in arrays.items()} if plain else {}
            self._levels, self._paths = None, []
            if plain and (levels := Levels.of(tree)) is not None:
                found, paths = levels.leaves(tree) or [], {id(a): path for path, a in arrays.items()}
                if {id(a) for a in found} == paths.keys():
                    self._levels, self._paths = levels, [paths[id(a)] for a in found]
            return dict(arrays)
        return {path: leaves[k] for path, k in self._places.items()}


@dataclass(frozen=True)
class Alike:
    """Dicts of one level that have the same keys."""

    at: Callable[[Any], tuple[Any, ...]]  # selects them from the values of the level above
    size: int
    values: Callable[[Any], Iterable[Any]]  # their values, in the order of the keys


class Levels:
    """The keys of a tree of plain dicts, and the classes of its leaves.

    A tree is flattened a whole level at a time, in loops that run in C: a third of the time of a recursive walk.
    """

    def __init__(self, tree: dict[Any, Any]) -> None:
        self._levels: list[tuple[list[Alike], list[bool]]] = []
        self._kinds: list[type] = []
        values: list[Any] = [tree]
        while any(type(value) is dict for value in values):
            alike: dict[tuple[Any, ...], list[int]] = {}
            for place, value in enumerate(values):
                if type(value) is dict:
                    alike.setdefault(tuple(value), []).append(place)
            groups = [Alike(_several(places), len(keys), _values(keys)) for keys, places in alike.items()]
            values = [value for group in groups for value in group.values(group.at(values))]
            leaves = [type(value) is not dict for value in values]
            self._levels.append((groups, leaves))
            self._kinds += map(type, compress(values, leaves))

    @staticmethod
    def of(tree: Any) -> Levels | None:
        """None if any branch is not a plain dict, or is empty."""
        if type(tree) is not dict or not tree:
            return None
        below = [value for value in tree.values() if isinstance(value, list | tuple | Mapping)]
        return Levels(tree) if all(Levels.of(value) is not None for value in below) else None

    def leaves(self, tree: Any) -> list[Any] | None:
        """The leaves, always in the same order; None if the tree has another structure."""
        values: Any = [tree]
        out: list[Any] = []
        try:
            for groups, leaves in self._levels:
                below: list[Any] = []
                for group in groups:
                    nodes = group.at(values)
                    if set(map(len, nodes)) != {group.size}:
                        return None
                    below += group.values(nodes)
                out += compress(below, leaves)
                values = below
        except (LookupError, TypeError):  # no such key, or no dict
            return None
        return out if list(map(type, out)) == self._kinds else None


def _several(places: list[int]) -> Callable[[Any], tuple[Any, ...]]:
    """Selects these indices of a list, as a tuple."""
    return itemgetter(*places) if len(places) > 1 else lambda values: (values[places[0]],)


def _values(keys: tuple[Any, ...]) -> Callable[[Any], Iterable[Any]]:
    """Selects the values of these keys from every dict."""
    take = itemgetter(*keys)
    return (lambda nodes: map(take, nodes)) if len(keys) == 1 else lambda nodes: chain.from_iterable(map(take, nodes))


def _is(tree: Any, *names: str) -> bool:
    """Is it an instance of a flax class of that name? By name, so that flax need not be installed."""
    return any(c.__name__ in names and c.__module__.split(".")[0] == "flax" for c in type(tree).__mro__)


def _plain(tree: Any) -> Any:
    """flax's own containers as plain mappings."""
    if _is(tree, "Module") and not isinstance(tree, Mapping):
        from flax import nnx

        if isinstance(tree, nnx.Module):
            return _plain(nnx.state(tree))
    if _is(tree, "State"):
        return dict(tree.items())
    module: Any = tree
    return module.state_dict() if is_module(module) else tree


def _is_variable(leaf: Any) -> bool:
    return _is(leaf, "Variable", "VariableState")


def _value(leaf: Any) -> Any:
    """The array inside an nnx variable or a linen metadata box."""
    if _is_variable(leaf):
        return leaf.get_value() if hasattr(leaf, "get_value") else leaf.value
    if _is(leaf, "AxisMetadata"):
        return leaf.unbox()
    return leaf


def _skip_reason(leaf: Any) -> str:
    if leaf is None:
        return "None"
    if _is(leaf, "RngState") or (_is(leaf, "VariableState") and "Rng" in getattr(leaf.type, "__name__", "")):
        return "nnx RNG state: no parameter"
    return ""


def _walk(tree: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    tree = _plain(tree)
    if isinstance(tree, Mapping):
        for key, child in tree.items():
            yield from _walk(child, (*path, str(key)))
    elif _is_variable(tree) or _is(tree, "AxisMetadata") or tree is None or hasattr(tree, "shape"):
        yield path, tree
    elif isinstance(tree, tuple) and hasattr(tree, "_fields"):
        names: tuple[str, ...] = getattr(tree, "_fields")  # noqa: B009 - a NamedTuple, which the type checker cannot see
        for key, child in zip(names, tree, strict=True):
            yield from _walk(child, (*path, key))
    elif isinstance(tree, list | tuple):
        for index, child in enumerate(tree):
            yield from _walk(child, (*path, str(index)))
    else:
        yield from _registered(tree, path)


def _registered(tree: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Any other pytree node registered with jax: equinox modules, chex dataclasses, user classes."""
    import jax

    children, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: x is not tree)
    if len(children) == 1 and children[0][1] is tree:
        yield path, tree
        return
    for keys, child in children:
        yield from _walk(child, (*path, *(_key(k) for k in keys)))


def _key(key: Any) -> str:
    for name in ("key", "name", "idx"):
        if hasattr(key, name):
            return str(getattr(key, name))
    return str(key)
