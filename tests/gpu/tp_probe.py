"""Can vLLM run tensor parallelism of 2 on one GPU? `python -m tests.gpu.tp_probe`: the last line is a JSON object.

What stands in the way in vLLM 0.32.0, and how each is passed:

- It counts GPUs when it chooses an executor: `distributed_executor_backend="mp"` says which.
- A rank takes the GPU of its number, and `device_ids=[0, 0]` is refused: `OneCardWorker` fills that table itself.
- NCCL refuses two ranks on one GPU of one host: each worker calls itself a host of its own (`NCCL_HOSTID`).
- Custom, symmetric-memory and FlashInfer all-reduces map memory between GPUs: off.
- Each rank would measure free memory that the other takes meanwhile: the size of the KV cache is given.

An engine with one rank and one with two load the same weights and say what they think of the same prompts. If the
first settings fail, others are tried; every engine has a process group of its own, which is ended.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.gpu.card import PROMPTS, tiny

ROOT = Path(__file__).parents[2]
ENGINE: dict[str, Any] = {
    "worker_cls": "tests.gpu.one_card.OneCardWorker",
    "distributed_executor_backend": "mp",
    "disable_custom_all_reduce": True,
    "enforce_eager": True,
    "kv_cache_memory_bytes": 128 << 20,
    "gpu_memory_utilization": 0.05,
    "dtype": "bfloat16",
    "max_model_len": 256,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 256,
}
# more settings, in the order in which they are tried
WAYS: dict[str, dict[str, str]] = {
    "sockets": {},
    "nothing shared": {
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
        "NCCL_CUMEM_ENABLE": "0",
    },
    "torch's NCCL": {"VLLM_DISABLE_PYNCCL": "1"},
}
TOKENS = 12
CLOSE = 0.1  # of log-probabilities: 16-bit sums in another order


def environment() -> dict[str, str]:
    """Variables of an engine's processes; the workers' module lies in this repository."""
    path = os.environ.get("PYTHONPATH", "")
    return {
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
        "NCCL_DEBUG": "WARN",
        "GLOO_SOCKET_IFNAME": "lo",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
        "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [path])]),
    }


def engine(ranks: int, device: str) -> dict[str, Any]:
    """Engine arguments of vLLM for so many ranks."""
    out: dict[str, Any] = {
        **ENGINE,
        "tensor_parallel_size": ranks,
        "skip_tokenizer_init": True,
    }
    if ranks == 1:
        del out["distributed_executor_backend"]
    if device == "cpu" or ranks == 1:
        del out["worker_cls"]
    # bfloat16 sums in another order gave gaps of 0.14 on an H200
    out["dtype"] = "float16"
    if device == "cpu":  # a rehearsal, where there is no GPU
        del out["kv_cache_memory_bytes"], out["gpu_memory_utilization"]
        out["dtype"] = "float32"
    return out


def say(model: str, ranks: int, device: str, into: Path) -> None:
    """In a process of its own: greedy tokens and their log-probabilities, one prompt at a time."""
    from vllm import LLM, SamplingParams

    llm = LLM(model, **engine(ranks, device))
    greedy = SamplingParams(
        temperature=0.0,
        max_tokens=TOKENS,
        ignore_eos=True,
        logprobs=0,
        detokenize=False,
    )
    said = []
    for ids in PROMPTS:
        output = llm.generate({"prompt_token_ids": ids}, greedy, use_tqdm=False)[
            0
        ].outputs[0]
        tokens = list(output.token_ids)
        steps: Any = output.logprobs
        logprobs = [
            step[token].logprob for step, token in zip(steps, tokens, strict=True)
        ]
        said.append({"tokens": tokens, "logprobs": logprobs})
    into.with_suffix(".part").write_text(json.dumps(said))
    into.with_suffix(".part").rename(into)
    sys.stdout.flush()
    os._exit(0)  # vLLM's teardown can hang


class Speaker:
    """An engine in a process group of its own, with a log."""

    def __init__(
        self,
        model: str,
        ranks: int,
        device: str,
        folder: Path,
        name: str,
        more: dict[str, str],
    ) -> None:
        self._into, self._log = folder / f"{name}.json", folder / f"{name}.log"
        command = [
            sys.executable,
            "-m",
            "tests.gpu.tp_probe",
            "--say",
            str(ranks),
            "--model",
            model,
        ]
        command += ["--into", str(self._into), "--device", device]
        env = {**os.environ, **environment(), **more}
        if device == "cpu":
            env |= {
                "VLLM_CPU_KVCACHE_SPACE": "1",
                "VLLM_CPU_OMP_THREADS_BIND": "0|1" if ranks == 2 else "0",
            }
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=env,
                cwd=ROOT,
                start_new_session=True,
            )

    def said(self, until: float) -> tuple[list[dict[str, Any]] | None, str]:
        """What it said, or None and why not."""
        while (
            self._process.poll() is None
            and not self._into.exists()
            and time.monotonic() < until
        ):
            time.sleep(0.2)
        late = self._process.poll() is None and not self._into.exists()
        self.end()
        if self._into.exists():
            return json.loads(self._into.read_text()), ""
        lines = self._log.read_text(errors="replace").splitlines()
        why = (
            "it was not done in time"
            if late
            else f"it ended with {self._process.returncode}"
        )
        return None, "\n".join([f"{why}; {_cause(lines)}", *lines[-40:]])

    def end(self) -> None:
        """Its whole group; can be called twice."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(10)


def _cause(lines: list[str]) -> str:
    """The first line that names an error: what comes after it is mostly its echo."""
    marks = ("NCCL WARN", "NCCL error", "Error:", "Error(", "Exception:")
    return next(
        (line.strip()[-300:] for line in lines if any(m in line for m in marks)),
        "no error in its log",
    )


def compared(one: list[dict[str, Any]], two: list[dict[str, Any]]) -> dict[str, Any]:
    """How far two engines agree. Later tokens may part ways where two are equally likely; the first must not."""
    leading, gaps = [], []
    for a, b in zip(one, two, strict=True):
        same = [x == y for x, y in zip(a["tokens"], b["tokens"], strict=True)]
        leading.append(same.index(False) if False in same else len(same))
        gaps += [
            abs(x - y)
            for x, y in zip(a["logprobs"][: leading[-1]], b["logprobs"], strict=False)
        ]
    gap = max(gaps, default=math.inf)
    agree = sum(count > 0 for count in leading) >= len(leading) - 1 and gap < CLOSE
    return {"agree": agree, "leading_equal": leading, "of": TOKENS, "logprob_gap": gap}


def probe(device: str, seconds: float) -> dict[str, Any]:
    """One rank and two ranks side by side; further settings while two ranks fail."""
    model, tried = tiny(), {}
    with (
        tempfile.TemporaryDirectory(prefix="jvlab-tp-") as place,
        contextlib.ExitStack() as stack,
    ):
        folder, begun = Path(place), time.monotonic()
        until = begun + seconds
        alone = Speaker(model, 1, device, folder, "one", {})
        stack.callback(alone.end)
        one: list[dict[str, Any]] | None = None
        for number, (way, more) in enumerate(WAYS.items()):
            start = time.monotonic()
            both = Speaker(model, 2, device, folder, f"two-{number}", more)
            stack.callback(both.end)
            two, why = both.said(min(until, start + seconds / 2))
            if one is None:
                one, other = alone.said(until)
                if one is None:
                    return {
                        "works": False,
                        "reason": f"the engine with one rank failed: {other}",
                    }
            took = time.monotonic() - start
            print(f"tp_probe: {way}: {'said something' if two else why}", flush=True)
            if two is not None:
                facts = compared(one, two)
                works = facts.pop("agree")
                reason = "" if works else "both engines ran, and do not agree"
                return {
                    "works": works,
                    "way": way,
                    "settings": more,
                    "reason": reason,
                    "seconds": took,
                    **facts,
                    "tried": tried,
                }
            tried[way] = why.splitlines()[0]
            if time.monotonic() > until - 20:
                break
    return {"works": False, "reason": tried[next(iter(tried))], "tried": tried}


def main() -> None:
    parser = argparse.ArgumentParser(description="tensor parallelism of 2 on one GPU")
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--say", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.say:
        say(given.model, given.say, given.device, given.into)
    print(
        json.dumps(
            {
                "probe": "tensor_parallel=2 on one GPU",
                **probe(given.device, given.seconds),
            }
        ),
        flush=True,
    )


if __name__ == "__main__":
    main()
