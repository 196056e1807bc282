"""Labs that do not run as processes of this machine: what `Lab` calls for Ray and for SLURM."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jvlab._errors import ConfigError

if TYPE_CHECKING:
    from jvlab._lab import Lab
    from jvlab.cluster._ray import RayCluster


OWN_GATEWAY = {
    "tls": None,
    "host": "127.0.0.1",
    "port": 0,
    "metrics_port": None,
}  # defaults of a gateway on this machine


def open_cluster(
    cluster: str | None, address: str | None, lease: float, beat: float, missed_beats: int,
    mine: dict[str, object],
) -> RayCluster | None:  # fmt: skip
    """The lab's cluster with its gateway running there; None for this machine."""
    if cluster is None:
        if address is not None:
            raise ConfigError(
                "address= is a cluster's", remedy='pass cluster="ray" too; jv.Lab.attach(address, token) rejoins a lab'
            )
        return None
    if cluster != "ray":
        raise ConfigError(
            f"cluster={cluster!r} is not known", remedy='"ray"; for SLURM use jv.Lab.from_slurm() inside a job'
        )
    if unused := [name for name, value in mine.items() if value != OWN_GATEWAY[name]]:
        raise ConfigError(
            f"{unused[0]}= is for a gateway on this machine; on Ray jvlab chooses address, port and certificate",
            remedy="leave it out",
        )
    from jvlab.cluster._ray import RayCluster

    return RayCluster(address, lease, beat, missed_beats)


def from_slurm(kind: type[Lab], trainers: int | None, patience: float) -> Lab:
    """See `Lab.from_slurm`."""
    import time

    from jvlab._errors import GatewayUnreachable
    from jvlab.cluster._slurm_lab import JobPlaces

    places = JobPlaces.of_job(trainers=trainers)
    deadline = time.monotonic() + patience
    token, certificate = places.token(patience)
    while True:
        try:
            lab = kind.attach(places.address, token, tls_ca=certificate)
            break
        except GatewayUnreachable:  # its files are there before it listens
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)
    lab.slurm = places
    return lab
