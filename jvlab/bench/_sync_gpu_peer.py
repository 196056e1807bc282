"""vLLM's own ipc weight transfer in its own process: the peer of `bench sync --device cuda`.

It needs VLLM_ALLOW_INSECURE_SERIALIZATION=1 (its handles are pickled), which is set in this process only.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any


def serve(pipe: Connection, order: dict[str, Any]) -> None:
    """Load the checkpoint with vLLM, report its tokens, then time both kinds of transfer and send the facts."""
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    # no deadline: whoever reads from the pipe has one, and kills this process
    run = lambda work: asyncio.run_coroutine_threadsafe(work, loop).result()
    try:
        engine = run(_start(order["arguments"]))
        pipe.send(
            {"tokens": run(_greedy(engine, order["prompts"], order["max_tokens"]))}
        )
        # no deadline: it is killed, or the pipe's other end closes
        pipe.recv()  # "go": the GPU is idle now
        pipe.send(_times(run, engine, order))
    except Exception as error:
        pipe.send({"error": f"{type(error).__name__}: {error}"})
        raise
    # no deadline: it is killed, or the pipe's other end closes
    pipe.recv()  # until we are killed


async def _start(arguments: dict[str, Any]) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments = {**arguments, "weight_transfer_config": {"backend": "ipc"}}
    return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))


async def _greedy(engine: Any, prompts: list[list[int]], count: int) -> list[list[int]]:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(
        max_tokens=count,
        temperature=0.0,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )

    async def one(k: int, ids: list[int]) -> list[int]:
        last: Any = None
        async for output in engine.generate(
            {"prompt_token_ids": ids}, params, f"peer-{k}-{time.time_ns()}"
        ):
            last = output
        return list(last.outputs[0].token_ids)

    return [await one(k, ids) for k, ids in enumerate(prompts)]


def _times(
    run: Callable[[Any], Any], engine: Any, order: dict[str, Any]
) -> dict[str, Any]:
    import torch
    from transformers import AutoModelForCausalLM
    from vllm.distributed.weight_transfer.base import ModuleSource
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
    from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

    class Client:
        """The engine calls that vLLM's trainer side makes."""

        def init_weight_transfer_engine(self, init_info: Any) -> None:
            run(
                engine.collective_rpc(
                    "init_weight_transfer_engine", kwargs={"init_info": init_info}
                )
            )

        def start_weight_update(self) -> None:
            run(engine.collective_rpc("start_weight_update"))

        def update_weights(self, update_info: Any) -> None:
            run(
                engine.collective_rpc(
                    "update_weights", kwargs={"update_info": update_info}
                )
            )

        def finish_weight_update(self, weight_version: str | None = None) -> None:
            run(engine.collective_rpc("finish_weight_update"))

        def get_world_size(self) -> int:
            return 1

    torch.cuda.set_device(0)
    model: Any = AutoModelForCausalLM.from_pretrained(
        order["arguments"]["model"], dtype=torch.bfloat16
    )
    model = model.to("cuda")
    out: dict[str, Any] = {
        "empty_rpc": [],
        "pause": [],
        "resume": [],
        "tensors": len(list(model.parameters())),
    }
    for _ in range(order["rounds"]):
        start = time.perf_counter()
        run(engine.collective_rpc("check_health"))
        out["empty_rpc"].append(time.perf_counter() - start)
    for packed in (False, True):
        name = "packed" if packed else "plain"
        sender = WeightTransferTrainerFactory.trainer_init(
            init_info=IPCTrainerInitInfo(rank=0, packed=packed),
            client=Client(),
            source=ModuleSource(model),
        )
        out[name] = []
        out[f"{name}_with_pause"] = []
        for turn in range(order["rounds"] + 1):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            run(engine.pause_generation(mode="keep", clear_cache=False))
            start = time.perf_counter()
            sender.send_weights()
            moved = time.perf_counter()
            run(engine.resume_generation())
            end = time.perf_counter()
            if turn:
                out[name].append(moved - start)
                out[f"{name}_with_pause"].append(end - begin)
                out["pause"].append(start - begin)
                out["resume"].append(end - moved)
        out[f"{name}_tokens"] = run(
            _greedy(engine, order["prompts"], order["max_tokens"])
        )
    return out
