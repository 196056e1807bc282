"""Parses SLURM's environment variables: node names, tasks, roles. Pure functions, without scontrol.

node list    list   := item ("," item)*                 rack1-n[01-03,07],login
             item   := (text | "[" ranges "]")+         several brackets: the first varies slowest, as in SLURM
             ranges := range ("," range)*
             range  := digits | digits "-" digits       leading zeros are kept: [08-10] is 08, 09, 10
task counts  counts := count ("," count)*               one per node, in the node list's order
             count  := digits ["(x" digits ")"]         2(x3),1 is 2, 2, 2, 1
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from jvlab._errors import ConfigError

MAX_NODES = 100_000  # more is a typo, not a cluster
# below Linux's ephemeral port range, which begins at 32,768
FIRST_PORT = 20_000
PORTS = 10_000
PORTS_PER_JOB = 8  # so 1,250 consecutive jobs share no port
INSIDE = "run this inside a job: in an sbatch script, or under srun or salloc"


def parse_nodelist(text: str) -> tuple[str, ...]:
    """Every node's name, in SLURM's order.

    >>> parse_nodelist("gpu[08-10],login,r[1-2]n[1,3]")
    ('gpu08', 'gpu09', 'gpu10', 'login', 'r1n1', 'r1n3', 'r2n1', 'r2n3')
    """
    names: list[str] = []
    for start, item in _items(text):
        choices = _choices(text, start, item)
        count = 1
        for choice in choices:
            count *= len(choice)
        if len(names) + count > MAX_NODES:
            raise _invalid(text, start, f"more than {MAX_NODES:,} nodes")
        names += ["".join(parts) for parts in product(*choices)]
    return tuple(names)


def _items(text: str) -> list[tuple[int, str]]:
    """(offset, item) of the items separated by commas outside brackets."""
    out = []
    start = 0
    inside = False
    for place, character in enumerate(text):
        if character == "[":
            if inside:
                raise _invalid(text, place, "a bracket inside a bracket")
            inside = True
        elif character == "]":
            if not inside:
                raise _invalid(text, place, "a bracket that was never opened")
            inside = False
        elif character == "," and not inside:
            out.append((start, text[start:place]))
            start = place + 1
        elif not inside and not (character.isalnum() or character in "-._"):
            raise _invalid(text, place, f"{character!r} can't be part of a node's name")
    if inside:
        raise _invalid(text, text.rindex("["), "a bracket that is never closed")
    out.append((start, text[start:]))
    for place, item in out:
        if not item:
            raise _invalid(text, place, "a node without a name")
    return out


def _choices(text: str, start: int, item: str) -> list[list[str]]:
    """The alternatives for each part of an item: fixed text, or the numbers of a bracket."""
    choices = []
    place = start
    for part in re.findall(r"\[[^]]*]|[^[]+", item):
        choices.append(
            _numbers(text, place + 1, part[1:-1]) if part.startswith("[") else [part]
        )
        place += len(part)
    return choices


def _numbers(text: str, start: int, ranges: str) -> list[str]:
    out: list[str] = []
    place = start
    for part in ranges.split(","):
        found = re.fullmatch(r"([0-9]{1,18})(?:-([0-9]{1,18}))?", part)
        if found is None:
            raise _invalid(text, place, f"{part!r} is neither a number nor a range")
        low = found[1]
        high = found[2] or found[1]
        count = int(high) - int(low) + 1
        if count < 1:
            raise _invalid(text, place, f"the range {part!r} runs backwards")
        if len(out) + count > MAX_NODES:
            raise _invalid(text, place, f"more than {MAX_NODES:,} nodes")
        out += [f"{number:0{len(low)}d}" for number in range(int(low), int(high) + 1)]
        place += len(part) + 1
    return out


def _invalid(text: str, place: int, why: str) -> ConfigError:
    return ConfigError(
        f"not a SLURM node list: {why}\n    {text}\n    {' ' * place}^",
        remedy="the format is, for example, gpu[08-10],login,r[1-2]n[1,3]",
        nodelist=text,
        place=place,
    )


def parse_counts(text: str) -> tuple[int, ...]:
    """One number per node, from SLURM's short form.

    >>> parse_counts("2(x3),1")
    (2, 2, 2, 1)
    """
    out: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"([0-9]{1,18})(?:\(x([0-9]{1,18})\))?", part)
        if found is None or int(found[2] or 1) < 1:
            raise ConfigError(
                f"not a SLURM count per node: {part!r} in {text!r}",
                remedy="the format is, for example, 2(x3),1",
            )
        if len(out) + int(found[2] or 1) > MAX_NODES:
            raise ConfigError(f"counts of more than {MAX_NODES:,} nodes: {text!r}")
        out += [int(found[1])] * int(found[2] or 1)
    return tuple(out)


@dataclass(frozen=True)
class SlurmJob:
    """A SLURM job, seen from one of its processes."""

    job: int
    nodes: tuple[str, ...]
    tasks: tuple[int, ...]  # per node
    process: int  # this process's index among all tasks; 0 in the batch script itself
    node: int  # the index of its node

    @classmethod
    def from_environment(cls, variables: Mapping[str, str] | None = None) -> SlurmJob:
        """Read and cross-check SLURM's variables; an error names what is missing or inconsistent."""
        env = os.environ if variables is None else variables
        job = _integer(env, "SLURM_JOB_ID", env.get("SLURM_JOBID"))
        if int(env.get("SLURM_HET_SIZE") or 1) > 1:
            raise ConfigError(
                "this is a heterogeneous job, with one node list per component, which is not supported",
                remedy="request all nodes in one component, and let jvlab split them",
            )
        listed = env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST")
        if not listed:
            raise ConfigError("SLURM_JOB_NODELIST is not set", remedy=INSIDE)
        nodes = parse_nodelist(listed)
        count = _integer(
            env, "SLURM_NNODES", env.get("SLURM_JOB_NUM_NODES") or str(len(nodes))
        )
        if count != len(nodes):
            raise ConfigError(
                f"SLURM_NNODES is {count}, but SLURM_JOB_NODELIST names {len(nodes)}: {listed}",
                remedy="the environment mixes variables of two jobs; start from a clean one",
            )
        tasks = _tasks(env, len(nodes))
        process = _integer(env, "SLURM_PROCID", "0")
        node = _integer(env, "SLURM_NODEID", "0")
        if node >= len(nodes) or process >= max(1, sum(tasks)):
            raise ConfigError(
                f"process {process} on node {node} can't exist: the job has {sum(tasks)} tasks on {len(nodes)} nodes"
            )
        return cls(job, nodes, tasks, process, node)

    def port(self, which: int = 0) -> int:
        """The port of this job's service number `which`, the same in all its processes without communication.

        If another program has it, the listener must fail instead of choosing another.
        """
        if not 0 <= which < PORTS_PER_JOB:
            raise ConfigError(f"a job has ports 0 to {PORTS_PER_JOB - 1}, not {which}")
        return FIRST_PORT + self.job * PORTS_PER_JOB % PORTS + which

    def split(self, trainers: int = 1) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """(trainer nodes, rollout nodes): the first ones train. A single node does both."""
        return split_nodes(self.nodes, trainers)


def split_nodes(
    nodes: Sequence[str], trainers: int = 1
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


def _integer(env: Mapping[str, str], name: str, other: str | None) -> int:
    text = env.get(name) or other
    if not text:
        raise ConfigError(
            f"{name} is not set: this process is not part of a SLURM job", remedy=INSIDE
        )
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise ConfigError(f"{name} must be a whole number, not {text!r}")
    return int(text)


def _tasks(env: Mapping[str, str], nodes: int) -> tuple[int, ...]:
    """Tasks per node: as placed by SLURM, else as requested, else one each."""
    for name in (
        "SLURM_STEP_TASKS_PER_NODE",
        "SLURM_TASKS_PER_NODE",
        "SLURM_NTASKS_PER_NODE",
    ):
        if text := env.get(name):
            counts = parse_counts(text)
            if len(counts) == 1 and name == "SLURM_NTASKS_PER_NODE":
                counts *= nodes  # the request is one number for all nodes
            if len(counts) != nodes:
                raise ConfigError(
                    f"{name}={text!r} counts {len(counts)} nodes, but the job has {nodes}"
                )
            return counts
    return (1,) * nodes
