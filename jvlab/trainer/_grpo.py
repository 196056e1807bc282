"""`jv.grpo`: reinforcement learning of a JAX policy on a pool's rollouts, on-policy or with bounded staleness."""

from __future__ import annotations

import functools
import inspect
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jvlab._errors import ConfigError
from jvlab._names import check_name
from jvlab._progress import Progress, in_kernel
from jvlab.record._events import StepEvent
from jvlab.record._log import EVENTS
from jvlab.record._writer import RecordWriter
from jvlab.trainer._batching import Buckets
from jvlab.trainer._groups import GroupMaker, SampleGroup
from jvlab.trainer._grpo_config import GrpoConfig, signature_with_options
from jvlab.trainer._loop import Control, Loop, LoopSettings
from jvlab.trainer._losses import Algorithm
from jvlab.trainer._producer import Producer
from jvlab.trainer._run import Run, remember
from jvlab.trainer._run_checkpoint import Checkpoints, Position
from jvlab.trainer._schedule import Flow, Ticket
from jvlab.trainer._step import TrainState, TrainStep

if TYPE_CHECKING:
    from jvlab.lab._pool import Pool
    from jvlab.sync._link import Link
    from jvlab.trainer._policy import Policy
    from jvlab.trainer._tasks import Task


def grpo(
    policy: Policy | tuple[Any, Callable[..., Any]],
    pool: Pool,
    link: Link,
    task: Task,
    steps: int = 50,
    max_staleness: int = 0,
    **options: Any,
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
    sync              options of `link.sync`: mode, verify, pause, kv, nonfinite, timeout
    background        True returns at once; default: in a notebook yes, in a script no. There, Ctrl-C ends the run after
                      the current step and this returns
    progress          a bar (True, False; None: if somebody looks), or a function that is called with each `StepEvent`

    One seed, K = 0 and the CPU: two runs give the same tokens and losses. On a GPU that takes a pool launched with
    `deterministic=True`, whose kernels do not round by the batch they run in; the trainer's then sum in one order too.

    >>> task = jv.tasks.digits()
    >>> run = jv.grpo(policy, pool, link, task, steps=2, group_size=4, prompts_per_step=2, checkpoint_every=0)
    >>> run.wait().status.step, run.record.summary()["syncs_verified"]      # one sync before the first step
    (2, 3)
    """
    config = GrpoConfig(steps, max_staleness, **options)
    algorithm, schedule, sampling = config.algorithm_for(task), config.schedule, config.sampling_for(task)
    params, logprobs_fn, keep_params = _model_and_logprobs(policy, config.temperature)
    _lend_scores(link, policy)
    train = TrainStep(
        logprobs_fn,
        algorithm,
        learning_rate=config.learning_rate,
        optimizer=config.optimizer,
        max_grad_norm=config.max_grad_norm,
        deterministic=_deterministic(pool),
    )
    copy_first = algorithm.needs_reference and config.reference is None
    settings = _settings(config, pool, algorithm, sampling, _copied(params) if copy_first else config.reference)
    folder = _folder(config.folder, task.name, config.resume)
    checkpoints, state = Checkpoints(folder, config.keep_checkpoints), train.init(params)
    position, state = _resumed(checkpoints, state, task, config.seed) if config.resume else (None, state)
    keep_params(state.params)
    started = position.step if position else 0
    version = max(position.version if position else 0, link.version + 1)
    writer = RecordWriter(
        folder,
        run=folder.name,
        config=config.to_record(task, pool, algorithm, sampling),
        gap_alarm=settings.gap_alarm,
        keep_samples=config.keep_samples,
        sinks=config.sinks,
        resumed=started if config.resume else -1,
    )
    reporter, task_state = _StepReporter(config, started, folder.name), functools.partial(_task_state, task)
    loop = Loop(
        settings,
        train,
        state,
        link,
        writer,
        checkpoints,
        Control(),
        task_state,
        keep_params,
        reporter,
        started,
        version,
    )

    def start() -> Producer:
        pending = tuple(Ticket(i, a) for i, a in position.pending) if position else ()
        flow: Flow[SampleGroup] = Flow(schedule, version, position.groups if position else task.position, pending)
        pool_version = lambda: flow.pool_version
        maker = GroupMaker(
            pool, task, writer, config.seed, config.group_size, sampling, config.max_turns, pool_version=pool_version
        )
        return Producer(flow, maker, loop.rejection_reason)

    run = Run(loop, start, folder, folder.name, max_staleness, getattr(pool, "_client", None))
    reporter.run = run
    remember(run)
    in_background = in_kernel() if config.background is None else config.background
    return run if in_background else run.wait()


grpo.__signature__ = signature_with_options(grpo)  # type: ignore[attr-defined]  # for help() and completion


def _settings(
    config: GrpoConfig, pool: Any, algorithm: Algorithm, sampling: Mapping[str, Any], reference: Any
) -> LoopSettings:
    return LoopSettings(
        config.steps,
        config.seed,
        algorithm,
        config.prompts_per_step,
        config.temperature,
        config.alarm_for(pool),
        Buckets(rows=config.micro_batch),
        config.checkpoint_every,
        sampling,
        config.sync_options,
        reference,
        probe=config.temperature == 1.0 and hasattr(pool, "score"),
    )


class _StepReporter:
    """Passes each step on: to a bar, to the user's function, to the run's card."""

    def __init__(self, config: GrpoConfig, done: int, name: str) -> None:
        progress = config.progress
        self._user = progress if callable(progress) else None
        self._bar = Progress(config.steps, name, unit="step", show=False if callable(progress) else progress)
        self._bar.to(done)
        self.run: Run | None = None

    def __call__(self, event: StepEvent) -> None:
        self._bar.advance(1, f"reward {event.reward_mean:.3f}")
        if self._user is not None:
            self._user(event)
        if self.run is not None:
            self.run._on_step(event)


def _model_and_logprobs(policy: Any, temperature: float) -> tuple[Any, Callable[..., Any], Callable[[Any], None]]:
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


def _deterministic(pool: Any) -> bool:
    """Whether the pool was launched to repeat itself to the bit on a card; then the trainer does too."""
    return hasattr(pool, "_facts") and bool(pool._facts().batch_invariant)


def _lend_scores(link: Any, policy: Any) -> None:
    """If it is not settled yet what the link's numbers mean, its next sync may ask this trainer to score tokens."""
    if hasattr(link, "lend_scores"):  # a stand-in for a link need not have it
        link.lend_scores(policy)


def _copied(params: Any) -> Any:
    import jax
    import jax.numpy as jnp

    return jax.tree.map(jnp.copy, params)


def _folder(given: str | os.PathLike[str] | None, task: str, resume: bool) -> Path:
    if given is None:
        if resume:
            raise ConfigError("resume=True without a folder", remedy="folder=run.folder of the run to go on with")
        name = check_name("task", task.replace(" ", "-"))  # it becomes a folder's
        stem = Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
        stems = (stem if n == 1 else stem.with_name(f"{stem.name}-{n}") for n in range(1, 1000))
        return next(folder for folder in stems if not folder.exists()).absolute()
    if "\0" in os.fspath(given):
        raise ConfigError(f"no folder can be called {os.fspath(given)!r}", remedy="give another one")
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
