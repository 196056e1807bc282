"""`Pool`: a set of identical vLLM replicas that generate and score."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from html import escape
from typing import TYPE_CHECKING, Any

from jvlab import _faces
from jvlab._deadline import Deadline
from jvlab._errors import Unsupported
from jvlab._version import __version__
from jvlab.lab._in_process import INSTEAD, EngineHost, open_pool, release
from jvlab.lab._launch_settings import LaunchOptions
from jvlab.lab._pool_calls import PoolCalls
from jvlab.sync import _connect
from jvlab.wire import jvlab_pb2 as pb
from jvlab.wire._local_calls import LocalClient

if TYPE_CHECKING:
    from jvlab.sync._link import Link


class Pool(PoolCalls):
    """Replicas of one model behind one name. Made by `lab.launch(...)`; starts in the background.

    >>> batch = pool.generate(["Once upon a time"], n=2, max_tokens=8, seed=0, ignore_eos=True)
    >>> batch
    RolloutBatch(2 samples, 1 prompt, 16 tokens, version ..., 2 length, model llama)
    >>> pool.score(batch).gap(batch) < 1e-3         # the same tokens, scored in one pass
    True
    >>> for sample in pool.stream(["one", "two"], max_tokens=4, ignore_eos=True):
    ...     assert len(sample.token_ids) == 4       # as they finish
    >>> pool.status()["healthy"]
    1
    """

    # launched with colocate=True by this process: it may sleep while an on-policy run trains
    colocated = False

    @staticmethod
    def in_process(model: str, **options: Any) -> InProcessPool:
        """A pool without a lab: one vLLM engine in this process, ready when this returns. Options as `lab.launch`.

        For one GPU that one process owns, and for quick experiments: no gateway, no ports, weights move in memory.
        `link = pool.connect(params)` replaces `lab.connect`. The pool ends with this process, so it does not survive a
        kernel restart; it has one replica and no tensor parallelism; a process can have one at a time (`pool.close()`).
        Trainer and engine share the interpreter: while one runs Python code the other waits.
        """
        asked = LaunchOptions(model=model, **options)
        pool = open_pool(InProcessPool, asked)
        pool.colocated = asked.colocate
        return pool


class InProcessPool(Pool):
    """A pool with one engine in this process: the API of `Pool`, with `connect` instead of `lab.connect`."""

    _one_process = True

    def __init__(
        self, client: LocalClient, snapshot: pb.PoolStatus, host: EngineHost
    ) -> None:
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
        nonfinite: str = "refuse",
        checkpoint: str | os.PathLike[str] | None = None,
        meaning: str = "auto",
    ) -> Link:
        """Connect a tree of parameters to this pool; arguments and result as for `lab.connect`."""
        from jvlab.sync._link import Link
        from jvlab.sync._meaning import unpack

        params, scorer = unpack(params)
        agreed = _connect.negotiate(
            params,
            self,
            rules,
            transport,
            bucket_mib,
            {},
            self._agreements,
            __version__,
            same_host=True,
        )
        _connect.check_meaning(agreed, params, self, meaning, checkpoint, scorer)
        for link in self._links:
            if faults is None and link.matches(self, agreed, mode, nonfinite):
                link.remembered.take(params)
                return link
        for link in list(self._links):
            link.close()  # replaced by the new one
        link = Link(self, agreed, mode, faults, self._links.remove, nonfinite=nonfinite)
        link.remembered.take(params)
        self._links.append(link)
        return link

    def restart(self, replica: int = 0, *, timeout: float = 30.0) -> InProcessPool:
        raise Unsupported(
            "an engine in this process can't be restarted: it ends with its process",
            remedy="pool.close(), then jv.Pool.in_process(...) again",
        )

    def scale(
        self, replicas: int, *, wait: bool = True, timeout: float = 900.0
    ) -> InProcessPool:
        if replicas == 1:
            return self
        raise Unsupported(
            f"this pool has one engine, in this process; it can't have {replicas}",
            remedy=INSTEAD,
        )

    def logs(self, replica: int = 0, lines: int = 50) -> str:
        raise Unsupported(
            "an engine in this process has no log of its own: it prints where this process prints",
            remedy="env={'VLLM_LOGGING_LEVEL': 'INFO'} makes it log more",
        )

    def close(self, timeout: float = 30.0) -> None:
        """End the engine and free its memory; another in-process pool can be made then. Can be called twice."""
        deadline = Deadline.of(timeout)
        with self._ending:
            if self._client.loop.stopping:
                return
            for link in list(self._links):
                link.close()
            if not self._snapshot.closed:
                self._client.call("ClosePool", pb.PoolRequest(pool=self.name), deadline)
                self._forget("close() was called")
            try:
                self._client.loop.run(self._host.tear_down())
            finally:
                self._client.close()
                release(self)

    def __enter__(self) -> InProcessPool:
        return self

    def __repr__(self) -> str:
        from jvlab.wire._pool_summary import model_name, pool_health

        now = self._snapshot
        return f"Pool({now.pool!r}, {model_name(now)!r}, in process on {now.device}, {pool_health(now)[0]})"

    def _repr_html_(self) -> str:
        return f"<div>{escape(repr(self))}</div>{_faces.draw(self, 'html')}"
