"""`Connections`: one holder's links. A lab, an in-process pool, a certificate and `notify_update` connect by it."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypedDict

from jvlab._deadline import Deadline
from jvlab._errors import ConfigError, LayoutError, SyncError, Unsupported
from jvlab._files import Plain
from jvlab._names import model_words
from jvlab._version import __version__
from jvlab.layout._checkpoint import (
    CheckpointValues,
    checkpoint_tensors,
    read_config,
)
from jvlab.layout._layout_codec import layout_to_plain, plain_to_bytes
from jvlab.layout._tree import TorchLeaf, cuda_ordinals, device_processes, flatten
from jvlab.layout.rules._ruleset import Rules
from jvlab.sync._compile_tree import CPU_GBPS, compile_tree
from jvlab.sync._coordinator import DRAFT, MODEL, PARTS, SLOTS, ready_replicas
from jvlab.sync._link import Link
from jvlab.sync._mapping import Mapping
from jvlab.sync._meaning import MeaningCheck, unpack
from jvlab.sync._team import together
from jvlab.transport._choose import choose, in_one_process
from jvlab.transport._ipc_tables import program_of, refuse_other_kinds
from jvlab.transport._shm import available_bytes
from jvlab.wire import _channels, _security
from jvlab.wire import jvlab_pb2 as pb

if TYPE_CHECKING:
    from jvlab.lab._pool import Pool
    from jvlab.layout._plan import TransferPlan
    from jvlab.layout._types import RankLayout
    from jvlab.wire._pool_view import PoolView

# of tensors in an order to trace the draft model; as in engine/tracing/_vllm_model.py, which imports torch
DRAFT_PREFIX = "draft."
# equal on all replicas
SHARED_FACTS = ("vllm_version", "vllm_build", "dtype", "architecture", "vocab_size")


@dataclass
class Agreement:
    """The result of `agree`; replicas that join later must match it."""

    plan: TransferPlan
    mapping: Mapping
    transport: str
    reason: str
    layouts: bytes = field(repr=False)  # of the first replica, serialized
    facts: dict[str, str]
    options: Plain = field(default_factory=dict)
    # replica -> epoch at which it was found to match
    checked: dict[str, int] = field(default_factory=dict)
    # of torch's tensors on a GPU: device of the plan -> its CUDA ordinal here
    ordinals: dict[int, int] = field(default_factory=dict)
    part: str = MODEL
    folder: str = ""  # of that part's checkpoint
    # of the tree that was connected last
    meaning: MeaningCheck = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.meaning = MeaningCheck(self)

    def check_replica(
        self, pool: PoolView, name: str, epoch: int, deadline: Deadline
    ) -> None:
        """Trace a replica that is new in this epoch; it must have the first replica's layout."""
        if self.checked.get(name) == epoch:
            return
        theirs = facts_of(pool, name)
        compare(self.facts, theirs, f"the pool's first replica and {name}")
        tensors = list(self.mapping.tensors)
        layouts = trace_part(pool, self.part, tensors, name, deadline)
        if layouts_bytes(layouts) != self.layouts:
            raise LayoutError(
                f"{name} has a different parameter layout than the replica this link was planned for",
                remedy="connect again: link = lab.connect(params, pool)",
                replica=name,
            )
        self.checked[name] = epoch


def layouts_bytes(layouts: list[RankLayout]) -> bytes:
    """A serialization of layouts: equal bytes if and only if the layouts are equal."""
    return b"".join(plain_to_bytes(layout_to_plain(layout)) for layout in layouts)


def facts_of(pool: PoolView, name: str) -> dict[str, str]:
    """The facts about a replica's engine that must be equal on all replicas."""
    for replica in pool.snapshot.replicas:
        if replica.replica == name:
            return {key: str(getattr(replica.facts, key)) for key in SHARED_FACTS}
    raise SyncError(f"no replica is called {name!r}", remedy="pool.status() lists them")


def compare(one: dict[str, str], other: dict[str, str], who: str) -> None:
    """Raise one error that names both values of every fact that differs."""
    differing = [
        f"{key}: {one[key]!r} and {other[key]!r}"
        for key in one
        if one[key] != other[key]
    ]
    if differing:
        raise SyncError(
            f"{who} do not fit together: " + "; ".join(differing),
            remedy="launch both sides with the same versions",
        )


def trace_part(
    pool: PoolView, part: str, tensors: list[Any], replica: str, deadline: Deadline
) -> list[RankLayout]:
    """Where a replica's ranks hold these tensors of a part."""
    if part == DRAFT:
        tensors = [replace(t, name=DRAFT_PREFIX + t.name) for t in tensors]
    return pool.trace(tensors, replica=replica, timeout=deadline)


def taken(tensors: list[Any], layouts: list[RankLayout]) -> list[Any]:
    """The tensors of which some rank takes anything."""
    left = set.intersection(*(set(layout.unused) for layout in layouts))
    return [t for t in tensors if t.name not in left]


def _folder_of(part: str, adapter: bool, pool: PoolView, deadline: Deadline) -> str:
    """The checkpoint folder of a part; raises if the engine has no such part."""
    if part == MODEL:
        return pool.model
    if part != DRAFT:
        raise ConfigError(
            f"part must be one of {', '.join(map(repr, PARTS))}, not {part!r}",
            remedy='part="draft" is the model that drafts tokens',
        )
    facts = pool.facts(deadline)
    if not facts.draft_model:
        how = (
            f"drafts by {facts.speculative}, which needs no weights"
            if facts.speculative
            else "does not draft tokens"
        )
        raise Unsupported(
            f"{pool.name} {how}",
            remedy='launch(..., speculative={"method": "draft_model", "model": FOLDER, "num_speculative_tokens": 3})',
        )
    if adapter:
        raise Unsupported(
            "an adapter goes into a slot of the model, and a draft model has none",
            remedy='lab.connect(policy.merge(), pool, part="draft")',
        )
    return facts.draft_model


def _adapter_tensors(lora: Any, pool: PoolView, deadline: Deadline) -> list[Any]:
    """The tensors of an adapter; raises if the engine can hold none."""
    if not pool.facts(deadline).max_adapters:
        rank = lora.spec.rank
        raise Unsupported(
            f"{pool.name} was launched without LoRA",
            remedy=f"launch(..., engine={{'enable_lora': True, 'max_lora_rank': {rank}}}), or sync a merged policy: "
            "lab.connect(policy.merge(), pool)",
        )
    return lora.peft_tensors()


def _kinds(array: Any) -> tuple[str, ...]:
    """The kinds of device that hold an array: torch's tensors, without a sharding, may move to a GPU and back."""
    return tuple(sorted({d.platform for d in getattr(array, "devices", set)()}))


def _key(arrays: Any, pool: PoolView, replicas: Any, *rest: Any) -> Any:
    """The cache key of a plan; None if a part of it is not hashable."""
    leaves = tuple(
        (p, tuple(a.shape), str(a.dtype), getattr(a, "sharding", None), _kinds(a))
        for p, a in arrays.items()
    )
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
    pool: PoolView,
    alone: bool,
) -> tuple[str, str]:
    """The transport's name and the reason; raises if the wanted one can't work here."""
    engine = pool.snapshot.device
    platforms = {kind for a in arrays.values() for kind in _kinds(a)}
    device = next(iter(platforms - {"cpu"}), "cpu")
    need = plan.bucket_bytes * SLOTS * plan.ranks * replicas
    no_ipc = _no_ipc(plan) if engine == "cuda" or wanted == "ipc" else ""
    tensors = [a for a in arrays.values() if isinstance(a, TorchLeaf)]
    if engine == "cuda" and tensors:
        if device not in ("cuda", "gpu") or "cpu" in platforms:
            raise Unsupported(
                "torch tensors in host memory can't be sent to an engine on a GPU",
                remedy='move all of them there first: model.to("cuda"); or launch with device="cpu"',
            )
        if plan.quantised:
            raise Unsupported(
                "this engine holds quantised weights, and jvlab quantises JAX arrays only",
                remedy="pass them as JAX arrays: {name: jax.dlpack.from_dlpack(t) for name, t in state_dict.items()} "
                "copies nothing",
            )
    if not alone:
        no_ipc = "the parameters are spread over several trainer processes, and ipc writes from one"
        if pool.one_process:
            raise ConfigError(
                "an engine in the trainer's own process can't be used by a trainer of several processes",
                remedy="launch the engine in a lab: lab.launch(model)",
            )
    if pool.one_process:
        return in_one_process(wanted, device, engine, no_ipc)
    return choose(wanted, same_host, device, available_bytes(), need, engine, no_ipc)


def _no_ipc(plan: TransferPlan) -> str:
    """Why the ipc kernels can't execute this plan; empty if they can."""
    if find_spec("cupy") is None:
        return "cupy is not installed here (pip install cupy-cuda12x or cupy-cuda13x)"
    try:
        refuse_other_kinds(plan, range(len(plan.target_parameter)))
        for transform in plan.transforms:
            program_of(transform, "rows")
    except Unsupported as error:
        return error.message
    return ""


# The links of one holder ----------------------------------------------------------------------------------------------


# of `jv.transport.listen`
TRANSPORT_OPTIONS = ("host", "directory", "fsync", "streams", "tls")


class ConnectOptions(TypedDict, total=False):
    """The options of `lab.connect`, which documents them, and of an in-process pool's `connect`."""

    bucket_mib: float
    faults: Callable[[Any], Any] | None
    nonfinite: str
    checkpoint: str | os.PathLike[str] | None
    meaning: str
    part: str
    timeout: float | Deadline
    host: str
    directory: str
    fsync: bool
    streams: int
    tls: bool


class Connections:
    """One holder's links, and the agreements by which an earlier plan is found again.

    Connecting a pool replaces the holder's earlier link to the same part of it, and no other's. Two links to one pool,
    to its model and to its draft model, take turns: each opens its channels when it is used, and closes the other's.
    """

    def __init__(self) -> None:
        self._links: list[Link] = []
        self._agreements: dict[Any, Agreement] = {}

    def connect(
        self,
        params: Any,
        pool: Pool,
        rules: Any = "auto",
        transport: str = "auto",
        mode: str = "direct",
        *,
        bucket_mib: float = 16.0,
        faults: Callable[[Any], Any] | None = None,
        nonfinite: str = "refuse",
        checkpoint: str | os.PathLike[str] | None = None,
        meaning: str = "auto",
        part: str = MODEL,
        timeout: float | Deadline = 900.0,
        **options: Any,
    ) -> Link:
        """See `Lab.connect`."""
        deadline = Deadline.of(timeout)
        check_options(params, options)
        params, scorer = unpack(params)
        arrays = flatten(params).arrays
        gateway = pool.client.call("Describe", pb.DescribeRequest(), deadline)
        near = pool.one_process or on_this_host(pool.snapshot, gateway.host)
        if not near:
            options = reachable(options, pool.client.address, gateway.public_address)
        # with a pool in this process nobody else could meet; `agree` says so
        meeting = (
            contextlib.nullcontext()
            if pool.one_process
            else together(pool.client, arrays, pool.name)
        )
        with meeting as team:
            agreed = agree(
                params,
                scorer,
                pool,
                rules,
                transport,
                meaning=meaning,
                checkpoint=checkpoint,
                bucket_mib=bucket_mib,
                options=options,
                cache=self._agreements,
                gateway_version=gateway.version,
                same_host=near,
                deadline=deadline,
                part=part,
            )
            if team is not None:
                if part == DRAFT:
                    raise Unsupported(
                        "a draft model's parameters can't be spread over several trainer processes yet",
                        remedy="gather them in one process, and connect there",
                    )
                team.agree(agreed)
            links = [link for link in self._links if link.pool is pool]
            beside = [link for link in links if link.part != part]
            for link in links:
                same = link.matches(agreed, mode, nonfinite)
                if same and faults is None and team is None:
                    link.remembered.take(params)
                    return link
                if link.part == part:
                    link.close()  # replaced by the new one
            link = Link(
                pool,
                agreed,
                mode,
                faults,
                self._links.remove,
                team,
                nonfinite,
                deadline,
                beside,
            )
            link.remembered.take(params)
        self._links.append(link)
        return link

    def close(self) -> None:
        """Close all links."""
        for link in list(self._links):
            link.close()


def agree(
    params: Any,
    scorer: Any,
    pool: Any,
    rules: Any,
    transport: str,
    *,
    meaning: str,
    checkpoint: str | os.PathLike[str] | None,
    bucket_mib: float,
    options: Plain,
    cache: dict[Any, Agreement],
    gateway_version: str,
    same_host: bool,
    deadline: Deadline,
    part: str = MODEL,
) -> Agreement:
    """Settle everything that can be settled before any byte moves; one error lists what does not match.

    A verdict is about values: an agreement is found again by shapes and rules, its meaning is not.
    """
    compare(
        {"jvlab": __version__},
        {"jvlab": gateway_version},
        "this process and the gateway",
    )
    flat = flatten(params)
    replicas = ready_replicas(pool, deadline)
    first = next(iter(replicas))
    alone = len(set(device_processes(flat.arrays).values())) < 2
    key = _key(
        flat.arrays, pool, replicas, rules, transport, bucket_mib, options, alone, part
    )
    agreed = cache.get(key)
    if agreed is None:
        # of `policy.with_lora()`; trainer/decoder/_lora.py
        adapter = hasattr(params, "peft_tensors")
        folder = _folder_of(part, adapter, pool, deadline)
        if adapter:
            tensors = _adapter_tensors(params, pool, deadline)
            if rules == "auto":
                rules = Rules.parse(params.peft_rules())
        else:
            tensors = checkpoint_tensors(folder)
        layouts = trace_part(pool, part, tensors, first, deadline)
        if part == DRAFT and pool.facts(deadline).speculative != "draft_model":
            # heads on top of the model: their checkpoint is the model's own, or repeats what they share with it
            tensors = taken(tensors, layouts)
            layouts = trace_part(pool, part, tensors, first, deadline)
        kind = " (LoRA)" if adapter else " (drafts)" if part == DRAFT else ""
        mapping = compile_tree(
            Mapping,
            params,
            read_config(folder),
            tensors,
            layouts,
            replicas=pool.replicas,
            rules=rules,
            bucket_mib=bucket_mib,
            link_gbps=CPU_GBPS if pool.snapshot.device == "cpu" else None,
            title=model_words(folder) + kind,
            checkpoint=None if adapter else CheckpointValues.of(folder),
        )
        plan = mapping.plan
        name, reason = _choose(
            transport, same_host, flat.arrays, plan, len(replicas), pool, alone
        )
        agreed = Agreement(
            plan,
            mapping,
            name,
            reason,
            layouts_bytes(layouts),
            facts_of(pool, first),
            options,
            {first: replicas[first][1]},
            cuda_ordinals(flat.arrays),
            part,
            folder,
        )
        for other, (_, epoch) in replicas.items():
            agreed.check_replica(pool, other, epoch, deadline)
        if key is not None:
            cache[key] = agreed
    check = MeaningCheck(agreed)
    check.configure(meaning, checkpoint, scorer)
    check.by_value(flat.arrays, agreed.folder)
    agreed.meaning = check  # not if that raised: an open link keeps its own
    return agreed


def check_options(params: Any, options: Plain) -> None:
    """Raise for arguments of `connect` that no transport and no trainer has."""
    if params is None:
        raise ConfigError(
            "params is None",
            remedy="lab.connect(policy, pool), or any pytree of arrays",
        )
    if unknown := sorted(set(options) - set(TRANSPORT_OPTIONS)):
        raise ConfigError(
            f"connect has no option {unknown[0]!r}",
            remedy=f"options of transports: {', '.join(TRANSPORT_OPTIONS)}; help(jv.Lab.connect) lists the others",
        )


def check_pool(pool: Any, call: str) -> None:
    """Raise if a call's argument is no pool, such as its name or the parameters."""
    if hasattr(pool, "snapshot"):
        return
    remedy = (
        f"lab.pools[{pool!r}] is the pool"
        if isinstance(pool, str)
        else f"{call}, in this order"
    )
    raise ConfigError(f"pool is {type(pool).__name__}, not a pool", remedy=remedy)


def on_this_host(snapshot: pb.PoolStatus, gateway: str) -> bool:
    """Whether every ready replica runs on this machine. `gateway`: its host."""
    ready = [r for r in snapshot.replicas if r.state == pb.READY]
    hosts = {r.facts.host or gateway for r in ready} or {gateway}
    return hosts == {platform.node()}


def reachable(options: Plain, *gateway: str) -> Plain:
    """Transport options for other hosts: by default, bind to our address on the route to the gateway.

    `gateway`: its address as we know it, which on its own host is loopback, then as other hosts do.
    """
    hosts = map(_channels.host_of, gateway)
    far = [host for host in hosts if not _security.is_loopback(host)]
    if "host" in options or not far:
        return options
    return {**options, "host": _channels.address_towards(far[0])}
