"""`Pool.in_process`: a pool whose one engine runs in this process, without gateway, ports or other processes.

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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from jvlab._errors import ConfigError, JvlabError, LaunchError, Unsupported
from jvlab._names import check_name
from jvlab.gateway import _registry as reg
from jvlab.gateway._gateway import TICK_SECONDS, Gateway
from jvlab.gateway._servicers import LabServicer
from jvlab.lab import _decode
from jvlab.lab._launch_settings import LaunchOptions
from jvlab.rollout import _defaults, _vllm
from jvlab.wire import jvlab_pb2 as pb
from jvlab.wire._local_calls import LocalClient, LocalStub

if TYPE_CHECKING:
    from jvlab.rollout._engine import Engine

Made = TypeVar("Made")
INSTEAD = "lab = jv.Lab(); pool = lab.launch(...) runs engines in processes of their own"
_claim = threading.Lock()
_open: list[Any] = []  # the one in-process pool, or the host of one that is coming up


class EngineHost(Gateway):
    """Gateway and replica in one: starts no process, serves no port, and its one replica is an object."""

    def __init__(self, spec: reg.PoolSpec, engine: dict[str, Any], env: dict[str, str]) -> None:
        super().__init__("in-process", Path(), "", lease=float("inf"), beat=1.0, missed_beats=10**9)
        self.spec, self.name = spec, f"{spec.pool}/0"
        self._arguments, self._env = engine, env
        self.engine: Engine | None = None
        self._local: Any = None
        self._beating: asyncio.Task[None] | None = None

    async def _start_process(self, replica: str, spec: reg.PoolSpec) -> None:
        self.handle(reg.ProcessStarted(replica, os.getpid()))

    def stub(self, replica: str) -> Any:
        return self._local

    def metadata(self) -> tuple[tuple[str, str], ...]:
        return ()

    async def bring_up(self) -> pb.PoolStatus:
        """Load the engine and register it; whatever goes wrong, nothing stays behind."""
        try:
            self.engine = await self._load()
            servicer = self._serve(self.engine)
            self._local = LocalStub(servicer)
            self.handle(reg.LaunchRequested(self.spec, time.monotonic()))
            await self._enrol(self.engine, servicer)
            self._beating = asyncio.create_task(self._beat(self.engine, servicer))
            return self.pool_status(self.spec.pool)
        except BaseException:
            await self.tear_down()
            raise

    async def _load(self) -> Engine:
        from jvlab.rollout._engine import Engine

        spec = self.spec
        given = {"use_tqdm_on_load": False, **self._arguments}  # it would draw into the trainer's own output
        arguments = _defaults.engine_arguments(spec.model, spec.device, 1, spec.load, given)
        with _variables(self._env):  # for imports too: libraries read some of them once, when they are loaded
            _vllm.build()  # an error with a remedy, before torch's own
            with _undisturbed():
                _vllm.check()
                from jvlab.rollout._in_process import start

                self.engine = Engine(arguments, spec.device, self.name, start, json.loads(spec.limits_json))
            await asyncio.sleep(0)  # a Ctrl-C while it loaded arrives here
            self.engine.facts.pid = os.getpid()
            await self.engine.begin()  # its first step sets variables too
        return self.engine

    def _serve(self, engine: Engine) -> Any:
        from jvlab.rollout._server import RolloutServicer

        return RolloutServicer(engine)

    async def _enrol(self, engine: Engine, servicer: Any) -> None:
        """What a replica elsewhere does when it comes, or was given up and is there all the same."""
        request = pb.RegisterRequest(
            replica=self.name, address="this process", facts=engine.facts, stats=await engine.stats()
        )
        servicer.epoch = self.register(request).epoch

    async def _beat(self, engine: Engine, servicer: Any) -> None:
        """What beats and ticks do for a replica elsewhere: fresh numbers, leases of syncs, and news of a death."""
        while not engine.dead:
            self.stats[self.name] = await engine.stats()
            try:
                self.handle(reg.BeatReceived(self.name, servicer.epoch, time.monotonic()))
            except reg.Refused:
                if self.registry.replica(self.name).ended:
                    return
                await engine.drop_all()
                await self._enrol(engine, servicer)
            self.links.tick(time.monotonic())
            await asyncio.sleep(TICK_SECONDS)
        self.handle(reg.ProcessExited(self.name, "the engine in this process died; its last lines were printed", ""))

    async def tear_down(self) -> None:
        """End the engine and let go of its memory. Can be called twice."""
        import gc

        if self._beating is not None:
            self._beating.cancel()
            await asyncio.gather(self._beating, return_exceptions=True)
        await self.shut_down()
        engine, self.engine, self._local = self.engine, None, None
        if engine is not None:
            await engine.drop_all()
            engine.close()
            del engine
            gc.collect()


def open_pool(make: Callable[[LocalClient, pb.PoolStatus, EngineHost], Made], options: LaunchOptions) -> Made:
    """`Pool.in_process`; see there. `make` builds the pool once the engine is up."""
    if options.name is not None:
        check_name("pool", options.name)
    _refuse(options.replicas, options.tensor_parallel, options.http, options.place)
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
    host = EngineHost(spec, chosen.engine, _environment(chosen.device, chosen.model, chosen.env))
    with _claim:
        if _open:
            raise ConfigError(
                f"this process has an engine already: {_open[0]!r}",
                remedy="close it first: pool.close() (this error's .fields['pool'] is that pool)",
                pool=_open[0],
            )
        _open.append(host)
    return _start(host, make)


def _refuse(replicas: int, tensor_parallel: int, http: bool | int, place: Any) -> None:
    if replicas != 1:
        raise Unsupported(f"one process holds one engine, not {replicas} replicas", remedy=INSTEAD)
    if tensor_parallel != 1:
        raise Unsupported(
            f"tensor_parallel={tensor_parallel} needs a process for each rank, and this engine is in this one",
            remedy=INSTEAD,
        )
    if place is not None:
        raise Unsupported(f"place={place!r}: an engine in this process is nowhere else", remedy=INSTEAD)
    if http is not False:
        raise Unsupported("an engine in this process serves no port", remedy="lab.launch(..., http=True)")


def _environment(device: str, model: str, given: dict[str, str]) -> dict[str, str]:
    """Variables while the engine starts. The hub's are left alone: they would stay in force for the trainer too."""
    import psutil

    memory = psutil.virtual_memory().available / 2**30
    ours = _defaults.environment(device, 1, 1, 0, _defaults.usable_cores(), memory, model)
    ours.pop("HF_HUB_OFFLINE", None)
    ours.pop("VLLM_CPU_OMP_THREADS_BIND", None)  # the trainer computes in this process too
    ours["VLLM_LOGGING_LEVEL"] = "ERROR"
    # Trainer and engine share the cores: OpenMP threads that spin while they wait take them from each other, and a
    # small matrix product then takes a millisecond instead of 80 µs. Counts only if torch is not loaded yet.
    ours["OMP_WAIT_POLICY"] = "PASSIVE"
    ours = {key: value for key, value in ours.items() if key not in os.environ}
    # One process: the core here, and no worker processes below it; no choice of the caller's.
    return {**ours, **given, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


@contextlib.contextmanager
def _variables(environment: dict[str, str]) -> Iterator[None]:
    """Environment variables while the engine starts; afterwards all are as before, vLLM's own (LD_PRELOAD) too."""
    before = dict(os.environ)
    os.environ.update(environment)
    try:
        yield
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """What else an engine's start changes in its process, put back: random states and one function of torch."""
    import torch

    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    threads = torch.set_num_threads  # vLLM's CPU worker replaces it
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the libraries that vLLM imports; a replica has them in its log
            yield
    finally:
        torch.set_num_threads = threads
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


def _start(host: EngineHost, make: Callable[[LocalClient, pb.PoolStatus, EngineHost], Made]) -> Made:
    """Bring the engine up in the background loop and wait for it."""
    client = LocalClient()
    try:
        snapshot = client.loop.run(host.bring_up())
    except KeyboardInterrupt:
        # A model that loads can't be stopped; it ends by itself as soon as it is up, and then another may be made.
        threading.Thread(target=_end_later, args=(client, host), name="jvlab-end", daemon=True).start()
        raise
    except BaseException as error:
        client.close()
        let_go(host)
        if isinstance(error, JvlabError) or not isinstance(error, Exception):
            raise
        cause = f"{type(error).__name__}: {error}"
        remedy = _decode.launch_remedy(cause)
        if "pool.logs" in remedy:  # there are none here
            remedy = "env={'VLLM_LOGGING_LEVEL': 'INFO'} makes vLLM say more"
        raise LaunchError(
            f"the engine did not come up in this process: {cause}", remedy=remedy, cause=cause, log=""
        ) from error
    client.stub = LocalStub(LabServicer(host))
    pool = make(client, snapshot, host)
    _open[0] = pool
    return pool


def _end_later(client: LocalClient, host: EngineHost) -> None:
    client.loop.submit(host.tear_down()).result()
    client.close()
    let_go(host)


def let_go(holder: Any) -> None:
    with contextlib.suppress(ValueError):
        _open.remove(holder)


@atexit.register
def _close_open() -> None:
    """A thread that computes while Python ends would crash it."""
    for pool in list(_open):
        if not isinstance(pool, EngineHost):
            pool.close()
