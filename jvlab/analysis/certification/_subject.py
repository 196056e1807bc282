"""`Subject`: the pool that is certified, and what the checks do with it: sync values, read memory, sample, score."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from numpy.lib.stride_tricks import as_strided

from jvlab._deadline import Deadline
from jvlab._errors import ConfigError, JvlabError, LayoutError, ModelError, Unsupported
from jvlab.layout._plan_types import FP8, FP8_MAX, numpy_dtype
from jvlab.layout._types import RankLayout
from jvlab.sync._connections import Connections
from jvlab.sync._link import Link
from jvlab.sync._value_samples import FULL, HALF
from jvlab.transport._faults import Faults
from jvlab.wire import jvlab_pb2 as pb

if TYPE_CHECKING:
    from jvlab.lab._pool import Pool
    from jvlab.layout._types import Parameter
    from jvlab.record._sample import Sample


# Known values, and where vLLM's own loader puts them: the reference that an engine's memory is compared with.
# Works from the traced layout alone (`pool.trace()`): no plan, no buckets and no digests, which a sync uses.

Values = dict[str, np.ndarray]  # by checkpoint name
# flat storage of a live parameter, by rank and name
Memory = dict[tuple[int, str], np.ndarray]


def is_float(dtype: np.dtype) -> bool:
    """Also of ml_dtypes' kinds, which numpy does not count among the floats."""
    return "float" in str(dtype)


def known_values(originals: Mapping[str, np.ndarray], seed: int) -> Values:
    """Other values of the same mean and spread, so that a model with them still computes finite numbers; none is 0."""
    out: Values = {}
    for name, array in originals.items():
        if not is_float(array.dtype) or not array.size:
            out[name] = array
            continue
        wide = array.astype(np.float32)
        mean = float(wide.mean())
        spread = max(float(wide.std()), 0.1 * abs(mean), 0.01)
        drawn = np.random.default_rng([seed, zlib.crc32(name.encode())])
        most = float(ml_dtypes.finfo(array.dtype).max)
        wide = np.clip(
            mean + spread * drawn.standard_normal(array.shape, np.float32), -most, most
        )
        fresh = np.asarray(wide.astype(array.dtype))
        fresh[fresh == 0] = spread  # a packed kernel loses the sign of a zero
        out[name] = fresh
    return out


class _Copy:
    """One copy of a layout: a box of a checkpoint tensor, and the box of a live parameter that it fills."""

    def __init__(
        self, layout: RankLayout, row: int, formats: Mapping[str, Any]
    ) -> None:
        self.tensor = layout.tensors[int(layout.tensor[row])].name
        self.parameter = layout.parameters[int(layout.parameter[row])].name
        self.how = formats.get(self.parameter)  # if it is quantised
        self.at = int(layout.dst_offset[row])
        self._from = int(layout.src_offset[row])
        self._shape = layout.shape[row]
        self._strides = (layout.src_strides[row], layout.dst_strides[row])

    def source(self, flat: np.ndarray) -> np.ndarray:
        return _box(flat, self._from, self._shape, self._strides[0])

    def target(self, flat: np.ndarray) -> np.ndarray:
        return _box(flat, self.at, self._shape, self._strides[1])


def _copies(layout: RankLayout) -> Iterator[_Copy]:
    formats = {f.parameter: f for f in layout.formats}
    for row in range(len(layout.tensor)):
        yield _Copy(layout, row, formats)


def _box(
    flat: np.ndarray, offset: int, shape: np.ndarray, strides: np.ndarray
) -> np.ndarray:
    last = offset + int(((shape - 1) * strides).sum())
    if offset < 0 or last >= flat.size:  # as_strided itself checks nothing
        raise IndexError(
            f"a copy from {offset} to {last} lies outside of {flat.size} elements"
        )
    return as_strided(flat[offset:], shape.tolist(), (strides * flat.itemsize).tolist())


def as_loaded(
    layouts: Sequence[RankLayout], values: Mapping[str, np.ndarray], before: Memory
) -> Memory:
    """What every rank's memory holds after vLLM's loader put these values there; padding stays as it was `before`."""
    out: Memory = {}
    largest = largest_of_groups(layouts, values)
    for layout in layouts:
        rank = layout.rank
        out |= {key: flat.copy() for key, flat in before.items() if key[0] == rank}
        for copy in _copies(layout):
            flat = out.get((rank, copy.parameter))
            # can't be read, or is loaded by the model's own code
            if flat is None or copy.tensor not in values:
                continue
            given = np.ascontiguousarray(values[copy.tensor])
            box = copy.source(given.reshape(-1))
            if (how := copy.how) is not None:
                scale = np.float32(largest[copy.tensor]) / np.float32(FP8_MAX)
                box = quantised(box.astype(numpy_dtype(how.loaded)), scale)
                if (scales := out.get((rank, how.scale))) is not None:
                    scales[copy.at // how.block] = scale
            copy.target(flat)[...] = box.astype(flat.dtype)
    return out


def largest_of_groups(
    layouts: Sequence[RankLayout], values: Mapping[str, np.ndarray]
) -> dict[str, float]:
    """For each quantised tensor, the largest magnitude among all that share its scale: those fused into one block.

    Whole tensors, not a rank's part of them: vLLM takes the maximum over the ranks that hold shards.
    """
    largest: dict[str, float] = {}
    blocks: dict[tuple[int, str, int], set[str]] = {}
    for layout in layouts:
        for copy in _copies(layout):
            name = copy.tensor
            if (how := copy.how) is None or name not in values:
                continue
            block = (layout.rank, copy.parameter, copy.at // how.block)
            blocks.setdefault(block, set()).add(name)
            if name not in largest:
                loaded = values[name].astype(numpy_dtype(how.loaded))
                wide = np.abs(loaded.astype(np.float32))
                largest[name] = float(wide.max(initial=0.0))
    settled = False
    while not settled:  # ranks may hold different parts of what shares a scale
        settled = True
        for names in blocks.values():
            most = max(largest[n] for n in names)
            settled = settled and all(largest[n] == most for n in names)
            largest |= dict.fromkeys(names, most)
    return largest


def quantised(values: np.ndarray, scale: np.float32) -> np.ndarray:
    """These values in fp8, as vLLM's kernel rounds them; of a scale of 0 it makes the largest value."""
    with np.errstate(divide="ignore", invalid="ignore"):
        scaled = values.astype(np.float32) * (np.float32(1.0) / scale)
    return np.clip(np.nan_to_num(scaled, nan=FP8_MAX), -FP8_MAX, FP8_MAX).astype(
        numpy_dtype(FP8)
    )


def values_held(
    layouts: Sequence[RankLayout], memory: Memory
) -> tuple[Values, dict[str, str]]:
    """The checkpoint's tensors as an engine holds them, and those that its memory does not show, with the reason.

    What it holds in fp8 is multiplied by its scale: less exact than what was loaded, and quantised again the same.
    """
    tensors = {t.name: t for layout in layouts for t in layout.tensors}
    opaque = {note.name: note.reason for layout in layouts for note in layout.opaque}
    values = {n: np.zeros(t.shape, numpy_dtype(t.dtype)) for n, t in tensors.items()}
    seen = {n: np.zeros(max(v.size, 1), bool) for n, v in values.items()}
    for layout in layouts:
        for copy in _copies(layout):
            flat = memory.get((layout.rank, copy.parameter))
            if flat is None or copy.tensor in opaque:
                continue
            box = copy.target(flat)
            if (how := copy.how) is not None:
                scales = memory.get((layout.rank, how.scale))
                if scales is None:
                    continue
                wide = box.astype(np.float32) * scales[copy.at // how.block]
                box = wide.astype(numpy_dtype(how.loaded))
            target = values[copy.tensor].reshape(-1)
            copy.source(target)[...] = box.astype(target.dtype)
            copy.source(seen[copy.tensor])[...] = True
    partly = "not all of it is in the engine's memory"
    left = {n: opaque.get(n) or partly for n, s in seen.items() if not s.all()}
    return values, left


@dataclass(frozen=True)
class Difference:
    """The first element of a parameter that is not as wanted."""

    parameter: str
    rank: int
    index: int
    wanted: float
    found: float
    count: int
    size: int

    def __str__(self) -> str:
        return (
            f"{self.parameter} (rank {self.rank}): {self.count} of {self.size} elements, from element {self.index}: "
            f"{self.found:.6g} instead of {self.wanted:.6g}"
        )


def differences(wanted: Memory, found: Memory) -> list[Difference]:
    """Every parameter whose bits differ, in the order of `wanted`."""
    out = []
    for (rank, name), one in wanted.items():
        other = found.get((rank, name))
        if other is None or other.size != one.size or other.dtype != one.dtype:
            size = 0.0 if other is None else float(other.size)
            out.append(Difference(name, rank, 0, float(one.size), size, 0, 0))
            continue
        bits = np.dtype(f"u{one.itemsize}")
        wrong = np.flatnonzero(one.view(bits) != other.view(bits))
        if len(wrong):
            at = int(wrong[0])
            pair = (float(one[at]), float(other[at]))
            out.append(Difference(name, rank, at, *pair, len(wrong), one.size))
    return out


# ----------------------------------------------------------------------------------------------------

# a small model is cut into about so many, so that a sync can fail between two of them
BUCKETS = 6
MIB = 2**20
REFUSALS = (ConfigError, Unsupported, LayoutError)  # raised before anything was written
SETS = ("original", "known", "other")  # of values


class Subject:
    """A pool, the values that it held at first, and a link of its own.

    `refused` says why no link to it can be made; the checks that need one do not apply then.
    """

    def __init__(
        self, pool: Pool, deadline: Deadline, transport: str = "auto", seed: int = 0
    ) -> None:
        self.pool = pool
        self.deadline = deadline
        self.seed = seed
        self.facts: Any = pool.facts(deadline)
        self.device: str = pool.snapshot.device
        ready = [
            (i, r.replica)
            for i, r in enumerate(pool.snapshot.replicas)
            if r.state == pb.READY
        ]
        self.replicas = [name for _, name in ready]
        self._places = [place for place, _ in ready]
        self.half = self.facts.dtype != "float32" or bool(self.facts.quantization)
        self.refused = self.no_direct = ""
        # what the caller says that the pool serves
        self.given: Mapping[str, Any] | None = None
        self.began_with = 0  # the pool's version at the beginning
        # the report of a link of this process, if one has synced this pool
        self.verified: Any = None
        # parameter -> why its memory can't be read
        self.unreadable: dict[str, str] = {}
        # tensor -> why only vLLM's own loader can place it
        self.through_loader: dict[str, str] = {}
        self.layouts: list[Any] = []
        self.loaded: Memory = {}  # what the first replica held
        self._sets: dict[str, Values] = {}
        # the set of values that the pool serves; None: unknown
        self.held: str | None = "original"
        self.transport = "none"  # of the link for the checkpoint's tensors
        self._wanted = transport
        self._link: Link | None = None
        # whether it is for the checkpoint's tensors, and not for a tree of a check's own
        self._is_original = False
        # of its own: links of others let go of the pool, and stay
        self._connections = Connections()

    # The link -----------------------------------------------------------------------------------------------------

    def open(self, params: Mapping[str, Any] | None = None) -> None:
        """Read what the pool holds, and connect to it."""
        self.given = params
        self.began_with = self.version
        for link in list(self.pool.links):
            if self.began_with and link.version == self.began_with:
                self.verified = link.verify(timeout=self.deadline)
            link.let_go(self.deadline)
        try:
            self.layouts = self.pool.trace(timeout=self.deadline)
            self.loaded = self.read(0)
            self._sets["original"] = self._originals(params)
            self.connect()
        except REFUSALS as error:
            self.refused = f"no link to this engine: {named_line(error)}"

    def _originals(self, params: Mapping[str, Any] | None) -> Values:
        """The checkpoint's tensors as the engine holds them. What its memory does not show is as `params` say."""
        values, left = values_held(self.layouts, self.loaded)
        used = {
            layout.tensors[int(t)].name
            for layout in self.layouts
            for t in layout.tensor
        }
        used |= {note.name for layout in self.layouts for note in layout.opaque}
        self.through_loader = {n: why for n, why in left.items() if n in used}
        if not left:
            return values
        given = params if params is not None else self.checkpoint()
        if (
            params is None
            and self.through_loader
            and self.pool.status(timeout=self.deadline)["version"]
        ):
            name, why = next(iter(self.through_loader.items()))
            raise ConfigError(
                f"{name} can't be read from the engine ({why}), and a sync has replaced what was loaded: it could not "
                "be restored",
                remedy="jv.certify(pool, params={checkpoint name: array}), or certify before the first sync",
            )
        for name in left:
            if name in given:
                values[name] = (
                    np.asarray(given[name])
                    .astype(values[name].dtype)
                    .reshape(values[name].shape)
                )
        return values

    def checkpoint(self) -> Mapping[str, Any]:
        from jvlab.layout._checkpoint import CheckpointValues

        found = CheckpointValues.of(self.pool.model)
        if found is None:
            raise ModelError(
                f"{self.pool.model} holds no weights to read",
                remedy="jv.certify(pool, params={...})",
            )
        return found

    def connect(self, faults: Faults | None = None, tree: Any = None) -> Link:
        """A link for these values, by default the checkpoint's tensors; it replaces the one before."""
        self.close()
        given = self.on_device("original") if tree is None else tree
        size = sum(a.nbytes for a in given.values())
        self._link = self._connections.connect(
            given,
            self.pool,
            "checkpoint",
            self._wanted,
            bucket_mib=min(16.0, max(size / BUCKETS / MIB, 1 / 64)),
            faults=None if faults is None else faults.wrap,
            meaning="off",
            timeout=self.deadline,
        )
        self._is_original = tree is None
        if tree is None:
            self.transport = self._link.transport
        senders = self._link._coordinator.senders
        self.no_direct = senders.no_direct if senders is not None else ""
        return self._link

    @property
    def link(self) -> Link:
        """The open link; connected again if a check replaced it."""
        link = self._link
        if link is None or link.closed or not self._is_original:
            return self.connect()
        return link

    def close(self) -> None:
        """Release the pool."""
        if self._link is not None and not self._link.closed:
            self._link.close()
        self._link = None

    # Values -------------------------------------------------------------------------------------------------------

    def values(self, which: str) -> Values:
        """A set of values by checkpoint name: "original", "known" or "other"."""
        if which not in self._sets:
            self._sets[which] = known_values(
                self._sets["original"], self.seed + SETS.index(which)
            )
        return self._sets[which]

    def expected(self, which: str) -> Memory:
        """The memory of all ranks with these values, as vLLM's own loader would leave it."""
        return as_loaded(self.layouts, self.values(which), self.loaded)

    def on_device(self, which: str | Mapping[str, Any]) -> dict[str, Any]:
        """The values where a trainer would have them: on the GPU for an engine there, else in host memory."""
        values = self.values(which) if isinstance(which, str) else which
        if self.device != "cuda":
            return dict(values)
        import jax

        return {name: jax.device_put(array) for name, array in values.items()}

    @property
    def mode(self) -> str:
        """The mode of syncs whose mode does not matter."""
        return "staged" if self.no_direct else "direct"

    def sync(self, which: str, mode: str | None = None) -> Any:
        """Sync a set of values; returns the report."""
        report = self.sync_values(self.values(which), mode)
        self.held = which
        return report

    def sync_values(self, values: Values, mode: str | None = None) -> Any:
        """Sync these values, by checkpoint name; returns the report."""
        self.held = None
        tree = self.on_device(values)
        return self.link.sync(
            tree, mode=mode or self.mode, progress=False, timeout=self.deadline.left()
        )

    def hold(self, which: str) -> None:
        """Make the pool serve these values, if it does not already."""
        if self.held != which:
            self.sync(which)

    def read(self, replica: int) -> Memory:
        """The memory of every parameter on every rank, read from the engine byte by byte."""
        out: Memory = {}
        for layout in self.layouts:
            for parameter in layout.parameters:
                if parameter.name in layout.reloaded:
                    self.unreadable[parameter.name] = (
                        f"{parameter.name} is what vLLM's own reload makes of it"
                    )
                if parameter.name in self.unreadable:
                    continue
                try:
                    out[layout.rank, parameter.name] = self.peek(
                        parameter, layout.rank, replica
                    )
                except Unsupported as error:
                    self.unreadable[parameter.name] = named_line(error)
        return out

    def peek(self, parameter: Parameter, rank: int, replica: int) -> np.ndarray:
        """The memory of one parameter, flat, of a replica by its place among those that are ready."""
        data = self.pool.peek(
            parameter.name, rank, replica=self._places[replica], timeout=self.deadline
        )
        return np.frombuffer(data, numpy_dtype(parameter.dtype))

    @property
    def version(self) -> int:
        """The pool's version now."""
        return int(self.pool.status(timeout=self.deadline)["version"])

    # Tokens -------------------------------------------------------------------------------------------------------

    def prompt(self, length: int, seed: int = 0) -> list[int]:
        """Random tokens; as many as the engine takes beside 16 new ones, if that is fewer."""
        drawn = np.random.default_rng([self.seed, seed, 7])
        room = max(1, int(self.facts.max_model_len) - 16)
        return drawn.integers(
            0, int(self.facts.vocab_size), max(1, min(length, room))
        ).tolist()

    def say(
        self,
        prompt: Sequence[int],
        replica: str = "",
        tokens: int = 8,
        seconds: float = 120.0,
    ) -> Sample:
        """One sample, drawn at temperature 1 with a fixed seed, on the given replica."""
        pool = self.pool
        within = Deadline(self.deadline.within(seconds))
        room = max(1, min(tokens, int(self.facts.max_model_len) - len(prompt) - 1))
        sampling = {
            "temperature": 1.0,
            "seed": self.seed,
            "ignore_eos": True,
            "max_tokens": room,
        }
        return pool.generate(
            [list(prompt)],
            replica=replica or None,
            progress=False,
            timeout=within,
            **sampling,
        )[0]

    def score(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        """Log-probabilities of the samples' tokens, computed in one pass over each whole sequence."""
        rows = [[*s.prompt_token_ids.tolist(), *s.token_ids.tolist()] for s in samples]
        scored = self.pool.score(rows, timeout=self.deadline)
        return [
            np.asarray(row[-len(s.token_ids) :])
            for row, s in zip(scored.logprobs, samples, strict=True)
        ]

    def gap(self, one: np.ndarray, other: np.ndarray) -> float:
        """Nats between two rows: the largest difference in float32, the mean in 16 bits, where single ones vary."""
        difference = np.abs(np.asarray(one, np.float64) - np.asarray(other, np.float64))
        return float(difference.mean() if self.half else difference.max())

    @property
    def tolerance(self) -> float:
        """Nats up to which two computations agree."""
        return (HALF if self.half else FULL)[0]

    def agree(self, one: np.ndarray, other: np.ndarray) -> bool:
        return self.gap(one, other) <= self.tolerance  # false for NaN


def first_line(error: JvlabError) -> str:
    return error.message.splitlines()[0][:300]


def named_line(error: JvlabError) -> str:
    return f"{type(error).__name__}: {first_line(error)}"
