"""vLLM's engine core in a thread of this process, under an unchanged AsyncLLM. Checked against vLLM 0.32.0.

AsyncLLM only accepts clients of a core in another process, and vLLM's own in-process client cannot pause with requests
in flight. Here the core is the one that vLLM runs in its processes, busy loop included, without the sockets: messages
are passed as objects through queues. To be removed when vLLM offers AsyncLLM without multiprocessing.

    loop thread                                   core thread "jvlab-engine"
    AsyncLLM ─ ThreadClient ── input_queue ─────▶ ThreadCore.run_busy_loop (scheduler, executor, model)
               outputs_queue ◀─ call_soon ─────── output_queue
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import traceback
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import EngineCore, EngineCoreProc, EngineShutdownState
from vllm.v1.engine.core_client import AsyncMPClient, _process_utility_output
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from jvlab._errors import DeadlineExceeded, Unsupported
from jvlab.engine import _patches, _vllm

CLOSE_SECONDS = 30.0
THREAD = "jvlab-engine"


_patches.install("Pool.in_process")


class ThreadCore(EngineCoreProc):
    """The core of vLLM's engine processes, without handshake and sockets."""

    def __init__(
        self,
        config: Any,
        executor: Any,
        log_stats: bool,
        deliver: Callable[[Any], None],
    ) -> None:
        # What EngineCoreProc.__init__ sets for one engine without data parallelism, in its order.
        self.input_queue: Any = queue.Queue()
        # passes each message to the loop at once
        self.output_queue: Any = SimpleNamespace(
            put_nowait=lambda output: deliver(output[1])
        )
        self.engine_index = 0
        self.engines_running = False
        self.shutdown_state = EngineShutdownState.RUNNING
        self.tensor_ipc_receiver = None
        self.has_coordinator = False
        self.frontend_stats_publish_address = None
        self.publish_dp_lb_stats = False
        self.last_counts = (0, 0)
        self.process_input_queue_block = True
        self.enable_fault_tolerance = False
        fail = lambda: self.input_queue.put_nowait(
            (EngineCoreRequestType.EXECUTOR_FAILED, b"")
        )
        EngineCore.__init__(self, config, executor, log_stats, fail, False)


class ThreadClient(AsyncMPClient):
    """AsyncLLM's client of a core in a thread: AsyncMPClient with another transport."""

    in_process = True

    def __init__(self, config: Any, executor: Any, log_stats: bool) -> None:
        self.vllm_config = config
        self.resources: Any = SimpleNamespace(engine_dead=False)
        self.engine_ranks_managed = [0]
        self.core_engines = [b"\0\0"]
        self.core_engine = self.core_engines[0]
        self.client_count = 1
        self.client_index = 0
        self.engines_running = False
        self.utility_results: dict[int, Any] = {}
        self.outputs_queue: Any = asyncio.Queue()
        self._engine_status: dict[int, dict[str, Any]] = {}
        self._kv_event_sources: dict[int, Any] = {}
        self._loop = asyncio.get_running_loop()
        self._core: ThreadCore | None = None
        self._failure: BaseException | None = None
        self._up = threading.Event()
        self._thread = threading.Thread(
            target=self._run_core,
            args=(config, executor, log_stats),
            name=THREAD,
            daemon=True,
        )
        self._thread.start()
        # no deadline: the thread loads a model, and sets this however that ends
        # blocks the loop while the model loads; nothing else runs on it yet
        self._up.wait()
        if self._failure is not None:
            self._thread.join()  # no deadline: its last act was to say that it failed
            raise self._failure

    # In the core's thread: torch's OpenMP threads belong to the thread that computes first -------------------------

    def _run_core(self, config: Any, executor: Any, log_stats: bool) -> None:
        try:
            self._core = core = ThreadCore(config, executor, log_stats, self._deliver)
        except BaseException as error:
            self._failure = error
            # the next core would fail on the process groups that are left
            cleanup_dist_env_and_memory()
            self._up.set()
            return
        self._up.set()
        try:
            core.run_busy_loop()
        except SystemExit:
            pass  # how vLLM ends its loop
        except BaseException as error:
            self._failure = error
            traceback.print_exception(error)  # there is no log file
            self._to_loop(self._died)
        finally:
            # no deadline: vLLM's, in a thread that `shutdown` waits for with one
            core.shutdown()

    def _deliver(self, outputs: Any) -> None:
        outputs.engine_index = 0
        self._to_loop(self._on_outputs, outputs)

    def _to_loop(self, work: Callable[..., None], *args: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(work, *args)

    # On the loop ----------------------------------------------------------------------------------------------------

    def _on_outputs(self, outputs: Any) -> None:
        if outputs.utility_output:
            _process_utility_output(outputs.utility_output, self.utility_results)
        elif outputs.outputs or outputs.scheduler_stats:
            self.outputs_queue.put_nowait(outputs)

    def _died(self) -> None:
        self.resources.engine_dead = True
        self.outputs_queue.put_nowait(EngineDeadError())
        for future in self.utility_results.values():
            if not future.done():
                future.set_exception(EngineDeadError())
        self.utility_results.clear()

    def _ensure_output_queue_task(self) -> None:
        """There is no socket to read."""

    async def _put(self, kind: EngineCoreRequestType, request: Any) -> None:
        self.ensure_alive()
        assert self._core is not None
        self._core.input_queue.put_nowait((kind, request))

    def _send_input(
        self, request_type: EngineCoreRequestType, request: Any, engine: Any = None
    ) -> Any:
        core = self._core
        assert core is not None
        if request_type == EngineCoreRequestType.ADD:
            request = core.preprocess_add_request(request)
        elif request_type == EngineCoreRequestType.ABORT:
            # both queues, as vLLM's input thread does
            core.aborts_queue.put_nowait(request)
        return self._put(request_type, request)

    async def _call_utility_async(
        self, method: str, *args: Any, engine: Any = None
    ) -> Any:
        future = self._loop.create_future()
        number = id(future)  # unique while it is awaited
        self.utility_results[number] = future
        await self._put(
            EngineCoreRequestType.UTILITY, (self.client_index, number, method, args)
        )
        return await future

    def shutdown(self, timeout: float | None = None) -> None:
        """End the core and its thread. Can be called twice, and from another thread (vLLM's finaliser)."""
        core = self._core
        self._core = None
        if core is None:
            return
        self.resources.engine_dead = True
        core.shutdown_state = EngineShutdownState.REQUESTED
        core.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            raise DeadlineExceeded(
                f"the engine in this process did not end within {CLOSE_SECONDS:g} s",
                remedy="restart this process: its memory can't be freed otherwise",
            )


def _client(
    vllm_config: Any, executor_class: Any, log_stats: bool, **_: Any
) -> ThreadClient:
    if not issubclass(executor_class, UniProcExecutor):
        raise Unsupported(
            f"these engine arguments need {executor_class.__name__}, whose workers are processes of their own",
            remedy="leave distributed_executor_backend out, or use lab.launch(...)",
        )
    return ThreadClient(vllm_config, executor_class, log_stats)


def start(arguments: dict[str, Any], meter: _vllm.Meter) -> Any:
    """As `_vllm.start_engine`, with the core in this process. Called on the loop that the engine will use."""
    clients = SimpleNamespace(make_async_mp_client=_client)
    with _patches.clients_of(clients):
        return _vllm.start_engine(arguments, meter)
