"""`jv.grpo`: reinforcement learning of a JAX policy on a pool's rollouts, on-policy or with bounded staleness."""

from __future__ import annotations

import functools
import inspect
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jvlab._errors import ConfigError
from jvlab.record._events import StepEvent
from jvlab.record._writer import EVENTS, RecordWriter
from jvlab.trainer._batching import Buckets
from jvlab.trainer._groups import Group, GroupMaker
from jvlab.trainer._loop import Control, Loop, Settings
from jvlab.trainer._losses import Algorithm
from jvlab.trainer._producer import Producer
from jvlab.trainer._run import Run
from jvlab.trainer._run_checkpoint import Checkpoints, Position
from jvlab.trainer._schedule import Flow, Schedule, Ticket
from jvlab.trainer._step import TrainState, TrainStep
from jvlab.views._progress import Progress, in_kernel

if TYPE_CHECKING:
    from jvlab._link import Link
    from jvlab._pool import Pool
    from jvlab.trainer._policy import Policy
    from jvlab.trainer._tasks import Task

ALARMS = {"float32": 1e-3}  # logprob_gap that is still healthy, by the engine's dtype
HALF_ALARM = 0.3  # for 16-bit floats: single tokens differ by so much in a healthy run
OWN = ("seed", "max_tokens", "temperature", "n", "logprobs")  # sampling parameters that have a place of their own


def grpo(
    policy: Policy | tuple[Any, Callable[..., Any]],
    pool: Pool,
    link: Link,
    task: Task,
    steps: int = 50,
    max_staleness: int = 0,
    *,
    algorithm: str | Algorithm = "grpo",
    group_size: int = 8,
    prompts_per_step: int = 8,
    learning_rate: float | Callable[[Any], Any] = 1e-4,
    optimizer: Any = None,
    max_grad_norm: float | None = 1.0,
    seed: int = 0,
    max_tokens: int | None = None,
    temperature: float = 1.0,
    sampling: Mapping[str, Any] | None = None,
    micro_batch: int = 16,
    reference: Any = None,
    on_stale: str = "drop",
    max_turns: int = 8,
    folder: str | os.PathLike[str] | None = None,
    checkpoint_every: int = 10,
    keep_checkpoints: int | None = 3,
    resume: bool = False,
    gap_alarm: float | None = None,
    keep_samples: int = 1,
    sinks: tuple[Callable[[Any], None], ...] = (),
    sync: Mapping[str, Any] | None = None,
    background: bool | None = None,
    progress: bool | Callable[[StepEvent], None] | None = None,
) -> Run:
    """Train `policy` on `task` with rollouts of `pool`, weights going over `link` after every step; returns a `Run`.

    policy            a `jv.Policy`, whose `params` are replaced after each step, or `(params, logprobs_fn)` of any
                      other JAX model: `logprobs_fn(params, tokens, mask)` as `TrainStep` describes it
    max_staleness     K: 0 generates, trains and syncs in turn, strictly on-policy; above 0 rollouts and training
                      overlap, and nothing older than K versions is trained on
    algorithm         a preset's name or a `jv.Algorithm`: grpo, dr_grpo, dapo, rloo, reinforce++, ppo_clip
    group_size        samples of one prompt; `prompts_per_step` groups make a step
    max_tokens        of one completion; default: the task's own. `sampling` holds more of vLLM's parameters
    reference         for a KL term: a pool, a tree of parameters; None: the policy as it is now
    on_stale          "drop" or "regenerate" groups that turned out too stale
    micro_batch       samples that one forward and backward pass takes
    folder            of the record and checkpoints; default: runs/<task>-<time>. `resume=True` goes on from its last
                      checkpoint, or from the start if there is none
    checkpoint_every  steps; 0: none. The `keep_checkpoints` newest are kept, None: all
    gap_alarm         `logprob_gap` over this is recorded as a fault; default 1e-3 for a float32 engine, 0.3 for 16 bits
    sync              options of `link.sync`: mode, verify, pause, kv, timeout
    background        True returns at once; default: in a notebook yes, in a script no. There, Ctrl-C ends the run after
                      the current step and this returns
    progress          a bar (True, False; None: if somebody looks), or a function that is called with each `StepEvent`

    One seed, K = 0 and the CPU: two runs give the same tokens and losses. A GPU engine needs vLLM's batch-invariant
    mode for that (env={"VLLM_BATCH_INVARIANT": "1"}), since its kernels round by the batch they run in.

    >>> task = jv.tasks.digits()
    >>> run = jv.grpo(policy, pool, link, task, steps=2, group_size=4, prompts_per_step=2, checkpoint_every=0)
    >>> run.wait().status.step, run.record.summary()["syncs_verified"]      # one sync before the first step
    (2, 3)
    """
    chosen = _algorithm(algorithm, max_tokens or task.sampling.get("max_tokens"))
    schedule = Schedule(prompts_per_step, max_staleness, on_stale)
    options = _sampling(task, max_tokens, temperature, sampling)
    _check(steps, group_size, checkpoint_every, temperature, reference, chosen)
    params, logprobs_fn, keep = _trainee(policy, temperature)
    train = TrainStep(
        logprobs_fn, chosen, learning_rate=learning_rate, optimizer=optimizer, max_grad_norm=max_grad_norm
    )
    if chosen.needs_reference and reference is None:
        reference = _copied(params)
    place = _folder(folder, task.name, resume)
    checkpoints = Checkpoints(place, keep_checkpoints)
    state = train.init(params)
    position, state = _resumed(checkpoints, state, task, seed) if resume else (None, state)
    keep(state.params)
    settings = Settings(
        steps, seed, chosen, prompts_per_step, temperature, _alarm(pool, gap_alarm), Buckets(rows=micro_batch),
        checkpoint_every, options, {"verify": "full", "pause": "keep", **(sync or {})}, reference,
        probe=temperature == 1.0 and hasattr(pool, "score"),
    )  # fmt: skip
    config = {
        "task": task.name, "steps": steps, "max_staleness": max_staleness, "algorithm": asdict(chosen),
        "group_size": group_size, "prompts_per_step": prompts_per_step, "seed": seed, "sampling": options,
        "learning_rate": learning_rate if isinstance(learning_rate, float) else str(learning_rate),
        "on_stale": on_stale, "micro_batch": micro_batch, "model": Path(str(getattr(pool, "model", ""))).name,
    }  # fmt: skip
    started = position.step if position else 0
    writer = RecordWriter(
        place, run=place.name, config=config, gap_alarm=settings.gap_alarm, keep_samples=keep_samples, sinks=sinks,
        resumed=started if resume else -1,
    )  # fmt: skip
    version = max(position.version if position else 0, link.version + 1)
    teller = _Teller(progress, steps, started, place.name)
    loop = Loop(
        settings, train, state, link, writer, checkpoints, Control(), functools.partial(_task_state, task), keep,
        teller, started, version,
    )  # fmt: skip

    def start() -> Producer:
        pending = tuple(Ticket(i, a) for i, a in position.pending) if position else ()
        flow: Flow[Group] = Flow(schedule, version, position.groups if position else task.position, pending)
        maker = GroupMaker(
            pool, task, writer, seed, group_size, options, max_turns, pool_version=lambda: flow.pool_version
        )
        return Producer(flow, maker, loop.worth)

    run = Run(loop, start, place, place.name, max_staleness, getattr(pool, "_client", None))
    teller.run = run
    _remember(run)
    if in_kernel() if background is None else background:
        return run
    return run.wait()


class _Teller:
    """Passes each step on: to a bar, to the user's function, to the run's card."""

    def __init__(self, progress: bool | Callable[[StepEvent], None] | None, steps: int, done: int, name: str) -> None:
        self._user = progress if callable(progress) else None
        self._bar = Progress(steps, name, unit="step", show=False if callable(progress) else progress)
        self._bar.to(done)
        self.run: Run | None = None

    def __call__(self, event: StepEvent) -> None:
        self._bar.advance(1, f"reward {event.reward_mean:.3f}")
        if self._user is not None:
            self._user(event)
        if self.run is not None:
            self.run._told(event)


def _algorithm(given: str | Algorithm, longest: int | None) -> Algorithm:
    if isinstance(given, Algorithm):
        return given
    if given == "dr_grpo" and longest:
        return Algorithm.named(given, constant_length=longest)
    return Algorithm.named(given)


def _sampling(task: Task, max_tokens: int | None, temperature: float, more: Mapping[str, Any] | None) -> dict[str, Any]:
    taken = sorted(set(OWN) & set(more or {}))
    if taken:
        raise ConfigError(
            f"sampling holds {', '.join(taken)}", remedy="these are arguments of jv.grpo itself, or fixed"
        )
    options = {**task.sampling, **(more or {}), "temperature": temperature}
    if max_tokens is not None:
        options["max_tokens"] = max_tokens
    if "max_tokens" not in options:
        raise ConfigError(f"task {task.name!r} does not say max_tokens", remedy="jv.grpo(..., max_tokens=64)")
    return options


def _check(steps: int, group_size: int, every: int, temperature: float, reference: Any, algorithm: Algorithm) -> None:
    if steps < 1 or group_size < 1 or every < 0 or not temperature > 0:
        raise ConfigError(
            f"steps={steps}, group_size={group_size}, checkpoint_every={every}, temperature={temperature}",
            remedy="steps and group_size from 1, checkpoint_every from 0, temperature above 0",
        )
    if reference is not None and not algorithm.needs_reference:
        raise ConfigError(
            "a reference without a KL term would not be used",
            remedy='algorithm=jv.Algorithm.named("grpo", kl_coef=0.05)',
        )
    if hasattr(reference, "score") and temperature != 1.0:
        raise ConfigError(
            f"a reference pool scores at temperature 1, the policy samples at {temperature}",
            remedy="temperature=1.0, or give the reference as a tree of parameters",
        )


def _trainee(policy: Any, temperature: float) -> tuple[Any, Callable[..., Any], Callable[[Any], None]]:
    """Parameters, their log-probabilities at this temperature, and what to do with each new state's parameters."""
    if isinstance(policy, tuple):
        if len(policy) != 2 or not callable(policy[1]):
            raise ConfigError("a policy as a tuple is (params, logprobs_fn)", remedy="see help(jv.grpo)")
        params, function = policy
        if "temperature" in inspect.signature(function).parameters:
            function = functools.partial(function, temperature=temperature)
        elif temperature != 1.0:
            raise ConfigError(
                f"temperature={temperature}, and logprobs_fn takes none",
                remedy="let it take temperature=..., so that it can be the engine's; or sample at 1.0",
            )
        return _copied(params), function, lambda _: None  # training takes over memory: the caller's stays
    if not hasattr(policy, "logprobs_fn") or not hasattr(policy, "params"):
        raise ConfigError(f"policy is {type(policy).__name__}", remedy="a jv.Policy, or (params, logprobs_fn)")
    function = functools.partial(policy.logprobs_fn, temperature=temperature)
    return policy.params, function, functools.partial(setattr, policy, "params")


def _copied(params: Any) -> Any:
    import jax
    import jax.numpy as jnp

    return jax.tree.map(jnp.copy, params)


def _alarm(pool: Any, given: float | None) -> float:
    if given is not None:
        return given
    return ALARMS.get(pool.status().get("dtype") or "float32", HALF_ALARM)


def _folder(given: str | os.PathLike[str] | None, task: str, resume: bool) -> Path:
    if given is None:
        if resume:
            raise ConfigError("resume=True without a folder", remedy="folder=run.folder of the run to go on with")
        stem = Path("runs") / f"{task}-{time.strftime('%Y%m%d-%H%M%S')}"
        names = (stem if n == 1 else stem.with_name(f"{stem.name}-{n}") for n in range(1, 1000))
        return next(name for name in names if not name.exists()).absolute()
    place = Path(given).absolute()
    if not resume and (place / EVENTS).exists():
        raise ConfigError(
            f"{place} already holds a run", remedy="resume=True to go on with it, or another folder", folder=str(place)
        )
    return place


def _resumed(checkpoints: Checkpoints, state: TrainState, task: Task, seed: int) -> tuple[Position | None, TrainState]:
    """The last checkpoint's position and state; the fresh ones if there is none."""
    latest = checkpoints.latest()
    if latest is None:
        return None, state
    position = checkpoints.position(latest)
    if position.seed != seed:
        raise ConfigError(
            f"this run was started with seed {position.seed}, not {seed}", remedy=f"resume with seed={position.seed}"
        )
    task.load_state(position.task)
    return position, checkpoints.load(latest, state)


def _task_state(task: Task, position: int) -> dict[str, Any]:
    return {**task.state_dict(), "position": position}


def _remember(run: Run) -> None:
    """So that `lab.plot` finds it."""
    from jvlab._lab_plots import remember

    remember(run)
