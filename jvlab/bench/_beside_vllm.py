"""`jvlab bench launch` and `jvlab bench rollout`: pools beside plain vLLM with the same arguments and environment.

Launch: from `lab.launch` to a pool that is ready, against `vllm.LLM(...)`, one after another.

    cold_s    the first launch of a lab: vLLM is imported (also if `jvlab warm` runs)
    warm_s    the median of later ones in the same lab: the warm process forks (JVLAB_WARM=0: same as cold)
    vllm_s    `vllm.LLM(...)` in a Python that has imported vLLM; the import is `vllm_import_s`

Ratios are vLLM's seconds over ours: above 1 ours is faster.

Rollout: the same prompts through both. Both engines run for the whole benchmark; only one is busy at a time. Each round
measures one side, then the other, in alternating order. The ratio is of the medians.
"""

from __future__ import annotations

import importlib
import os
import statistics
import time
from pathlib import Path
from typing import Any

import jvlab as jv
from jvlab._files import Plain
from jvlab.bench._side import Lines, Side, model_of, prompts_of, timed, vllm_build
from jvlab.engine import _defaults
from jvlab.lab._launch_settings import resolve_device

# prompts, n, tokens, runs per round: a short case needs more
CASES = {"batch": (64, 8, 32, 1), "single": (1, 1, 64, 5)}


def plain_side(order: Plain, lines: Lines) -> None:
    """Import vLLM and start one engine; report how long each took, then the seconds and tokens of each generation."""
    imported, vllm = timed(lambda: importlib.import_module("vllm"))
    started, llm = timed(vllm.LLM, **order)
    lines.send((imported, started))
    while True:  # until it is killed
        asked = lines.receive()
        prompts = [{"prompt_token_ids": ids} for ids in asked.pop("prompts")]
        profile = asked.pop("profile", False)
        params = vllm.SamplingParams(temperature=1.0, ignore_eos=True, **asked)
        if profile:
            llm.start_profile()
        seconds, outputs = timed(llm.generate, prompts, params, use_tqdm=False)
        if profile:
            llm.stop_profile()
        made = sum(len(o.token_ids) for out in outputs for o in out.outputs)
        lines.send((seconds, made))


def _plain(path: str, device: str, load: str, engine: Plain) -> Side:
    """vLLM with the arguments and the environment of a pool's engine."""
    env = _defaults.environment(device, 1, 1, 0, _defaults.usable_cores(), path)
    arguments = _defaults.engine_arguments(path, device, 1, load, engine)
    return Side("jvlab.bench._beside_vllm:plain_side", arguments, env)


def run_bench_launch(
    rounds: int = 5, model: str | None = None, device: str = "auto", eager: bool = False
) -> Plain:
    """Measure; prints a line for each launch, returns the facts."""
    device = resolve_device(device)
    path = model_of(model)
    engine: Plain = {"max_model_len": 512}
    if eager:
        engine["enforce_eager"] = True
    print(f"bench launch on {device}: {path}", flush=True)
    seconds = []
    if os.environ.get("JVLAB_WARM") != "0":
        os.environ["JVLAB_WARM"] = "lab"
    with jv.Lab() as lab:
        for number in range(rounds + 1):
            start = time.perf_counter()
            with lab.launch(
                path, name=f"launch{number}", engine=engine, device=device
            ).wait(progress=False):
                seconds.append(time.perf_counter() - start)
            print(f"{'warm' if number else 'cold'}: {seconds[-1]:.2f} s", flush=True)
    with _plain(path, device, "auto", engine) as plain:
        imported, started = plain.receive()
    warm = statistics.median(seconds[1:])
    print(
        f"vllm.LLM: {started:.2f} s, after {imported:.2f} s of imports; {started / warm:.2f} × a warm launch"
    )
    return {
        "device": device,
        "eager": eager or device == "cpu",
        "model": path,
        "vllm": vllm_build(),
        "cold_s": seconds[0],
        "warm_s": warm,
        "warm_samples": seconds[1:],
        "vllm_s": started,
        "vllm_import_s": imported,
        "vs_vllm_ratio": started / warm,
        "cold_vs_vllm_ratio": (imported + started) / seconds[0],
    }


def _jvlab_side(
    pool: Any, prompts: list[list[int]], n: int, tokens: int
) -> tuple[float, int]:
    options = {"temperature": 1.0, "seed": 0, "ignore_eos": True, "progress": False}
    seconds, batch = timed(pool.generate, prompts, n=n, max_tokens=tokens, **options)
    return seconds, batch.tokens


def run_bench_rollout(
    rounds: int = 5, model: str | None = None, load: str = "auto", device: str = "auto"
) -> Plain:
    """Measure both sides; prints a table as it goes, returns the facts."""
    device = resolve_device(device)
    path = model_of(model)
    engine: Plain = {"max_model_len": 512}
    if device == "cuda":
        engine["gpu_memory_utilization"] = 0.4  # two engines share the GPU
    if not (Path(path) / "tokenizer.json").is_file():
        engine["skip_tokenizer_init"] = True
    print(
        f"bench rollout on {device}: {path}; plain vLLM against jvlab, {rounds} rounds",
        flush=True,
    )
    with (
        _plain(path, device, load, engine) as plain,
        jv.Lab() as lab,
    ):
        pool = lab.launch(path, load=load, engine=engine, device=device).wait()
        plain.receive()
        times = _measure(pool, plain, rounds)
    result: Plain = {
        "device": device,
        "model": path,
        "rounds": rounds,
        "vllm": vllm_build(),
    }
    for case, sides in times.items():
        rate = {side: statistics.median(rates) for side, rates in sides.items()}
        result |= {
            f"{case}_plain_tokens_per_s": rate["plain"],
            f"{case}_jvlab_tokens_per_s": rate["jvlab"],
        }
        result[f"{case}_ratio"] = rate["jvlab"] / rate["plain"]
        result[f"{case}_samples"] = {
            side: [round(r, 1) for r in rates] for side, rates in sides.items()
        }
        prompts, n, tokens, _ = CASES[case]
        print(
            f"{case}: {prompts} prompts × n={n} × {tokens} tokens: plain {rate['plain']:.1f} tokens/s, "
            f"jvlab {rate['jvlab']:.1f}, ratio {result[f'{case}_ratio']:.3f}",
            flush=True,
        )
    return result


def _measure(pool: Any, plain: Side, rounds: int) -> dict[str, dict[str, list[float]]]:
    times: dict[str, dict[str, list[float]]] = {
        case: {"plain": [], "jvlab": []} for case in CASES
    }
    for turn in range(rounds + 1):  # the first one warms up and does not count
        for case, (count, n, tokens, runs) in CASES.items():
            prompts = prompts_of(count)
            for side in ("plain", "jvlab") if turn % 2 else ("jvlab", "plain"):
                for _ in range(runs):
                    if side == "plain":
                        seconds, made = plain.ask(
                            {"prompts": prompts, "n": n, "max_tokens": tokens}
                            | {"seed": 0, "logprobs": 0}
                        )
                    else:
                        seconds, made = _jvlab_side(pool, prompts, n, tokens)
                    if made != count * n * tokens:
                        raise RuntimeError(
                            f"{side} made {made} tokens instead of {count * n * tokens}"
                        )
                    if turn:
                        times[case][side].append(made / seconds)
    return times
