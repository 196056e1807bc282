"""A SLURM job's lab: each node's role and the gateway's address, from SLURM's variables alone."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from jvlab._errors import ConfigError
from jvlab.gateway.cluster._slurm import SlurmJob


@dataclass(frozen=True)
class JobNodes:
    """The role of each node of a job. The gateway runs on the first trainer node."""

    job: SlurmJob
    trainers: tuple[str, ...]
    rollouts: tuple[str, ...]
    folder: Path  # holds token and certificate; visible to all nodes
    per_node: int = 1  # replicas on each rollout node

    @classmethod
    def of_job(
        cls, variables: Mapping[str, str] | None = None, trainers: int | None = None
    ) -> JobNodes:
        """For the job that this process is part of."""
        env = os.environ if variables is None else variables
        job = SlurmJob.from_environment(env)
        count = _count(env, "JVLAB_SLURM_TRAINERS") if trainers is None else trainers
        folder = env.get("JVLAB_SLURM_FOLDER")
        if not folder:
            raise ConfigError(
                "JVLAB_SLURM_FOLDER is not set: it names the folder with the lab's token",
                remedy="`jvlab slurm` writes a script that sets it; all nodes must see that folder",
            )
        train, roll = job.split(count)
        return cls(
            job, train, roll, Path(folder), _count(env, "JVLAB_SLURM_ROLLOUTS_PER_NODE")
        )

    @property
    def replicas(self) -> int:
        """How many rollout processes the script starts."""
        return len(self.rollouts) * self.per_node

    @property
    def alone(self) -> bool:
        """Does a single node do everything, so that loopback is enough?"""
        return len(self.job.nodes) == 1

    @property
    def host(self) -> str:
        return "127.0.0.1" if self.alone else self.trainers[0]

    @property
    def address(self) -> str:
        return f"{self.host}:{self.job.port()}"

    def variables(self) -> dict[str, str]:
        """Variables for the job's script."""
        return {
            "JVLAB_GATEWAY_NODE": self.trainers[0],
            "JVLAB_GATEWAY_HOST": self.host,
            "JVLAB_GATEWAY_PORT": str(self.job.port()),
            "JVLAB_TRAINER_NODES": ",".join(self.trainers),
            "JVLAB_TRAINER_COUNT": str(len(self.trainers)),
            "JVLAB_ROLLOUT_NODES": ",".join(self.rollouts),
            "JVLAB_ROLLOUT_COUNT": str(len(self.rollouts)),
            "JVLAB_TLS": "" if self.alone else f"--tls-dir {self.folder}/tls",
        }

    def token(self, patience: float) -> tuple[str, str | None]:
        """(token, the certificate's path or None); waits for a gateway that is still starting."""
        from jvlab.engine._agent import wait_for
        from jvlab.wire._channels import read_token

        certificate = None if self.alone else str(self.folder / "tls" / "cert.pem")
        token = str(self.folder / "token")
        wait_for([token, *([certificate] if certificate else [])], patience)
        return read_token(token), certificate


def _count(env: Mapping[str, str], name: str) -> int:
    text = env.get(name, "1")
    if not text.isdigit() or int(text) < 1:
        raise ConfigError(f"{name} must be a whole number of at least 1, not {text!r}")
    return int(text)
