"""Sending by CUDA IPC: kernels in this process write the plan's boxes directly into the engines' memory.

    IpcSenders(plan, replicas)  before the link is opened;   .replicas[name][rank].sender.endpoint() → LinkOpen
    .attach(exports)            map the memory the ranks exported (IpcExport.export), upload tables
    .send_all(...)              once per sync; returns when every byte is in the engines' memory
    .close()                    unmap everything; also after errors

Only the pointers of the JAX arrays change from sync to sync.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter, itemgetter, methodcaller
from typing import Any

import numpy as np

from jvlab._deadline import Deadline
from jvlab._errors import DeadlineExceeded, LayoutError, SyncError, TransportError
from jvlab.layout._digest import MASK
from jvlab.layout._plan import TransferPlan
from jvlab.layout._tree import Flattener, as_sent, flatten, is_distributed
from jvlab.sync._ipc_lanes import (
    Destination,
    Held,
    IpcJob,
    Lane,
    LanePart,
    Launch,
    Port,
    check_layouts,
    cuda_ordinal,
)
from jvlab.sync._pack import Source, check_like_connected
from jvlab.sync._quantise import Naming, sent_arrays, unchanged
from jvlab.sync._senders import Exports, Senders, Sent
from jvlab.sync._transaction import exports_of
from jvlab.transport._ipc_kernels import cupy
from jvlab.transport._ipc_memory import Mapped
from jvlab.transport._ipc_tables import link_pieces, whole_links
from jvlab.wire import jvlab_pb2 as pb

# A sync's arrays, checked against the plan in microseconds by remembering trees that passed before.
# `jvlab.sync._pack.Source` inspects every cell of every sharding each time, which takes longer than the whole copy.

KEPT = 4  # trees remembered: several programs may alternate
AVAL = attrgetter("aval")
SHARDING = attrgetter("sharding")
DELETED = methodcaller("is_deleted")
READY = methodcaller("is_ready")
READY_SAMPLE = 64  # every 64th array is asked whether it is ready


class Shards:
    """One version of the parameters, with the interface of `Source` that senders need."""

    def __init__(self, arrays: Mapping[str, Any], whole: bool) -> None:
        # whole: every array is on one device
        self._arrays = arrays
        self._whole = whole
        self.by_path = arrays  # the trainer's own, where what is sent differs
        # of leaves that are not finite, as `by_path` has them
        self.naming: Naming = unchanged
        self._pieces: dict[str, dict[int, Any]] = {}

    def shard(self, path: str, device: int) -> Any:
        """The leaf's shard on this device."""
        array = self._arrays[path]
        if self._whole or len(array.sharding.device_set) == 1:
            return array
        if path not in self._pieces:
            self._pieces[path] = {
                piece.device.id: piece.data for piece in array.addressable_shards
            }
        return self._pieces[path][device]

    def shards(self, paths: Sequence[str], device: int) -> Sequence[Any]:
        """The shards of several leaves."""
        return (
            _several(self._arrays, paths)
            if self._whole
            else [self.shard(p, device) for p in paths]
        )

    def memory(self, path: str, device: int) -> None:
        """None: these arrays are on a GPU."""

    @property
    def arrays(self) -> list[Any]:
        return list(self._arrays.values())

    def seem_ready(self) -> bool:
        """Is a sample of the arrays computed, the last included? One program's outputs become ready together."""
        arrays = self.arrays
        return all(map(READY, (*arrays[::READY_SAMPLE], *arrays[-1:])))


@dataclass(frozen=True)
class TreeSignature:
    """A tree's leaf classes, avals (shape and dtype) and shardings."""

    kinds: set[type]
    avals: tuple[Any, ...]
    shardings: tuple[Any, ...]

    @cached_property
    def whole(self) -> bool:
        """Is every leaf on a single device?"""
        return all(len(sharding.device_set) == 1 for sharding in self.shardings)


class TensorLeaves(Mapping[str, Any]):
    """Torch's tensors as the leaves of a tree, each made when it is asked for."""

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        self._tensors = tensors

    def __getitem__(self, path: str) -> Any:
        return flatten({path: self._tensors[path]}).arrays[path]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


class Tensors:
    """One version of torch's tensors, all whole or each this process's shard, with the interface of `Shards`."""

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        self.naming: Naming = unchanged
        self._tensors = tensors
        self.by_path = TensorLeaves(tensors)

    def shards(self, paths: Sequence[str], device: int) -> list[Any]:
        """These leaves' own memory; of one that is not contiguous, a copy on its GPU."""
        return [self._tensors[path].contiguous() for path in paths]

    def memory(self, path: str, device: int) -> None:
        """None: these tensors are on a GPU."""

    def settle(self) -> None:
        """Wait for all streams of their GPUs: which of them computes a tensor, nobody knows."""
        import torch

        for device in {t.device for t in self._tensors.values()}:
            if device.type == "cuda":
                torch.cuda.synchronize(device)


class KnownTensors:
    """Remembers the shapes of a tree of torch's tensors that matches the plan."""

    def __init__(self, plan: TransferPlan) -> None:
        self._plan = plan
        self._known: list[tuple[Any, ...]] = []

    def source(self, given: Any) -> Tensors:
        """The tensors that the plan reads; raises unless paths, shapes, dtypes and shardings match it."""
        named = given.state_dict() if hasattr(given, "state_dict") else given
        paths = [info.path for info in self._plan.leaves]
        try:
            ours = _several(named, paths)
            signature = tuple(map(_signature, ours))
        except (LookupError, AttributeError, TypeError):  # nested, or one is missing
            signature = None
        if signature is None or signature not in self._known:
            leaves = flatten(given).arrays
            check_like_connected(self._plan, leaves)
            found = {path: leaves[path].local for path in paths}
            if signature is not None:
                self._known = [signature, *self._known[: KEPT - 1]]
        else:
            found = {
                path: tensor.to_local() if is_distributed(tensor) else tensor
                for path, tensor in zip(paths, ours, strict=True)
            }
        return Tensors({path: t.detach() for path, t in found.items()})


def _signature(tensor: Any) -> tuple[Any, ...]:
    spread = getattr(tensor, "placements", None)
    return tensor.shape, tensor.dtype, tensor.device, type(tensor), spread


class KnownArrays:
    """Remembers the signatures of trees that match the plan.

    A program reuses its aval and sharding objects from step to step, and tuples compare by identity first.
    """

    def __init__(self, plan: TransferPlan) -> None:
        self._plan = plan
        self._paths = [info.path for info in plan.leaves]
        self._known: list[TreeSignature] = []

    def source(self, given: Mapping[str, Any]) -> Shards:
        """The arrays as `Shards`; raises unless paths, shapes, dtypes and shardings match the plan."""
        arrays, naming = sent_arrays(self._plan, given)
        source = self._matching(arrays)
        source.by_path = given
        source.naming = naming
        return source

    def _matching(self, arrays: Mapping[str, Any]) -> Shards:
        try:
            ours = _several(arrays, self._paths)
            kinds = set(map(type, ours))
            avals = tuple(map(AVAL, ours))
            shardings = tuple(map(SHARDING, ours))
        # a leaf is missing, or is not a JAX array
        except (LookupError, AttributeError):
            check_like_connected(self._plan, arrays)
            raise
        # extra leaves: tied ones are fine, new ones are an error
        if len(arrays) != len(self._paths):
            check_like_connected(self._plan, arrays)
        signature = TreeSignature(kinds, avals, shardings)
        deleted = next(iter(kinds)).is_deleted if len(kinds) == 1 else DELETED
        # try signatures with the identical last sharding object first: comparing equal but distinct objects is slow
        likely = sorted(
            self._known, key=lambda known: known.shardings[-1] is not shardings[-1]
        )
        match = next((known for known in likely if known == signature), None)
        if match is None or any(map(deleted, ours)):
            check_like_connected(self._plan, arrays)
        if match is None or match.shardings[-1] is not shardings[-1]:
            match = signature
            self._known = [signature, *self._known[: KEPT - 1]]
        return Shards(arrays, match.whole)


def _several(arrays: Mapping[str, Any], paths: Sequence[str]) -> Sequence[Any]:
    return (
        itemgetter(*paths)(arrays)
        if len(paths) > 1
        else [arrays[path] for path in paths]
    )


# ----------------------------------------------------------------------------------------------------

TABLES_KEPT = 8
POINTER = methodcaller("unsafe_buffer_pointer")
# busy-wait for the device this long before sleeping: a sync takes milliseconds
SPIN_SECONDS = 0.05


@dataclass(eq=False)
class Gathered:
    """A source's arrays, kept alive, and their pointers; the launches too, if their destination is known."""

    source: Any
    held: Held
    pointers: dict[LanePart, np.ndarray]
    seconds: float
    launches: list[Launch] = field(default_factory=list)
    digest: bool | None = None
    staged: bool | None = None


class IpcSenders(Senders):
    """The ranks that one trainer process writes to. `ordinal` maps a device of the plan to its CUDA ordinal."""

    no_delta = "ipc writes the engine's memory in one pass, without buckets"

    def __init__(
        self,
        plan: TransferPlan,
        replicas: dict[str, int],
        *,
        process: int | None = None,
        ordinal: Callable[[int], int] | None = None,
        torch: bool = False,
    ) -> None:
        super().__init__(plan, replicas)
        self._ordinal = ordinal or cuda_ordinal
        self._tensors = KnownTensors(plan) if torch else None
        self._arrays, self._flattener = KnownArrays(plan), Flattener()
        # whether the next send_all writes shadow buffers or live memory
        self.staged = False
        self._streams: dict[int, Any] = {}
        self._closed = self._checked = False
        self._early: Gathered | None = None
        self._running: list[Launch] = []
        self._uploaded: dict[Lane, dict[bytes, Any]] = {}
        mine = (
            None
            if process is None
            else [int(d) for d in plan.devices if plan.process_of(int(d)) == process]
        )
        self.channels = [
            Port(name, rank, self._lanes(rank, index, mine))
            for name, index in replicas.items()
            for rank in range(plan.ranks)
        ]

    def _lanes(self, rank: int, index: int, devices: list[int] | None) -> list[Lane]:
        out = []
        for link in whole_links(self.plan, rank, index, devices):
            leaves = {
                int(leaf): k for k, leaf in enumerate(np.unique(link.leaf).tolist())
            }
            numbers = np.unique(link.target).tolist()
            pieces = link_pieces(
                self.plan, link, leaves, {t: k for k, t in enumerate(numbers)}
            )
            paths = [self.plan.leaves[leaf].path for leaf in leaves]
            out.append(
                Lane(
                    link.device,
                    self._ordinal(link.device),
                    paths,
                    numbers,
                    pieces,
                    link.total_bytes,
                )
            )
        return out

    @property
    def total_bytes(self) -> int:
        return sum(port.nbytes for port in self.channels)

    def source(self, params: Any) -> Shards | Tensors:
        """Like `Source.of(plan, params)`, but much faster."""
        if self._tensors is not None:
            return self._tensors.source(as_sent(params))
        return self._arrays.source(self._flattener.arrays(as_sent(params)))

    # Opening ------------------------------------------------------------------------------------------------------

    def open(
        self, order: Callable[[], pb.LinkReply], deadline: Deadline
    ) -> pb.LinkReply:
        reply = order()
        exports = exports_of(reply)
        self.no_direct = next(
            (
                e["no_direct"]
                for ranks in exports.values()
                for e in ranks
                if "no_direct" in e
            ),
            "",
        )
        if not self.no_direct:
            self.attach(exports)
            self.ready(0.0)
        return reply

    def attach(self, exports: Exports) -> None:
        """Map the memory that ranks exported, live or shadow; replaces earlier mappings."""
        ports = {(port.replica, port.rank): port for port in self.channels}
        if exports and self._early is not None:
            # its launches point to the mappings that are replaced now
            self._early.digest = None
        try:
            for replica, plain in (
                (name, e) for name, many in exports.items() for e in many
            ):
                port = ports.get((replica, int(plain["rank"])))
                if port is None or plain["plan"] != self.plan.digest:
                    raise SyncError(
                        f"rank {plain['rank']} of {replica} exported its memory for another plan",
                        remedy="connect again",
                    )
                for lane in port.lanes:
                    self._attach(port, lane, plain)
        except BaseException:
            self.close()
            raise

    def _attach(self, port: Port, lane: Lane, plain: dict[str, Any]) -> None:
        key = (bool(plain["staged"]), lane.ordinal)
        place = {int(t): where for t, *where in plain["targets"]}
        missing = [t for t in lane.numbers if t not in place]
        if missing:
            raise LayoutError(
                f"rank {port.rank} of {port.replica} exported no memory for targets {missing[:3]}"
            )
        if key in port.into:
            port.into.pop(key).mapped.close()
        mapped = Mapped(plain, lane.ordinal, f"rank {port.rank} of {port.replica}")
        try:
            cp = cupy()
            with cp.cuda.Device(lane.ordinal):
                pointers = np.array(
                    [mapped.pointer(place[t]) for t in lane.numbers], np.uint64
                )
                if lane.ordinal not in self._streams:
                    self._streams[lane.ordinal] = cp.cuda.Stream(non_blocking=True)
                targets = cp.asarray(pointers)
                cp.cuda.get_current_stream().synchronize()
            aligned = not (pointers % 16).any()
            for part in lane.parts:
                lane.launcher(bool(aligned), part=part).warm()
            port.into[key] = Destination(
                mapped,
                targets,
                bool(aligned),
                mapped.pointer(plain["permit"]),
                int(plain["token"]),
            )
        except BaseException:
            mapped.close()
            raise

    def ready(self, seconds: float) -> None:
        """Raise unless every rank's memory is mapped."""
        if self._closed:
            raise TransportError("these senders are closed", remedy="connect again")
        for port in self.channels:
            for lane in port.lanes:
                self._destination(port, lane, False)

    def _destination(self, port: Port, lane: Lane, staged: bool) -> Destination:
        try:
            return port.into[staged, lane.ordinal]
        except KeyError:
            what = "shadow memory" if staged else "memory"
            raise TransportError(
                f"rank {port.rank} of {port.replica} has not exported its {what}",
                remedy="open the link again"
                if not staged
                else "prepare a staged sync first",
            ) from None

    def release_shadows(self) -> None:
        """Unmap the shadow buffers before the engines free them; the next staged sync exports new ones."""
        for stream in self._streams.values():
            stream.synchronize()
        for port in self.channels:
            for key in [key for key in port.into if key[0]]:
                port.into.pop(key).mapped.close()

    # One sync -----------------------------------------------------------------------------------------------------

    def send(
        self,
        job: IpcJob,
        channel: Port,
        source: Source | Shards | Tensors,
        version: int,
        seconds: float,
        sent: Sent,
        digest: bool,
    ) -> None:
        """Write one target to one rank and wait; its digest is added to `sent`."""
        if self._closed or job.lane not in channel.lanes:
            raise TransportError(
                "these senders are closed, or the job belongs to another rank",
                remedy="connect again",
            )
        until = time.monotonic() + seconds
        try:
            self._early, gathered = None, self._pointers(source, [job.lane.whole])
            sent.seconds["pack"] += gathered.seconds
            check_layouts(gathered.held)
            self._launch(
                self._launches(gathered.pointers, digest, job), version, until, sent
            )
            with sent.timed("copy"):
                self._wait(until)
                self.collect(sent)
            del gathered
        except BaseException:
            self.close()
            raise

    def send_all(
        self,
        source: Source | Shards | Tensors,
        version: int,
        seconds: float,
        digest: bool = True,
        progress: Callable[[Sent], None] = lambda _: None,
        collect: bool = True,
    ) -> Sent:
        """Write every box to every rank; returns when all of it is visible to the engines.

        Without `collect`, refused writes and digests are left for `collect()`.
        """
        if self._closed:
            raise TransportError("these senders are closed", remedy="connect again")
        until = time.monotonic() + seconds
        start = time.perf_counter()
        sent = Sent()
        try:
            early = self._early
            self._early = None
            held: Held = []
            for number in range(self._part_count):
                gathered = (
                    early
                    if number == 0 and early is not None and early.source is source
                    else None
                )
                gathered = gathered or self._pointers(source, self._parts(number))
                sent.seconds["pack"] += gathered.seconds
                held += gathered.held
                if not self._checked:
                    check_layouts(gathered.held)
                ready = (gathered.digest, gathered.staged) == (digest, self.staged)
                launches = (
                    gathered.launches
                    if ready
                    else self._launches(gathered.pointers, digest)
                )
                self._launch(launches, version, until, sent, cleared=ready)
                del gathered
            with sent.timed("copy"):
                if self._checked:
                    # takes a third of the copy's time, so it runs during the copy
                    check_layouts(held)
                self._checked = True
                self._wait(until)
            del held  # nothing reads the arrays any more: JAX may free them
            if collect:
                self.collect(sent)
        except BaseException:
            # waits for running kernels before arrays or mappings are released
            self.close()
            raise
        sent.seconds["move"] = sent.seconds["sent"] = time.perf_counter() - start
        progress(sent)
        return sent

    def collect(self, sent: Sent) -> None:
        """Read the kernels' results: refused blocks (an error), digests, non-finite leaves."""
        running = self._running
        self._running = []
        for launch in running:
            stream = self._streams[launch.lane.ordinal]
            if refused := launch.launcher.refused(stream):
                self.close()
                raise TransportError(
                    f"rank {launch.port.rank} of {launch.port.replica} revoked write access ({refused} blocks were "
                    "refused): it abandoned the sync in the meantime",
                    remedy="sync again",
                )
            if launch.digest:
                sums = launch.launcher.sums(stream).tolist()
                sent.add_digests(dict(zip(launch.lane.numbers, sums, strict=True)))
            for slot in launch.launcher.flawed(stream):
                sent.flawed |= launch.lane.feeding(slot)

    def settle_jobs(
        self, jobs: Iterable[IpcJob], channel: Port, sent: Sent, seconds: float
    ) -> None:
        """Nothing to do: `send` has waited and collected already."""

    def settle(self, source: Source | Shards | Tensors, staged: bool) -> None:
        """Wait until the arrays seem to be computed; `gather` waits for the rest."""
        self.staged = staged
        if isinstance(source, Tensors):
            source.settle()
        elif isinstance(source, Shards) and not source.seem_ready():
            import jax

            jax.block_until_ready(source.arrays)

    @property
    def _part_count(self) -> int:
        return max(
            (len(lane.parts) for port in self.channels for lane in port.lanes),
            default=0,
        )

    def _parts(self, number: int) -> list[LanePart]:
        """Part `number` of every lane that has one."""
        return [
            p
            for port in self.channels
            for lane in port.lanes
            for p in lane.parts[number : number + 1]
        ]

    def gather(self, source: Source | Shards | Tensors, digest: bool) -> None:
        """Prepare the first launches of `send_all` while the engine is waited for."""
        gathered = self._pointers(source, self._parts(0))
        if all(
            (self.staged, lane.ordinal) in port.into
            for port in self.channels
            for lane in port.lanes
        ):
            gathered.launches = self._launches(gathered.pointers, digest)
            gathered.digest = digest
            gathered.staged = self.staged
            for launch in gathered.launches:
                launch.launcher.clear(self._streams[launch.lane.ordinal])
        self._early = gathered

    def _pointers(
        self, source: Source | Shards | Tensors, parts: Iterable[LanePart]
    ) -> Gathered:
        """Wait for these parts' arrays, keep them alive, and look up their pointers."""
        start = time.perf_counter()
        held: Held = []
        pointers: dict[LanePart, np.ndarray] = {}
        for part in parts:
            if isinstance(source, Source):
                arrays = [source.shard(path, part.lane.device) for path in part.leaves]
            else:
                arrays = source.shards(part.leaves, part.lane.device)
            held.append((part.leaves, arrays))
            pointers[part] = part.table(_located(source, arrays))
        return Gathered(source, held, pointers, time.perf_counter() - start)

    def _launches(
        self,
        pointers: dict[LanePart, np.ndarray],
        digest: bool,
        only: IpcJob | None = None,
    ) -> list[Launch]:
        ports = {id(lane): port for port in self.channels for lane in port.lanes}
        target = only.target if only is not None else None
        out = []
        for part, table in pointers.items():
            lane = part.lane
            port = ports[id(part.lane)]
            destination = self._destination(port, lane, self.staged)
            aligned = destination.aligned and not int(np.bitwise_or.reduce(table)) % 16
            launcher = lane.launcher(aligned, target=target, part=part)
            sources = self._upload(lane, table, self._streams[lane.ordinal])
            digested = digest and port.replica == self.digest_replica
            out.append(Launch(port, lane, launcher, destination, sources, digested))
        return out

    def _launch(
        self,
        launches: list[Launch],
        version: int,
        until: float,
        sent: Sent,
        cleared: bool = False,
    ) -> None:
        for launch in launches:
            # a process that was suspended in the meantime must not write now
            if time.monotonic() >= until:
                raise _deadline_passed(launch.port)
            launch.launcher.launch(
                self._streams[launch.lane.ordinal],
                launch.sources,
                launch.into.targets,
                digest=launch.digest,
                permit=launch.into.permit,
                version=launch.into.token + version,
                cleared=cleared,
            )
            self._running.append(launch)
            sent.bytes += launch.launcher.nbytes
            sent.buckets += 1

    def _upload(self, lane: Lane, pointers: np.ndarray, stream: Any) -> Any:
        """A pointer table on the device. The last few are cached: with donation, buffers alternate between trees."""
        known = self._uploaded.setdefault(lane, {})
        key = pointers.tobytes()
        if key in known:
            return known[key]
        cp = cupy()
        with cp.cuda.Device(lane.ordinal), stream:
            out = cp.empty(len(pointers), np.uint64)
            out.set(pointers, stream=stream)
        known[key] = out
        while len(known) > TABLES_KEPT:
            known.pop(next(iter(known)))
        return out

    def _wait(self, until: float) -> None:
        begun = time.monotonic()
        for stream in self._streams.values():
            while not stream.done:
                now = time.monotonic()
                if now >= until:
                    raise DeadlineExceeded(
                        "the sync's deadline passed while the copy kernels ran",
                        remedy="pass a larger timeout=",
                    )
                if now - begun > SPIN_SECONDS:
                    time.sleep(0.0005)

    def digests(self, source: Source | Shards | Tensors) -> dict[int, int]:
        """By target, the digests the replica would hold if these parameters were sent; writes nothing."""
        lanes = [
            lane
            for port in self.channels
            if port.replica == self.digest_replica
            for lane in port.lanes
        ]
        gathered = self._pointers(source, [lane.whole for lane in lanes])
        check_layouts(gathered.held)
        out: dict[int, int] = {}
        for part, table in gathered.pointers.items():
            lane = part.lane
            with cupy().cuda.Device(lane.ordinal):
                if lane.ordinal not in self._streams:
                    self._streams[lane.ordinal] = cupy().cuda.Stream(non_blocking=True)
                stream = self._streams[lane.ordinal]
                # nothing is written
                no_targets = cupy().asarray(np.zeros(len(lane.numbers), np.uint64))
            launcher = lane.launcher(not (table % 16).any(), write=False)
            launcher.launch(stream, self._upload(lane, table, stream), no_targets)
            for t, value in zip(
                lane.numbers, launcher.sums(stream).tolist(), strict=True
            ):
                out[t] = (out.get(t, 0) + value) & MASK
        del gathered
        return out

    def close(self) -> None:
        """Wait for running kernels, then unmap all memory. Can be called twice."""
        self._closed = True
        self._early = None
        self._running = []
        for stream in self._streams.values():
            # a broken CUDA context holds nothing any more
            with contextlib.suppress(Exception):
                stream.synchronize()
        for port in self.channels:
            while port.into:
                port.into.popitem()[1].mapped.close()


def _located(source: Source | Shards | Tensors, arrays: Sequence[Any]) -> list[int]:
    """Pointers to arrays that are computed by now."""
    if isinstance(source, Tensors):
        source.settle()
        return [tensor.data_ptr() for tensor in arrays]
    import jax

    jax.block_until_ready(arrays)
    return list(map(POINTER, arrays))


def _deadline_passed(port: Port) -> DeadlineExceeded:
    return DeadlineExceeded(
        f"the sync's deadline passed before rank {port.rank} of {port.replica} was written",
        remedy="pass a larger timeout=",
    )
