"""`jv.grpo`: reinforcement learning of a JAX policy on a pool's rollouts, on-policy or with bounded staleness."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import os
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np

from jvlab._errors import ConfigError
from jvlab._files import writing
from jvlab._names import check_name, own_name
from jvlab._progress import Progress, in_kernel
from jvlab._tracebacks import brief
from jvlab._units import how_many
from jvlab.engine._defaults import usable_cores
from jvlab.record._events import EvaluationEvent, StepEvent
from jvlab.record._export import Report, check_reports, reports
from jvlab.record._log import EVENTS
from jvlab.record._record import Record
from jvlab.record._writer import RecordWriter
from jvlab.trainer._checks import meant
from jvlab.trainer._compile_cache import use_compile_cache
from jvlab.trainer._groups import Evaluation, GroupMaker, SampleGroup
from jvlab.trainer._grpo_config import GrpoConfig, GrpoOptions, signature_with_options
from jvlab.trainer._loop import Alone, Loop
from jvlab.trainer._losses import Algorithm
from jvlab.trainer._processes import Crew, Follower, NoProducer, facts_of, whole
from jvlab.trainer._producer import Producer
from jvlab.trainer._run import Run
from jvlab.trainer._run_checkpoint import Checkpoints, Position
from jvlab.trainer._schedule import Flow, Ticket
from jvlab.trainer._step import TrainState, TrainStep
from jvlab.trainer._task_library import named
from jvlab.trainer._tasks import Task
from jvlab.wire._pool_summary import waiting_for

if TYPE_CHECKING:
    from jvlab.lab._pool import Pool
    from jvlab.sync._link import Link
    from jvlab.trainer._policy import Policy


LATE_SECONDS = 5.0  # after a step, until its bar says what is under way


@brief
def grpo(
    policy: Policy | tuple[Any, Callable[..., Any]],
    pool: Pool,
    link: Link,
    task: Task | str,
    steps: int = 50,
    max_staleness: int = 0,
    **options: Unpack[GrpoOptions],
) -> Run:
    """Train `policy` on `task` with rollouts of `pool`, syncing weights over `link` after every step; returns a `Run`.

    policy            a `jv.Policy`, whose `params` are replaced after each step, or `(params, logprobs_fn)` of any
                      other JAX model: `logprobs_fn(params, tokens, mask)` as `TrainStep` describes it
    task              a `jv.Task`, or the name of a built-in one: "digits", "add", ... (`jv.tasks.names`)
    max_staleness     K: with 0, generation, training and sync alternate (strictly on-policy); above 0 rollouts and
                      training overlap, and samples more than K versions old are not trained on
    algorithm         a preset's name or a `jv.Algorithm`: grpo, dr_grpo, dapo, rloo, reinforce++, ppo_clip
    group_size        samples per prompt; a step takes `prompts_per_step` groups
    max_tokens        of one completion; default: the task's own. `temperature` and `sampling`, which holds other
                      sampling parameters of vLLM, are for rollouts; `max_turns` for tasks with an environment
    learning_rate     its highest value, or a function of the number of updates. `schedule` is "constant", or falls to 0
                      at the last step: "linear", "cosine". The first `warmup` updates rise to it. AdamW uses it; an
                      optax `optimizer` has its own. Gradients are clipped to `max_grad_norm`, unless it is None
    reference         for a KL term: a pool or a tree of parameters; None: the policy as it is now
    on_stale          "drop" or "regenerate" groups that are too stale
    replay            for a policy with experts, whose router may choose differently from the engine's by rounding:
                      "ids" trains with the experts that the engine chose for each token, weighed by the policy's own
                      router; "full" with the engine's weights too, as constants: the router then gets no gradient.
                      Needs lab.launch(..., engine={"enable_return_routed_experts": True}); "full" a pool on a CPU.
                      Where a pool's prefix cache knew a prompt the policy's router chooses; a reference always does
    token_budget      tokens in one forward and backward pass: samples are packed into rows, one shape for the whole
                      run. Default for a `jv.Policy`: what the available memory allows. A step has as many passes as its
                      samples need; their gradients are accumulated into one update
    micro_batch       samples in one pass instead, each padded to the longest's bucket; 16 by default where log-
                      probabilities come from a function that takes no `segments`
    folder            for the record and checkpoints; default: runs/<task>-<time>. `resume=True` continues the run in
                      it from its last checkpoint, or from its start; `resume="auto"` does so if the folder holds a run.
                      The record keeps the content of every `keep_samples`-th sample; 0: of none
    sinks             functions that are called with each event of the record
    report_to         "wandb", "tensorboard", "mlflow", "trackio", a function(metrics, step), or a list of them: each
                      step's numbers by TRL's names. A resumed run goes on in the same place; one that fails is left out
    checkpoint_every  number of steps; 0: none. The newest `keep_checkpoints` are kept, None: all
    evaluate          a task whose first `evaluate_prompts` prompts, fewer if it has fewer, are answered greedily, once
                      each, before the first step, then `every` so many steps, and at the end; recorded and plotted. A
                      `jv.Policy` is saved to the folder as `best`, by that reward, and as `last`
    gap_alarm         a `logprob_gap` above this is recorded as a fault; default 1e-3 for a float32 engine, 0.3 for
                      16 bits
    sync              options of `link.sync`: mode, verify, pause, kv, nonfinite, timeout
    sleep             True: the pool sleeps while the trainer trains, which may use its memory, and wakes for the sync.
                      Default: if it was launched with `colocate=True`, and max_staleness is 0
    background        True returns at once; default: True in a notebook, False in a script, where Ctrl-C ends the run
                      after the current step
    progress          True or None: a bar in a terminal or notebook, a line for each step in a log; False: nothing; or
                      a function called with each `StepEvent`

    With the same seed, K = 0 and a CPU, two runs give the same tokens and losses. A GPU needs a pool launched with
    `deterministic=True`, whose kernels are batch-invariant; the trainer then sums in a fixed order too.

    >>> task = jv.tasks.digits()
    >>> run = jv.grpo(policy, pool, link, task, steps=2, group_size=4, prompts_per_step=2, checkpoint_every=0)
    >>> run.wait().status.step, run.record.summary()["syncs_verified"]      # one sync before the first step
    (2, 3)
    """
    use_compile_cache()
    config = GrpoConfig.of(steps, max_staleness, options)
    task = _checked_task(task)
    _check_parts(pool, link, config)
    algorithm = config.algorithm_for(task)
    sampling = config.sampling_for(task)
    params, logprobs_fn, keep_params = _model_and_logprobs(policy, config.temperature)
    config.check_replay_of(policy, logprobs_fn, pool, task)
    config.check_engine(pool, sampling)
    link.lend_scores(policy)  # to check what tensors mean, if the next sync needs it
    several = Crew.of(link, params)
    crew = several or Alone()
    with several.sharing() if several else contextlib.nullcontext():
        together = crew.together
        # of a micro-batch; None: samples are padded
        budget = config.token_budget
        if budget is None and config.micro_batch is None:
            free = getattr(policy, "token_budget", lambda: None)
            budget = together(free)
        if several:
            several.hello(facts_of(config, algorithm, task.name, params, budget))
        train = TrainStep(
            logprobs_fn,
            algorithm,
            learning_rate=config.rate,
            optimizer=config.optimizer,
            max_grad_norm=config.max_grad_norm,
            deterministic=pool.facts().batch_invariant,
            token_budget=budget,
            short_rows=not getattr(policy, "fused_attention", False),
        )
        own_reference = algorithm.needs_reference and config.reference is None
        reference = (
            together(lambda: _copied(params))
            if own_reference
            else _checked_reference(config.reference, params)
        )
        state = together(lambda: train.init(params))
        parts = {
            "config": config,
            "algorithm": algorithm,
            "reference": reference,
            "train": train,
            "link": link,
            "keep": keep_params,
        }
        if several and not several.leads:
            return _follow(several, state, parts)
        return _lead(crew, policy, pool, task, sampling, state, parts)


def _follow(crew: Crew, state: TrainState, parts: dict[str, Any]) -> Run:
    """The run in every process but the first."""
    config: GrpoConfig = parts["config"]
    begin = crew.next()
    folder = Path(begin["folder"])
    checkpoints = Checkpoints(folder, config.keep_checkpoints)
    if config.checkpoint_every and not checkpoints.folder.is_dir():
        raise ConfigError(
            f"{checkpoints.folder}, where process 0 writes checkpoints, is not there for this process",
            remedy="a folder that all processes see, or checkpoint_every=0",
            folder=str(folder),
        )
    if begin["checkpoint"]:
        latest = checkpoints.folder / begin["checkpoint"]
        state = crew.together(lambda: checkpoints.load(latest, state))
    parts["keep"](state.params)
    # it has what `Run` reads of a loop
    follower: Any = Follower(
        crew=crew,
        checkpoints=checkpoints,
        state=state,
        step=int(begin["step"]),
        version=int(begin["version"]),
        **parts,
    )
    start: Any = NoProducer
    run = Run(follower, start, folder, None, lambda: None)
    return _started(run, config)


def _lead(
    crew: Crew | Alone,
    policy: Any,
    pool: Pool,
    task: Task,
    sampling: dict[str, Any],
    state: TrainState,
    parts: dict[str, Any],
) -> Run:
    """The run in the process that decides, records and evaluates."""
    config: GrpoConfig = parts["config"]
    algorithm: Algorithm = parts["algorithm"]
    link: Link = parts["link"]
    folder, resume = _folder(config.folder, task.name, config.resume)
    gap_alarm = config.alarm_for(pool)
    checkpoints = Checkpoints(folder, config.keep_checkpoints)
    position = None
    latest = checkpoints.latest() if resume else None
    if latest is not None:
        position = _resumed(checkpoints, latest, task, config.seed)
    # where a run begins, or goes on
    at = position or Position(step=0, version=0, seed=config.seed, groups=task.position)
    version = max(at.version, link.version + 1)
    if config.checkpoint_every:
        checkpoints.prepare(state)
    begin = {"folder": str(folder), "step": at.step, "version": version}
    crew.order("begin", checkpoint=latest.name if latest else "", **begin)
    if latest is not None:
        state = crew.together(lambda: checkpoints.load(latest, state))
    parts["keep"](state.params)
    about = {**config.to_record(task, pool, algorithm, sampling), "cores": _cores()}
    if len(crew.processes) > 1:
        about["processes"] = len(crew.processes)
    evaluation = _evaluation(config, pool, sampling, folder, resume)
    try:
        writer = RecordWriter(
            folder,
            run=folder.name,
            config=about,
            gap_alarm=gap_alarm,
            keep_samples=config.keep_samples,
            sinks=[*config.sinks, *_reports(config, folder, about, at, resume)],
            resumed=at.step if resume else -1,
        )
    except BaseException:
        if evaluation is not None:
            evaluation.rewarder.close()
        raise
    loop = Loop(
        crew=crew,
        sampling=sampling,
        gap_alarm=gap_alarm,
        state=state,
        task=task,
        writer=writer,
        checkpoints=checkpoints,
        evaluation=evaluation,
        export=_exporter(policy, folder, crew),
        step=at.step,
        version=version,
        **parts,
    )
    reporter = _StepReporter(loop, pool, folder.name)
    loop.on_step.append(reporter.step)

    def start() -> Producer:
        pending = tuple(Ticket(index, attempt) for index, attempt in at.pending)
        flow: Flow[SampleGroup] = Flow(config.flow, loop.version, at.groups, pending)
        version = lambda: flow.pool_version
        maker = GroupMaker(pool, task, writer, config, sampling, version)
        return Producer(flow, maker, loop.rejection_reason)

    run = Run(loop, start, folder, pool.client, reporter.close)
    return _started(run, config)


def _started(run: Run, config: GrpoConfig) -> Run:
    in_background = in_kernel() if config.background is None else config.background
    # no deadline: as long as the run takes; Ctrl-C ends it
    return run if in_background else run.wait()


grpo.__signature__ = signature_with_options(grpo)  # type: ignore[attr-defined]  # for help() and completion


def _checked_task(task: Any) -> Task:
    """The task itself, or the built-in one of that name."""
    if isinstance(task, str):
        return named(task)
    if not isinstance(task, Task):
        raise ConfigError(
            f"task is {type(task).__name__}",
            remedy="a jv.Task(prompts, reward), or the name of a built-in one",
        )
    if task.environment is None:
        # raises if the reward function cannot be run as the task says
        task.rewarder().close()
    return task


def _check_parts(pool: Any, link: Any, config: GrpoConfig) -> None:
    """Raise if the pool or the link is something else, or in the other's place, or does not know a sync option."""
    if not hasattr(pool, "status"):
        raise ConfigError(
            f"pool is {type(pool).__name__}",
            remedy="pool = lab.launch(model); jv.grpo(policy, pool, link, task)",
        )
    if not hasattr(link, "sync"):
        raise ConfigError(
            f"link is {type(link).__name__}",
            remedy="link = lab.connect(policy, pool); jv.grpo(policy, pool, link, task)",
        )
    if link.part != "model":
        raise ConfigError(
            f"this link writes the {link.part} model, and the policy is not that",
            remedy="link = lab.connect(policy, pool); jv.grpo(policy, pool, link, task)",
        )
    try:
        inspect.signature(link.sync).bind_partial(**config.sync_options)
    except TypeError as error:
        raise ConfigError(
            f"link.sync does not take sync={config.sync!r}: {error}",
            remedy="options: mode, verify, require, pause, kv, nonfinite, timeout",
        ) from error


class _StepReporter:
    """A run's bar: the last step, and what is under way since. Tells the user's function of each step too."""

    def __init__(self, loop: Loop, pool: Any, name: str) -> None:
        progress = loop.config.progress
        self._user = progress if callable(progress) else None
        self._loop = loop
        self._pool = pool
        self._last = ""  # what it said of the last step
        self._since = time.perf_counter()  # when that ended
        self._bar = Progress(
            loop.config.steps,
            name,
            unit="step",
            show=False if callable(progress) else progress,
            each=True,
            ask=self._look,
        )
        self._bar.to(loop.step)
        self._bar.start()

    def close(self) -> None:
        """The run has ended."""
        self._bar.close()

    def step(self, event: StepEvent) -> None:
        """A step has ended."""
        now = time.perf_counter()
        rate = event.tokens / max(now - self._since, 1e-9)
        self._since = now
        self._last = f"reward {event.reward_mean:.3f}, {rate:,.0f} tokens/s"
        self._bar.advance(1, self._last)
        if self._user is not None:
            self._user(event)

    def _look(self) -> str:
        """Which function of the user's is waited for, and what holds up the pool; the bar asks twice a second."""
        said = [self._last]
        producer = self._loop.producer
        if waiting := self._loop.waiting():
            said = [waiting]
        elif producer and time.perf_counter() - self._since >= LATE_SECONDS:
            flying = how_many(producer.snapshot()["flying"], "group")
            said.append(f"{flying} being generated or rewarded")
        self._bar.remark(", ".join(filter(None, said)))
        snapshot = self._pool.snapshot
        held = _held_by_the_run(snapshot)
        return "" if held else waiting_for(snapshot, own_name())


def _held_by_the_run(snapshot: Any) -> bool:
    """Whether the pool is held up by what each step does: a sync, or a sleep while the trainer trains."""
    syncs = (
        snapshot.sync not in ("", "idle")
        and snapshot.trainer == own_name()
        and not snapshot.stepping
    )
    return syncs or snapshot.asleep_by == own_name()


def _model_and_logprobs(
    policy: Any, temperature: float
) -> tuple[Any, Callable[..., Any], Callable[[Any], None]]:
    """Parameters, the log-probability function at this temperature, and a callback for each step's new parameters."""
    if isinstance(policy, tuple):
        if len(policy) != 2 or not callable(policy[1]):
            raise ConfigError(
                "a policy as a tuple is (params, logprobs_fn)",
                remedy="see help(jv.grpo)",
            )
        params, function = policy
        if "temperature" in inspect.signature(function).parameters:
            function = functools.partial(function, temperature=temperature)
        elif temperature != 1.0:
            raise ConfigError(
                f"temperature={temperature}, but logprobs_fn takes no temperature",
                remedy="add a temperature parameter to it, or sample at 1.0",
            )
        # training donates its buffers: the caller's must survive
        return _copied(params), function, lambda _: None
    if not hasattr(policy, "logprobs_fn") or not hasattr(policy, "params"):
        raise ConfigError(
            f"policy is {type(policy).__name__}",
            remedy="a jv.Policy, or (params, logprobs_fn)",
        )
    function = functools.partial(policy.logprobs_fn, temperature=temperature)
    return policy.params, function, functools.partial(setattr, policy, "params")


def _evaluation(
    config: GrpoConfig,
    pool: Any,
    sampling: Mapping[str, Any],
    folder: Path,
    resume: bool,
) -> Evaluation | None:
    if config.evaluate is None:
        return None
    best = -math.inf
    if resume and (folder / "best").exists():
        for event in Record.open(folder).events("evaluation"):
            if isinstance(event, EvaluationEvent) and event.best:
                best = max(best, event.reward_mean)
    task = config.evaluate
    if isinstance(task, str):
        task = _checked_task(task)
    return Evaluation(task, pool, config.evaluate_prompts, sampling, best)


def _reports(
    config: GrpoConfig,
    folder: Path,
    about: Mapping[str, Any],
    at: Position,
    resume: bool,
) -> list[Report]:
    to = check_reports(config.report_to)
    if not to:
        return []
    earlier = Record.open(folder).events("step") if resume else []
    done = (e for e in earlier if isinstance(e, StepEvent) and e.step < at.step)
    seen = sum(e.extra.get("sequence_tokens", 0) for e in done)
    with writing(folder, "the run's reports"):
        folder.mkdir(parents=True, exist_ok=True)
    return reports(to, folder, about, at.step if resume else -1, seen)


def _exporter(
    policy: Any, folder: Path, crew: Crew | Alone
) -> Callable[[str], None] | None:
    """Saves the policy under a name in the run's folder, in place of an earlier one of that name.

    Where several processes hold it, each of them hands over its shards at the same time.
    """
    if not hasattr(policy, "save_pretrained"):
        return None

    def export(name: str) -> None:
        target = folder / name
        fresh = folder / f"{name}.new"
        old = folder / f"{name}.old"
        # a user's own policy may take the folder alone
        gathered = []
        if len(crew.processes) > 1:
            gathered.append(crew.together(lambda: whole(policy.params)))
        shutil.rmtree(fresh, ignore_errors=True)
        try:
            with writing(target, "the policy"):
                policy.save_pretrained(fresh, *gathered)
                if target.exists():
                    target.rename(old)
                fresh.rename(target)
        except BaseException:
            shutil.rmtree(fresh, ignore_errors=True)
            raise
        shutil.rmtree(old, ignore_errors=True)

    return export


def _cores() -> int:
    """Cores that the trainer computes on, and shares with engines on a CPU; 1 if it does so on an accelerator."""
    import jax

    return len(usable_cores()) if jax.default_backend() == "cpu" else 1


def _checked_reference(reference: Any, params: Any) -> Any:
    """A pool, None, or a tree of parameters as arrays of JAX; raises if it is not like the policy's."""
    import jax
    import jax.numpy as jnp

    if reference is None or hasattr(reference, "score"):
        return reference
    shapes = lambda tree: (
        jax.tree.structure(tree),
        [np.shape(leaf) for leaf in jax.tree.leaves(tree)],
    )
    if shapes(reference) != shapes(params):
        raise ConfigError(
            f"reference is {type(reference).__name__}, not a tree with the policy's shapes",
            remedy="a pool, parameters such as policy.params, or None: the policy as it is now",
            option="reference",
        )
    return jax.tree.map(
        lambda leaf: leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf),
        reference,
    )


def _copied(params: Any) -> Any:
    import jax
    import jax.numpy as jnp

    return jax.tree.map(jnp.copy, params)


def _folder(
    given: str | os.PathLike[str] | None, task: str, resume: bool | str
) -> tuple[Path, bool]:
    """The run's folder, and whether the run in it is continued."""
    if given is None:
        if resume:
            raise ConfigError(
                f"resume={resume!r} without a folder",
                remedy="folder=run.folder of the run to resume",
            )
        name = check_name("task", task.replace(" ", "-"))  # it becomes part of a path
        stem = Path("runs").absolute() / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
        folder = stem
        number = 1
        while folder.exists():
            number += 1
            folder = stem.with_name(f"{stem.name}-{number}")
        return folder, False
    if "\0" in os.fspath(given):
        raise ConfigError(
            f"no folder can be called {os.fspath(given)!r}",
            remedy="choose another name",
        )
    folder = Path(given).absolute()
    holds_run = (folder / EVENTS).exists() or bool(Checkpoints(folder).paths())
    if holds_run and not resume:
        raise ConfigError(
            f"{folder} already holds a run",
            remedy="resume=True to continue it, or another folder",
            folder=str(folder),
        )
    if resume is True and not holds_run:
        raise ConfigError(
            f"{folder} holds no run to resume",
            remedy=_other_runs(folder),
            folder=str(folder),
        )
    return folder, holds_run


def _other_runs(folder: Path) -> str:
    """The runs beside a folder that holds none, the one with the nearest name first."""
    names = sorted(path.parent.name for path in folder.parent.glob(f"*/{EVENTS}"))
    hint = f"{meant(folder.name, names)} " if names else ""
    return f'{hint}resume="auto" starts a run if there is none'


def _resumed(checkpoints: Checkpoints, latest: Path, task: Task, seed: int) -> Position:
    """Position of the last checkpoint, which the task takes too."""
    position = checkpoints.position(latest)
    if position.seed != seed:
        raise ConfigError(
            f"this run was started with seed {position.seed}, not {seed}",
            remedy=f"resume with seed={position.seed}",
        )
    task.load_state(position.task)
    return position
