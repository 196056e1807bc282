"""A lab's pools by name, and the check that an argument is a pool."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jvlab._errors import ConfigError, UnknownName
from jvlab.lab._script_end import open_labs

if TYPE_CHECKING:
    from jvlab.lab._lab import Lab
    from jvlab.lab._pool import Pool

TRANSPORT_OPTIONS = ("host", "directory", "fsync")  # of `jv.transport.listen`


class PoolTable(dict[str, "Pool"]):
    """What `lab.pools` returns: an unknown name is an error that lists the known ones."""

    def __missing__(self, name: object) -> Pool:
        raise UnknownName.of(
            "open pool of this lab",
            name,
            self,
            'lab.launch(model, name="...") starts one',
        )


def replica_name(pool: Any, replica: Any) -> str:
    """ "pool/number" of one of the pool's replicas, given its number."""
    known = [status.replica for status in pool._snapshot.replicas]
    name = f"{pool.name}/{replica}"
    if name not in known:
        raise UnknownName.of(
            f"replica of {pool.name!r}", name, known, "by its number, beginning at 0"
        )
    return name


def check_connect(params: Any, options: dict[str, Any]) -> None:
    """Raise for arguments of `lab.connect` that no transport and no trainer has."""
    if params is None:
        raise ConfigError(
            "params is None",
            remedy="lab.connect(policy, pool), or any pytree of arrays",
        )
    if unknown := sorted(set(options) - set(TRANSPORT_OPTIONS)):
        raise ConfigError(
            f"lab.connect has no option {unknown[0]!r}",
            remedy=f"options of transports: {', '.join(TRANSPORT_OPTIONS)}; help(jv.Lab.connect) lists the others",
        )


def check_owner(pool: Any, lab: Lab) -> None:
    """Raise if the pool is not one of this lab's: its engines take orders from another gateway."""
    if pool._one_process:
        raise ConfigError(
            f"pool {pool.name!r} is in this process, and in no lab",
            remedy="link = pool.connect(params)",
        )
    # perhaps of another Lab object: attach() makes one
    if pool._client.address == lab._client.address:
        return
    owner = next(
        (other.name for other in open_labs if other._client is pool._client),
        "one that was closed",
    )
    raise ConfigError(
        f"pool {pool.name!r} is not of this lab, {lab.name}, but of {owner}",
        remedy="call connect of the lab that launched the pool, or launch a pool in this one",
    )


def check_pool(pool: Any, call: str) -> None:
    """Raise if a call's argument is no pool, such as its name or the parameters."""
    if hasattr(pool, "_snapshot"):
        return
    remedy = (
        f"lab.pools[{pool!r}] is the pool"
        if isinstance(pool, str)
        else f"{call}, in this order"
    )
    raise ConfigError(f"pool is {type(pool).__name__}, not a pool", remedy=remedy)
