"""Weights through storage: `Publisher` writes a trainer's versions, `Follower` brings a pool to the newest of them.

    trainer ─Export▶ checkpoint tensors ─diff▶ version in a store ─▶ Copy in memory ─link.sync▶ engines

Neither knows the other. What is published are the checkpoint's own tensors, so a follower connects them by their names,
and its syncs are ordinary ones: plan, digests, transaction and versions are those of any link. The format, the writer's
lease and what a reader believes are in `transport/_storage.py`.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import threading
import time
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jvlab._deadline import Deadline, check_timeout
from jvlab._errors import (
    ConfigError,
    DeadlineExceeded,
    JvlabError,
    LayoutError,
    LinkBusy,
    NonFiniteError,
    StorageError,
    SyncError,
    Unsupported,
)
from jvlab._names import own_name
from jvlab._tracebacks import brief
from jvlab._units import how_many, human_bytes
from jvlab.layout._checkpoint import (
    CheckpointValues,
    checkpoint_tensors,
    read_config,
)
from jvlab.layout._digest import flawed
from jvlab.layout._plan_types import numpy_dtype
from jvlab.layout._sparse import changed
from jvlab.layout._tree import FlatTree, checkpoint_names, flatten
from jvlab.layout.rules._rules import apply_binding
from jvlab.sync._compile_tree import bind_rules
from jvlab.sync._coordinator import behind, version_after
from jvlab.sync._meaning import owner_of, unpack
from jvlab.sync._transaction import Closing
from jvlab.trainer.models import resolve
from jvlab.transport._storage import (
    FULL_EVERY,
    KEEP,
    LATEST,
    LEASE_SECONDS,
    LONGEST_TENSOR,
    RELEASE_SECONDS,
    Copy,
    Index,
    Lease,
    Patient,
    Shelf,
    Stopped,
    Stored,
    Why,
    checksum,
    encode_changes,
    encoded_bytes,
    failure,
    model_of,
    open_store,
    raw,
    shard_parts,
    shards,
    small_files,
    state_of,
    version_name,
    versions_in,
)

if TYPE_CHECKING:
    from jvlab.layout._types import Binding, CheckpointTensor
    from jvlab.sync._link import Link

PUBLISH_SECONDS = 600.0
SHARD_MIB = 1024.0
_PIECE = 1 << 24  # bytes of a tensor that are compared at once
NAMED = 6  # tensors that one message names


# What is published: the trainer's tree as checkpoint tensors ----------------------------------------------------------


class Export:
    """A trainer's tree as the tensors of a checkpoint, in host memory, one at a time."""

    def __init__(
        self,
        bindings: Sequence[Binding],
        tensors: Sequence[CheckpointTensor],
        dtypes: Mapping[str, str],
        folder: Path,
    ) -> None:
        """`dtypes`: tensor -> the dtype to publish it in, where that is not the checkpoint's."""
        self.folder = folder
        self.dtypes = dict(dtypes)
        self._bindings: dict[str, list[Binding]] = defaultdict(list)
        for binding in bindings:
            self._bindings[binding.tensor].append(binding)
        known = {t.name: t for t in tensors}
        # leaf by leaf, so that a leaf on a device is copied to the host once
        names = sorted(self._bindings, key=lambda n: self._bindings[n][0].leaf)
        self.shapes = {name: tuple(known[name].shape) for name in names}
        self._types = {n: dtypes.get(n, known[n].dtype) for n in names}
        if packed := [n for n in names if not _is_plain(self._types[n])]:
            raise Unsupported(
                f"{packed[0]} is {self._types[packed[0]]} in the checkpoint, and nothing quantises what is published",
                remedy="like= a checkpoint of the same model in 16 or 32 bits",
                tensors=packed,
            )

    @classmethod
    def of_tree(cls, params: Any, like: Any, rules: Any, dtype: str | None) -> Export:
        """Bound as `lab.connect` would, without an engine."""
        policy = params if hasattr(params, "source") else owner_of(params)
        if like is None and policy is None:
            raise ConfigError(
                "like= is needed: the model folder whose tensors are published",
                remedy='jv.Publisher(path, params, like="path/of/the/checkpoint")',
            )
        folder = Path(like if like is not None else policy.source)
        if like is not None:
            folder = Path(resolve(os.fspath(like)))
        if not folder.is_dir():
            from jvlab.trainer._policy import local

            folder = local(str(folder))
        arrays = _arrays(params)
        tensors = checkpoint_tensors(folder)
        kept, _, rules = checkpoint_names(arrays, rules, tensors)
        config = read_config(folder)
        _, bindings = bind_rules(
            rules,
            FlatTree(kept).shapes,
            tensors,
            config,
            kept,
            CheckpointValues.of(folder),
        )
        dtypes = {}
        if dtype is not None:
            numpy_dtype(dtype)  # an unknown one is an error now
            dtypes = {t.name: dtype for t in tensors if _is_plain(t.dtype)}
        return cls(bindings, tensors, dtypes, folder)

    @classmethod
    def of_link(cls, link: Link, folder: str) -> Export:
        """As a link's mapping has it, in the dtypes in which its engine holds what is not quantised."""
        mapping = link.mapping
        dtypes: dict[str, set[str]] = defaultdict(set)
        for row in mapping.rows:
            if row.status in ("direct", "cast", "staged"):
                dtypes[row.tensor].add(row.dtype)
        chosen = {n: found.pop() for n, found in dtypes.items() if len(found) == 1}
        return cls(mapping.bindings, mapping.tensors, chosen, Path(resolve(folder)))

    def tensors(self, params: Any) -> Iterator[tuple[str, np.ndarray]]:
        """Name and values of each tensor, in memory of its own; raises if the tree is not as it was bound."""
        arrays = _arrays(params)
        wanted = {b.leaf: b for found in self._bindings.values() for b in found}
        wrong = [
            leaf
            for leaf, b in wanted.items()
            if leaf not in arrays or tuple(arrays[leaf].shape) != b.leaf_shape
        ]
        if wrong:
            raise LayoutError(
                f"{len(wrong)} leaves are missing or have other shapes than at first ({', '.join(wrong[:NAMED])})",
                remedy="pass the same tree, or make a new publisher",
                leaves=wrong,
            )
        uses = Counter(b.leaf for found in self._bindings.values() for b in found)
        leaves: dict[str, np.ndarray] = {}
        for name in self.shapes:
            made = np.empty(self.shapes[name], numpy_dtype(self._types[name]))
            for binding in self._bindings[name]:
                leaf = binding.leaf
                if leaf not in leaves:
                    leaves[leaf] = np.asarray(arrays[leaf])
                apply_binding(binding, leaves[leaf], made)
                uses[leaf] -= 1
                if not uses[leaf]:
                    del leaves[leaf]
            yield name, made

    @property
    def total_bytes(self) -> int:
        return sum(
            math.prod(shape) * numpy_dtype(self._types[name]).itemsize
            for name, shape in self.shapes.items()
        )

    def files(self) -> dict[str, bytes]:
        """What makes a full version a checkpoint: config and tokenizer, the config with the dtype that is written."""
        found = small_files(self.folder)
        types = Counter(self.dtypes.values()).most_common(1)
        if types and "config.json" in found:
            config = json.loads(found["config.json"])
            for key in ("dtype", "torch_dtype"):
                if key in config:
                    config[key] = types[0][0]
            found["config.json"] = json.dumps(config, indent=2).encode()
        return found


def _is_plain(dtype: str) -> bool:
    return dtype in ("float64", "float32", "float16", "bfloat16")


def _arrays(params: Any) -> Mapping[str, Any]:
    """A tree's arrays by path; raises if it is an adapter, or not all of it is in this process."""
    params = unpack(params)[0]
    if hasattr(params, "peft_tensors"):
        raise Unsupported(
            "an adapter is not published",
            remedy="publish a merged policy: jv.Publisher(path, policy.merge())",
        )
    arrays = flatten(params).arrays
    far = [p for p, a in arrays.items() if not getattr(a, "is_fully_addressable", True)]
    if far:
        raise Unsupported(
            f"{far[0]} is spread over several trainer processes, and one process publishes",
            remedy="gather it first: jax.experimental.multihost_utils.process_allgather",
            leaves=far,
        )
    return arrays


# Publishing -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PublishReport:
    """One version as it was published: what was written, and why it is full if it is.

    `changed` is the share of bytes that differ from the version before, None if nothing was compared.

    >>> import tempfile
    >>> policy = jv.Policy.from_pretrained(model)
    >>> with jv.Publisher(tempfile.mkdtemp(), policy) as publisher:
    ...     report = publisher.publish(policy.params)
    >>> report.kind, report.base, report.why_full
    ('full', None, 'it is the first')
    """

    version: int
    kind: str  # "full" or "delta"
    base: int | None
    bytes: int  # written
    total_bytes: int  # of all tensors
    changed: float | None = None
    why_full: str = ""
    pruned: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict, repr=False)

    def __repr__(self) -> str:
        what = "full"
        if self.kind == "delta":
            what = f"delta on {self.base}, {self.changed:.2%} of the bytes changed"
        why = f"; full because {self.why_full}" if self.why_full else ""
        sizes = f"{human_bytes(self.bytes)} for {human_bytes(self.total_bytes)}"
        return f"PublishReport(version {self.version}, {what}, {sizes}{why})"


@dataclass(frozen=True, kw_only=True)
class PublishOptions:
    """How a publisher writes; `Publisher` documents them."""

    full_every: int = FULL_EVERY
    keep: int = KEEP
    nonfinite: str = "refuse"
    lease: float = LEASE_SECONDS
    shard_mib: float = SHARD_MIB
    storage_options: Mapping[str, Any] | None = None

    def check(self) -> PublishOptions:
        """Itself; a ConfigError names what cannot work."""
        check_timeout(self.lease, "lease")
        for name in ("full_every", "keep", "shard_mib"):
            value = getattr(self, name)
            kinds = (int, float) if name == "shard_mib" else (int,)
            if not isinstance(value, kinds) or isinstance(value, bool) or value < 1:
                raise ConfigError(
                    f"{name} must be a number from 1 up, not {value!r}",
                    remedy=f"leave it out for {getattr(PublishOptions(), name)}",
                )
        if self.nonfinite not in ("refuse", "allow"):
            raise ConfigError(
                f"nonfinite must be 'refuse' or 'allow', not {self.nonfinite!r}"
            )
        return self


@dataclass(frozen=True)
class _Change:
    positions: np.ndarray
    values: np.ndarray
    checksum: str


class Publisher(Closing):
    """Writes a trainer's versions into a folder or a bucket, for engines that share nothing else with it.

    path            a folder that both sides see, or a URL that fsspec knows: "s3://bucket/run"
    params          what is published: a `jv.Policy`, or any pytree of arrays as `lab.connect` takes it
    like            the model folder (or "tiny:llama") whose tensors are published; default: the policy's own
    rules           how leaves correspond to its tensors; see `jv.plan`
    dtype           publish in this dtype, the engines'; default: the checkpoint's
    full_every      a full version after so many deltas; one is also written where a delta would not be smaller
    keep            full versions that are kept, with the deltas after them; what is older is removed
    nonfinite       "refuse": NaN or Inf is an error that names the tensors; "allow": it is published
    lease           seconds without a heartbeat after which another may take the folder over
    storage_options of fsspec: credentials, an endpoint

    One publisher writes into a folder: a second one is refused by a `LinkBusy`. No pool and no engine is needed.

    >>> import tempfile
    >>> policy = jv.Policy.from_pretrained(model)
    >>> publisher = jv.Publisher(tempfile.mkdtemp(), policy)
    >>> publisher.publish(policy.params)
    PublishReport(version 1, full, ...)
    >>> publisher.publish(policy.params).kind
    'delta'
    >>> publisher.close()
    """

    @brief
    def __init__(
        self,
        path: str | os.PathLike[str],
        params: Any,
        *,
        like: str | os.PathLike[str] | None = None,
        rules: Any = "auto",
        dtype: str | None = None,
        full_every: int = FULL_EVERY,
        keep: int = KEEP,
        nonfinite: str = "refuse",
        lease: float = LEASE_SECONDS,
        shard_mib: float = SHARD_MIB,
        storage_options: Mapping[str, Any] | None = None,
        timeout: float | Deadline = PUBLISH_SECONDS,
    ) -> None:
        deadline = Deadline.of(timeout)
        options = PublishOptions(
            full_every=full_every,
            keep=keep,
            nonfinite=nonfinite,
            lease=lease,
            shard_mib=shard_mib,
            storage_options=storage_options,
        ).check()
        if not isinstance(params, Export):  # as `link.publish` gives one
            params = Export.of_tree(params, like, rules, dtype)
        self.path = os.fspath(path)
        self._export: Export = params
        self.options = options
        self._model = model_of(params.shapes)
        self._store = open_store(path, options.storage_options)
        self._calls = Patient(self._store)
        self._shelf = Shelf(self._calls)
        # what the newest version that this publisher wrote holds; None: nothing is known
        self._held: Copy | None = None
        # version -> whether it is full, of those that are visible
        self._full: dict[int, bool] = {}
        self._since_full = 0
        self._one = threading.Lock()
        self._closed = False
        self.version = 0
        self.last: PublishReport | None = None
        found = self._newest(deadline)
        if found is not None:
            self.version = found.version
            if found.model != self._model:
                raise ConfigError(
                    f"{self.path} holds versions of another model: {found.name} has other tensors",
                    remedy="one model to a folder: choose another, or remove what is there",
                    path=self.path,
                )
        self._lease = Lease(self._store, float(options.lease))
        self._lease.claim(deadline)
        # a publisher that nobody kept blocks nobody
        self._release = weakref.finalize(self, self._lease.release, RELEASE_SECONDS)

    def _newest(self, deadline: Deadline) -> Index | None:
        """The newest version that readers would take; None if there is none."""
        names = self._shelf.names(deadline)
        for version in versions_in(names):
            try:
                return self._shelf.complete(version, names, deadline)
            except StorageError as error:
                if "why" not in error.fields:
                    raise
        return None

    @property
    def closed(self) -> bool:
        """Whether it was closed, or another publisher has taken its place."""
        return self._closed or self._lease.lost

    @brief
    def publish(
        self,
        params: Any,
        version: int | None = None,
        *,
        full: bool = False,
        timeout: float | Deadline = PUBLISH_SECONDS,
    ) -> PublishReport:
        """Write these parameters as the next version; when it returns, readers see all of it.

        version   an integer larger than every version that is there; default: the next one
        full      write all of it, whatever changed

        After a failure no part of it is visible, or all of it; the next version is written for what is visible then.
        """
        deadline = Deadline.of(timeout)
        if not self._one.acquire(timeout=min(deadline.left(), threading.TIMEOUT_MAX)):
            raise DeadlineExceeded(
                f"waited {deadline.seconds:g} s for another thread that publishes into {self.path}",
                remedy="one version at a time",
            )
        try:
            if self._closed:
                raise StorageError(
                    "this publisher is closed",
                    remedy="make a new one: jv.Publisher(path, params)",
                    path=self.path,
                )
            report = self._publish(params, version, full, deadline)
        finally:
            self._one.release()
        self.last = report
        return report

    def _publish(
        self, params: Any, version: int | None, full: bool, deadline: Deadline
    ) -> PublishReport:
        began = time.perf_counter()
        self._lease.check(deadline)
        names = self._shelf.names(deadline)
        number = self._number(version, names)
        visible = self._newest(deadline)
        why = self._why_full(full, visible)
        changes: dict[str, _Change] | None = None
        if not why:
            changes, why = self._changes(params)
        if changes is None:
            base = None
            copy = self._all(params)
            stored = _whole(copy)
        else:
            base = visible
            copy = self._changed(changes)
            stored = [_payload(name, change) for name, change in changes.items()]
        found_at = time.perf_counter()
        index, notes = self._write(number, copy, stored, base, deadline)
        self._lease.check(deadline)
        share = self._take(copy, changes, index)
        self._since_full = self._since_full + 1 if base is not None else 0
        self._full[number] = base is None
        self.version = number
        written_at = time.perf_counter()
        pruned, more = self._tidy(number, deadline)
        return PublishReport(
            version=number,
            kind="full" if base is None else "delta",
            base=None if base is None else base.version,
            bytes=index.nbytes,
            total_bytes=index.total_bytes,
            changed=share,
            why_full=why,
            pruned=pruned,
            notes=(*notes, *more),
            seconds={
                "find": found_at - began,
                "write": written_at - found_at,
                "total": time.perf_counter() - began,
            },
        )

    def _number(self, version: int | None, names: Sequence[str]) -> int:
        # incomplete ones too: their names are taken
        last = max([self.version, *versions_in(names)])
        return version_after(last, version, self.path)

    def _why_full(self, full: bool, visible: Index | None) -> str:
        """Why everything must be written; empty if changes may be."""
        if full:
            return "full=True"
        if visible is None:
            return "it is the first"
        if self._held is None or self._held.state != visible.state:
            # after a crash, or a version that was or was not completed after its deadline
            return f"{visible.name} is not known to be what this publisher holds"
        if self._since_full >= self.options.full_every:
            return f"{self._since_full} deltas were written since the last"
        return ""

    def _changes(self, params: Any) -> tuple[dict[str, _Change] | None, str]:
        """What differs from the version that is held; or None, and why everything must be written."""
        held = self._held
        assert held is not None
        total = self._export.total_bytes
        size = 0
        out: dict[str, _Change] = {}
        for name, new in self._tensors(params):
            flat = raw(new)
            if len(flat) > LONGEST_TENSOR:
                return None, f"{name} has more than {human_bytes(LONGEST_TENSOR)}"
            positions = _differing(flat, raw(held.tensors[name]))
            if not len(positions):
                continue
            size += encoded_bytes(len(positions))
            if size >= total:
                return None, "a delta would not be smaller"
            out[name] = _Change(positions, flat[positions], checksum(flat))
        return out, ""

    def _all(self, params: Any) -> Copy:
        """Every tensor. Nothing is held until they are published: their memory would be needed twice."""
        self._held = None
        copy = Copy()
        for name, new in self._tensors(params):
            copy.tensors[name] = new
            copy.checksums[name] = checksum(raw(new))
        return copy

    def _changed(self, changes: Mapping[str, _Change]) -> Copy:
        """The checksums after these changes; the tensors are still those that are held."""
        held = self._held
        assert held is not None
        new = {name: change.checksum for name, change in changes.items()}
        return Copy(tensors=held.tensors, checksums={**held.checksums, **new})

    def _tensors(self, params: Any) -> Iterator[tuple[str, np.ndarray]]:
        """Name and values of each tensor; raises after the last one if some are not finite, and may not be."""
        bad: list[str] = []
        for name, new in self._export.tensors(params):
            if self.options.nonfinite == "refuse" and flawed(new, new.dtype.name):
                bad.append(name)
            yield name, new
        if bad:
            raise NonFiniteError(
                f"{how_many(len(bad), 'tensor')} hold NaN or Inf: {', '.join(bad[:NAMED])}",
                remedy='find the step that made them; nonfinite="allow" publishes them',
                leaves=bad,
            )

    def _write(
        self,
        number: int,
        copy: Copy,
        stored: Sequence[Stored],
        base: Index | None,
        deadline: Deadline,
    ) -> tuple[Index, list[str]]:
        """Write files and index, and make them visible."""
        name = version_name(number)
        store = self._store
        # in the names of files too: a bucket may write what was given up only after the next try
        token = f"e{self._lease.epoch:04d}-{secrets.token_hex(4)}"
        staged = self._calls.call(f"begin {name}", deadline, store.begin, name, token)
        try:
            files, weight_map = self._write_files(staged, stored, token, base, deadline)
            # the last moment at which another writer is noticed before anything is visible
            self._lease.check(deadline)
        except BaseException:
            # room for the next try; what this process cannot remove any more, the next writer does
            with contextlib.suppress(StorageError, DeadlineExceeded):
                self._calls.call(
                    f"remove {name}", Deadline(RELEASE_SECONDS), store.remove, staged
                )
            raise
        index = Index(
            version=number,
            base=None if base is None else base.version,
            epoch=self._lease.epoch,
            model=self._model,
            state=state_of(copy.tensors, copy.checksums),
            base_state="" if base is None else base.state,
            total_bytes=sum(a.nbytes for a in copy.tensors.values()),
            files=files,
            weight_map=weight_map,
            by=own_name(),
        )
        shown = self._calls.call(
            f"show {name}", deadline, store.show, staged, name, index.to_bytes()
        )
        if not shown:
            raise LinkBusy(
                f"another writer published {name} into {self.path} meanwhile",
                remedy="one trainer publishes into one folder: close the other one",
                path=self.path,
                version=number,
            )
        notes: list[str] = []
        try:
            self._calls.call(
                f"write {LATEST}", deadline, store.replace, LATEST, name.encode()
            )
        except (StorageError, DeadlineExceeded) as error:  # only a hint
            notes.append(f"{LATEST} was not renewed: {error.message}")
        return index, notes

    def _write_files(
        self,
        staged: str,
        stored: Sequence[Stored],
        token: str,
        base: Index | None,
        deadline: Deadline,
    ) -> tuple[dict[str, tuple[int, str]], dict[str, str]]:
        """Bytes and checksum of each file, and the file of each tensor."""
        files: dict[str, tuple[int, str]] = {}
        weight_map: dict[str, str] = {}

        def put(file: str, parts: list[Any]) -> None:
            path = f"{staged}/{file}"
            self._calls.call(f"write {file}", deadline, self._store.put, path, parts)
            files[file] = (sum(len(part) for part in parts), checksum(*parts))

        groups = list(shards(stored, int(self.options.shard_mib * 2**20)))
        for i, group in enumerate(groups):
            file = f"model-{i + 1:05d}-of-{len(groups):05d}-{token}.safetensors"
            put(file, shard_parts(group))
            weight_map |= {tensor.name: file for tensor in group}
        if base is None:
            for file, content in self._export.files().items():
                put(file, [content])
        return files, weight_map

    def _take(
        self, copy: Copy, changes: Mapping[str, _Change] | None, index: Index
    ) -> float | None:
        """The version is visible: it is held from now on. Returns the share of bytes that changed."""
        # if this is interrupted, nothing is held
        self._held = None
        for name, change in (changes or {}).items():
            raw(copy.tensors[name])[change.positions] = change.values
        copy.version = index.version
        copy.state = index.state
        copy.model = index.model
        self._held = copy
        if changes is None:
            return None
        count = sum(len(change.positions) for change in changes.values())
        return count / max(1, index.total_bytes)

    def _tidy(
        self, newest: int, deadline: Deadline
    ) -> tuple[tuple[int, ...], list[str]]:
        """Remove what no reader needs: all that is older than the oldest full version that is kept."""
        gone: list[int] = []
        try:
            names = self._shelf.names(deadline)
            versions = versions_in(names)
            for version in versions:
                if version in self._full or version > newest:
                    continue
                try:
                    index = self._shelf.complete(version, names, deadline)
                    self._full[version] = index.base is None
                except StorageError as error:
                    if "why" not in error.fields:
                        raise
                    self._full[version] = False  # damaged: nobody can start from it
            full = [v for v in versions if self._full.get(v)]
            if len(full) > self.options.keep:
                floor = full[self.options.keep - 1]
                # from the newest down: what remains is always a chain
                for version in (v for v in versions if v < floor):
                    name = version_name(version)
                    self._calls.call(
                        f"remove {name}", deadline, self._store.remove, name
                    )
                    gone.append(version)
                    self._full.pop(version, None)
        except (StorageError, DeadlineExceeded) as error:
            return tuple(gone), [f"older versions were not removed: {error.message}"]
        return tuple(gone), []

    def close(self) -> None:
        """Let another publisher write there at once. Can be called twice."""
        if not self._closed:
            self._closed = True
            self._release()
            self._held = None

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"version {self.version}"
        size = human_bytes(self._export.total_bytes)
        return f"Publisher({_short(self.path)!r}, {size}, {state})"


def _short(path: str) -> str:
    """A path for a repr: without its folders."""
    return path.rstrip("/").rpartition("/")[2]


def _differing(new: np.ndarray, old: np.ndarray) -> np.ndarray:
    """The positions of bytes that differ."""
    out = []
    for at in range(0, len(new), _PIECE):
        found = changed(new[at : at + _PIECE], old[at : at + _PIECE])
        out.append(found + np.uint32(at))
    return np.concatenate(out) if out else np.zeros(0, np.uint32)


def _whole(copy: Copy) -> list[Stored]:
    """Every tensor, wide elements first: all of a file are then aligned."""
    order = sorted(copy.tensors, key=lambda name: -copy.tensors[name].itemsize)
    return [
        Stored(
            name,
            copy.tensors[name].dtype.name,
            copy.tensors[name].shape,
            raw(copy.tensors[name]).data,
            copy.checksums[name],
        )
        for name in order
    ]


def _payload(name: str, change: _Change) -> Stored:
    data = encode_changes(change.positions, change.values)
    return Stored(name, "uint8", (len(data),), data, change.checksum)


# Following ------------------------------------------------------------------------------------------------------------

FOLLOW_SECONDS = 600.0
POLL_SECONDS = 1.0
LONGEST_PAUSE = 30.0  # between two tries after failures
CLOSE_SECONDS = 10.0
ASK_SECONDS = 60.0  # for listings and small files
APPLIED = 100  # remembered


@dataclass(frozen=True, kw_only=True)
class Applied:
    """A published version that a pool now serves."""

    version: int  # as published
    pool_version: int  # as the pool counts
    read: tuple[int, ...]  # the versions that were read for it
    bytes: int  # of their files
    seconds: Mapping[str, float] = field(default_factory=dict, repr=False)


class Follower(Closing):
    """Keeps a pool at the newest complete version of a folder or bucket; made by `lab.follow(pool, path)`.

    `follower.version` is the published version that the pool serves, 0 before the first; `.last` says how it got there.
    A version that is torn, damaged or another model's is never served: `.error` then has the reason, the one before is
    served on, and it is tried again later. Each version is read into host memory, proven by checksums, and synced by
    an ordinary `link.sync`.

    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> publisher = jv.Publisher(folder, policy, dtype="float32")
    >>> publisher.publish(policy.params).version
    1
    >>> follower = lab.follow(pool, folder)
    >>> follower.wait(1).version
    1
    >>> follower.close()
    >>> publisher.close()
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        connect: Callable[[Mapping[str, np.ndarray]], Any],
        pool: Any = None,
        *,
        poll: float = POLL_SECONDS,
        delta: str = "never",
        storage_options: Mapping[str, Any] | None = None,
        timeout: float = FOLLOW_SECONDS,
        on_close: Callable[[Follower], None] | None = None,
    ) -> None:
        """`connect` makes a link from tensors by name; `timeout`: for reading one version, and for one sync."""
        self.path = os.fspath(path)
        self.pool = pool
        self._connect = connect
        self._poll = check_timeout(poll, "poll")
        self._seconds = check_timeout(timeout)
        self._delta = delta
        self._on_close = on_close
        self._closing = threading.Event()
        self._news = threading.Condition()
        self._calls = Patient(open_store(path, storage_options), self._closing.is_set)
        self._shelf = Shelf(self._calls)
        self._copy: Copy | None = None
        self._link: Any = None
        # version -> how often it failed, and when it is tried again
        self._failed: dict[int, tuple[int, float]] = {}
        # what was read since the last sync
        self._unsynced: list[Index] = []
        self.version = 0
        self.newest = 0  # that was seen, complete or not
        self.error: JvlabError | None = None
        self.applied: deque[Applied] = deque(maxlen=APPLIED)
        self._thread = threading.Thread(
            target=self._run, name="jvlab-follow", daemon=True
        )
        self._thread.start()

    @property
    def last(self) -> Applied | None:
        """How the version that is served got there."""
        return self.applied[-1] if self.applied else None

    @property
    def closed(self) -> bool:
        """Whether it was closed, or its pool is gone."""
        return self._closing.is_set()

    @property
    def link(self) -> Any:
        """The link that it syncs with; None before the first version."""
        return self._link

    def wait(
        self, version: int = 1, timeout: float | Deadline | None = FOLLOW_SECONDS
    ) -> Follower:
        """Wait until the pool serves this published version, or a later one."""
        deadline = Deadline.of(timeout)
        with self._news:
            while self.version < version:
                if self.closed:
                    raise self._ended(version)
                if deadline.over:
                    raise DeadlineExceeded(
                        f"waited {deadline.seconds:g} s for version {version} of {self.path}; {self._words()}",
                        remedy="is the trainer publishing there? follower.error has what went wrong last",
                        version=version,
                        served=self.version,
                    ) from self.error
                self._news.wait(deadline.within(1.0))
        return self

    def _ended(self, version: int) -> JvlabError:
        return SyncError(
            f"this follower is closed, at version {self.version} and not {version}; {self._words()}",
            remedy="lab.follow(pool, path) makes another",
        )

    def _words(self) -> str:
        if self.error is not None:
            return f"its last problem: {self.error.message}"
        return (
            f"{how_many(self.newest, 'version')} seen"
            if self.newest
            else "no version was seen"
        )

    # The thread -------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        pause = self._poll
        while not self._closing.is_set():
            failed: JvlabError | None = None
            try:
                self._step()
            except Stopped:
                break
            except JvlabError as error:
                failed = error
            # nothing may end it unseen
            except Exception as error:
                failed = SyncError(
                    f"following {self.path} failed: {type(error).__name__}: {error}",
                    remedy="this is a bug of jvlab; it is tried again",
                )
                failed.__cause__ = error
            with self._news:
                if failed is not None:
                    self.error = failed
                self._news.notify_all()
            if self.pool is not None and self.pool.snapshot.closed:
                self._closing.set()
            pause = min(2 * pause, LONGEST_PAUSE) if failed is not None else self._poll
            self._closing.wait(pause)
        with self._news:
            self._news.notify_all()

    def _step(self) -> None:
        """Look once: read what is new, sync it, bring newcomers to it."""
        asked = Deadline(min(ASK_SECONDS, self._seconds))
        names = self._shelf.names(asked)
        self.newest = max(versions_in(names), default=0)
        began = time.perf_counter()
        problem = self._went_back()
        if self.newest > self._held:
            problem = self._read_newest(names)
        read_at = time.perf_counter()
        copy = self._copy
        if copy is not None and copy.version != self.version:
            self._sync(copy, began, read_at)
        elif copy is not None:
            self._bring_newcomers(copy)
        if problem is not None:
            raise problem
        if copy is not None:
            self.error = None

    @property
    def _held(self) -> int:
        """The version in memory; 0 before the first."""
        return self._copy.version if self._copy is not None else 0

    def _went_back(self) -> JvlabError | None:
        """What is wrong with a folder whose versions are older than the one in memory."""
        if self.newest >= self._held:
            return None
        return failure(
            Why.MISSING,
            f"{self.path} holds nothing newer than version {self.newest}, and {self._held} was read from it",
            "was it emptied, or is it another run's? its versions are served once they are newer; a new follower "
            "takes them as they are",
            version=self.newest,
        )

    def _read_newest(self, names: Sequence[str]) -> JvlabError | None:
        """Bring the copy to the newest version that can be read; the problem with a newer one, if there is one."""
        problem: JvlabError | None = None
        for version in versions_in(names):
            # of a version that failed, what leads to it may have been read
            if version <= self._held:
                break
            tries, again = self._failed.get(version, (0, 0.0))
            if time.monotonic() < again:
                problem = problem or self.error
                continue
            try:
                index = self._index(version, names)
                if index is not None:
                    self._read(index, names)
                    break
            except StorageError as error:
                pause = min(LONGEST_PAUSE, self._poll * 2 ** min(tries, 10))
                self._failed[version] = (tries + 1, time.monotonic() + pause)
                problem = problem or error
        return problem

    def _index(self, version: int, names: Sequence[str]) -> Index | None:
        """None where there is none yet: a bucket shows the files of a version before it is one."""
        deadline = Deadline(min(ASK_SECONDS, self._seconds))
        try:
            return self._shelf.complete(version, names, deadline)
        except StorageError as error:
            if error.fields.get("why") is Why.MISSING:
                return None
            raise

    def _read(self, index: Index, names: Sequence[str]) -> None:
        """Bring the copy to this version, by the deltas after it or from a full version on."""
        deadline = Deadline(self._seconds)
        copy = self._copy
        if copy is not None and copy.model != index.model:
            raise failure(
                Why.FOREIGN,
                f"{index.name} is of another model than the versions before",
                "one model to a folder; follow another folder for another model",
                version=index.version,
            )
        chain = self._shelf.chain(index, names, copy, deadline)

        def read(path: str, nbytes: int) -> np.ndarray:
            return self._shelf.read_file(path, nbytes, deadline)

        for step in chain:
            if step.base is None:
                copy = Copy.read(step, read)
            else:
                assert copy is not None
                copy.apply(step, read)
            # step by step: what was read once need not be read again
            self._copy = copy
            self._unsynced.append(step)
        self._failed = {v: f for v, f in self._failed.items() if v > index.version}

    def _sync(self, copy: Copy, began: float, read_at: float) -> None:
        link = self._open_link(copy)
        wanted = copy.version if copy.version > link.version else None
        try:
            report = link.sync(
                copy.tensors,
                wanted,
                delta=self._delta,
                timeout=self._seconds,
                progress=False,
            )
        except LayoutError:
            link.close()  # another dtype is published now: the next try connects it
            raise
        now = time.perf_counter()
        applied = Applied(
            version=copy.version,
            pool_version=report.version,
            read=tuple(index.version for index in self._unsynced),
            bytes=sum(index.nbytes for index in self._unsynced),
            seconds={
                "read": read_at - began,
                "sync": now - read_at,
                "total": now - began,
            },
        )
        self._unsynced = []
        with self._news:
            self.applied.append(applied)
            self.version = copy.version
            self._news.notify_all()

    def _open_link(self, copy: Copy) -> Any:
        if self._link is None or self._link.closed:
            link = self._connect(copy.tensors)
            self._link = link
            if self.closed:  # close() came meanwhile, and did not see it
                link.close()
                raise Stopped
        return self._link

    def _bring_newcomers(self, copy: Copy) -> None:
        """Replicas that joined or were restarted since the last sync."""
        if self.pool is not None and behind(self.pool.snapshot):
            self._open_link(copy).catch_up(copy.tensors, timeout=self._seconds)

    # Closing ----------------------------------------------------------------------------------------------------------

    def close(self, timeout: float = CLOSE_SECONDS) -> None:
        """Stop following; the pool keeps what it serves. A store that hangs, or a sync, is not waited for longer."""
        deadline = Deadline.of(timeout)
        self._closing.set()
        with self._news:
            self._news.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join(deadline.left())
        link = self._link
        if link is not None:
            link.close()  # ends a sync that is still under way
        if self._on_close is not None:
            self._on_close(self)

    def __repr__(self) -> str:
        state = "closed" if self.closed else "following"
        served = f"version {self.version} served" if self.version else "none served yet"
        problem = f"; {self.error.message}" if self.error is not None else ""
        return f"Follower({_short(self.path)!r}, {state}, {served}{problem})"
