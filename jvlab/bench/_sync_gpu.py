"""`jvlab bench sync --device cuda`: a model from JAX into vLLM on one GPU, jvlab's ipc against vLLM's own.

`--shape` chooses the model: qwen3-1.7b (dense, 4 GB) or qwen3-moe (12 layers of Qwen3-30B-A3B, 16 GB). Both sides are
timed from the call with the trainer's arrays until the engine could generate, without pause and resume, and again with
them (`*_with_pause`). Parameters are stored as in Flax (in × out), so jvlab transposes every matrix in transit; vLLM's
own side gets a torch model, which needs no transposing, and whose experts are fused as vLLM holds them. The floor is a
plain copy of the same bytes on the device. After every way, tokens are compared with those of an engine that loaded a
checkpoint of the weights.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from jvlab._errors import LaunchError
from jvlab._files import Plain
from jvlab.bench._shapes import shaped
from jvlab.bench._side import (
    Lines,
    Side,
    folder_for,
    median_ms,
    prompts_of,
    seconds_of,
    timed,
    vllm_build,
)
from jvlab.bench._sync import WAYS

TOKENS = 32


def copy_ms(size: int, rounds: int = 20) -> float:
    """The median time of a device-to-device copy of `size` bytes, in milliseconds."""
    import cupy

    with cupy.cuda.Device(0):
        source = cupy.cuda.alloc(size)
        target = cupy.cuda.alloc(size)
        stream = cupy.cuda.Stream(non_blocking=True)
        times = []
        for _ in range(rounds):
            start = cupy.cuda.Event()
            end = cupy.cuda.Event()
            start.record(stream)
            cupy.cuda.runtime.memcpyAsync(
                target.ptr,
                source.ptr,
                size,
                cupy.cuda.runtime.memcpyDeviceToDevice,
                stream.ptr,
            )
            end.record(stream)
            end.synchronize()
            times.append(cupy.cuda.get_elapsed_time(start, end))
        del source, target
        cupy.get_default_memory_pool().free_all_blocks()
    return statistics.median(times)


@contextmanager
def peak_extra() -> Iterator[dict[str, float]]:
    """The peak increase of device memory in use, in MiB, polled continuously."""
    import cupy

    used = lambda: (lambda free, total: total - free)(*cupy.cuda.runtime.memGetInfo())
    first = used()
    over = threading.Event()
    out = {"mib": 0.0}

    def poll() -> None:
        while not over.is_set():
            out["mib"] = max(out["mib"], (used() - first) / 2**20)

    thread = threading.Thread(target=poll, daemon=True)
    thread.start()
    try:
        yield out
    finally:
        over.set()
        thread.join(10)


def _engine(weights: int, eager: bool, experts: bool = False) -> Plain:
    """An engine's options, for so many bytes of weights."""
    # it computes from live memory; others re-arrange experts
    more = {"moe_backend": "triton"} if experts else {}
    return more | {
        "max_model_len": 512,
        "gpu_memory_utilization": min(0.6, weights / 141e9 + 0.12),
        "skip_tokenizer_init": True,
        "enforce_eager": eager,
        "dtype": "bfloat16",
        "max_num_seqs": 64,
        "kv_cache_memory_bytes": 4 << 30,
    }


def _greedy(pool: Any, prompts: list[list[int]]) -> list[list[int]]:
    options = {
        "max_tokens": TOKENS,
        "temperature": 0.0,
        "ignore_eos": True,
        "progress": False,
    }
    return [pool.generate([ids], **options)[0].token_ids.tolist() for ids in prompts]


def measure(
    policy: Any,
    rounds: int,
    ways: dict[str, Plain],
    eager: bool = False,
    masters: bool = False,
) -> Plain:
    """jvlab's side: the reports of every way, tokens after each, and the extra device memory of a sync."""
    import jax

    import jvlab as jv

    params = policy.params
    weights = sum(x.nbytes for x in jax.tree.leaves(params))
    prompts = prompts_of(3)
    out: Plain = {
        "bytes": weights,
        "ceiling_ms": copy_ms(weights),
        "tokens": {},
        "seconds": {},
    }
    # different weights, to alternate with
    other = jax.tree.map(lambda x: x * 2 if x.ndim > 1 else x, params)
    engine = _engine(weights, eager, bool(policy.config.experts))
    with jv.Lab() as lab:
        start = time.perf_counter()
        pool = lab.launch(
            str(policy.source), load="dummy", engine=engine, device="cuda"
        ).wait(500)
        out["launch_s"] = time.perf_counter() - start
        out["connect_s"], link = timed(lab.connect, params, pool, rules="policy")
        out["transport"] = link.transport
        out["reason"] = link.reason
        print(
            f"{link!r}; up in {out['launch_s']:.0f} s, connected in {out['connect_s']:.1f} s",
            flush=True,
        )
        out["empty_call_ms"] = median_ms(seconds_of(pool.status, 20))
        for way, options in ways.items():
            # the first staged sync allocates the shadow buffers, which stay
            with peak_extra() as extra:
                link.sync(other, progress=False, **options)
                link.sync(params, progress=False, **options)
            out.setdefault("extra_mib", {})[way] = extra["mib"]
            if not link.verify():
                raise LaunchError(f"{way}: the engine does not hold what was synced")
            out["tokens"][way] = _greedy(pool, prompts)
            reports = []
            for turn in range(rounds):
                start = time.perf_counter()
                report = link.sync(
                    params if turn % 2 else other, progress=False, **options
                )
                reports.append({**report.seconds, "call": time.perf_counter() - start})
            out["seconds"][way] = reports
            link.sync(params, progress=False, **options)
            print(f"  {way}: {_line(_medians(reports))}", flush=True)
        if masters:
            out |= _masters(lab, pool, params, rounds, prompts)
    return out


def _masters(
    lab: Any, pool: Any, params: Any, rounds: int, prompts: list[list[int]]
) -> Plain:
    """The same weights as float32 masters in the trainer, cast in transit."""
    import jax

    wide = jax.tree.map(lambda x: x.astype("float32"), params)
    link = lab.connect(wide, pool, rules="policy")
    reports = [dict(link.sync(wide, progress=False).seconds) for _ in range(rounds)]
    if not link.verify(wide):
        raise LaunchError("float32: the engine does not hold what was synced")
    print(f"  direct_verified from float32: {_line(_medians(reports))}", flush=True)
    return {"masters": _medians(reports), "masters_tokens": _greedy(pool, prompts)}


def _medians(reports: list[dict[str, float]]) -> dict[str, float]:
    """The median of each part in milliseconds; `sync` is the total without pause and resume."""
    names = sorted({name for r in reports for name in r})
    out = {f"{name}_ms": median_ms(r.get(name, 0.0) for r in reports) for name in names}
    bare = [r["total"] - r.get("halt", 0.0) - r.get("go_on", 0.0) for r in reports]
    return {
        "sync_ms": median_ms(bare),
        "sync_worst_ms": 1e3 * max(bare),
        **out,
    }


def _line(m: dict[str, float]) -> str:
    parts = (
        "sync",
        "total",
        "pause",
        "move",
        "pack",
        "halt",
        "prepare",
        "admit",
        "verify",
        "digest",
        "commit",
        "go_on",
        "control",
    )
    return (
        ", ".join(
            f"{name} {m[f'{name}_ms']:.2f}" for name in parts if f"{name}_ms" in m
        )
        + " ms"
    )


def _peer(checkpoint: Path, rounds: int, engine: Plain) -> Side:
    """vLLM's side: says when it is up, and measures when it is told to."""
    from jvlab.engine import _defaults

    order = {
        "prompts": prompts_of(3),
        "max_tokens": TOKENS,
        "arguments": {"model": str(checkpoint), **engine},
        "rounds": rounds,
    }
    own = {"HF_HUB_OFFLINE": "1", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    return Side("jvlab.bench._sync_gpu:vllm_side", order, {**_defaults.QUIET, **own})


def run_bench_sync_gpu(rounds: int = 20, size: str = "4") -> Plain:
    """Measure every way at one size of `_shapes.py` against vLLM's own; prints as it goes, returns the facts."""
    # the engine needs the rest of the GPU
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax

    with ExitStack() as stack:
        source = tempfile.TemporaryDirectory(prefix="jvlab-bench-")
        policy = shaped(Path(stack.enter_context(source)), size)
        weights = sum(x.nbytes for x in jax.tree.leaves(policy.params))
        folder, _ = folder_for(2 * weights, stack)
        written = Path(policy.save_pretrained(folder / "written"))
        experts = bool(policy.config.experts)
        peer = stack.enter_context(
            _peer(written, max(3, rounds // 2), _engine(weights, True, experts))
        )
        ready = (
            peer.receive()
        )  # one that still starts would slow what is measured first
        # eager like the peer, for equal rounding; a float32 copy of a large model would not fit beside it
        ours = measure(policy, rounds, WAYS, eager=True, masters=weights < 8e9)
        try:
            theirs = ready | peer.ask("go")
        except LaunchError:
            # what was measured before the peer failed
            print(json.dumps(ours), flush=True)
            raise
    result = _facts(ours, theirs)
    result |= {
        "device": "cuda",
        "size": size,
        "rounds": rounds,
        "vllm": vllm_build(),
    }
    print(_table(result), flush=True)
    return result


def _facts(ours: Plain, theirs: Plain) -> Plain:
    best = min(median_ms(theirs["plain"]), median_ms(theirs["packed"]))
    paused = min(
        median_ms(theirs["plain_with_pause"]), median_ms(theirs["packed_with_pause"])
    )
    tokens = {
        **ours["tokens"],
        **({"masters": ours["masters_tokens"]} if "masters" in ours else {}),
    }
    out: Plain = {
        "bytes": ours["bytes"],
        "ceiling_ms": ours["ceiling_ms"],
        "empty_call_ms": ours["empty_call_ms"],
        "transport": ours["transport"],
        "connect_s": ours["connect_s"],
        "extra_mib": ours["extra_mib"],
        "vllm_plain_ms": median_ms(theirs["plain"]),
        "vllm_packed_ms": median_ms(theirs["packed"]),
        "vllm_best_ms": best,
        "vllm_with_pause_ms": paused,
        "vllm_pause_ms": median_ms(theirs["pause"]),
        "vllm_empty_rpc_ms": median_ms(theirs["empty_rpc"]),
        "masters": ours.get("masters", {}),
        "vllm_tensors": theirs["tensors"],
        "tokens_equal": {way: got == theirs["tokens"] for way, got in tokens.items()},
        "tokens": {"loaded": theirs["tokens"], **tokens},
        "vllm_tokens_equal": theirs["plain_tokens"]
        == theirs["packed_tokens"]
        == theirs["tokens"],
        "ways": {way: _medians(reports) for way, reports in ours["seconds"].items()},
    }
    for m in out["ways"].values():
        m["vs_vllm_ratio"] = best / m["sync_ms"]
        m["vs_vllm_with_pause_ratio"] = paused / m["total_ms"]
        m["move_vs_ceiling"] = ours["ceiling_ms"] / m["move_ms"]
    return out


def _table(r: Plain) -> str:
    lines = [
        f"{r['bytes'] / 1e9:.2f} GB; device copy {r['ceiling_ms']:.2f} ms; vLLM's ipc {r['vllm_plain_ms']:.1f} ms, "
        f"packed {r['vllm_packed_ms']:.1f}; its empty RPC {r['vllm_empty_rpc_ms']:.2f}, its pause "
        f"{r['vllm_pause_ms']:.1f}"
    ]
    for way, m in r["ways"].items():
        lines.append(
            f"  jvlab {way:16} {m['sync_ms']:7.2f} ms ({m['vs_vllm_ratio']:.1f}×), with pause {m['total_ms']:7.2f} "
            f"({m['vs_vllm_with_pause_ratio']:.1f}×); pause {m['pause_ms']:.2f}, move {m['move_ms']:.2f} = "
            f"{m['move_vs_ceiling']:.2f} of the ceiling; tokens equal: {r['tokens_equal'][way]}"
        )
    return "\n".join(lines)


def run_sizes(sizes: list[str], rounds: int = 10) -> Plain:
    """Time and extra memory by model size; direct and staged, verified."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax

    out: Plain = {}
    for size in sizes:
        with tempfile.TemporaryDirectory(prefix="jvlab-bench-") as folder:
            ways = {
                name: WAYS[name]
                for name in ("direct_verified", "direct", "staged_verified")
            }
            ours = measure(shaped(Path(folder), size), rounds, ways, eager=True)
            out[size] = {
                "bytes": ours["bytes"],
                "ceiling_ms": ours["ceiling_ms"],
                "extra_mib": ours["extra_mib"],
                "connect_s": ours["connect_s"],
                "ways": {
                    way: _medians(reports) for way, reports in ours["seconds"].items()
                },
            }
            print(json.dumps({size: out[size]}), flush=True)
        jax.clear_caches()
    return {"sizes": out}


# vLLM's own ipc weight transfer, in its own process ------------------------------------------------------------


def vllm_side(order: Plain, lines: Lines) -> None:
    """Load the checkpoint with vLLM, report its tokens, then time both kinds of transfer and send the facts.

    Its handles are pickled, which needs VLLM_ALLOW_INSECURE_SERIALIZATION=1: set in this process only.
    """
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    # no deadline: whoever reads its lines has one, and kills this process
    run = lambda work: asyncio.run_coroutine_threadsafe(work, loop).result()
    engine = run(_start(order["arguments"]))
    tokens = run(_tokens_of(engine, order["prompts"], order["max_tokens"]))
    lines.send({"tokens": tokens})
    lines.receive()  # "go": the GPU is idle now
    lines.send(_times(run, engine, order))
    lines.receive()  # until it is killed


async def _start(arguments: Plain) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments = {**arguments, "weight_transfer_config": {"backend": "ipc"}}
    return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))


async def _tokens_of(
    engine: Any, prompts: list[list[int]], count: int
) -> list[list[int]]:
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


def _times(run: Callable[[Any], Any], engine: Any, order: Plain) -> Plain:
    import torch
    from transformers import AutoModelForCausalLM
    from vllm.distributed.weight_transfer.base import ModuleSource
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
    from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

    call = lambda method, **more: run(engine.collective_rpc(method, kwargs=more))

    class EngineCalls:
        """The engine calls that vLLM's trainer side makes."""

        def init_weight_transfer_engine(self, init_info: Any) -> None:
            call("init_weight_transfer_engine", init_info=init_info)

        def start_weight_update(self) -> None:
            call("start_weight_update")

        def update_weights(self, update_info: Any) -> None:
            call("update_weights", update_info=update_info)

        def finish_weight_update(self, weight_version: str | None = None) -> None:
            call("finish_weight_update")

        def get_world_size(self) -> int:
            return 1

    torch.cuda.set_device(0)
    model: Any = AutoModelForCausalLM.from_pretrained(
        order["arguments"]["model"], dtype=torch.bfloat16
    )
    model = model.to("cuda")
    out: Plain = {
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
            client=EngineCalls(),
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
            _tokens_of(engine, order["prompts"], order["max_tokens"])
        )
    return out


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description="time and memory of a sync over sizes, on one GPU"
    )
    parser.add_argument("--sizes", default="1,4,16,32")
    parser.add_argument("--rounds", type=int, default=10)
    given = parser.parse_args()
    print(json.dumps(run_sizes(given.sizes.split(","), given.rounds)))
