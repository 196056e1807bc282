"""Torch's tensors on a GPU, by ipc: modules, state dicts, FSDP2 shards, into engines and into plain `vllm serve`."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jvlab as jv
from jvlab import errors
from tests.conftest import plain_vllm
from tests.gpu.card import PROMPTS, ending_lab, greedy, tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.engine,
    pytest.mark.skipif(
        not os.path.exists("/dev/nvidia0"), reason="no NVIDIA GPU on this machine"
    ),
]
ENGINE = {
    "gpu_memory_utilization": 0.12,
    "dtype": "bfloat16",
    "max_model_len": 1024,
    "max_num_seqs": 64,
    "kv_cache_memory_bytes": 2 << 30,
    "enforce_eager": True,
}


@pytest.fixture(scope="module")
def lab() -> Iterator[jv.Lab]:
    with ending_lab() as made:
        yield made


@pytest.fixture(scope="module")
def pool(lab: jv.Lab) -> jv.Pool:
    return lab.launch(tiny(0), name="torch", engine=ENGINE).wait(300)


@pytest.fixture(scope="module")
def loaded(pool: jv.Pool) -> list[list[int]]:
    """What the engine says of the weights it loaded itself."""
    return greedy(pool)


def model_of(seed: int) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(tiny(seed), dtype=torch.bfloat16)
    return model.to("cuda")


def test_a_module_and_its_state_dict(
    lab: jv.Lab, pool: jv.Pool, loaded: list[list[int]]
):
    model = model_of(0)
    other = model_of(1)
    link = lab.connect(model, pool)
    assert link.transport == "ipc"
    assert link.meaning.state == "checked"
    for mode in ("direct", "staged"):
        report = link.sync(other, mode=mode)
        assert report.verified
        assert set(report.evidence) == {"live"}
        assert greedy(pool) != loaded
        assert link.sync(model.state_dict(), mode=mode).verified
        assert link.verify(model).ok
        assert not link.verify(other).ok
        assert greedy(pool) == loaded
    link.close()


def test_what_is_still_computed_is_waited_for(lab: jv.Lab, pool: jv.Pool):
    """On another stream than torch's current one, and in a tensor that is not contiguous."""
    import torch

    tree = dict(model_of(0).state_dict())
    name = next(n for n in tree if n.endswith("o_proj.weight"))
    tree[name] = tree[name].T.contiguous().T
    assert not tree[name].is_contiguous()
    # values are changed on purpose
    link = lab.connect(tree, pool, meaning="off")
    side = torch.cuda.Stream()
    busy = torch.randn(8192, 8192, device="cuda")
    for _ in range(3):
        with torch.cuda.stream(side):
            for _ in range(30):
                busy = busy @ busy
                busy /= busy.abs().max()
            tree[name].mul_(1 + (busy[0, 0] * 0).to(tree[name].dtype) + 1)
        report = link.sync(tree)
        torch.cuda.synchronize()
        assert report.verified
        assert link.verify(tree).ok
    link.close()


def test_shards_of_fsdp2(lab: jv.Lab, pool: jv.Pool, loaded: list[list[int]]):
    """A mesh of one process: its shards are DTensors all the same."""
    import torch
    from torch.distributed.fsdp import fully_shard

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.cuda.set_device(0)
    torch.distributed.init_process_group(
        "nccl", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1
    )
    try:
        model = model_of(0)
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        assert type(next(iter(model.parameters()))).__name__ == "DTensor"
        link = lab.connect(model, pool)
        assert link.transport == "ipc"
        matrices = [p for p in model.parameters() if p.ndim > 1]
        for by, same in ((2.0, False), (0.5, True)):  # powers of two: exact
            with torch.no_grad():
                for matrix in matrices:
                    matrix.mul_(by)
            assert link.sync(model).verified
            assert (greedy(pool) == loaded) == same
        link.close()
    finally:
        torch.distributed.destroy_process_group()


def test_tensors_on_the_host_are_refused(lab: jv.Lab, pool: jv.Pool):
    with pytest.raises(errors.Unsupported, match="host memory") as caught:
        lab.connect(model_of(0).to("cpu"), pool)
    assert 'model.to("cuda")' in caught.value.remedy


def test_plain_vllm_serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its own client and factory, by ipc; the server's tokens are those of the weights it loaded."""
    from vllm.distributed.weight_transfer import (
        HTTPVLLMWeightSyncClient,
        ModuleSource,
        WeightTransferTrainerFactory,
    )

    from jvlab.bench._server import PlainServer
    from jvlab.integrations.vllm import TrainerInitInfo

    for key, value in plain_vllm().items():
        monkeypatch.setenv(key, value)
    options = ["--dtype", "bfloat16", "--gpu-memory-utilization", "0.12"]
    options += ["--kv-cache-memory-bytes", str(2 << 30), "--max-model-len", "512"]
    with PlainServer(tmp_path, tiny(0), "jvlab", *options) as server:
        server.wait(300)
        loaded = server.tokens(PROMPTS, 16)
        for mode in ("direct", "staged"):
            for seed in (1, 0):
                engine: Any = WeightTransferTrainerFactory.trainer_init(
                    TrainerInitInfo(rank=0, mode=mode),
                    client=HTTPVLLMWeightSyncClient(server.url),
                    source=ModuleSource(model_of(seed)),
                )
                engine.send_weights()
                assert engine.report.verified
                assert engine.report.transport == "ipc"
                server.calls.ask("POST", "/reset_prefix_cache")
                assert (server.tokens(PROMPTS, 16) == loaded) == (seed == 0)
                engine.shutdown()
        policy = jv.Policy.from_pretrained(tiny(1), dtype="bfloat16")
        with jv.integrations.vllm.connect(server.url, policy) as link:
            assert link.sync(policy.params).verified
            assert link.transport == "ipc"
