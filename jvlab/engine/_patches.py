"""What jvlab changes of vLLM, a function for each change, listed in `PATCHES`. Checked against vLLM 0.32.0.

Each says what it replaces, why, and until when; a test checks that what it replaces is there.
Those that stay are installed once in a process, by their place (`install`):

    worker, CPU worker      `worker/_extension.py`, which vLLM imports before it builds a model
    core                    `worker/_scheduler.py`, which the engine core loads
    Pool.in_process         `_in_process.py`

Those of other places last for one call (`replacing`). Nothing here imports vLLM before a function is called.
What changes one object and not a class is not here: in `_vllm.start_engine` the loggers and the client, in
`_requests.py` a request, in `worker/_poison.py` and `worker/_routes.py` the runner; each says why and until when.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.context import ForkContext, ForkProcess
from types import SimpleNamespace
from typing import Any, TypeVar

ARCH_PRCTL, REQUEST_PERMISSION, TILES = 158, 0x1023, 18  # of Linux on x86-64
SPIN_SECONDS = 0.005  # that core and worker spin for the next message on a CPU

_CORE = "vllm.v1.engine.core"
_FP8 = "vllm.model_executor.layers.quantization"
_MOE = "vllm.model_executor.layers.fused_moe"


@dataclass(frozen=True)
class Patch:
    """One change of vLLM; its reason is the docstring of `install`."""

    place: str
    replaces: tuple[str, ...]  # module:attribute; empty: a call that must come first
    install: Callable[..., Any]


PATCHES: list[Patch] = []
_Install = TypeVar("_Install", bound=Callable[..., Any])


def patch(place: str, *replaces: str) -> Callable[[_Install], _Install]:
    """Enter a function into `PATCHES`."""

    def enter(install: _Install) -> _Install:
        PATCHES.append(Patch(place, replaces, install))
        return install

    return enter


@functools.cache
def install(place: str) -> None:
    """Make the changes of a place in this process, once."""
    for patch in PATCHES:
        if patch.place == place:
            patch.install()


def patched(place: str) -> tuple[str, ...]:
    """What is replaced there."""
    return tuple(
        name for patch in PATCHES if patch.place == place for name in patch.replaces
    )


Values = list[tuple[Any, str, Any]]


@contextmanager
def replacing(*new: tuple[Any, str, Any]) -> Iterator[None]:
    """Inside, these attributes (owner, name, value) have other values; AttributeError if one is not there."""
    # as they lie there: a class's static method is not what reading it gives
    before = [
        (owner, name, vars(owner).get(name, getattr(owner, name)))
        for owner, name, _ in new
    ]
    try:
        for owner, name, value in new:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def _wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """From now on `around` is called instead, with the method before its arguments."""
    method = getattr(owner, name)

    @functools.wraps(method)
    def wrapped(*args: Any, **options: Any) -> Any:
        return around(method, *args, **options)

    setattr(owner, name, wrapped)


# Workers on a CPU -----------------------------------------------------------------------------------------------------


def own_experts_only(
    apply: Any, *kernel: Any, expert_map: Any, topk_ids: Any, **given: Any
) -> None:
    """The method, given places on this rank instead of numbers of experts; those of other ranks get the weight 0.

    `expert_map` has each expert's place on a rank, or -1. vLLM adds the ranks' results up itself, and names arguments.
    """
    import torch

    if expert_map is not None:
        places = expert_map.to(torch.int64)[topk_ids.to(torch.int64)]
        given["topk_weights"] = torch.where(places >= 0, given["topk_weights"], 0)
        topk_ids = places.clamp(min=0).to(topk_ids.dtype)
    apply(*kernel, expert_map=expert_map, topk_ids=topk_ids, **given)


@patch("CPU worker", f"{_MOE}.experts.cpu_moe:CPUUnquantizedExperts.apply")
def cpu_experts() -> None:
    """With expert parallelism the first token crashes: the kernels take an expert's number for its place on the rank,
    and read past the end of its memory.

    Until CPUUnquantizedExperts.apply uses its expert_map.
    """
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    _wrap(cpu_moe.CPUUnquantizedExperts, "apply", own_experts_only)


def no_adapter_is_zero(
    shrink: Any, inputs: Any, weights: Any, output: Any, slots: Any, *more: Any
) -> None:
    """The kernel, the first of two products, with rows of zeros where the slot is negative."""
    shrink(inputs, weights, output, slots, *more)
    output[: slots.shape[0]][slots < 0] = 0


@patch(
    "CPU worker",
    "vllm.lora.ops.torch_ops.lora_ops:bgmv_shrink",
    "vllm.lora.punica_wrapper.punica_cpu:bgmv_shrink",
)
def cpu_lora() -> None:
    """A request without an adapter has the slot -1, and the kernels index with it: it is computed with the last slot's
    adapter, in every decoding step and in prefills beside an adapted one.

    Until bgmv_shrink in torch_ops gives zeros for slot -1.
    """
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    _wrap(lora_ops, "bgmv_shrink", no_adapter_is_zero)  # sgmv_shrink calls it too
    punica_cpu.bgmv_shrink = lora_ops.bgmv_shrink


def restoring_generators(sample: Any, runner: Any, *args: Any) -> Any:
    """The runner's method; a token that will be discarded leaves its request's generator as it was."""
    before = [(g, g.get_state()) for g in _discarded(runner).values()]
    out = sample(runner, *args)
    for generator, state in before:
        generator.set_state(state)
    return out


def without_rewinding(bookkeeping: Any, runner: Any, *args: Any) -> Any:
    """The runner's method, which finds no generator to rewind."""
    generators = runner.input_batch.generators
    hidden = _discarded(runner)
    for row in hidden:
        del generators[row]
    try:
        return bookkeeping(runner, *args)
    finally:
        generators.update(hidden)


def _discarded(runner: Any) -> dict[int, Any]:
    """Row → generator of the requests whose token of this step is discarded."""
    batch = runner.input_batch
    rows = runner.discard_request_mask.np[: batch.num_reqs].nonzero()[0].tolist()
    return {row: batch.generators[row] for row in rows if row in batch.generators}


def patch_runner(runner: Any) -> None:
    """Of a runner class, what samples and what rewinds."""
    _wrap(runner, "_sample", restoring_generators)
    _wrap(runner, "_bookkeeping_sync", without_rewinding)


@patch(
    "CPU worker",
    "vllm.v1.worker.cpu_model_runner:CPUModelRunner._sample",
    "vllm.v1.worker.cpu_model_runner:CPUModelRunner._bookkeeping_sync",
)
def cpu_seeds() -> None:
    """A step that prefills a part of a prompt samples all the same, and rewinds the generator with set_offset, which
    CPU generators do not have: the engine dies. Restored, a seed gives the same tokens however its prompt was chunked.

    Until CPUModelRunner restores its generators.
    """
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    patch_runner(CPUModelRunner)


def expanded(
    values: Any, ends: Any, count: int, replace_from: int = 0, replace_to: int = 0
) -> Any:
    """A value of each request for each of its `count` drafted tokens in all; `ends`: the running sum of their numbers.

    vLLM's function of these arguments, in the values' own dtype.
    """
    import torch

    found = torch.where(values == replace_from, replace_to, values).to(values.dtype)
    numbers = torch.diff(ends, prepend=ends.new_zeros(1)).to(torch.int64)
    return found.repeat_interleave(numbers, output_size=count)


@patch("CPU worker", "vllm.v1.sample.rejection_sampler:expand_batch_to_tokens")
def cpu_drafts() -> None:
    """The kernel that gives each drafted token its request's temperature, top-k and top-p writes a copy in int64, which
    is then dropped: drafted tokens are accepted, replaced and given log-probabilities by uninitialised memory. It may
    hold the right numbers, left there by an earlier tensor of that size.

    Until _expand_kernel_impl of cpu_triton_utils copies its result back, in the dtype of the values.
    """
    from vllm.v1.sample import rejection_sampler

    rejection_sampler.expand_batch_to_tokens = expanded


def without_packing() -> Values:
    """Replaced so that CPU linear layers compute from `layer.weight` itself: oneDNN packs it, AMX a small one."""
    import vllm._custom_ops as ops
    import vllm.model_executor.layers.utils as layers

    return [
        (ops, "_supports_onednn", False),
        (layers, "check_cpu_sgl_kernel", lambda n, k, dtype: False),
    ]


@patch(
    "CPU worker",
    "vllm._custom_ops:_supports_onednn",
    "vllm.model_executor.layers.utils:check_cpu_sgl_kernel",
)
def live_weights() -> None:
    """CPU linear layers compute from `layer.weight` itself, if JVLAB_LIVE_WEIGHTS=1 asks for that; from a packed copy
    of it otherwise.

    Until vLLM has a setting for it.
    """
    if os.environ.get("JVLAB_LIVE_WEIGHTS") == "1":
        for owner, name, value in without_packing():
            setattr(owner, name, value)


@patch("CPU worker")
def settle_vector_math() -> None:
    """Make this process's first call of MKL's vector functions, in one thread: torch's cos and sin are made of them.

    If several threads make it at once, one of them may compute with 13 bits instead of 24, once. In a worker the rotary
    table is made first: in up to four of a hundred processes a part of it had errors of 1.5e-4, and all
    log-probabilities of that engine were 1e-3 off for as long as it lived.
    Until MKL's first call can be made by several threads.
    """
    import torch

    torch.ones(1).cos()


@patch("CPU worker")
def allow_amx() -> None:
    """Ask Linux for AMX's tiles, which it gives to processes that asked; an error, which nobody reads, without AMX.

    vLLM's attention in bfloat16 takes them for granted: it dies of SIGILL unless a product of oneDNN's asked before,
    which that of a small layer does not.
    Until vLLM's attention asks.
    """
    if platform.machine() == "x86_64":
        ctypes.CDLL(None).syscall(ARCH_PRCTL, REQUEST_PERMISSION, TILES)


# Every worker ---------------------------------------------------------------------------------------------------------


def adapting_sampled_rows(
    get_logits: Any, layer: Any, hidden_states: Any, *args: Any, **options: Any
) -> Any:
    """The layer's method; rows other than one for each request are computed without adapters."""
    kernels = layer.punica_wrapper
    if hidden_states.shape[0] != kernels.sampler_indices.shape[0]:
        layer.punica_wrapper = SimpleNamespace(add_lora_logits=lambda y, *_: y)
    try:
        return get_logits(layer, hidden_states, *args, **options)
    finally:
        layer.punica_wrapper = kernels


@patch("worker", "vllm.lora.layers:LogitsProcessorWithLoRA._get_logits")
def prompt_scores() -> None:
    """The output head adapts one row for each request that samples; given the rows of prompts, as pool.score asks for,
    it fails, on a CPU with an error that ends the engine. Scores are of the base or of a linked adapter, neither of
    which adapts the head.

    Until LogitsProcessorWithLoRA takes rows of prompts.
    """
    from vllm.lora.layers import LogitsProcessorWithLoRA

    _wrap(LogitsProcessorWithLoRA, "_get_logits", adapting_sampled_rows)


# The engine core ------------------------------------------------------------------------------------------------------


def sending_held(method: Any, self: Any, *args: Any, **options: Any) -> Any:
    """The core's method; held tokens are sent first, labelled with the weight version that generated them."""
    # the scheduler may be the user's own
    held = getattr(self.scheduler, "jv_held", None)
    if held is not None:
        groups = held.release()
        self._attach_weight_version(groups)
        for group in groups.items():
            self.output_queue.put_nowait(group)
    return method(self, *args, **options)


def clearing_poison(
    reset: Any,
    core: Any,
    reset_running_requests: bool = False,
    reset_connector: bool = False,
) -> bool:
    """The core's `reset_prefix_cache`; if KV is poisoned, requests in flight lose theirs and all of it is zeroed."""
    poisoned = getattr(core.scheduler, "jv_poisoned", False)
    done = reset(core, reset_running_requests or poisoned, reset_connector)
    if poisoned and done:
        from jvlab.engine.worker import _poison

        _poison.clear_awake(core)
    return done


@patch(
    "core",
    f"{_CORE}:EngineCore.post_step",
    f"{_CORE}:EngineCore.reset_prefix_cache",
    f"{_CORE}:EngineCore.set_weight_version",
    f"{_CORE}:EngineCoreProc.pause_scheduler",
)
def core_methods() -> None:
    """The calls that our front end makes (`jv_…`), held tokens, and the check for NaN (`worker/_poison.py`).

    Until vLLM's core can be extended, as its workers can.
    """
    from vllm.v1.engine import EngineCoreRequestType
    from vllm.v1.engine.core import EngineCore, EngineCoreProc

    from jvlab.engine.worker import _ipc_core, _poison

    def jv_wake(self: Any, tags: Any) -> None:
        """EngineCore.wake_up without resuming the scheduler."""
        self.model_executor.wake_up(list(tags))
        _poison.clear_awake(self)

    def check_nan(post_step: Any, core: Any, model_executed: bool) -> None:
        post_step(core, model_executed)
        _poison.after_step(core)

    added: dict[str, Any] = {
        "jv_wake": jv_wake,
        "jv_poison": _poison.poison,
        "jv_utility": EngineCoreRequestType.UTILITY,
        "jv_wake_up": EngineCoreRequestType.WAKEUP,
        **{name: vars(_ipc_core)[name] for name in _ipc_core.METHODS},
    }
    for name, value in added.items():
        setattr(EngineCore, name, value)
    _wrap(EngineCore, "post_step", check_nan)
    _wrap(EngineCore, "reset_prefix_cache", clearing_poison)
    _wrap(EngineCoreProc, "set_weight_version", sending_held)
    _wrap(EngineCoreProc, "pause_scheduler", sending_held)


# The front end --------------------------------------------------------------------------------------------------------


class _ForkedProcess(ForkProcess):
    """A forked process whose exit code is known as soon as its sentinel says that it has ended.

    A process closes its files a moment before its parent can read its code: vLLM, which asks just then, would log
    "exit code: None", and nobody would learn which signal ended a worker.
    """

    @property
    def exitcode(self) -> int | None:
        code = super().exitcode
        if code is None and self.pid is not None and wait([self.sentinel], 0):
            self.join(1.0)
            code = super().exitcode
        return code


class _ForkContext(ForkContext):
    Process = _ForkedProcess  # type: ignore[assignment]


@patch(
    "front end",
    "vllm.v1.engine.utils:get_mp_context",
    "vllm.v1.executor.multiproc_executor:get_mp_context",
    "vllm.v1.executor.multiproc_executor:WorkerProc.worker_main",
    "vllm.distributed.device_communicators.shm_broadcast:SpinCondition.__init__",
)
@contextmanager
def forked(device: str) -> Iterator[None]:
    """On a CPU, fork engine core and workers instead of starting Python again: vLLM is imported once, not three times.

    vLLM spawns there because OpenMP reads its settings when it is loaded; a forked worker sets them itself (see
    `_worker_threads`). The core is forked from here, where only one other thread may be running and gRPC must not have
    started, and forks its workers as vLLM does on a GPU. A core that stays in this process (see `_in_process.py`) still
    spawns them, as other threads may be running here.
    Until vLLM forks on CPUs, and has a setting for the spinning.
    """
    if device != "cpu":
        yield
        return
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
    from vllm.v1.engine import utils
    from vllm.v1.executor import multiproc_executor as executor

    here = os.getpid()
    spawning = utils.get_mp_context

    @functools.cache  # by the core, before its workers' settings are in the environment
    def workers_fork() -> bool:
        if os.getpid() == here or not _workers_may_fork():
            return False
        main = executor.WorkerProc.worker_main
        executor.WorkerProc.worker_main = staticmethod(
            lambda **given: (_worker_threads(), main(**given))
        )
        return True

    with replacing(
        (utils, "get_mp_context", _ForkContext),
        (
            executor,
            "get_mp_context",
            lambda: _ForkContext() if workers_fork() else spawning(),
        ),
        # By default core and workers spin on their shared memory for a second after each message: with few cores, that
        # time is taken from computation. A wake-up takes a tenth of a millisecond.
        (SpinCondition.__init__, "__defaults__", (SPIN_SECONDS,)),
    ):
        yield


def _workers_may_fork() -> bool:
    """Whether a forked worker would have the threads and libraries of a spawned one; other libraries are logged."""
    if (
        os.environ.get("OMP_NUM_THREADS") != "1"
        or os.environ.get("VLLM_CPU_OMP_THREADS_BIND") == "nobind"
    ):
        # threads may exist already, which a child does not inherit; or the user set them
        return False
    try:
        with open("/proc/self/maps") as maps:
            mapped = {line.split(None, 5)[5].strip() for line in maps if ".so" in line}
    except OSError:
        return False
    wanted = {
        os.path.realpath(path)
        for path in os.environ.get("LD_PRELOAD", "").split(":")
        if path
    }
    runtimes = openmp_of_torch(mapped)
    if wanted <= mapped and len(runtimes) == 1 and "libgomp" in next(iter(runtimes)):
        return True
    found = f"OpenMP is {sorted(runtimes)}, preloaded {sorted(wanted)}"
    print(f"workers cannot be forked and import vLLM again: {found}", flush=True)
    return False


def openmp_of_torch(mapped: set[str]) -> set[str]:
    """The OpenMP libraries among those of a process that torch may compute with.

    Not those that a wheel brought for itself, as sentencepiece does: their names have a hash, so that nobody else finds
    them, and nothing here starts their threads.
    """
    runtimes = {
        path
        for path in mapped
        if os.path.basename(path).startswith(("libgomp", "libiomp", "libomp"))
    }
    return {
        path
        for path in runtimes
        if not re.match(r"lib\w+-[0-9a-f]{8,}\.so", os.path.basename(path))
    }


def _worker_threads() -> None:
    """Do what libgomp does when loaded: start one thread per core of the worker, bound to it."""
    import torch

    named = os.environ.get("GOMP_CPU_AFFINITY") or os.environ.get("OMP_PLACES", "")
    cores = [int(core) for core in re.findall(r"\d+", named)]
    if not cores:
        return
    before = set(os.listdir("/proc/self/task"))
    torch.set_num_threads(len(cores))
    torch.ones(1 << 20).add_(1)  # starts them
    os.sched_setaffinity(0, cores)
    for thread, core in zip(
        sorted(set(os.listdir("/proc/self/task")) - before, key=int),
        cores[1:],
        strict=False,
    ):
        os.sched_setaffinity(int(thread), {core})


# An engine in this process --------------------------------------------------------------------------------------------


@patch(
    "Pool.in_process",
    "vllm.triton_utils.dispatcher:register_kernels",
    "vllm.triton_utils.dispatcher:_registry",
)
def kernel_table() -> None:
    """vLLM's table of CPU kernels tolerates every loaded module, and being filled twice.

    It looks for kernels in every loaded module and fails at llvmlite's (of numba, which digests use), whose __dict__ is
    not a dict; and a second engine in this process would wrap the first one's wrappers.
    Until _rebind_kernels tolerates such objects and register_kernels can be called twice.
    """
    from vllm.triton_utils import dispatcher

    registered = vars(dispatcher)["_registry"]

    def once(register: Any, overrides: Mapping[str, Any]) -> None:
        if fresh := {k: v for k, v in overrides.items() if k not in registered}:
            register(fresh)

    def attributes(value: object) -> Mapping[str, Any]:
        found = vars(value)
        return found if isinstance(found, Mapping) else {}

    dispatcher.vars = attributes  # type: ignore[attr-defined]
    _wrap(dispatcher, "register_kernels", once)


@patch("a core in a thread", "vllm.v1.engine.async_llm:EngineCoreClient")
def clients_of(clients: Any) -> AbstractContextManager[None]:
    """Inside, an AsyncLLM gets its client from this class; it accepts only those of a core in another process.

    Until vLLM offers AsyncLLM without multiprocessing.
    """
    from vllm.v1.engine import async_llm

    return replacing((async_llm, "EngineCoreClient", clients))


# A plan without an engine ---------------------------------------------------------------------------------------------


@patch("jv.plan", "vllm.model_executor.models.registry:_run_in_subprocess")
def classes_imported_here() -> AbstractContextManager[None]:
    """Inside, vLLM imports a model's class in this process only, not in a subprocess first (13 s on two cores), so that
    CUDA need not be initialised here.

    Until vLLM has a setting for it.
    """
    import vllm.model_executor.models.registry as registry

    return replacing((registry, "_run_in_subprocess", lambda question: question()))


@patch(
    "jv.plan",
    "vllm.model_executor.models.transformers.base:Base._decorate_for_torch_compile",
)
def undecorated_classes(model_class: type) -> AbstractContextManager[None]:
    """Inside, vLLM's Transformers backend does not decorate transformers' classes: that would outlast a trace.

    Until it decorates instances.
    """
    name = "_decorate_for_torch_compile"
    owners = [owner for owner in model_class.__mro__ if name in vars(owner)]
    return replacing(*((owner, name, lambda model: None) for owner in owners))


@patch(
    "jv.plan",
    f"{_MOE}.expert_map_manager:ExpertMapManager.__init__",
)
def expert_maps_on_cpu() -> AbstractContextManager[None]:
    """Inside, expert maps are real also in a model on meta: the loader reads from them which experts are local.

    Until vLLM makes them on the CPU.
    """
    import torch
    from vllm.model_executor.layers.fused_moe.expert_map_manager import ExpertMapManager

    original = ExpertMapManager.__init__

    def on_cpu(self: Any, *args: Any, **options: Any) -> None:
        with torch.device("cpu"):
            original(self, *args, **options)

    return replacing((ExpertMapManager, "__init__", on_cpu))


@patch("jv.plan", "vllm.distributed.utils:get_pp_indices")
def only_layers(stage: int, count: int) -> AbstractContextManager[None]:
    """Inside, this pipeline stage builds only its first `count` layers; the rest are treated as another stage's.

    One layer of each kind is enough for a trace. Until vLLM can build a part of a stage.
    """
    import vllm.distributed.utils as distributed

    original = distributed.get_pp_indices

    def shortened(layers: int, rank: int, stages: int) -> tuple[int, int]:
        start, end = original(layers, rank, stages)
        return (start, min(end, start + count)) if rank == stage else (start, end)

    return replacing((distributed, "get_pp_indices", shortened))


def linear_kernel(module_name: str = "", **options: Any) -> Any:
    """vLLM's CUTLASS kernel of an fp8 layer on any machine; blocks are left as they are loaded, so need none."""
    from vllm.model_executor.kernels.linear.scaled_mm.cutlass import (
        CutlassFP8ScaledMMLinearKernel,
    )
    from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import (
        FP8ScaledMMLinearLayerConfig,
    )

    class AnyMachine(CutlassFP8ScaledMMLinearKernel):
        @classmethod
        def is_supported(
            cls, compute_capability: int | None = None
        ) -> tuple[bool, str | None]:
            return True, None

    if options["weight_quant_key"].scale.group_shape.row > 1:
        return SimpleNamespace()
    return AnyMachine(
        FP8ScaledMMLinearLayerConfig(**options),
        ["weight", "weight_scale", "input_scale", "x"],
    )


@patch(
    "jv.plan",
    f"{_FP8}.fp8:init_fp8_linear_kernel",
    f"{_FP8}.fp8:select_fp8_moe_backend",
    f"{_FP8}.online.fp8:init_fp8_linear_kernel",
    f"{_FP8}.online.fp8:select_fp8_moe_backend",
    f"{_FP8}.online.fp8:amax_for_tp_weight_quant",
    f"{_FP8}.online.fp8:amax_for_moe_weight_quant",
    f"{_MOE}.oracle.fp8:make_fp8_moe_kernel",
    "vllm._custom_ops:scaled_fp8_quant",
)
def card_kernels() -> AbstractContextManager[None]:
    """Inside, fp8 models on meta are built and processed as on a GPU: vLLM's own classes, its kernels named.

    Without a GPU vLLM finds no kernel for fp8, and without values its step after loading cannot quantise. So kernels
    are those that an H200 was seen to take (CUTLASS for linear maps, Triton for experts), and quantising gives shapes
    alone. Which arithmetic it is follows from the class; connecting to the engine proves it, on known values
    (`tracing/_trace.py`).
    Until vLLM can build a model for another device than this machine's.
    """
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.fused_moe.oracle import fp8 as moe
    from vllm.model_executor.layers.quantization import fp8
    from vllm.model_executor.layers.quantization.online import fp8 as online

    triton = moe.Fp8MoeBackend.TRITON
    # the maximum over ranks has the shape of each
    of_rank = lambda amax, _: amax
    return replacing(
        (fp8, "init_fp8_linear_kernel", linear_kernel),
        (online, "init_fp8_linear_kernel", linear_kernel),
        (fp8, "select_fp8_moe_backend", lambda **_: (triton, SimpleNamespace)),
        (online, "select_fp8_moe_backend", lambda **_: (triton, SimpleNamespace)),
        (online, "amax_for_tp_weight_quant", of_rank),
        (online, "amax_for_moe_weight_quant", of_rank),
        (moe, "make_fp8_moe_kernel", lambda **_: SimpleNamespace()),
        (ops, "scaled_fp8_quant", _quantised),
    )


def _quantised(values: Any, scale: Any, **_: Any) -> tuple[Any, Any]:
    import torch

    return torch.empty_like(values, dtype=torch.float8_e4m3fn), scale
