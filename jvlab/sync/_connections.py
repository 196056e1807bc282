"""`Connections`: one holder's links. A lab, an in-process pool, a certificate and `notify_update` connect by it."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypedDict

from jvlab._deadline import Deadline
from jvlab._errors import ConfigError, Unsupported
from jvlab.layout._tree import flatten
from jvlab.sync._connect import Agreement, negotiate
from jvlab.sync._coordinator import DRAFT, MODEL
from jvlab.sync._link import Link
from jvlab.sync._meaning import MeaningCheck, unpack
from jvlab.sync._team import together
from jvlab.wire import _channels, _security
from jvlab.wire import jvlab_pb2 as pb

if TYPE_CHECKING:
    from jvlab.lab._pool import Pool

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
        # with a pool in this process nobody else could meet; `negotiate` says so
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
    **how: Any,
) -> Agreement:
    """`negotiate`, and compare values before anything is written.

    A verdict is about values: an agreement is found again by shapes and rules, its meaning is not.
    """
    agreed = negotiate(params, pool, rules, transport, **how)
    check = MeaningCheck(agreed)
    check.configure(meaning, checkpoint, scorer)
    check.by_value(flatten(params).arrays, agreed.folder)
    agreed.meaning = check  # not if that raised: an open link keeps its own
    return agreed


def check_options(params: Any, options: dict[str, Any]) -> None:
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


def reachable(options: dict[str, Any], *gateway: str) -> dict[str, Any]:
    """Transport options for other hosts: by default, bind to our address on the route to the gateway.

    `gateway`: its address as we know it, which on its own host is loopback, then as other hosts do.
    """
    hosts = map(_channels.host_of, gateway)
    far = [host for host in hosts if not _security.is_loopback(host)]
    if "host" in options or not far:
        return options
    return {**options, "host": _channels.address_towards(far[0])}
