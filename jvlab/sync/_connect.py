"""What a trainer and a pool agree on before the first sync: libraries, layout, plan, transport."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jvlab._deadline import Deadline
from jvlab._errors import ConfigError, LayoutError, SyncError, Unsupported
from jvlab._version import __version__
from jvlab.layout._layout_codec import layout_to_plain, plain_to_bytes
from jvlab.layout._tree import flatten
from jvlab.sync._meaning import MeaningCheck, Scorer
from jvlab.wire import jvlab_pb2 as pb

if TYPE_CHECKING:
    from jvlab.lab._pool import Pool
    from jvlab.layout._plan import TransferPlan
    from jvlab.layout._types import RankLayout
    from jvlab.planning._mapping import Mapping
    from jvlab.sync._bucket_senders import SendingChannel
    from jvlab.sync._ipc_lanes import Port
    from jvlab.transport._channel import Sender

ALIKE = ("vllm_version", "vllm_build", "dtype", "architecture", "vocab_size")  # facts that replicas must share
CONNECT_SECONDS = 900.0  # for a pool that is still coming up, too
SLOTS = 3  # buckets in flight to a rank: one filled, one on its way, one emptied


@dataclass
class Agreement:
    """What was agreed; replicas that come later must fit it."""

    plan: TransferPlan
    mapping: Mapping
    transport: str
    reason: str
    layouts: bytes = field(repr=False)  # of the first replica, as they cross the wire
    facts: dict[str, str]
    options: dict[str, Any] = field(default_factory=dict)
    checked: dict[str, int] = field(default_factory=dict)  # replica -> epoch at which it was found to fit
    meaning: MeaningCheck = field(init=False, repr=False)  # of this mapping, for every link that follows it

    def __post_init__(self) -> None:
        self.meaning = MeaningCheck(self)

    def check_replica(self, pool: Pool, name: str, epoch: int, deadline: Deadline) -> None:
        """A replica that was not seen before must be built like the first one; it is traced to find out."""
        if self.checked.get(name) == epoch:
            return
        theirs = facts_of(pool, name)
        compare(self.facts, theirs, f"the pool's first replica and {name}")
        layouts = pool.trace(self.mapping_tensors, replica=name, timeout=deadline)
        if layouts_bytes(layouts) != self.layouts:
            raise LayoutError(
                f"{name} keeps its parameters in another layout than the replica this link was planned for",
                remedy="connect anew: link = lab.connect(params, pool)",
                replica=name,
            )
        self.checked[name] = epoch

    @property
    def mapping_tensors(self) -> list[Any]:
        return list(self.mapping._layouts[0].tensors)


def layouts_bytes(layouts: list[RankLayout]) -> bytes:
    """Layouts as bytes that are equal exactly when the layouts are."""
    return b"".join(plain_to_bytes(layout_to_plain(layout)) for layout in layouts)


def ready_replicas(pool: Pool, deadline: Deadline) -> dict[str, tuple[int, int]]:
    """Name -> (place in the pool, epoch) of every replica that is ready; waits for a pool that is coming up."""
    pool._facts(deadline)
    snapshot = pool._snapshot
    return {r.replica: (i, r.epoch) for i, r in enumerate(snapshot.replicas) if r.state == pb.READY}


def facts_of(pool: Pool, name: str) -> dict[str, str]:
    """What a replica's engine is, as far as replicas must agree."""
    for replica in pool._snapshot.replicas:
        if replica.replica == name:
            return {key: str(getattr(replica.facts, key)) for key in ALIKE}
    raise SyncError(f"no replica is called {name!r}", remedy="pool.status() shows who is there")


def compare(one: dict[str, str], other: dict[str, str], who: str) -> None:
    """One error that names both values of everything that differs."""
    differing = [f"{key}: {one[key]!r} and {other[key]!r}" for key in one if one[key] != other[key]]
    if differing:
        raise SyncError(
            f"{who} do not fit together: " + "; ".join(differing), remedy="launch both sides with the same versions"
        )


def negotiate(
    params: Any,
    pool: Pool,
    rules: Any,
    transport: str,
    bucket_mib: float,
    options: dict[str, Any],
    cache: dict[Any, Agreement],
    gateway_version: str,
    same_host: bool,
    alone: bool = True,
    deadline: Deadline | None = None,
) -> Agreement:
    """Everything that can be settled before a byte moves; raises one error that says what does not fit."""
    from jvlab.checkpoint._config import read_config
    from jvlab.checkpoint._tensors import checkpoint_tensors
    from jvlab.checkpoint._values import CheckpointValues
    from jvlab.planning._compile_tree import compile_tree
    from jvlab.planning._mapping import Mapping

    deadline = deadline or Deadline(CONNECT_SECONDS)
    compare({"jvlab": __version__}, {"jvlab": gateway_version}, "this process and the gateway")
    flat = flatten(params)
    replicas = ready_replicas(pool, deadline)
    first = next(iter(replicas))
    key = _key(flat.arrays, pool, replicas, rules, transport, bucket_mib, options, alone)
    if key is not None and key in cache:
        return cache[key]
    tensors = checkpoint_tensors(pool.model)
    layouts = pool.trace(tensors, replica=first, timeout=deadline)
    mapping = compile_tree(
        Mapping,
        params,
        read_config(pool.model),
        tensors,
        layouts,
        pool.replicas,
        None,
        rules,
        bucket_mib,
        title=Path(pool.model).name,
        checkpoint=CheckpointValues.of(pool.model),
    )
    plan = mapping.plan
    name, reason = _choose(
        transport, same_host, flat.arrays, plan, len(replicas), pool._snapshot.device, pool._one_process, alone
    )
    agreed = Agreement(
        plan, mapping, name, reason, layouts_bytes(layouts), facts_of(pool, first), options, {first: replicas[first][1]}
    )
    for other, (_, epoch) in replicas.items():
        agreed.check_replica(pool, other, epoch, deadline)
    if key is not None:
        cache[key] = agreed
    return agreed


def check_meaning(agreed: Agreement, params: Any, pool: Pool, way: str, checkpoint: Any, scorer: Scorer | None) -> None:
    """Look for the trainer's numbers in the checkpoint before anything is written; see `_meaning.py`."""
    agreed.meaning.ask(way, checkpoint, scorer)
    agreed.meaning.by_value(flatten(params).arrays, pool.model)


def _key(arrays: Any, pool: Pool, replicas: Any, *rest: Any) -> Any:
    """What two connects must share to share their plan; None if a part of it can't be compared."""
    leaves = tuple((p, tuple(a.shape), str(a.dtype), getattr(a, "sharding", None)) for p, a in arrays.items())
    key = (pool.name, tuple(replicas.items()), leaves, *(repr(part) for part in rest))
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _choose(
    wanted: str,
    same_host: bool,
    arrays: Any,
    plan: TransferPlan,
    replicas: int,
    engine: str,
    one_process: bool,
    alone: bool = True,
) -> tuple[str, str]:
    """The transport's name and why; a choice that can't work here is refused."""
    from importlib.util import find_spec

    from jvlab.layout._torch_leaf import TorchLeaf
    from jvlab.transport._choose import choose, in_one_process
    from jvlab.transport._host_memory import available_bytes

    platforms = {d.platform for a in arrays.values() for d in getattr(a, "devices", set)()}
    device = next(iter(platforms - {"cpu"}), "cpu")
    need = plan.bucket_bytes * SLOTS * plan.ranks * replicas
    no_ipc = _no_ipc(plan) if engine == "cuda" or wanted == "ipc" else ""
    if engine == "cuda" and any(isinstance(a, TorchLeaf) for a in arrays.values()):
        raise Unsupported(
            "torch tensors cross host memory, and this engine's weights are on a GPU",
            remedy="hand them over as JAX arrays: {name: jax.dlpack.from_dlpack(t) for name, t in state_dict.items()} "
            'copies nothing; or launch with device="cpu"',
        )
    if not alone:
        no_ipc = "the parameters lie in several trainer processes, and ipc writes from one"
        if one_process:
            raise ConfigError(
                "an engine in the trainer's own process, and a trainer of several processes",
                remedy="launch the engine in a lab: lab.launch(model)",
            )
    if one_process:
        return in_one_process(wanted, device, engine, no_ipc)
    return choose(wanted, same_host, device, find_spec("torch") is not None, available_bytes(), need, engine, no_ipc)


def _no_ipc(plan: TransferPlan) -> str:
    """Why kernels of ours can't write what this plan writes; empty if they can."""
    from importlib.util import find_spec

    from jvlab.transport._ipc_tables import program_of, refuse_other_kinds

    if find_spec("cupy") is None:
        return "cupy is not installed here (pip install cupy-cuda12x or cupy-cuda13x)"
    try:
        refuse_other_kinds(plan, range(len(plan.target_parameter)))
        for transform in plan.transforms:
            program_of(transform, "rows")
    except Unsupported as error:
        return error.message
    return ""


def listen(agreed: Agreement, room: int, replica: str, rank: int) -> Sender:
    """One channel's sending end."""
    from jvlab.transport._choose import listen

    return listen(agreed.transport, slot_bytes=room, slots=SLOTS, peer=f"rank {rank} of {replica}", **agreed.options)


def ranks_json(channels: Sequence[SendingChannel | Port]) -> list[str]:
    """Per rank, the JSON list of its channels' endpoints: one, as one trainer process sends."""
    return [json.dumps([channel.sender.endpoint()]) for channel in channels]
