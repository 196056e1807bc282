"""`jvlab bench rollout`: the same prompts through plain vllm.LLM and through a jvlab pool, alternating, in one run.

Both engines run for the whole benchmark with equal arguments and environment; only one is busy at a time. Each round
measures one side, then the other, in alternating order. The ratio is of the medians.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from jvlab.bench._side import Lines, Side, model_of, prompts_of, timed, vllm_build

CASES = {"batch": (64, 8, 32), "single": (1, 1, 64)}  # prompts, n, tokens
REPEAT = {"batch": 1, "single": 5}  # runs per round; a short case needs more


def plain_side(order: dict[str, Any], lines: Lines) -> None:
    """Plain vLLM, which measures what it is asked, until it is killed."""
    from vllm import LLM, SamplingParams

    llm = LLM(**order)
    lines.send("ready")
    while True:
        prompts, n, tokens = lines.receive()
        params = SamplingParams(
            n=n, max_tokens=tokens, temperature=1.0, seed=0, ignore_eos=True, logprobs=0
        )
        asked: Any = [{"prompt_token_ids": ids} for ids in prompts]
        seconds, outputs = timed(llm.generate, asked, params, use_tqdm=False)
        made = sum(len(o.token_ids) for out in outputs for o in out.outputs)
        lines.send((seconds, made))


def _jvlab_side(
    pool: Any, prompts: list[list[int]], n: int, tokens: int
) -> tuple[float, int]:
    options = {"temperature": 1.0, "seed": 0, "ignore_eos": True, "progress": False}
    seconds, batch = timed(pool.generate, prompts, n=n, max_tokens=tokens, **options)
    return seconds, batch.tokens


def run_bench_rollout(
    rounds: int = 5, model: str | None = None, load: str = "auto", device: str = "auto"
) -> dict[str, Any]:
    """Measure both sides; prints a table as it goes, returns the facts."""
    import jvlab as jv
    from jvlab.engine import _defaults
    from jvlab.lab._launch_settings import resolve_device

    device = resolve_device(device)
    path = model_of(model)
    engine: dict[str, Any] = {"max_model_len": 512}
    if device == "cuda":
        engine["gpu_memory_utilization"] = 0.4  # two engines share the GPU
    if not (Path(path) / "tokenizer.json").is_file():
        engine["skip_tokenizer_init"] = True
    env = _defaults.environment(device, 1, 1, 0, _defaults.usable_cores(), path)
    arguments = _defaults.engine_arguments(path, device, 1, load, engine)
    print(
        f"bench rollout on {device}: {path}; plain vLLM against jvlab, {rounds} rounds",
        flush=True,
    )
    with (
        Side("jvlab.bench._rollout:plain_side", arguments, env) as plain,
        jv.Lab() as lab,
    ):
        pool = lab.launch(path, load=load, engine=engine, env=env, device=device).wait()
        plain.receive()
        times = _measure(pool, plain, rounds)
    result: dict[str, Any] = {
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
        prompts, n, tokens = CASES[case]
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
        for case, (count, n, tokens) in CASES.items():
            prompts = prompts_of(count)
            for side in ("plain", "jvlab") if turn % 2 else ("jvlab", "plain"):
                for _ in range(REPEAT[case]):
                    if side == "plain":
                        seconds, made = plain.ask((prompts, n, tokens))
                    else:
                        seconds, made = _jvlab_side(pool, prompts, n, tokens)
                    if made != count * n * tokens:
                        raise RuntimeError(
                            f"{side} made {made} tokens instead of {count * n * tokens}"
                        )
                    if turn:
                        times[case][side].append(made / seconds)
        print(
            json.dumps(
                {
                    c: {s: [round(r) for r in v[-1:]] for s, v in d.items()}
                    for c, d in times.items()
                }
            ),
            flush=True,
        )
    return times
