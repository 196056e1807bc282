"""`jvlab slurm`: an sbatch script that starts a gateway, rollouts and a trainer in one job."""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path
from string import Template
from typing import Any

from jvlab._errors import ConfigError

SCRIPT = Template("""\
#!/bin/bash
# Written by `jvlab slurm`: one gateway, $rollouts_text, one trainer. Edit as you like.
#SBATCH --job-name=$name
#SBATCH --nodes=$nodes
#SBATCH --ntasks-per-node=1
#SBATCH --time=$time
$resources
set -euo pipefail

# Token and certificate of this job's lab, in a folder that all nodes see and only you can read; removed at the end.
umask 077
export JVLAB_SLURM_FOLDER="$${JVLAB_SLURM_FOLDER:-$folder}/job-$$SLURM_JOB_ID"
export JVLAB_SLURM_TRAINERS=$trainers JVLAB_SLURM_ROLLOUTS_PER_NODE=$per_node
mkdir -p "$$JVLAB_SLURM_FOLDER"
jvlab="$python -m jvlab"

# Each node's role and the port, derived from SLURM's variables: every node computes the same.
eval "$$($$jvlab slurm --show-places)"

srun --nodes=1 --ntasks=1 --exact --overlap --nodelist="$$JVLAB_GATEWAY_NODE" \\
    $$jvlab gateway --host "$$JVLAB_GATEWAY_HOST" --port "$$JVLAB_GATEWAY_PORT" --place join --lease $lease \\
    --token-file "$$JVLAB_SLURM_FOLDER/token" $$JVLAB_TLS --folder "$$JVLAB_SLURM_FOLDER/gateway" &
gateway=$$!

srun --nodes="$$JVLAB_ROLLOUT_COUNT" --ntasks=$$((JVLAB_ROLLOUT_COUNT * $per_node)) --ntasks-per-node=$per_node \\
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


def add_slurm_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--nodes",
        type=int,
        default=2,
        help="nodes of the job; a single one trains and rolls out",
    )
    parser.add_argument(
        "--trainers", type=int, default=1, help="how many of the nodes train"
    )
    parser.add_argument(
        "--rollouts-per-node",
        type=int,
        default=1,
        help="replicas on each of the other nodes",
    )
    parser.add_argument("--gpus-per-node", type=int, default=0, help="0: a CPU job")
    parser.add_argument("--time", default="01:00:00")
    parser.add_argument("--partition", default="")
    parser.add_argument("--account", default="")
    parser.add_argument("--job-name", default="jvlab")
    parser.add_argument(
        "--lease",
        type=float,
        default=600.0,
        help="seconds that the lab outlives a dead trainer",
    )
    parser.add_argument(
        "--shared", default="$HOME/.jvlab", help="a folder that all nodes see"
    )
    parser.add_argument(
        "--python", default="python", help="the interpreter on the nodes"
    )
    parser.add_argument(
        "--trainer", default="python train.py", help="the trainer's command"
    )
    parser.add_argument("--output", help="the file to write; default: standard output")
    parser.add_argument(
        "--show-places",
        action="store_true",
        help="inside a job: print each node's role",
    )


def script(arguments: argparse.Namespace) -> str:
    """The sbatch script for these arguments."""
    from jvlab.gateway.cluster._slurm import split_nodes

    # validates the counts
    split_nodes([f"n{i}" for i in range(arguments.nodes)], arguments.trainers)
    if (
        arguments.rollouts_per_node < 1
        or arguments.gpus_per_node < 0
        or arguments.lease <= 0
    ):
        raise ConfigError(
            "--rollouts-per-node must be at least 1, --gpus-per-node 0 or more, --lease positive"
        )
    for option in ("time", "partition", "account", "job_name"):
        if not re.fullmatch(r"[\w.:@+-]*", getattr(arguments, option)):
            raise ConfigError(
                f"--{option.replace('_', '-')} {getattr(arguments, option)!r} has characters that a script can't hold"
            )
    if not re.fullmatch(r"[\w./$\-+]+", arguments.shared):
        raise ConfigError(
            f"--shared {arguments.shared!r} is not a plain path",
            remedy="without spaces and quotes",
        )
    flags = [("--partition", arguments.partition), ("--account", arguments.account)]
    flags.append(("--gpus-per-node", str(arguments.gpus_per_node or "")))
    hosts = max(1, arguments.nodes - arguments.trainers) if arguments.nodes > 1 else 1
    count = hosts * arguments.rollouts_per_node
    share = arguments.gpus_per_node // arguments.rollouts_per_node
    return SCRIPT.substitute(
        name=arguments.job_name,
        nodes=arguments.nodes,
        time=arguments.time,
        trainers=arguments.trainers,
        rollouts_text=f"{count} rollout{'s' if count > 1 else ''}",
        per_node=arguments.rollouts_per_node,
        resources="\n".join(
            f"#SBATCH {flag}={value}" for flag, value in flags if value
        ),
        lease=f"{arguments.lease:g}",
        gpu_flag=f" --gpus-per-task={share}" if share else "",
        folder=arguments.shared,
        python=shlex.quote(arguments.python),
        trainer=arguments.trainer,
    )


def job_roles() -> dict[str, str]:
    """The roles in this job as the script's variables."""
    from jvlab.gateway.cluster._slurm_lab import JobNodes

    return JobNodes.of_job().variables()


def run_slurm(arguments: argparse.Namespace) -> dict[str, Any]:
    """The body of `jvlab slurm`."""
    if arguments.show_places:
        found = job_roles()
        print(
            "\n".join(
                f"export {name}={shlex.quote(value)}" for name, value in found.items()
            )
        )
        return dict(found)
    text = script(arguments)
    if arguments.output:
        Path(arguments.output).write_text(text)
        if not arguments.json:
            print(f"wrote {arguments.output}; start it with: sbatch {arguments.output}")
        return {"output": arguments.output, "lines": text.count("\n")}
    print(text, end="")
    return {"lines": text.count("\n")}
