"""What a trainer and a pool agree on before the first sync: libraries, layout, plan, transport."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jvlab._errors import ConfigError, LayoutError, SyncError, Unsupported
from jvlab.control import jvlab_pb2 as pb
from jvlab.layout._tree import flatten
from jvlab.layout._wire import layout_to_plain, plain_to_bytes

if TYPE_CHECKING:
    from jvlab._pool import Pool
    from jvlab.layout._mapping import Mapping
    from jvlab.layout._plan import TransferPlan
    from jvlab.layout._types import RankLayout
    from jvlab.trainer._outlet import Channel
    from jvlab.transport._channel import Sender
    from jvlab.transport._ipc_lanes import Port

ALIKE = ("vllm_version", "vllm_build", "dtype", "architecture", "vocab_size")  # facts that replicas must share
SLOTS = 3  # buckets in flight to a rank: one filled, one on its way, one emptied
TRACE_SECONDS = 300.0


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

    def check_replica(self, pool: Pool, name: str, epoch: int) -> None:
        """A replica that was not seen before must be built like the first one; it is traced to find out."""
        if self.checked.get(name) == epoch:
            return
        theirs = facts_of(pool, name)
        compare(self.facts, theirs, f"the pool's first replica and {name}")
        layouts = pool.trace(self.mapping_tensors, replica=name, timeout=TRACE_SECONDS)
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


def ready_replicas(pool: Pool) -> dict[str, tuple[int, int]]:
    """Name -> (place in the pool, epoch) of every replica that is ready; waits for a pool that is coming up."""
    pool._facts()
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
) -> Agreement:
    """Everything that can be settled before a byte moves; raises one error that says what does not fit."""
    import jvlab
    from jvlab._plan_api import compile_from, read_config
    from jvlab.rollout._checkpoint import checkpoint_tensors
    from jvlab.rollout._checkpoint_values import CheckpointValues

    compare({"jvlab": jvlab.__version__}, {"jvlab": gateway_version}, "this process and the gateway")
    flat = flatten(params)
    replicas = ready_replicas(pool)
    first = next(iter(replicas))
    key = _key(flat.arrays, pool, replicas, rules, transport, bucket_mib, options, alone)
    if key is not None and key in cache:
        return cache[key]
    tensors = checkpoint_tensors(pool.model)
    layouts = pool.trace(tensors, replica=first, timeout=TRACE_SECONDS)
    plan, mapping = compile_from(
        params, read_config(pool.model), tensors, layouts, pool.replicas, None, rules, bucket_mib,
        title=Path(pool.model).name, checkpoint=CheckpointValues.of(pool.model),
    )  # fmt: skip
    name, reason = _choose(
        transport, same_host, flat.arrays, plan, len(replicas), pool._snapshot.device, pool._one_process, alone
    )  # fmt: skip
    agreed = Agreement(
        plan, mapping, name, reason, layouts_bytes(layouts), facts_of(pool, first), options,
        {first: replicas[first][1]},
    )  # fmt: skip
    for other, (_, epoch) in replicas.items():
        agreed.check_replica(pool, other, epoch)
    if key is not None:
        cache[key] = agreed
    return agreed


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
    wanted: str, same_host: bool, arrays: Any, plan: TransferPlan, replicas: int, engine: str, one_process: bool,
    alone: bool = True,
) -> tuple[str, str]:  # fmt: skip
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
        for law in plan.laws:
            program_of(law, "rows")
    except Unsupported as error:
        return error.message
    return ""


def listen(agreed: Agreement, room: int, replica: str, rank: int) -> Sender:
    """One channel's sending end."""
    from jvlab.transport._choose import listen

    return listen(agreed.transport, slot_bytes=room, slots=SLOTS, peer=f"rank {rank} of {replica}", **agreed.options)


def ranks_json(channels: Sequence[Channel | Port]) -> list[str]:
    """Per rank, the JSON list of its channels' endpoints: one, as one trainer process sends."""
    return [json.dumps([channel.sender.endpoint()]) for channel in channels]
