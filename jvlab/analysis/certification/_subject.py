"""`Subject`: the pool that is certified, and what the checks do with it: sync values, read memory, sample, score."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jvlab._deadline import Deadline
from jvlab._errors import ConfigError, JvlabError, LayoutError, ModelError, Unsupported
from jvlab._version import __version__
from jvlab.analysis.certification._known_values import Memory, Values, as_loaded, known_values, values_held
from jvlab.layout._plan_types import numpy_dtype
from jvlab.sync import _connect
from jvlab.sync._link import Link
from jvlab.sync._meaning_scores import FULL, HALF
from jvlab.transport._faults import Faults
from jvlab.wire import jvlab_pb2 as pb

if TYPE_CHECKING:
    from jvlab.lab._pool import Pool
    from jvlab.layout._types import Parameter
    from jvlab.record._sample import Sample

BUCKETS = 6  # a small model is cut into about so many, so that a sync can fail between two of them
MIB = 2**20
REFUSALS = (ConfigError, Unsupported, LayoutError)  # raised before anything was written
SETS = ("original", "known", "other")  # of values


class Subject:
    """A pool, the values that it held at first, and a link of its own.

    `refused` says why no link to it can be made; the checks that need one do not apply then.
    """

    def __init__(self, pool: Pool, deadline: Deadline, transport: str = "auto", seed: int = 0) -> None:
        self.pool, self.deadline, self.seed = pool, deadline, seed
        self.facts: Any = pool._facts(deadline)
        self.device: str = pool._snapshot.device
        ready = [(i, r.replica) for i, r in enumerate(pool._snapshot.replicas) if r.state == pb.READY]
        self.replicas, self._places = [name for _, name in ready], [place for place, _ in ready]
        self.half = self.facts.dtype != "float32" or bool(self.facts.quantization)
        self.refused = self.no_direct = ""
        self.given: Mapping[str, Any] | None = None  # what the caller says that the pool serves
        self.began_with = 0  # the pool's version at the beginning
        self.verified: Any = None  # the report of a link of this process, if one has synced this pool
        self.unreadable: dict[str, str] = {}  # parameter -> why its memory can't be read
        self.through_loader: dict[str, str] = {}  # tensor -> why only vLLM's own loader can place it
        self.layouts: list[Any] = []
        self.loaded: Memory = {}  # what the first replica held
        self._sets: dict[str, Values] = {}
        self.held: str | None = "original"  # the set of values that the pool serves; None: unknown
        self._transport = transport
        self._link: Link | None = None
        self._agreed: Any = None

    # The link -----------------------------------------------------------------------------------------------------

    def open(self, params: Mapping[str, Any] | None = None) -> None:
        """Read what the pool holds, and connect to it."""
        self.given = params
        self.began_with = self.version
        for link in list(self.pool._linked):
            if self.began_with and link.version == self.began_with:
                self.verified = link.verify(timeout=self.deadline)
            link.let_go(self.deadline)
        try:
            self.layouts = self.pool.trace(timeout=self.deadline)
            self.loaded = self.read(0)
            self._sets["original"] = self._originals(params)
            self.connect()
        except REFUSALS as error:
            self.refused = f"no link to this engine: {_first_line(error)}"

    def _originals(self, params: Mapping[str, Any] | None) -> Values:
        """The checkpoint's tensors as the engine holds them. What its memory does not show is as `params` say."""
        values, left = values_held(self.layouts, self.loaded)
        used = {layout.tensors[int(t)].name for layout in self.layouts for t in layout.tensor}
        self.through_loader = {n: why for n, why in left.items() if n in used or "memory" not in why}
        if not left:
            return values
        given = params if params is not None else self.checkpoint()
        if params is None and self.through_loader and self.pool.status(timeout=self.deadline)["version"]:
            name, why = next(iter(self.through_loader.items()))
            raise ConfigError(
                f"{name} can't be read from the engine ({why}), and a sync has replaced what was loaded: it could not "
                "be restored",
                remedy="jv.certify(pool, params={checkpoint name: array}), or certify before the first sync",
            )
        for name in left:
            if name in given:
                values[name] = np.asarray(given[name]).astype(values[name].dtype).reshape(values[name].shape)
        return values

    def checkpoint(self) -> Mapping[str, Any]:
        from jvlab.layout.checkpoint._values import CheckpointValues

        found = CheckpointValues.of(self.pool.model)
        if found is None:
            raise ModelError(f"{self.pool.model} holds no weights to read", remedy="jv.certify(pool, params={...})")
        return found

    def connect(self, faults: Faults | None = None, tree: Any = None) -> Link:
        """A link for these values, by default the checkpoint's tensors; it replaces the one before."""
        self.close()
        wrap = None if faults is None else faults.wrap
        if tree is not None or self._agreed is None:
            agreed = self._negotiate(self.on_device("original") if tree is None else tree)
            if tree is None:
                self._agreed = agreed
        else:
            agreed = self._agreed
        self._link = Link(self.pool, agreed, "direct", wrap, lambda _: None, deadline=self.deadline)
        senders = self._link._channels.senders
        self.no_direct = senders.no_direct if senders is not None else ""
        return self._link

    def _negotiate(self, tree: Any) -> Any:
        from jvlab.lab import _scaling

        pool, version, near, options = self.pool, __version__, True, {}
        if not pool._one_process:
            gateway = pool._client.call("Describe", pb.DescribeRequest(), self.deadline)
            version, near = gateway.version, _scaling.on_this_host(pool, gateway.host or platform.node())
            options = {} if near else _scaling.reachable({}, pool._client.address)
        size = sum(a.nbytes for a in tree.values())
        bucket_mib = min(16.0, max(size / BUCKETS / MIB, 1 / 64))
        rest = self._transport, bucket_mib, options, {}, version
        agreed = _connect.negotiate(tree, pool, "checkpoint", *rest, same_host=near, deadline=self.deadline)
        _connect.check_meaning(agreed, tree, pool, "off", None, None)
        return agreed

    @property
    def link(self) -> Link:
        """The open link; connected again if a check replaced it."""
        if self._link is None or self._link.closed or self._link._agreed is not self._agreed:
            self.connect()
        assert self._link is not None
        return self._link

    def close(self) -> None:
        """Release the pool."""
        if self._link is not None and not self._link.closed:
            self._link.close()
        self._link = None

    # Values -------------------------------------------------------------------------------------------------------

    def values(self, which: str) -> Values:
        """A set of values by checkpoint name: "original", "known" or "other"."""
        if which not in self._sets:
            self._sets[which] = known_values(self._sets["original"], self.seed + SETS.index(which))
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
        return self.link.sync(tree, mode=mode or self.mode, progress=False, timeout=self.deadline.left())

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
                    self.unreadable[parameter.name] = f"{parameter.name} is what vLLM's own reload makes of it"
                if parameter.name in self.unreadable:
                    continue
                try:
                    out[layout.rank, parameter.name] = self.peek(parameter, layout.rank, replica)
                except Unsupported as error:
                    self.unreadable[parameter.name] = _first_line(error)
        return out

    def peek(self, parameter: Parameter, rank: int, replica: int) -> np.ndarray:
        """The memory of one parameter, flat, of a replica by its place among those that are ready."""
        data = self.pool.peek(parameter.name, rank, replica=self._places[replica], timeout=self.deadline)
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
        return drawn.integers(0, int(self.facts.vocab_size), max(1, min(length, room))).tolist()

    def say(self, prompt: Sequence[int], replica: str = "", tokens: int = 8, seconds: float = 120.0) -> Sample:
        """One sample, drawn at temperature 1 with a fixed seed, on the given replica."""
        pool, within = self.pool, Deadline(self.deadline.within(seconds))
        room = max(1, min(tokens, int(self.facts.max_model_len) - len(prompt) - 1))
        sampling = {"temperature": 1.0, "seed": self.seed, "ignore_eos": True, "max_tokens": room}
        start = pool._start([list(prompt)], 1, 0, sampling, deadline=within)
        start.home = replica
        return pool._client.loop.run(pool._collect(start, [list(prompt)], False, within))[0]

    def score(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        """Log-probabilities of the samples' tokens, computed in one pass over each whole sequence."""
        rows = [[*s.prompt_token_ids.tolist(), *s.token_ids.tolist()] for s in samples]
        scored = self.pool.score(rows, timeout=self.deadline)
        return [np.asarray(row[-len(s.token_ids) :]) for row, s in zip(scored.logprobs, samples, strict=True)]

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


def _first_line(error: JvlabError) -> str:
    return f"{type(error).__name__}: {error.message.splitlines()[0][:300]}"
