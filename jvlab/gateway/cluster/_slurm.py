"""A lab in a SLURM job: the sbatch script of `jvlab slurm`, and each node's role from the script's variables.

The script starts a gateway, rollouts and a trainer. Node lists are expanded by SLURM's own `scontrol show hostnames`,
once, in the script; all processes read the names from JVLAB_SLURM_NODES, also in a container without SLURM's tools.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

from jvlab._errors import ConfigError

# below Linux's ephemeral port range, which begins at 32,768
FIRST_PORT = 20_000
PORTS = 10_000  # as many consecutive jobs share no port
INSIDE = "run this inside a job: in an sbatch script, or under srun or salloc"
WRITTEN = "`jvlab slurm` writes a script that sets it"

# Roles of nodes.


@dataclass(frozen=True)
class JobNodes:
    """The role of each node of a job. The gateway runs on the first trainer node."""

    job: int
    nodes: tuple[str, ...]
    trainers: tuple[str, ...]
    rollouts: tuple[str, ...]
    folder: Path  # holds token and certificate; visible to all nodes
    per_node: int = 1  # replicas on each rollout node

    @classmethod
    def of_job(
        cls, variables: Mapping[str, str] | None = None, trainers: int | None = None
    ) -> JobNodes:
        """For the job that this process is part of; an error names what is missing or inconsistent."""
        env = os.environ if variables is None else variables
        if not env.get("SLURM_JOB_ID"):
            text = "SLURM_JOB_ID is not set: this process is not part of a SLURM job"
            raise ConfigError(text, remedy=INSIDE)
        if env.get("SLURM_HET_SIZE", "1") != "1":
            raise ConfigError(
                "this is a heterogeneous job, with one node list per component, which is not supported",
                remedy="request all nodes in one component, and let jvlab split them",
            )
        for name in ("JVLAB_SLURM_FOLDER", "JVLAB_SLURM_NODES"):
            if not env.get(name):
                raise ConfigError(f"{name} is not set", remedy=WRITTEN)
        nodes = env["JVLAB_SLURM_NODES"].split(",")
        # In a step, SLURM_NNODES counts the nodes of the step; this one those of the job.
        count = _count(env, "SLURM_JOB_NUM_NODES", str(len(nodes)))
        if count != len(nodes):
            raise ConfigError(
                f"SLURM_JOB_NUM_NODES is {count}, but JVLAB_SLURM_NODES names {len(nodes)}: {','.join(nodes)}",
                remedy="the environment mixes variables of two jobs; start from a clean one",
            )
        if trainers is None:
            trainers = _count(env, "JVLAB_SLURM_TRAINERS", "1")
        train, roll = split_nodes(nodes, trainers)
        return cls(
            _count(env, "SLURM_JOB_ID", ""),
            tuple(nodes),
            train,
            roll,
            Path(env["JVLAB_SLURM_FOLDER"]),
            _count(env, "JVLAB_SLURM_ROLLOUTS_PER_NODE", "1"),
        )

    @property
    def replicas(self) -> int:
        """How many rollout processes the script starts."""
        return len(self.rollouts) * self.per_node

    @property
    def alone(self) -> bool:
        """Does a single node do everything, so that loopback is enough?"""
        return len(self.nodes) == 1

    @property
    def host(self) -> str:
        return "127.0.0.1" if self.alone else self.trainers[0]

    @property
    def port(self) -> int:
        """The gateway's, the same in all processes of the job without communication.

        If another program has it, the gateway must fail instead of choosing another.
        """
        return FIRST_PORT + self.job % PORTS

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    def variables(self) -> dict[str, str]:
        """Variables for the job's script."""
        return {
            "JVLAB_GATEWAY_NODE": self.trainers[0],
            "JVLAB_GATEWAY_HOST": self.host,
            "JVLAB_GATEWAY_PORT": str(self.port),
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


def split_nodes(
    nodes: Sequence[str], trainers: int
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(trainer nodes, rollout nodes): the first `trainers` train, the others roll out; a single node does both."""
    if trainers < 1:
        raise ConfigError(f"at least 1 node must train, not {trainers}")
    if len(nodes) == 1 and trainers == 1:
        return tuple(nodes), tuple(nodes)
    if trainers >= len(nodes):
        raise ConfigError(
            f"{trainers} of {len(nodes)} nodes would train, leaving none for rollouts",
            remedy=f"request at least {trainers + 1} nodes (sbatch --nodes), or train on fewer",
        )
    return tuple(nodes[:trainers]), tuple(nodes[trainers:])


def _count(env: Mapping[str, str], name: str, default: str) -> int:
    text = env.get(name) or default
    if not re.fullmatch(r"[0-9]{1,18}", text) or int(text) < 1:
        raise ConfigError(f"{name} must be a whole number of at least 1, not {text!r}")
    return int(text)


# The script.

SCRIPT = Template("""\
#!/bin/bash
# Written by `jvlab slurm`: one gateway, $rollouts_text, one trainer. Edit as you like.
#SBATCH --job-name=$job_name
#SBATCH --nodes=$nodes
#SBATCH --ntasks-per-node=1
#SBATCH --time=$time
$resources
set -euo pipefail

# Token and certificate of this job's lab, in a folder that all nodes see and only you can read; removed at the end.
umask 077
export JVLAB_SLURM_FOLDER="$${JVLAB_SLURM_FOLDER:-$shared}/job-$$SLURM_JOB_ID"
export JVLAB_SLURM_TRAINERS=$trainers JVLAB_SLURM_ROLLOUTS_PER_NODE=$rollouts_per_node
mkdir -p "$$JVLAB_SLURM_FOLDER"
jvlab="$python -m jvlab"

# Each node's role and the port, derived from the job's nodes and number: every node computes the same.
JVLAB_SLURM_NODES="$$(scontrol show hostnames "$$SLURM_JOB_NODELIST" | paste -s -d , -)"
export JVLAB_SLURM_NODES
eval "$$($$jvlab slurm --show-places)"

srun --nodes=1 --ntasks=1 --exact --overlap --nodelist="$$JVLAB_GATEWAY_NODE" \\
    $$jvlab gateway --host "$$JVLAB_GATEWAY_HOST" --port "$$JVLAB_GATEWAY_PORT" --place join --lease $lease \\
    --token-file "$$JVLAB_SLURM_FOLDER/token" $$JVLAB_TLS --folder "$$JVLAB_SLURM_FOLDER/gateway" &
gateway=$$!

srun --nodes="$$JVLAB_ROLLOUT_COUNT" --ntasks=$$((JVLAB_ROLLOUT_COUNT * $rollouts_per_node)) \\
    --ntasks-per-node=$rollouts_per_node \\
    --overlap --kill-on-bad-exit=0 --nodelist="$$JVLAB_ROLLOUT_NODES"$gpu_flag \\
    $$jvlab rollout --gateway "$$JVLAB_GATEWAY_HOST:$$JVLAB_GATEWAY_PORT" \\
    --token-file "$$JVLAB_SLURM_FOLDER/token" $$JVLAB_TLS &
rollouts=$$!

# However the trainer ends, the lab ends with it: this signal ends the gateway, and the gateway the rollouts.
finish() {
    kill -TERM "$$gateway" 2>/dev/null || true
    wait "$$gateway" "$$rollouts" 2>/dev/null || true
    rm -rf "$$JVLAB_SLURM_FOLDER"
}
trap finish EXIT

# The trainer: lab = jv.Lab.from_slurm(); pool = lab.launch(MODEL, replicas=lab.slurm.replicas); pool.wait(); ...
srun --nodes="$$JVLAB_TRAINER_COUNT" --ntasks="$$JVLAB_TRAINER_COUNT" --overlap --nodelist="$$JVLAB_TRAINER_NODES" \\
    $trainer
""")

OPTIONS = (
    ("--nodes", 2, "nodes of the job; a single one trains and rolls out"),
    ("--trainers", 1, "how many of the nodes train"),
    ("--rollouts-per-node", 1, "replicas on each of the other nodes"),
    ("--gpus-per-node", 0, "0: a CPU job"),
    ("--time", "01:00:00", "the job's limit"),
    ("--partition", "", "as sbatch takes it"),
    ("--account", "", "as sbatch takes it"),
    ("--job-name", "jvlab", "as sbatch takes it"),
    ("--lease", 600.0, "seconds that the lab outlives a dead trainer"),
    ("--shared", "$HOME/.jvlab", "a folder that all nodes see"),
    ("--python", "python", "the interpreter on the nodes"),
    ("--trainer", "python train.py", "the trainer's command"),
    ("--output", "", "the file to write; default: standard output"),
    ("--show-places", False, "inside a job: print each node's role"),
)


def script(arguments: argparse.Namespace) -> str:
    """The sbatch script for these arguments."""
    names = [f"n{i}" for i in range(arguments.nodes)]
    _, hosts = split_nodes(names, arguments.trainers)
    per_node = arguments.rollouts_per_node
    gpus = arguments.gpus_per_node
    if per_node < 1 or gpus < 0 or arguments.lease <= 0:
        raise ConfigError(
            "--rollouts-per-node must be at least 1, --gpus-per-node 0 or more, --lease positive"
        )
    for option in ("time", "partition", "account", "job_name"):
        given = getattr(arguments, option)
        if not re.fullmatch(r"[\w.:@+-]*", given):
            flag = option.replace("_", "-")
            raise ConfigError(
                f"--{flag} {given!r} has characters that a script can't hold"
            )
    if not re.fullmatch(r"[\w./$\-+]+", arguments.shared):
        raise ConfigError(
            f"--shared {arguments.shared!r} is not a plain path",
            remedy="without spaces and quotes",
        )
    asked = {
        "partition": arguments.partition,
        "account": arguments.account,
        "gpus-per-node": gpus,
    }
    count = len(hosts) * per_node
    share = gpus // per_node
    values = vars(arguments) | {
        "rollouts_text": f"{count} rollout{'s' if count > 1 else ''}",
        "resources": "\n".join(f"#SBATCH --{k}={v}" for k, v in asked.items() if v),
        "lease": f"{arguments.lease:g}",
        "gpu_flag": f" --gpus-per-task={share}" if share else "",
        "python": shlex.quote(arguments.python),
    }
    return SCRIPT.substitute(values)


def run_slurm(arguments: argparse.Namespace) -> dict[str, Any]:
    """The body of `jvlab slurm`."""
    if arguments.show_places:
        found = JobNodes.of_job().variables()
        for name, value in found.items():
            print(f"export {name}={shlex.quote(value)}")
        return found
    text = script(arguments)
    if arguments.output:
        Path(arguments.output).write_text(text)
        if not arguments.json:
            print(f"wrote {arguments.output}; start it with: sbatch {arguments.output}")
        return {"output": arguments.output, "lines": text.count("\n")}
    print(text, end="")
    return {"lines": text.count("\n")}
