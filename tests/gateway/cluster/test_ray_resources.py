"""What replicas and trainers ask of a Ray cluster, and what is refused; without ray."""

from __future__ import annotations

import builtins
from types import SimpleNamespace
from typing import Any

import pytest

import jvlab as jv
from jvlab import errors
from jvlab.gateway.cluster._ray_replica import Resources, one_host
from jvlab.wire.processes import _labs

NODES = [
    {
        "NodeID": "aa",
        "NodeManagerAddress": "10.0.0.1",
        "NodeManagerHostname": "one",
        "Alive": True,
    },
    {
        "NodeID": "bb",
        "NodeManagerAddress": "10.0.0.2",
        "NodeManagerHostname": "two",
        "Alive": True,
    },
    {
        "NodeID": "cc",
        "NodeManagerAddress": "10.0.0.3",
        "NodeManagerHostname": "three",
        "Alive": False,
    },
]


@pytest.mark.parametrize(
    ("given", "device", "ranks", "engine", "bundle"),
    [
        ({}, "cpu", 2, {}, {"CPU": 2.0}),
        ({}, "cuda", 4, {}, {"CPU": 1.0, "GPU": 4.0}),
        ({"cpus": 8}, "cuda", 1, {}, {"CPU": 8.0, "GPU": 1.0}),
        (
            {"gpus": 0.5, "resources": {"rollout": 1}},
            "cuda",
            1,
            {},
            {"CPU": 1.0, "GPU": 0.5, "rollout": 1.0},
        ),
        ({}, "cuda", 16, {"distributed_executor_backend": "ray"}, {"CPU": 1.0}),
        ({"cpus": 0}, "cuda", 1, {"distributed_executor_backend": "ray"}, {}),
    ],
)
def test_bundles(
    given: dict[str, Any],
    device: str,
    ranks: int,
    engine: dict[str, Any],
    bundle: dict[str, float],
):
    resources_asked = Resources.of(given)
    assert resources_asked.bundle(device, ranks, engine) == bundle
    assert Resources.from_json(resources_asked.to_json()) == resources_asked


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"cpu": 1}, "'cpu' is not known"),
        ({"cpus": -1}, "cpus must be"),
        ({"gpus": "2"}, "gpus must be"),
        ({"resources": {"a": 0}}, "resources must be"),
        ({"resources": ["a"]}, "resources must be"),
        ({"nodes": "10.0.0.1"}, "nodes must be a list"),
        ({"restarts": -1}, "restarts must be"),
    ],
)
def test_wishes_that_make_no_sense(given: dict[str, Any], word: str):
    with pytest.raises(errors.ConfigError, match=word):
        Resources.of(given)


def test_nodes_by_address_name_or_id():
    resources_asked = Resources.of({"nodes": ["10.0.0.2", "one"]})
    assert [resources_asked.node(k, NODES) for k in range(4)] == [
        "bb",
        "aa",
        "bb",
        "aa",
    ]
    assert Resources().node(0, NODES) is None
    with pytest.raises(
        errors.ConfigError, match=r"no node of this cluster is called '10\.0\.0\.3'"
    ) as caught:
        Resources.of({"nodes": ["10.0.0.3"]}).node(0, NODES)
    assert "10.0.0.1, 10.0.0.2" in caught.value.remedy
    twins = [{**NODES[0]}, {**NODES[0], "NodeID": "dd"}]
    assert [Resources.of({"nodes": ["10.0.0.1"]}).node(k, twins) for k in range(3)] == [
        "aa",
        "dd",
        "aa",
    ], "one host, two nodes"


def test_one_host():
    assert not one_host(NODES)
    assert one_host([NODES[0], NODES[2]])


def test_without_ray_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch):
    real = builtins.__import__

    def refuse(name: str, *rest: Any, **more: Any) -> Any:
        if name == "ray" or name.startswith("ray."):
            raise ImportError("No module named 'ray'")
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(
        errors.MissingDependency, match="needs the package ray"
    ) as caught:
        jv.Lab(cluster="ray")
    assert caught.value.remedy == 'pip install "jvlab[ray]"'


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"cluster": "mars"}, "cluster='mars' is not known"),
        ({"address": "auto"}, "address= needs a cluster"),
        ({"cluster": "ray", "port": 5}, "port= is for a gateway on this machine"),
        (
            {"cluster": "ray", "metrics_port": 0},
            "metrics_port= is for a gateway on this machine",
        ),
    ],
)
def test_arguments_that_do_not_go_together(given: dict[str, Any], word: str):
    with pytest.raises(errors.ConfigError, match=word):
        jv.Lab(**given)


def test_train_needs_ray():
    lab: Any = SimpleNamespace(_cluster=None)
    with pytest.raises(errors.ConfigError, match="no Ray cluster") as caught:
        jv.Lab.train(lab, "train.py", processes=2)
    assert "jvlab slurm" in caught.value.remedy


def test_a_trainer_process_finds_the_lab_that_started_it(
    monkeypatch: pytest.MonkeyPatch,
):
    lab = _labs.LabInfo("far", "running", "10.0.0.1:7", token="t", fingerprint="f")
    monkeypatch.setattr(_labs, "given", lab)
    assert _labs.find_lab() is _labs.find_lab("far") is lab
    assert not {"token", "fingerprint"} & lab.plain().keys()
    with pytest.raises(errors.LabNotFound):
        _labs.find_lab("another")
