"""`Pool.in_process`: a pool with one engine in this process, without gateway, ports or other processes.

    caller's thread          loop thread                                     engine thread
    Pool, Link ────────────▶ LabServicer, PoolSync ─▶ RolloutServicer ─────▶ vLLM's core, model
       └─────── bytes of a plan: loopback (CPU) │ ipc (GPU), both this process's own memory ───▲

The servicers and state machines are those of gateway and replica; only gRPC between them is left out.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import json
import os
import random
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jvlab._errors import ConfigError, JvlabError, Unsupported
from jvlab._names import check_name
from jvlab._progress import Progress
from jvlab.engine import _defaults, _vllm_versions
from jvlab.gateway import _registry as reg
from jvlab.gateway._gateway import TICK_SECONDS, Gateway
from jvlab.gateway._servicers import LabServicer
from jvlab.lab import _prompts
from jvlab.lab._launch_settings import LaunchOptions
from jvlab.wire import jvlab_pb2 as pb
from jvlab.wire._local_calls import LocalClient, LocalStub

if TYPE_CHECKING:
    from jvlab.engine._engine import Engine

INSTEAD = (
    "lab = jv.Lab(); pool = lab.launch(...) runs engines in processes of their own"
)
_claim = threading.Lock()
_open: list[Any] = []  # the only in-process pool, or the host of one that is starting


class EngineHost(Gateway):
    """Gateway and replica in one: starts no process, serves no port; its only replica is an object."""

    def __init__(
        self, spec: reg.PoolSpec, engine: dict[str, Any], env: dict[str, str]
    ) -> None:
        super().__init__(
            "in-process", Path(), "", lease=float("inf"), beat=1.0, missed_beats=10**9
        )
        self.spec = spec
        self.name = f"{spec.pool}/0"
        self._arguments = engine
        self._env = env
        self.engine: Engine | None = None
        self._local: Any = None
        self.calls.stub = lambda replica: self._local
        self._beating: asyncio.Task[None] | None = None

    async def _start_process(self, replica: str, spec: reg.PoolSpec) -> None:
        self.handle(reg.ProcessStarted(replica, os.getpid(), spec.run))

    async def bring_up(self) -> pb.PoolStatus:
        """Load the engine and register it; on failure, tear everything down."""
        try:
            self.engine = await self._load()
            servicer = self._serve(self.engine)
            self._local = LocalStub(servicer)
            self.handle(reg.LaunchRequested(self.spec, time.monotonic()))
            await self._register(self.engine, servicer)
            self._beating = asyncio.create_task(self._beat(self.engine, servicer))
            return self.pool_status(self.spec.pool)
        except BaseException:
            await self.tear_down()
            raise

    async def _load(self) -> Engine:
        from jvlab.engine._engine import Engine

        spec = self.spec
        # no progress bars in the trainer's output
        given = {"use_tqdm_on_load": False, **self._arguments}
        arguments = _defaults.engine_arguments(
            spec.model, spec.device, 1, spec.load, given
        )
        note = _defaults.cpu_dtype(spec.model, given)[1] if spec.device == "cpu" else ""
        # around imports too: libraries read some of them at import
        with _defaults.variables(self._env):
            _vllm_versions.build()  # raises with a remedy, before torch's own error
            with _restored_state():
                _vllm_versions.check_engine()
                _vllm_versions.check(_vllm_versions.FEATURES["Pool.in_process"])
                from jvlab.engine._in_process import start

                self.engine = Engine(
                    arguments,
                    spec.device,
                    self.name,
                    start,
                    json.loads(spec.limits_json),
                )
            await asyncio.sleep(0)  # a KeyboardInterrupt during loading arrives here
            self.engine.facts.pid = os.getpid()
            self.engine.facts.vllm_warning = note
            await self.engine.begin()  # its first step sets variables too
        return self.engine

    def _serve(self, engine: Engine) -> Any:
        from jvlab.engine._engine import RolloutServicer

        return RolloutServicer(engine)

    async def _register(self, engine: Engine, servicer: Any) -> None:
        """Register, as a replica process does when it starts, or when it was fenced but is still alive."""
        request = pb.RegisterRequest(
            replica=self.name,
            address="this process",
            facts=engine.facts,
            stats=await engine.stats(),
        )
        servicer.epoch = self.register(request).epoch

    async def _beat(self, engine: Engine, servicer: Any) -> None:
        """What heartbeats and ticks do for replica processes: refresh stats, expire sync leases, report a death."""
        while not engine.dead:
            self.stats[self.name] = await engine.stats()
            try:
                self.handle(
                    reg.BeatReceived(self.name, servicer.epoch, time.monotonic())
                )
            except reg.Refused:
                if self.registry.replica(self.name).ended:
                    return
                await engine.drop_all()
                await self._register(engine, servicer)
            self.links.tick(time.monotonic())
            await asyncio.sleep(TICK_SECONDS)
        self.handle(
            reg.ProcessExited(
                self.name,
                "the engine in this process died; its last lines were printed",
                "",
            )
        )

    async def tear_down(self) -> None:
        """End the engine and free its memory. Can be called twice."""
        import gc

        if self._beating is not None:
            self._beating.cancel()
            await asyncio.gather(self._beating, return_exceptions=True)
        await self.shut_down()
        engine = self.engine
        self.engine = None
        self._local = None
        if engine is not None:
            await engine.drop_all()
            engine.close()
            del engine
            gc.collect()


Opened = tuple[LocalClient, pb.PoolStatus, "EngineHost"]


def open_pool(options: LaunchOptions) -> Opened:
    """See `Pool.in_process`: what the pool is made of, once the engine is up."""
    if options.name is not None:
        check_name("pool", options.name)
    _refuse(options)
    chosen = options.settings()
    spec = reg.PoolSpec(
        options.name or "in-process",
        chosen.model,
        1,
        1,
        options.load,
        chosen.device,
        "{}",
        "{}",
        options.routing,
        limits_json=json.dumps(chosen.limits),
    )
    host = EngineHost(
        spec, chosen.engine, _environment(chosen.device, chosen.model, chosen.env)
    )
    with _claim:
        if _open:
            raise ConfigError(
                f"this process has an engine already: {_open[0]!r}",
                remedy="close it first: pool.close() (this error's .fields['pool'] is that pool)",
                pool=_open[0],
            )
        _open.append(host)
    return _start(host)


def refuse_restarts(restarts: int) -> None:
    """Raise if an engine of this process is to be restarted; 0 is what it has."""
    if restarts:
        raise Unsupported(
            f"restarts={restarts}: an engine in this process ends with it, and nobody is left to start it again",
            remedy=f"leave it out; {INSTEAD}, and starts those that die again",
        )


def _refuse(options: LaunchOptions) -> None:
    """Raise for an option of `lab.launch` that an engine in this process cannot have."""
    parallel = options.tensor_parallel
    for wrong, text, remedy in (
        (
            options.replicas != 1,
            f"one process holds one engine, not {options.replicas} replicas",
            INSTEAD,
        ),
        (
            parallel != 1,
            f"tensor_parallel={parallel} needs a process for each rank, and this engine is in this one",
            INSTEAD,
        ),
        (
            options.place is not None,
            f"place={options.place!r}: an in-process engine can't be placed elsewhere",
            INSTEAD,
        ),
        (
            options.http or options.http_key,
            "an engine in this process serves no port",
            "lab.launch(..., http=True)",
        ),
    ):
        if wrong:
            raise Unsupported(text, remedy=remedy)


def _environment(device: str, model: str, given: dict[str, str]) -> dict[str, str]:
    """Environment variables while the engine starts. The hub's are not set: they would affect the trainer too."""
    ours = _defaults.environment(device, 1, 1, 0, _defaults.usable_cores(), model)
    ours.pop("HF_HUB_OFFLINE", None)
    # the trainer computes in this process too
    ours.pop("VLLM_CPU_OMP_THREADS_BIND", None)
    ours["VLLM_LOGGING_LEVEL"] = "ERROR"
    # Trainer and engine share the cores: with OpenMP threads that spin while waiting, a small matrix product takes a
    # millisecond instead of 80 µs. Only effective if torch is not loaded yet.
    ours.pop("GOMP_SPINCOUNT", None)
    ours["OMP_WAIT_POLICY"] = "PASSIVE"
    ours = {key: value for key, value in ours.items() if key not in os.environ}
    # Not the caller's choice: the engine core runs in this process.
    return {**ours, **given, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


@contextlib.contextmanager
def _restored_state() -> Iterator[None]:
    """Restore what else starting an engine changes in its process: random states and one function of torch."""
    import torch

    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    threads = torch.set_num_threads  # vLLM's CPU worker replaces it
    try:
        with warnings.catch_warnings():
            # from libraries that vLLM imports; a replica process logs them
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_num_threads = threads
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


def _start(host: EngineHost) -> Opened:
    """Start the engine in the background loop and wait for it."""
    client = LocalClient()
    title = f"{host.spec.pool}: imports vLLM and starts its engine in this process"
    try:
        with Progress(0, title, unit="", after=1.0):
            snapshot = client.loop.run(host.bring_up())
    except KeyboardInterrupt:
        # Loading can't be interrupted: tear the engine down as soon as it is up; then another may be started.
        threading.Thread(
            target=_end_later, args=(client, host), name="jvlab-end", daemon=True
        ).start()
        raise
    except BaseException as error:
        client.close()
        release(host)
        if isinstance(error, JvlabError) or not isinstance(error, Exception):
            raise
        cause = f"{type(error).__name__}: {error}"
        what = "the engine did not start in this process"
        raise _prompts.launch_error(what, cause, host.spec.model) from error
    for replica in snapshot.replicas:
        if replica.facts.vllm_warning:
            warnings.warn(replica.facts.vllm_warning, stacklevel=4)
    client.stub = LocalStub(LabServicer(host))
    return client, snapshot, host


def claim(pool: Any) -> None:
    """The engine that was started is this pool's."""
    _open[0] = pool


def _end_later(client: LocalClient, host: EngineHost) -> None:
    # no deadline: a thread that does nothing else, for an engine that still loads
    client.loop.submit(host.tear_down()).result()
    client.close()
    release(host)


def release(holder: Any) -> None:
    with contextlib.suppress(ValueError):
        _open.remove(holder)


@atexit.register
def _close_open() -> None:
    """Close at exit: a thread that computes during interpreter shutdown would crash it."""
    for pool in list(_open):
        if not isinstance(pool, EngineHost):
            pool.close()
