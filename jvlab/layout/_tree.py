"""Any pytree of parameters as flat paths: dicts, nnx modules and states, linen variables, abstract arrays, torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
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
            raise LayoutError(
                f"leaf {name or '(the tree itself)'} is a {type(leaf).__name__}, not an array",
                remedy="pass a pytree of arrays: nnx.state(model, nnx.Param), variables['params'], or a dict of arrays",
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


class Flattener:
    """`flatten` for trees of one kind, again and again: the second time only the leaves are taken out."""

    def __init__(self) -> None:
        self._kind: Any = None
        self._places: dict[str, int] = {}
        self._paths: list[str] = []
        self._branches: Branches | None = None  # of a tree of plain dicts, which is taken apart without jax

    def arrays(self, tree: Any) -> dict[str, Any]:
        """The arrays by dotted path, as `flatten(tree).arrays`."""
        if self._branches is not None:
            found: list[Any] = []
            if _take_leaves(tree, self._branches, found):
                return dict(zip(self._paths, found, strict=True))
        import jax

        leaves, kind = jax.tree_util.tree_flatten(tree)
        if self._kind is None or kind != self._kind:
            arrays = flatten(tree).arrays
            where = {id(leaf): k for k, leaf in enumerate(leaves)}
            plain = len(where) == len(leaves) and all(id(a) in where for a in arrays.values())
            self._kind = kind if plain else None  # else a leaf is there twice, or is not what jax says it is
            self._places = {path: where[id(a)] for path, a in arrays.items()} if plain else {}
            self._branches, self._paths = None, []
            if plain and (branches := _branches(tree)) is not None:
                found, paths = [], {id(a): path for path, a in arrays.items()}
                if _take_leaves(tree, branches, found) and {id(a) for a in found} == paths.keys():
                    self._branches, self._paths = branches, [paths[id(a)] for a in found]
            return dict(arrays)
        return {path: leaves[k] for path, k in self._places.items()}


Branches = list[tuple[Any, "Branches | None"]]  # keys of a dict, with those of the dict below; None: a leaf


def _branches(tree: Any) -> Branches | None:
    """The keys of a tree of plain dicts; None where something else is a branch."""
    if type(tree) is not dict or not tree:
        return None
    out: Branches = []
    for key, value in tree.items():
        below = _branches(value) if isinstance(value, Mapping) else None
        if isinstance(value, list | tuple) or (isinstance(value, Mapping) and below is None):
            return None
        out.append((key, below))
    return out


def _take_leaves(tree: Any, branches: Branches, out: list[Any]) -> bool:
    """Take the leaves out; False if the tree has other keys."""
    if type(tree) is not dict or len(tree) != len(branches):
        return False
    for key, below in branches:
        value = tree.get(key)
        if below is None:
            if value is None or type(value) is dict:
                return False
            out.append(value)
        elif not _take_leaves(value, below, out):
            return False
    return True


def leaf_shapes(tree: Any) -> dict[str, LeafShape]:
    """The shapes and dtypes of a tree's arrays by dotted path."""
    return flatten(tree).shapes


def _is(tree: Any, *names: str) -> bool:
    """Is the tree an instance of a class of flax so named? By name, so that no flax need be installed."""
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
    """Any other pytree node that jax knows: equinox modules, chex dataclasses, user classes."""
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
