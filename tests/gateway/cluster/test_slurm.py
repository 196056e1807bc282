"""SLURM's variables: node lists as SLURM writes them, task counts, roles of nodes, ports."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jvlab import errors
from jvlab.gateway.cluster import _slurm
from jvlab.gateway.cluster._slurm import (
    SlurmJob,
    parse_counts,
    parse_nodelist,
    split_nodes,
)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("node1", ["node1"]),
        ("localhost", ["localhost"]),
        ("node[1-4]", ["node1", "node2", "node3", "node4"]),
        ("node[08-11]", ["node08", "node09", "node10", "node11"]),  # zeros in front
        ("node[9-11]", ["node9", "node10", "node11"]),  # and none
        ("node[099-101]", ["node099", "node100", "node101"]),
        ("nid[001234-001236]", ["nid001234", "nid001235", "nid001236"]),
        ("node[1,3,5-6]", ["node1", "node3", "node5", "node6"]),
        ("node[03-04,12,7]", ["node03", "node04", "node12", "node7"]),
        ("c-0,c-1", ["c-0", "c-1"]),
        ("login,gpu[1-2],big-3", ["login", "gpu1", "gpu2", "big-3"]),
        ("a[1-2],b[01,3],c", ["a1", "a2", "b01", "b3", "c"]),
        (
            "rack[1-2]-node[01-02]",
            ["rack1-node01", "rack1-node02", "rack2-node01", "rack2-node02"],
        ),
        (
            "r[0-1]c[1,3]s[7-8]",
            [
                "r0c1s7",
                "r0c1s8",
                "r0c3s7",
                "r0c3s8",
                "r1c1s7",
                "r1c1s8",
                "r1c3s7",
                "r1c3s8",
            ],
        ),
        ("node[1-2].example.org", ["node1.example.org", "node2.example.org"]),
        ("ip-10-0-0-[7-8]", ["ip-10-0-0-7", "ip-10-0-0-8"]),
        (
            "queue1-dy-p4d24xlarge-[1-2]",
            ["queue1-dy-p4d24xlarge-1", "queue1-dy-p4d24xlarge-2"],
        ),
        ("[1-2]", ["1", "2"]),
    ],
)
def test_nodelists(text: str, names: list[str]):
    assert parse_nodelist(text) == tuple(names)


@pytest.mark.parametrize(
    ("text", "why", "place"),
    [
        ("", "without a name", 0),
        ("a,,b", "without a name", 2),
        ("a,", "without a name", 2),
        ("n[1-2", "never closed", 1),
        ("n1]", "never opened", 2),
        ("n[1[2]]", "inside a bracket", 3),
        ("n[]", "neither a number nor a range", 2),
        ("n[1,,2]", "neither a number nor a range", 4),
        ("n[a-c]", "neither a number nor a range", 2),
        ("n[1,3-]", "neither a number nor a range", 4),
        ("bg[000x733]", "neither a number nor a range", 3),
        ("n[5-3]", "runs backwards", 2),
        ("a b", "can't be part of a node's name", 1),
        ("$(hostname)", "can't be part of a node's name", 0),
        ("n[1-999999999]", "more than 100,000 nodes", 2),
        ("a,n[1-1000]x[1-1000]", "more than 100,000 nodes", 2),
    ],
)
def test_what_is_no_nodelist_is_pointed_at(text: str, why: str, place: int):
    with pytest.raises(errors.ConfigError, match=why) as caught:
        parse_nodelist(text)
    assert caught.value.fields["place"] == place
    assert str(caught.value).splitlines()[2] == "    " + " " * place + "^"


NAMES = st.from_regex(r"[a-z]{1,4}-?", fullmatch=True)
GROUPS = st.tuples(NAMES, st.integers(0, 999), st.integers(0, 20), st.integers(0, 4))


@given(st.lists(GROUPS, min_size=1, max_size=5))
def test_ranges_written_and_read_again(groups: list[tuple[str, int, int, int]]):
    text = ",".join(
        f"{name}[{low:0{width}d}-{low + more:0{width}d}]"
        for name, low, more, width in groups
    )
    names = [
        f"{name}{n:0{width}d}"
        for name, low, more, width in groups
        for n in range(low, low + more + 1)
    ]
    assert parse_nodelist(text) == tuple(names)


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("1", [1]),
        ("2(x3),1", [2, 2, 2, 1]),
        ("4(x2)", [4, 4]),
        ("1,2,3", [1, 2, 3]),
        ("64", [64]),
    ],
)
def test_counts(text: str, counts: list[int]):
    assert parse_counts(text) == tuple(counts)


@pytest.mark.parametrize(
    "text", ["", "2x3", "2(x)", "2(3)", "(x3)", "1,", "-1", "1(x0)", "1(x999999999)"]
)
def test_what_is_no_count(text: str):
    with pytest.raises(errors.ConfigError, match=r"count"):
        parse_counts(text)


JOB = {  # as srun gives them to task 3 of `sbatch --nodes=3 --ntasks=5`
    "SLURM_JOB_ID": "48213",
    "SLURM_JOBID": "48213",
    "SLURM_JOB_NODELIST": "gpu[07-08,11]",
    "SLURM_NODELIST": "gpu[07-08,11]",
    "SLURM_NNODES": "3",
    "SLURM_JOB_NUM_NODES": "3",
    "SLURM_NTASKS": "5",
    "SLURM_TASKS_PER_NODE": "2(x2),1",
    "SLURM_PROCID": "3",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "1",
}


def test_a_task_of_a_job():
    job = SlurmJob.from_environment(JOB)
    assert job == SlurmJob(
        48213, ("gpu07", "gpu08", "gpu11"), (2, 2, 1), process=3, node=1
    )
    assert job.split() == (("gpu07",), ("gpu08", "gpu11"))


def test_the_batch_script_and_old_names(monkeypatch: pytest.MonkeyPatch):
    env = {"SLURM_JOBID": "7", "SLURM_NODELIST": "n[1-2]", "SLURM_NTASKS_PER_NODE": "4"}
    assert SlurmJob.from_environment(env) == SlurmJob(7, ("n1", "n2"), (4, 4), 0, 0)
    assert SlurmJob.from_environment(env | {"SLURM_NTASKS_PER_NODE": ""}).tasks == (
        1,
        1,
    )
    for name in JOB:
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert SlurmJob.from_environment().job == 7


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (
            {"SLURM_JOB_ID": "", "SLURM_JOBID": ""},
            "SLURM_JOB_ID is not set: this process is not part of a SLURM job",
        ),
        (
            {"SLURM_JOB_NODELIST": "", "SLURM_NODELIST": ""},
            "SLURM_JOB_NODELIST is not set",
        ),
        ({"SLURM_NNODES": "2"}, "SLURM_NNODES is 2, but SLURM_JOB_NODELIST names 3"),
        ({"SLURM_NNODES": "three"}, "SLURM_NNODES must be a whole number, not 'three'"),
        ({"SLURM_TASKS_PER_NODE": "2(x2)"}, "counts 2 nodes, but the job has 3"),
        (
            {"SLURM_PROCID": "5"},
            "process 5 on node 1 can't exist: the job has 5 tasks on 3 nodes",
        ),
        ({"SLURM_NODEID": "3"}, "process 3 on node 3 can't exist"),
        ({"SLURM_HET_SIZE": "2"}, "heterogeneous job"),
    ],
)
def test_what_does_not_fit_together_is_named(change: dict[str, str], why: str):
    with pytest.raises(errors.ConfigError, match=why):
        SlurmJob.from_environment(JOB | change)


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
    first, *rest = (
        SlurmJob(number, ("n",), (1,), 0, 0) for number in range(48_213, 48_213 + 1250)
    )
    assert first.port(1) == first.port() + 1
    seen = {job.port(k) for job in (first, *rest) for k in range(_slurm.PORTS_PER_JOB)}
    assert len(seen) == 1250 * _slurm.PORTS_PER_JOB, (
        "jobs that run side by side share none"
    )
    assert min(seen) >= 20_000
    assert max(seen) < 30_000
    with pytest.raises(errors.ConfigError, match="ports 0 to 7"):
        first.port(8)
