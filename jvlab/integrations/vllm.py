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
    from jvlab._deadline import Deadline
    from jvlab.integrations._vllm_backend import Engine, TrainerEngine
    from jvlab.integrations._vllm_backend import JvlabTrainerInitInfo as TrainerInitInfo
    from jvlab.integrations._vllm_server import FourCalls
    from jvlab.sync._link import Link

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
    if name not in ("Engine", "TrainerEngine", "TrainerInitInfo"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from jvlab.integrations import _vllm_backend

    register()  # a trainer loads no plugins of vLLM's
    return getattr(
        _vllm_backend, "JvlabTrainerInitInfo" if name == "TrainerInitInfo" else name
    )


def connect(
    server: str | FourCalls,
    params: Any,
    rules: Any = "auto",
    transport: str = "auto",
    mode: str = "direct",
    *,
    api_key: str | None = None,
    bucket_mib: float = 16.0,
    nonfinite: str = "refuse",
    checkpoint: Any = None,
    meaning: str = "auto",
    timeout: float | Deadline = 900.0,
) -> Link:
    """Connect a tree of parameters with a server whose backend is `jvlab`; `link.sync(params)` then writes them there.

    server   its address, "http://127.0.0.1:8000", or an object with vLLM's four calls (`VLLMWeightSyncClient`). By its
             address, generation is paused for each sync, and KV of older weights is dropped; by four calls alone the
             caller pauses it
    api_key  what the server was started with, if it was
    others   as of `lab.connect`; `params` is a JAX tree, a torch state dict or module, a `jv.Policy`

    After a failed sync the server holds its old weights, or, in direct mode, is dirty: it stays paused, its version
    does not move, and calls of another trainer's are answered with an error that says so, until a sync commits.
    """
    from jvlab._deadline import Deadline
    from jvlab._errors import Unsupported
    from jvlab.integrations._vllm_server import HttpCalls, Server, ServerPool
    from jvlab.layout._tree import device_processes, flatten
    from jvlab.sync._connections import agree, check_options
    from jvlab.sync._link import Link
    from jvlab.sync._meaning import unpack

    deadline = Deadline.of(timeout)
    calls = HttpCalls(server, api_key) if isinstance(server, str) else server
    check_options(params, {})
    params, scorer = unpack(params)
    if len(set(device_processes(flatten(params).arrays).values())) > 1:
        raise Unsupported(
            "these parameters are spread over several trainer processes; a server is written from one",
            remedy="launch the engines in a lab: lab.launch(model), or gather the parameters in one process",
        )
    reached = Server(calls)
    try:
        pool: Any = ServerPool(reached, deadline)
        agreed = agree(
            params,
            scorer,
            pool,
            rules,
            transport,
            meaning=meaning,
            checkpoint=checkpoint,
            bucket_mib=bucket_mib,
            options={},
            cache={},
            gateway_version=pool.jvlab,
            same_host=True,
            deadline=deadline,
        )
        forget = lambda link: None
        link = Link(pool, agreed, mode, None, forget, None, nonfinite, deadline)
    except BaseException as error:
        reached.hang_up(str(error))
        raise
    link.remembered.take(params)
    return link
