"""`jvlab bench server`: torch's weights into plain `vllm serve`, by the backend `jvlab` and by vLLM's `ipc` and `nccl`.

For each backend a server and a trainer, processes of their own, one backend after the other; the trainer speaks
vLLM's four calls through vLLM's own HTTP client. Timed is `send_weights`, from the call with the trainer's tensors
until the server could generate, without pause and resume, and again with them (`with_pause`). Each way first sends
other weights, then the checkpoint's again: the server's tokens must be those it gave after loading them. jvlab's
are verified by digests of live memory each time, unless a way is called `unverified`; vLLM's own are not.

(a) vs_vllm_ipc_ratio: vLLM's faster `ipc` over `jvlab_direct`.    (b) vs_vllm_nccl_ratio: the same of `nccl`.

A backend that fails, or takes longer than `PART_SECONDS`, has an `error` instead. On a CPU vLLM has no backend of its
own.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Self

from jvlab._errors import ControlError, JvlabError, LaunchError, SyncDeadline
from jvlab._files import Plain
from jvlab.bench._shapes import config_of, size_of
from jvlab.bench._side import (
    Lines,
    Side,
    folder_for,
    median_ms,
    prompts_of,
    vllm_build,
)
from jvlab.integrations._vllm_server import HttpCalls
from jvlab.wire.processes._supervisor import descendants, shared_memory, unlink_segments

BACKENDS = {"cpu": ("jvlab",), "cuda": ("jvlab", "ipc", "nccl")}
PART_SECONDS = {"cpu": 420.0, "cuda": 150.0}
START_SECONDS = 300.0
TOKENS = 16
# NCCL refuses two ranks on one GPU of one host
ONE_CARD = {"NCCL_SHM_DISABLE": "1", "NCCL_P2P_DISABLE": "1"}


def plugin_path(folder: Path) -> list[str]:
    """Where vLLM finds our entry point: a folder made here, unless jvlab is installed with it."""
    if any(e.name == "jvlab" for e in entry_points(group="vllm.general_plugins")):
        return []
    info = folder / "jvlab_plugin-0.dist-info"
    info.mkdir(exist_ok=True)
    about = "Metadata-Version: 2.1\nName: jvlab-plugin\nVersion: 0\n"
    (info / "METADATA").write_text(about)
    entry = "[vllm.general_plugins]\njvlab = jvlab.integrations.vllm:register\n"
    (info / "entry_points.txt").write_text(entry)
    return [str(folder)]


class PlainServer:
    """`vllm serve`, by the module behind it: the command asks for a package that a CPU's vLLM is not called.

    A context manager; at its end nothing of the server is left.
    """

    def __init__(
        self,
        folder: Path,
        model: str,
        backend: str = "jvlab",
        *arguments: str,
        env: dict[str, str] | None = None,
    ) -> None:
        # held, without listening, to the end: vLLM binds it a minute later, and nobody else is given it meanwhile
        self._held = socket.socket()
        self._held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._held.bind(("127.0.0.1", 0))
        port = self._held.getsockname()[1]
        self.calls = HttpCalls(f"http://127.0.0.1:{port}")
        self.url = self.calls.url
        path = [*plugin_path(folder), *filter(None, sys.path)]
        own = {
            "PYTHONPATH": os.pathsep.join(path),
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        config = json.dumps({"backend": backend})
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", model, "--host", "127.0.0.1", "--port", str(port)]
        command += ["--enforce-eager", "--weight-transfer-config", config, *arguments]
        self.log = folder / "server.log"
        with open(self.log, "w") as log:
            self._process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                env={**os.environ, **own, **(env or {})},
                start_new_session=True,
            )

    def wait(self, seconds: float = START_SECONDS) -> Self:
        """Until it serves; raises with its last lines."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and self._process.poll() is None:
            with contextlib.suppress(ControlError, SyncDeadline):
                self.calls.ask("GET", "/health")
                return self
            time.sleep(0.2)
        raise LaunchError(
            f"vLLM's server did not start within {seconds:g} s:\n{self.log.read_text()[-3000:]}",
            remedy="its own lines say why",
        )

    def tokens(self, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        """Greedy ones."""
        asked = {
            "max_tokens": count,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "detokenize": False,
        }
        ask = lambda ids: self.calls.ask(
            "POST", "/v1/completions", {"prompt": list(ids), **asked}
        )
        return [ask(ids)["choices"][0]["token_ids"] for ids in prompts]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pid = self._process.pid
        held = shared_memory([pid, *descendants(pid)])
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # vLLM's own teardown can hang
        self._process.wait(60)
        self._held.close()
        unlink_segments(held)


def run_bench_server(
    rounds: int = 10,
    model: str | None = None,
    shape: str | None = None,
    device: str = "cpu",
) -> Plain:
    """Measure every backend; prints as it goes, returns the facts."""
    result: Plain = {
        "device": device,
        "rounds": rounds,
        "vllm": vllm_build(),
        "ways": {},
        "errors": {},
    }
    with ExitStack() as stack:
        checkpoint = model or _checkpoint(shape, device, stack)
        for backend in BACKENDS[device]:
            order = {
                "backend": backend,
                "model": checkpoint,
                "device": device,
                "rounds": rounds,
            }
            environment = {
                "NCCL_HOSTID": "trainer",
                "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # the server needs the GPU
                **ONE_CARD,
            }
            found: Plain
            try:
                with Side("jvlab.bench._server:trainer_side", order, environment) as it:
                    found = it.receive(PART_SECONDS[device])
            except JvlabError as error:
                found = {"error": error.message}
            if "error" in found:
                result["errors"][backend] = found["error"]
                print(f"  {backend}: {found['error']}", flush=True)
                continue
            result["bytes"] = found["bytes"]
            for way, seen in found["ways"].items():
                result["ways"][way] = seen
                print(f"  {way}: {_line(seen)}", flush=True)
    return result | _ratios(result["ways"])


def _checkpoint(shape: str | None, device: str, stack: ExitStack) -> str:
    import jvlab as jv

    if device == "cpu":
        return jv.models.tiny("qwen3")
    size = size_of(shape)
    folder, _ = folder_for(int(float(size.removeprefix("moe-")) * 1.2e9), stack)
    order = {"config": config_of(size), "folder": str(folder / "written")}
    with Side("jvlab.bench._server:checkpoint_side", order) as side:
        return side.receive(PART_SECONDS[device])


def _line(seen: Plain) -> str:
    return (
        f"{seen['send_ms']:.2f} ms (worst {seen['worst_ms']:.2f}), with pause {seen['with_pause_ms']:.2f}; "
        f"verified: {seen['verified']}; tokens equal: {seen['tokens_equal']}, changed: {seen['tokens_changed']}"
    )


def _ratios(ways: Plain) -> dict[str, float]:
    """vLLM's best over ours."""
    out: dict[str, float] = {}
    ours = ways.get("jvlab_direct")
    for backend in ("ipc", "nccl"):
        theirs = [w for name, w in ways.items() if name.startswith(backend)]
        if ours and theirs:
            for what, kind in (("send", ""), ("with_pause", "_with_pause")):
                best = min(w[f"{what}_ms"] for w in theirs)
                out[f"vs_vllm_{backend}{kind}_ratio"] = best / ours[f"{what}_ms"]
    return out


# In processes of their own -------------------------------------------------------------------------------------------


def checkpoint_side(order: Plain, lines: Lines) -> None:
    """Write a checkpoint of random weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = Path(order["folder"])
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(order["config"]))
    config = AutoConfig.from_pretrained(folder)
    with torch.device("cuda"):
        made = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    made.save_pretrained(folder)
    lines.send(str(folder))
    lines.receive()


def trainer_side(order: Plain, lines: Lines) -> None:
    """One backend: its server, and a torch trainer that sends to it."""
    folder = Path(os.environ["TMPDIR"])
    cpu = order["device"] == "cpu"
    weights = sum(f.stat().st_size for f in Path(order["model"]).glob("*.safetensors"))
    share = min(0.6, weights / 141e9 + 0.12)
    card = ["--dtype", "bfloat16", "--gpu-memory-utilization", str(share)]
    card += ["--kv-cache-memory-bytes", str(4 << 30)]
    options = ["--max-model-len", "512", "--skip-tokenizer-init"]
    options += ["--dtype", "float32"] if cpu else card
    env = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}  # vLLM's own ipc pickles handles
    if cpu:
        env |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_TARGET_DEVICE": "cpu"}
    else:
        env |= {"NCCL_HOSTID": "server", **ONE_CARD}
    server = PlainServer(folder, order["model"], order["backend"], *options, env=env)
    with server:
        try:
            server.wait(START_SECONDS)
            lines.send({"bytes": weights, "ways": _measure(server, order)})
        except Exception as error:
            tail = server.log.read_text()[-1500:]
            print(tail, file=sys.stderr)
            lines.send({"error": f"{type(error).__name__}: {error}"[-2000:]})
    lines.receive()


def _ways(backend: str) -> Iterator[tuple[str, Any]]:
    """The trainer's init infos of a backend, by name."""
    if backend == "jvlab":
        from jvlab.integrations.vllm import TrainerInitInfo

        yield "jvlab_direct", TrainerInitInfo(rank=0, mode="direct")
        yield (
            "jvlab_direct_unverified",
            TrainerInitInfo(rank=0, mode="direct", verify="off"),
        )
        yield "jvlab_staged", TrainerInitInfo(rank=0, mode="staged")
    elif backend == "ipc":
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

        for packed in (False, True):
            name = "ipc_packed" if packed else "ipc"
            yield name, IPCTrainerInitInfo(rank=0, packed=packed)
    else:
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        yield (
            "nccl",
            NCCLTrainerInitInfo(
                rank=0, master_address="127.0.0.1", master_port=port, world_size=2
            ),
        )


def _measure(server: PlainServer, order: Plain) -> Plain:
    import torch
    from transformers import AutoModelForCausalLM
    from vllm.distributed.weight_transfer import (
        HTTPVLLMWeightSyncClient,
        ModuleSource,
        WeightTransferTrainerFactory,
    )

    prompts = prompts_of(3)
    loaded = server.tokens(prompts, TOKENS)
    cuda = order["device"] == "cuda"
    if cuda:
        torch.cuda.set_device(0)
    dtype = torch.bfloat16 if cuda else torch.float32
    model: Any = AutoModelForCausalLM.from_pretrained(order["model"], dtype=dtype)
    model = model.to(order["device"])
    matrices = [p for p in model.parameters() if p.ndim > 1]

    def scaled(by: float) -> None:
        with torch.no_grad():
            for matrix in matrices:
                matrix.mul_(by)  # powers of two: exact

    out = {}
    for way, info in _ways(order["backend"]):
        sender = WeightTransferTrainerFactory.trainer_init(
            info,
            client=HTTPVLLMWeightSyncClient(server.url),
            source=ModuleSource(model),
        )
        seconds: list[float] = []
        paused: list[float] = []

        def send(
            sender: Any = sender,
            seconds: list[float] = seconds,
            paused: list[float] = paused,
        ) -> None:
            if cuda:
                torch.cuda.synchronize()
            begin = time.perf_counter()
            server.calls.pause("keep")
            start = time.perf_counter()
            sender.send_weights()
            seconds.append(time.perf_counter() - start)
            server.calls.ask("POST", "/resume")
            paused.append(time.perf_counter() - begin)
            server.calls.ask("POST", "/reset_prefix_cache")

        scaled(2.0)
        send()
        changed = server.tokens(prompts, TOKENS)
        for _ in range(order["rounds"]):
            send()
        scaled(0.5)
        send()
        report = getattr(sender, "report", None)
        out[way] = {
            "send_ms": median_ms(seconds[1:]),
            "worst_ms": 1e3 * max(seconds[1:]),
            "first_ms": 1e3 * seconds[0],
            "with_pause_ms": median_ms(paused[1:]),
            "verified": report is not None and report.verified,
            "transport": getattr(report, "transport", order["backend"]),
            "parts_ms": {
                name: 1e3 * value
                for name, value in (report.seconds if report else {}).items()
            },
            "tokens_changed": changed != loaded,
            "tokens_equal": server.tokens(prompts, TOKENS) == loaded,
        }
        sender.shutdown()  # no deadline: jvlab's has one; vLLM's own wait for nothing
    return out
