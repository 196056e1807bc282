"""The rollout process: one vLLM engine, registered at a gateway, serving until it is ended or loses its gateway."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import platform
import shutil
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from jvlab._errors import ConfigError
from jvlab.engine import _defaults
from jvlab.wire import _channels as channels
from jvlab.wire import _security as security
from jvlab.wire import jvlab_pb2 as pb
from jvlab.wire import jvlab_pb2_grpc as rpc
from jvlab.wire._rpc_errors import received
from jvlab.wire.processes._identity import read_secret
from jvlab.wire.processes._pool_spec import AWAY_SECONDS
from jvlab.wire.processes._supervisor import SCRATCH_NAME

BEAT_DEADLINE = 5.0
TEARDOWN_SECONDS = 8.0
# the longest that a core may take to answer: one step, or what it compiles; env={"JVLAB_SILENT_ENGINE_SECONDS": …}
SILENT_ENGINE_SECONDS = 300.0


@dataclass(frozen=True)
class Order:
    """The configuration of this process."""

    replica: str
    index: int
    gateway: str
    model: str
    replicas: int
    tensor_parallel: int
    load: str
    device: str
    engine: dict[str, Any]
    env: dict[str, str]
    http: bool = False
    # of one call, over the defaults
    limits: dict[str, int] = field(default_factory=dict)
    run: int = 0  # tells this process from another of its name, to the gateway
    # the address to listen on; other than loopback needs the TLS files
    bind: str = "127.0.0.1"
    tls_ca: str | None = None  # the gateway's certificate, or its CA's
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_name: str = ""  # the name in both certificates, if it is not the address
    away: float = AWAY_SECONDS  # without a gateway for this long, end


def run(order: Order, token: str, supervised: bool) -> int:
    """Run the engine until it ends. Returns the exit code."""
    if supervised:
        threading.Thread(
            target=_end_with_parent, name="watch-parent", daemon=True
        ).start()
    set_environment(order)
    try:
        asyncio.run(_serve(order, token))
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        sys.stdout.flush()
        # vLLM's finalisers would hide the cause behind errors of their own, or hang
        os._exit(1)
    return 0


def order_and_token() -> tuple[Order, str]:
    """What the gateway passed: the order in the environment, so that `ps` does not show it, the token by pipe.

    The processes that vLLM starts inherit the environment, and must not get the token.
    """
    text = os.environ.pop("JVLAB_ORDER", None)
    if text is None:
        raise ConfigError(
            "jvlab rollout is started by a gateway, which passes JVLAB_ORDER and a token",
            remedy="use jv.Lab().launch(...), which starts it",
        )
    return Order(**json.loads(text)), read_secret()


def _end_with_parent() -> None:
    """Kill this process group when the pipe from the supervisor closes: it died, and can't clean up.

    Reads the raw descriptor: a lock on sys.stdin would still be held in processes that vLLM forks.
    """
    while os.read(0, 4096):
        pass
    if scratch := os.environ.get(SCRATCH_NAME):
        shutil.rmtree(scratch, ignore_errors=True)
    os.killpg(os.getpgid(0), signal.SIGKILL)


def _visible_gpus() -> list[str]:
    """The GPUs that this process may use, as in CUDA_VISIBLE_DEVICES."""
    if given := os.environ.get("CUDA_VISIBLE_DEVICES"):
        return given.split(",")
    return [
        str(n) for n in range(len(list(Path("/proc/driver/nvidia/gpus").glob("*"))))
    ]


def set_environment(order: Order) -> None:
    cores = _defaults.usable_cores()
    ours = _defaults.environment(
        order.device,
        order.tensor_parallel,
        order.replicas,
        order.index,
        cores,
        order.model,
        _visible_gpus(),
    )
    for name, value in ours.items():
        # GPUs are chosen among those visible, so they replace what is set
        if name == "CUDA_VISIBLE_DEVICES" or name not in os.environ:
            os.environ[name] = value
    os.environ.update(order.env)
    if (
        order.device == "cpu"
        and os.environ.get("VLLM_CPU_OMP_THREADS_BIND") != "nobind"
    ):
        # for this process and the core; workers use the binding
        os.environ["OMP_NUM_THREADS"] = "1"
    # no pickle between our processes
    os.environ.pop("VLLM_ALLOW_INSECURE_SERIALIZATION", None)
    if order.engine.get("distributed_executor_backend") != "ray":
        # vLLM imports Ray if it is installed, which takes seconds in each of its processes; it is not needed here
        os.environ["JVLAB_WITHOUT_RAY"] = "1"
        sys.modules.setdefault("ray", None)  # type: ignore[arg-type]


async def _serve(order: Order, token: str) -> None:
    from jvlab.engine import _vllm_versions

    _vllm_versions.check_engine()
    # The engine comes first: vLLM forks, and gRPC's threads must not exist yet.
    from jvlab.engine._engine import Engine

    arguments = _defaults.engine_arguments(
        order.model,
        order.device,
        order.tensor_parallel,
        order.load,
        order.engine,
        order.replicas,
    )
    if order.device == "cpu" and arguments.get("enforce_eager"):
        switch_compiler_off()
    engine = Engine(arguments, order.device, order.replica, limits=order.limits)
    engine.facts.pid = os.getpid()
    if order.device == "cpu":
        engine.say(_defaults.cpu_dtype(order.model, order.engine)[1])
    await engine.begin()
    try:
        await _serve_engine(engine, order, token)
    finally:
        # vLLM's teardown can hang
        watchdog = threading.Timer(TEARDOWN_SECONDS, os._exit, [1])
        watchdog.daemon = True
        watchdog.start()
        engine.close()


def switch_compiler_off() -> None:
    """Let what vLLM compiles even in an eager engine (it counts ranks of log-probabilities so) run as it is.

    Each worker would trace it for seconds, and the first one on a machine wait for g++. Spawned processes read the
    variable, forked ones inherit the setting. env={"TORCH_COMPILE_DISABLE": "0"} keeps the compiler.
    """
    import torch._dynamo.config as compiler

    os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
    compiler.disable = os.environ["TORCH_COMPILE_DISABLE"] == "1"


async def _serve_engine(engine: Any, order: Order, token: str) -> None:
    from jvlab.engine._engine import RolloutServicer

    servicer = RolloutServicer(engine)
    server = grpc.aio.server(
        interceptors=[security.TokenInterceptor(token)], options=security.options()
    )
    rpc.add_RolloutServicer_to_server(servicer, server)
    address, pem = _listen(server, order)
    engine.facts.host = platform.node()
    await server.start()
    web = None
    if order.http:
        from jvlab.engine._http import serve_http

        web = await serve_http(engine, lambda: servicer.epoch, token)
        engine.facts.http_url = web.url
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    trust = channels.Trust.of_file(order.tls_ca, order.tls_name)
    async with channels.open_channel(order.gateway, trust) as channel:
        beating = asyncio.create_task(
            _beat_forever(servicer, channel, order, token, address, pem)
        )
        waiting = asyncio.create_task(ended.wait())
        # no deadline: the replica's whole life; SIGTERM or its pipe's end ends it
        done, _ = await asyncio.wait(
            {beating, waiting}, return_when=asyncio.FIRST_COMPLETED
        )
        for task in (beating, waiting):
            task.cancel()
        if web is not None:
            await web.close()
        await server.stop(0.2)
        for task in done:
            # no deadline: the task is done
            task.result()  # raises if beating failed


def _listen(server: Any, order: Order) -> tuple[str, str]:
    """(the address for the gateway, the certificate used there)."""
    if security.is_loopback(order.bind):
        return f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}", ""
    if order.tls_cert is None or order.tls_key is None:
        raise ConfigError(
            f"refusing to listen on {order.bind} without TLS: the token would cross the network in clear text",
            remedy="pass --tls-cert and --tls-key, or --tls-dir",
        )
    tls = security.Tls(order.tls_cert, order.tls_key)
    port = server.add_secure_port(channels.joined(order.bind, 0), tls.credentials())
    return channels.joined(order.bind, port), Path(order.tls_cert).read_text()


class Pulse:
    """Whether the engine core answers: it can hang behind a process that goes on, and only it can tell.

    One question at a time. The core answers between two steps; while a sync is open it may take as long as that does.
    """

    def __init__(self, engine: Any) -> None:
        given = os.environ.get("JVLAB_SILENT_ENGINE_SECONDS")
        self._limit = float(given or SILENT_ENGINE_SECONDS)
        self._engine = engine
        self._question: asyncio.Task[None] | None = None
        self._asked = 0.0
        self._told = False

    async def _ask(self) -> None:
        with contextlib.suppress(Exception):  # `engine.dead` says what is wrong
            await self._engine.llm.is_sleeping()

    def is_felt(self) -> bool:
        """Ask again if the last question was answered; False once one has waited for too long."""
        now = time.monotonic()
        if self._question is None or self._question.done():
            self._question = asyncio.create_task(self._ask())
            self._asked = now
        if self._engine.state.stage != "idle":
            self._asked = now
        silent = now - self._asked
        if silent > self._limit and not self._told:
            print(
                f"jvlab: the engine core has not answered for {silent:.0f} s: no beats until it does",
                flush=True,
            )
        self._told = silent > self._limit
        return not self._told


async def _beat_forever(
    servicer: Any, channel: Any, order: Order, token: str, address: str, pem: str
) -> None:
    """Register, then beat; when fenced, drop all work and register again; without a gateway, end."""
    stub = rpc.RegistryStub(channel)
    metadata = security.authorization(token)
    engine = servicer.engine
    registered = False
    last_contact = time.monotonic()
    beat_seconds = 1.0
    pulse = Pulse(engine)
    while True:
        if engine.dead:
            raise RuntimeError(f"{engine.why_dead()}; see the log above")
        if not pulse.is_felt():
            last_contact = time.monotonic()  # it is not the gateway that is silent
            await asyncio.sleep(beat_seconds)
            continue
        try:
            if not registered:
                stats = await engine.stats()  # version and dirty survive fencing
                request = pb.RegisterRequest(
                    replica=order.replica,
                    address=address,
                    facts=engine.facts,
                    stats=stats,
                    tls_pem=pem,
                    tls_name=order.tls_name,
                    run=order.run,
                )
                reply = await stub.Register(
                    request, timeout=BEAT_DEADLINE, metadata=metadata
                )
                servicer.epoch = reply.epoch
                beat_seconds = reply.beat_seconds
                registered = True
                print(
                    f"jvlab: {order.replica} registered, epoch {reply.epoch}, serving on {address}",
                    flush=True,
                )
            else:
                beat = pb.BeatRequest(
                    replica=order.replica,
                    epoch=servicer.epoch,
                    stats=await engine.stats(),
                )
                answer = await stub.Beat(beat, timeout=BEAT_DEADLINE, metadata=metadata)
                if answer.fenced:
                    print(
                        f"jvlab: fenced at epoch {servicer.epoch}; dropping all work",
                        flush=True,
                    )
                    servicer.epoch = 0
                    registered = False
                    await engine.drop_all()
                    continue
            last_contact = time.monotonic()
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                print(
                    f"jvlab: the gateway refuses this replica: {error.details()}",
                    file=sys.stderr,
                    flush=True,
                )
                return
            if time.monotonic() - last_contact > order.away:
                raise RuntimeError(
                    f"no gateway at {order.gateway} for {order.away:g} s: {received(error).message}"
                ) from error
        await asyncio.sleep(beat_seconds)
