"""Plain `vllm serve` as where weights go, without a gateway: the weight-transfer backend `jvlab`.

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --weight-transfer-config '{"backend": "jvlab"}'

A JAX trainer, or a torch one that has no vLLM, connects by the server's address:

    link = jv.integrations.vllm.connect("http://127.0.0.1:8000", params)
    report = link.sync(params)

A torch trainer that speaks vLLM's four calls changes the backend's name:

    from jvlab.integrations.vllm import TrainerInitInfo
    engine = WeightTransferTrainerFactory.trainer_init(
        TrainerInitInfo(rank=0), client=HTTPVLLMWeightSyncClient(url), source=ModuleSource(model)
    )
    engine.send_weights()

Both get jvlab's plan, writes (shared memory, or CUDA IPC on a GPU), digests of live memory, and versions. Trainer and
server run on one host. vLLM finds the backend by the entry point `vllm.general_plugins`, which calls `register`.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

# Light: every process of every vLLM on this machine imports this module.
from jvlab.engine._patches import settle_vector_math

if TYPE_CHECKING:
    from jvlab.integrations._vllm_backend import Engine, TrainerEngine
    from jvlab.integrations._vllm_backend import JvlabTrainerInitInfo as TrainerInitInfo
    from jvlab.integrations._vllm_server import connect

__all__ = ["Engine", "TrainerEngine", "TrainerInitInfo", "connect", "register"]


def register() -> None:
    """Add the backend to vLLM's two factories. Can be called twice; vLLM calls it in each of its processes."""
    settle_vector_math()  # before a CPU's worker builds the model
    try:
        from vllm.distributed.weight_transfer.factory import (
            WeightTransferEngineFactory,
            WeightTransferTrainerFactory,
        )
    except ImportError:  # a vLLM before 0.32; its engines must start all the same
        return
    with contextlib.suppress(ValueError):  # registered already
        WeightTransferEngineFactory.register_engine("jvlab", __name__, "Engine")
    with contextlib.suppress(ValueError):
        WeightTransferTrainerFactory.register_engine("jvlab", __name__, "TrainerEngine")


def __getattr__(name: str) -> Any:
    if name == "connect":
        from jvlab.integrations._vllm_server import connect

        return connect
    if name not in ("Engine", "TrainerEngine", "TrainerInitInfo"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from jvlab.integrations import _vllm_backend

    register()  # a trainer loads no plugins of vLLM's
    return getattr(
        _vllm_backend, "JvlabTrainerInitInfo" if name == "TrainerInitInfo" else name
    )
