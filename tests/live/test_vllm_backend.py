"""vLLM's own server with the backend `jvlab`: its example's flow, a JAX trainer, and trainers that fail."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

import jvlab as jv
from jvlab import errors
from jvlab.bench._server import PlainServer
from tests.conftest import plain_vllm

# a server that imports vLLM by itself takes minutes on a busy machine, before its first test
pytestmark = [pytest.mark.engine, pytest.mark.timeout(1500)]
START_SECONDS = 900.0
SECONDS = 300.0
SCRIPT = """
import os, signal, sys
import jvlab as jv
from safetensors.torch import load_file

url, folder, mode, how, timeout = sys.argv[1:]
params = load_file(folder + "/model.safetensors")
link = jv.integrations.vllm.connect(url, params, meaning="off")
stepper = link.stepper(params, mode=mode, timeout=float(timeout))
stepper.step()
print("half sent", flush=True)
os.kill(os.getpid(), getattr(signal, how))
"""


class Served(PlainServer):
    """A server on this machine's cores, and what tests ask it."""

    def __init__(self, folder: Path, model: str, ranks: int = 1) -> None:
        # those that this process may use: of a container they need not begin with 0
        cores = list(map(str, sorted(os.sched_getaffinity(0))[:2]))
        own = {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_TARGET_DEVICE": "cpu",
            "VLLM_CPU_OMP_THREADS_BIND": ("|" if ranks == 2 else ",").join(cores),
        }
        options = ("--dtype", "float32", "--max-model-len", "256")
        size = ("--tensor-parallel-size", str(ranks))
        super().__init__(
            folder, model, "jvlab", *options, *size, env={**plain_vllm(), **own}
        )

    def post(self, path: str, **body: Any) -> requests.Response:
        return requests.post(f"{self.url}{path}", json=body, timeout=SECONDS)

    def get(self, path: str) -> Any:
        return requests.get(f"{self.url}{path}", timeout=SECONDS).json()

    @property
    def version(self) -> str:
        return self.get("/weight_info")["weight_version"]

    def greedy(self) -> list[int]:
        return self.tokens([[1, 2, 3, 4]], 8)[0]

    def reload(self, model: str) -> None:
        """vLLM's own loading of a checkpoint."""
        asked = {"method": "reload_weights", "kwargs": {"weights_path": model}}
        assert self.post("/collective_rpc", **asked).ok
        self.post("/reset_prefix_cache")


@pytest.fixture(scope="module")
def models() -> list[str]:
    """One shape with two sets of weights."""
    return [jv.models.tiny("qwen3", seed=seed) for seed in (0, 1)]


@pytest.fixture(scope="module")
def server(
    models: list[str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    with Served(tmp_path_factory.mktemp("server"), models[0]) as made:
        yield made.wait(START_SECONDS)


def state_dict(model: str) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(f"{model}/model.safetensors")


def connected(server: Served, model: str, **options: Any) -> jv.Link:
    return jv.integrations.vllm.connect(server.url, state_dict(model), **options)


def half_a_sync(
    server: Served, model: str, mode: str, how: str, timeout: float = SECONDS
) -> subprocess.Popen[str]:
    """A trainer that sent one tensor, and then died or was stopped."""
    trainer = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, server.url, model, mode, how, str(timeout)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert trainer.stdout is not None
    said = trainer.stdout.readline()
    assert said == "half sent\n", said
    return trainer


def ended(trainer: subprocess.Popen[str]) -> None:
    trainer.kill()
    trainer.wait(30)
    assert trainer.stdout is not None
    trainer.stdout.close()


def test_the_flow_of_vllms_example(server: Served, models: list[str]):
    """As in vLLM's rlhf_http_ipc.py: only the init info has another class."""
    import torch
    from transformers import AutoModelForCausalLM
    from vllm.distributed.weight_transfer import (
        HTTPVLLMWeightSyncClient,
        ModuleSource,
        WeightTransferTrainerFactory,
    )

    from jvlab.integrations.vllm import TrainerInitInfo

    before = server.greedy()
    model = AutoModelForCausalLM.from_pretrained(models[1], dtype=torch.float32)
    engine: Any = WeightTransferTrainerFactory.trainer_init(
        TrainerInitInfo(rank=0),
        client=HTTPVLLMWeightSyncClient(server.url),
        source=ModuleSource(model),
    )
    server.post("/pause")
    engine.send_weights()
    server.post("/resume")
    assert engine.report.verified
    assert engine.report.mode == "staged"
    assert server.version == str(engine.report.version)
    after = server.greedy()
    assert after != before
    engine.shutdown()
    server.reload(models[1])
    assert server.greedy() == after


def test_a_jax_trainer(server: Served, models: list[str]):
    policy = jv.Policy.from_pretrained(models[1])
    with jv.integrations.vllm.connect(server.url, policy) as link:
        for mode in ("direct", "staged"):
            server.reload(models[0])
            old = server.greedy()
            report = link.sync(policy.params, mode=mode)
            assert report.verified
            assert report.meaning.startswith("checked")
            assert server.version == str(report.version) == str(link.version)
            new = server.greedy()
            assert new != old
            # the same bits as vLLM's own loader leaves
            server.reload(models[1])
            assert link.verify(policy.params).ok
            assert server.greedy() == new
        assert not server.get("/is_paused")["is_paused"]
        assert len(link.pool.peek("model.norm.weight")) > 0
        scores = link.pool.score([[1, 2, 3, 4]])
        assert len(scores[0]) == 4


def test_a_wrong_digest_leaves_the_old_weights(
    server: Served, models: list[str], monkeypatch: pytest.MonkeyPatch
):
    from jvlab.sync._transaction import Transaction

    with connected(server, models[0]) as link:
        committed = link.sync(state_dict(models[0])).version
        before = server.greedy()
        right = Transaction.expected

        def wrong(self: Transaction) -> Any:
            out = right(self)
            out[0].values[0] ^= 1
            return out

        with monkeypatch.context() as patch:
            patch.setattr(Transaction, "expected", wrong)
            with pytest.raises(errors.VerifyError, match="as before") as caught:
                link.sync(state_dict(models[1]), mode="staged")
            assert len(caught.value.fields["differing"]) == 1  # type: ignore[arg-type]
            assert (server.version, server.greedy()) == (str(committed), before)
            with pytest.raises(errors.VerifyError, match="dirty"):
                link.sync(state_dict(models[1]), mode="direct")
        assert server.version == str(committed)
        assert server.get("/is_paused")["is_paused"]  # nobody gets tokens of it
        link.sync(state_dict(models[0]))
        assert server.greedy() == before


def test_bad_parameters_change_nothing(server: Served, models: list[str]):
    with connected(server, models[0]) as link:
        version = link.sync(state_dict(models[0])).version
        smaller = {name: t[..., :-1] for name, t in state_dict(models[1]).items()}
        for bad in (smaller, {"x": next(iter(smaller.values()))}, 3):
            with pytest.raises(errors.JvlabError):
                link.sync(bad)
        # another client's words, which no rank understands
        assert not server.post("/init_weight_transfer_engine", init_info={"a": 1}).ok
        assert not server.post("/finish_weight_update", weight_version="99").ok
        assert server.version == str(version)
        assert link.sync(state_dict(models[1])).version == version + 1


def test_the_last_trainer_to_connect_writes(server: Served, models: list[str]):
    with connected(server, models[0]) as first, connected(server, models[1]) as second:
        version = second.sync(state_dict(models[1])).version
        start = time.monotonic()
        with pytest.raises(errors.SyncError, match="another trainer has connected"):
            first.sync(state_dict(models[0]), timeout=SECONDS)
        assert time.monotonic() - start < SECONDS / 2
        assert server.version == str(version)
        # asked again, it is the last one
        assert first.sync(state_dict(models[0])).version == version + 1


@pytest.mark.parametrize(
    "mode", [pytest.param("staged", marks=pytest.mark.soak), "direct"]
)
def test_a_trainer_that_dies_in_the_middle(
    server: Served, models: list[str], mode: str
):
    with connected(server, models[0]) as link:
        version = link.sync(state_dict(models[0])).version
        before = server.greedy()
    ended(half_a_sync(server, models[1], mode, "SIGKILL"))
    assert server.version == str(version)
    if mode == "staged":
        assert server.greedy() == before
    else:
        said = server.post("/start_weight_update").text
        assert "dirty" in said
        assert f"after version {version}" in said
        assert server.get("/is_paused")["is_paused"]
    with connected(server, models[0]) as link:
        assert link.pool.snapshot.replicas[0].dirty == (mode == "direct")
        assert link.sync(state_dict(models[0])).version == version + 1
    assert server.greedy() == before


@pytest.mark.soak
def test_a_trainer_that_stops_does_not_hold_the_server(
    server: Served, models: list[str]
):
    with connected(server, models[0]) as link:
        version = link.sync(state_dict(models[0])).version
    trainer = half_a_sync(server, models[1], "direct", "SIGSTOP", timeout=20)
    try:
        start = time.monotonic()
        # waits in the engine's queue until its ranks gave up
        said = server.post("/start_weight_update").text
        assert time.monotonic() - start < SECONDS / 2
        assert "dirty" in said
        assert server.version == str(version)
    finally:
        ended(trainer)
    with connected(server, models[0]) as link:
        assert link.sync(state_dict(models[0])).verified


def test_requests_in_flight_go_on(server: Served, models: list[str]):
    """With new weights, and KV of those: vLLM's own cache has no other way."""
    said: list[Any] = []
    asked = {"prompt": [5, 6, 7], "max_tokens": 200, "ignore_eos": True}
    with connected(server, models[0]) as link:
        call = threading.Thread(
            target=lambda: said.append(server.post("/v1/completions", **asked).json())
        )
        call.start()
        versions = [link.sync(state_dict(models[k % 2])).version for k in range(3)]
        call.join(SECONDS)
        assert said[0]["usage"]["completion_tokens"] == 200
        assert server.version == str(versions[-1])


@pytest.mark.soak
def test_two_ranks(models: list[str], tmp_path: Path):
    with Served(tmp_path, models[0], 2) as server:
        server.wait(START_SECONDS)
        before = server.greedy()
        with connected(server, models[1]) as link:
            assert link.plan.ranks == 2
            report = link.sync(state_dict(models[1]), mode="staged")
            assert {rank for _, rank in report.digests} == {0, 1}
            assert server.greedy() != before
        for mode in ("direct", "staged"):
            ended(half_a_sync(server, models[1], mode, "SIGKILL"))
            # one rank's error must not be taken for another call's answer
            for _ in range(3):
                with connected(server, models[0]) as link:
                    link.sync(state_dict(models[0]))
                    assert link.verify(state_dict(models[0])).ok
                assert server.greedy() == before
