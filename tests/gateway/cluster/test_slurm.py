"""A SLURM job's variables: what is missing or does not fit together, roles of nodes, ports."""

from __future__ import annotations

from pathlib import Path

import pytest

from jvlab import errors
from jvlab.gateway.cluster import _slurm
from jvlab.gateway.cluster._slurm import JobNodes, split_nodes

JOB = {  # as the script and srun give them to a task of `sbatch --nodes=3`
    "SLURM_JOB_ID": "48213",
    "SLURM_JOB_NUM_NODES": "3",
    "SLURM_NNODES": "1",  # of the task's step
    "JVLAB_SLURM_NODES": "gpu07,gpu08,gpu11",
    "JVLAB_SLURM_FOLDER": "/shared/job-48213",
    "JVLAB_SLURM_ROLLOUTS_PER_NODE": "2",
}


def test_places_of_a_job_of_several_nodes(monkeypatch: pytest.MonkeyPatch):
    places = JobNodes.of_job(JOB)
    assert places == JobNodes(
        48213,
        ("gpu07", "gpu08", "gpu11"),
        ("gpu07",),
        ("gpu08", "gpu11"),
        Path("/shared/job-48213"),
        per_node=2,
    )
    assert places.replicas == 4
    assert places.address == f"gpu07:{places.port}"
    assert places.variables()["JVLAB_TLS"] == "--tls-dir /shared/job-48213/tls", (
        "nothing leaves a node in clear text"
    )
    assert JobNodes.of_job(JOB, trainers=2).rollouts == ("gpu11",)
    for name, value in JOB.items():
        monkeypatch.setenv(name, value)
    assert JobNodes.of_job() == places


def test_places_of_one_node():
    env = {**JOB, "JVLAB_SLURM_NODES": "n1", "SLURM_JOB_NUM_NODES": "1"}
    places = JobNodes.of_job(env)
    assert (places.trainers, places.rollouts) == (("n1",), ("n1",))
    assert places.host == "127.0.0.1"
    assert places.variables()["JVLAB_TLS"] == ""


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (
            {"SLURM_JOB_ID": ""},
            "SLURM_JOB_ID is not set: this process is not part of a SLURM job",
        ),
        ({"SLURM_JOB_ID": "x"}, "SLURM_JOB_ID must be a whole number"),
        ({"JVLAB_SLURM_NODES": ""}, "JVLAB_SLURM_NODES is not set"),
        ({"JVLAB_SLURM_FOLDER": ""}, "JVLAB_SLURM_FOLDER is not set"),
        ({"JVLAB_SLURM_TRAINERS": "x"}, "JVLAB_SLURM_TRAINERS must be"),
        ({"JVLAB_SLURM_TRAINERS": "3"}, "leaving none for rollouts"),
        ({"SLURM_JOB_NUM_NODES": "2"}, "is 2, but JVLAB_SLURM_NODES names 3"),
        (
            {"SLURM_JOB_NUM_NODES": "three"},
            "SLURM_JOB_NUM_NODES must be a whole number of at least 1, not 'three'",
        ),
        ({"SLURM_HET_SIZE": "2"}, "heterogeneous job"),
    ],
)
def test_what_does_not_fit_together_is_named(change: dict[str, str], why: str):
    with pytest.raises(errors.ConfigError, match=why):
        JobNodes.of_job(JOB | change)


@pytest.mark.parametrize(
    ("nodes", "trainers", "expected"),
    [
        ("abcd", 1, ("a", "bcd")),
        ("abcd", 3, ("abc", "d")),
        ("a", 1, ("a", "a")),  # one node does both
    ],
)
def test_trainer_and_rollout_nodes(
    nodes: str, trainers: int, expected: tuple[str, str]
):
    assert split_nodes(nodes, trainers) == (tuple(expected[0]), tuple(expected[1]))


@pytest.mark.parametrize(
    ("trainers", "why"),
    [(0, "at least 1 node must train"), (2, "leaving none"), (9, "leaving none")],
)
def test_splits_that_cannot_be(trainers: int, why: str):
    with pytest.raises(errors.ConfigError, match=why):
        split_nodes("ab", trainers)


def test_ports_follow_from_the_job_alone():
    jobs = (JOB | {"SLURM_JOB_ID": str(48_213 + k)} for k in range(_slurm.PORTS))
    seen = {JobNodes.of_job(job).port for job in jobs}
    assert len(seen) == _slurm.PORTS, "jobs that run side by side share none"
    assert min(seen) >= 20_000
    assert max(seen) < 30_000
