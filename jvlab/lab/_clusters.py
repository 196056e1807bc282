"""Labs on Ray and SLURM: what `Lab` calls for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jvlab._deadline import Deadline, check_timeout
from jvlab._errors import ConfigError
from jvlab.gateway._options import GatewayOptions

if TYPE_CHECKING:
    from jvlab.gateway.cluster._ray import RayCluster
    from jvlab.lab._lab import Lab


def open_cluster(
    cluster: str | None, address: str | None, gateway: GatewayOptions, name: str | None = None
) -> RayCluster | None:
    """The cluster on which the lab's gateway now runs; None for this machine."""
    if cluster is None:
        if address is not None:
            raise ConfigError(
                "address= needs a cluster", remedy='pass cluster="ray" too; jv.Lab.attach(address, token) rejoins a lab'
            )
        return None
    if cluster != "ray":
        raise ConfigError(
            f"cluster={cluster!r} is not known", remedy='"ray"; for SLURM use jv.Lab.from_slurm() inside a job'
        )
    defaults = GatewayOptions()
    for option in ("tls", "host", "port", "metrics_port"):
        if getattr(gateway, option) != getattr(defaults, option):
            raise ConfigError(
                f"{option}= is for a gateway on this machine; on Ray jvlab chooses address, port and certificate",
                remedy="leave it out",
            )
    from jvlab.gateway.cluster._ray import RayCluster

    return RayCluster(address, gateway, name)


def from_slurm(kind: type[Lab], trainers: int | None, patience: float) -> Lab:
    """See `Lab.from_slurm`."""
    import time

    from jvlab._errors import GatewayUnreachable
    from jvlab.gateway.cluster._slurm_lab import JobNodes

    nodes = JobNodes.of_job(trainers=trainers)
    deadline = Deadline(check_timeout(patience, "patience"))
    token, certificate = nodes.token(deadline.left())
    while True:
        try:
            lab = kind.attach(nodes.address, token, tls_ca=certificate)
            break
        except GatewayUnreachable:  # it writes its files before it listens
            if deadline.over:
                raise
            time.sleep(0.5)
    lab.slurm = nodes
    return lab
