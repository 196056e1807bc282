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
import os
import random
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jvlab import _connect, _replies
from jvlab._errors import ConfigError, JvlabError, LaunchError, Unsupported
from jvlab._pool import Pool
from jvlab.control import _registry as reg
from jvlab.control import jvlab_pb2 as pb
from jvlab.control._gateway import TICK_SECONDS, Gateway
from jvlab.control._local_calls import LocalClient, LocalStub
from jvlab.control._servicers import LabServicer
from jvlab.rollout import _defaults, _vllm

if TYPE_CHECKING:
    from jvlab._link import Link
    from jvlab.rollout._engine import Engine

INSTEAD = "lab = jv.Lab(); pool = lab.launch(...) runs engines in processes of their own"
_claim = threading.Lock()
_open: list[Any] = []  # the one in-process pool, or the host of one that is coming up


class _Host(Gateway):
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
            self.facts[self.name] = self.engine.facts
            self.handle(reg.Registered(self.name, "this process", time.monotonic()))
            replica = self.registry.replica(self.name)
            servicer.epoch = replica.epoch
            self.links.joined(replica, await self.engine.stats())
            self._beating = asyncio.create_task(self._beat(self.engine, replica.epoch))
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

                self.engine = Engine(arguments, spec.device, self.name, start)
            await asyncio.sleep(0)  # a Ctrl-C while it loaded is heard here
            self.engine.facts.pid = os.getpid()
            await self.engine.begin()  # its first step sets variables too
        return self.engine

    def _serve(self, engine: Engine) -> Any:
        from jvlab.rollout._server import RolloutServicer

        return RolloutServicer(engine)

    async def _beat(self, engine: Engine, epoch: int) -> None:
        """What beats and ticks do for a replica elsewhere: fresh numbers, leases of syncs, and news of a death."""
        while not engine.dead:
            self.stats[self.name] = await engine.stats()
            self.handle(reg.Beaten(self.name, epoch, time.monotonic()))
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


class InProcessPool(Pool):
    """A pool whose one engine lives in this process: the API of `Pool`, and `connect` in place of `lab.connect`."""

    _one_process = True

    def __init__(self, client: LocalClient, snapshot: pb.PoolStatus, host: _Host) -> None:
        super().__init__(client, snapshot)
        self._host = host
        self._links: list[Link] = []
        self._agreements: dict[Any, Any] = {}
        self._ending = threading.RLock()

    def connect(
        self,
        params: Any,
        rules: Any = "auto",
        transport: str = "auto",
        mode: str = "direct",
        *,
        bucket_mib: float = 16.0,
        faults: Callable[[Any], Any] | None = None,
    ) -> Link:
        """Connect a tree of parameters with this pool; arguments and the link are those of `lab.connect`."""
        import jvlab
        from jvlab._link import Link

        agreed = _connect.negotiate(
            params, self, rules, transport, bucket_mib, {}, self._agreements, jvlab.__version__, same_host=True
        )
        for link in self._links:
            if link._agreed is agreed and faults is None and link.mode == mode:
                return link
        for link in list(self._links):
            link.close()  # the new one takes its place
        link = Link(self, agreed, mode, faults, self._links.remove)
        self._links.append(link)
        return link

    def restart(self, replica: int = 0, *, timeout: float = 30.0) -> Pool:
        raise Unsupported(
            "an engine in this process can't be restarted: it ends with its process",
            remedy="pool.close(), then jv.Pool.in_process(...) again",
        )

    def scale(self, replicas: int, *, wait: bool = True, timeout: float = 900.0) -> Pool:
        if replicas == 1:
            return self
        raise Unsupported(f"this pool has one engine, in this process; it can't have {replicas}", remedy=INSTEAD)

    def logs(self, replica: int = 0, lines: int = 50) -> str:
        raise Unsupported(
            "an engine in this process has no log of its own: it prints where this process prints",
            remedy="env={'VLLM_LOGGING_LEVEL': 'INFO'} makes it say more",
        )

    def close(self, timeout: float = 30.0) -> None:
        """End the engine and give its memory back; another in-process pool may be made then. Can be called twice."""
        with self._ending:
            if self._client.loop.loop.is_closed():
                return
            for link in list(self._links):
                link.close()
            if not self._snapshot.closed:
                self._client.call("ClosePool", pb.PoolRequest(pool=self.name), timeout=timeout)
                self._forget("close() was called")
            try:
                self._client.loop.run(self._host.tear_down())
            finally:
                self._client.close()
                _let_go(self)

    def __enter__(self) -> InProcessPool:
        return self

    def __repr__(self) -> str:
        from jvlab.views._cards import model_name, pool_state

        now = self._snapshot
        return f"Pool({now.pool!r}, {model_name(now)!r}, in process on {now.device}, {pool_state(now)})"

    def _repr_html_(self) -> str:
        from jvlab.views._cards import pool_html

        return f"<div>{escape(repr(self))}</div>{pool_html(self._snapshot)}"


def open_pool(
    model: str,
    *,
    replicas: int = 1,
    tensor_parallel: int = 1,
    load: str = "auto",
    device: str = "auto",
    engine: dict[str, Any] | None = None,
    env: dict[str, str] | None = None,
    name: str | None = None,
    colocate: bool = False,
    routing: str = "least",
    deterministic: bool = False,
    speculative: dict[str, Any] | None = None,
    http: bool | int = False,
    place: str | dict[str, Any] | None = None,
) -> InProcessPool:
    """`Pool.in_process`; see there."""
    from jvlab._launch_settings import settings

    _refuse(replicas, tensor_parallel, http, place)
    chosen = settings(model, load, device, engine, env, colocate, routing, deterministic, speculative)
    spec = reg.PoolSpec(name or "in-process", chosen.model, 1, 1, load, chosen.device, "{}", "{}", routing)
    host = _Host(spec, chosen.engine, _environment(chosen.device, chosen.model, chosen.env))
    with _claim:
        if _open:
            raise ConfigError(
                f"this process has an engine already: {_open[0]!r}",
                remedy="close it first: pool.close() (this error's .fields['pool'] is that pool)", pool=_open[0],
            )  # fmt: skip
        _open.append(host)
    return _start(host)


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


def _start(host: _Host) -> InProcessPool:
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
        _let_go(host)
        if isinstance(error, JvlabError) or not isinstance(error, Exception):
            raise
        cause = f"{type(error).__name__}: {error}"
        remedy = _replies.launch_remedy(cause)
        if "pool.logs" in remedy:  # there are none here
            remedy = "env={'VLLM_LOGGING_LEVEL': 'INFO'} makes vLLM say more"
        raise LaunchError(
            f"the engine did not come up in this process: {cause}", remedy=remedy, cause=cause, log=""
        ) from error  # fmt: skip
    client.stub = LocalStub(LabServicer(host))
    pool = InProcessPool(client, snapshot, host)
    _open[0] = pool
    return pool


def _end_later(client: LocalClient, host: _Host) -> None:
    client.loop.submit(host.tear_down()).result()
    client.close()
    _let_go(host)


def _let_go(holder: Any) -> None:
    with contextlib.suppress(ValueError):
        _open.remove(holder)


@atexit.register
def _close_open() -> None:
    """A thread that computes while Python ends would crash it."""
    for pool in list(_open):
        if isinstance(pool, InProcessPool):
            pool.close()
