"""`GrpoConfig`: the options of `jv.grpo`, their checks, and values derived from them for a task."""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from jvlab._errors import ConfigError
from jvlab.record._events import StepEvent
from jvlab.record._export import check_reports
from jvlab.record._sample import check_replay
from jvlab.trainer._batching import Buckets
from jvlab.trainer._checks import (
    check_choice,
    check_number,
    check_sampling,
    check_whole,
    meant,
)
from jvlab.trainer._losses import Algorithm
from jvlab.trainer._schedule import Schedule

if TYPE_CHECKING:
    from jvlab.trainer._tasks import Task

GAP_ALARM_FLOAT32 = 1e-3  # default gap_alarm for a float32 engine
# for 16-bit floats, where single tokens differ by as much in a healthy run
GAP_ALARM_HALF = 0.3
MICRO_BATCH = 16  # samples, where they are padded
MEANT = {  # names that other trainers give to options
    "lr": "learning_rate",
    "num_generations": "group_size",
    "n": "group_size",
    "batch_size": "prompts_per_step",
    "max_steps": "steps",
    "kl_coef": "algorithm",
    "beta": "algorithm",
    "max_completion_length": "max_tokens",
    "output_dir": "folder",
}
WHOLE = {  # options that are whole numbers, and the least of each
    "steps": 1,
    "max_staleness": 0,
    "group_size": 1,
    "prompts_per_step": 1,
    "warmup": 0,
    "seed": 0,
    "max_turns": 1,
    "checkpoint_every": 0,
    "every": 1,
    "evaluate_prompts": 1,
    "keep_samples": 0,
}
# options that a run's record holds as they are
RECORDED = (
    "steps",
    "max_staleness",
    "group_size",
    "prompts_per_step",
    "seed",
    "schedule",
    "warmup",
    "on_stale",
    "replay",
    "micro_batch",
    "token_budget",
)
# sampling parameters that jv.grpo sets itself
RESERVED = ("seed", "max_tokens", "temperature", "n", "logprobs")


class GrpoOptions(TypedDict, total=False):
    """The keyword arguments of `jv.grpo`, for type checkers and editors; `GrpoConfig` has their defaults."""

    algorithm: str | Algorithm
    group_size: int
    prompts_per_step: int
    learning_rate: float | Callable[[Any], Any]
    schedule: str
    warmup: int
    optimizer: Any
    max_grad_norm: float | None
    seed: int
    max_tokens: int | None
    temperature: float
    sampling: Mapping[str, Any] | None
    micro_batch: int | None
    token_budget: int | None
    reference: Any
    on_stale: str
    replay: str
    max_turns: int
    folder: str | os.PathLike[str] | None
    checkpoint_every: int
    keep_checkpoints: int | None
    evaluate: Task | str | None
    every: int
    evaluate_prompts: int
    resume: bool | str
    gap_alarm: float | None
    keep_samples: int
    sinks: Sequence[Callable[[Any], None]]
    report_to: Any
    sync: Mapping[str, Any] | None
    sleep: bool | None
    background: bool | None
    progress: bool | Callable[[StepEvent], None] | None


@dataclass(frozen=True, kw_only=True)
class GrpoConfig:
    """The options of one run; `jv.grpo` documents them."""

    steps: int = 50
    max_staleness: int = 0
    algorithm: str | Algorithm = "grpo"
    group_size: int = 8
    prompts_per_step: int = 8
    learning_rate: float | Callable[[Any], Any] = 1e-4
    schedule: str = "constant"
    warmup: int = 0
    optimizer: Any = None
    max_grad_norm: float | None = 1.0
    seed: int = 0
    max_tokens: int | None = None
    temperature: float = 1.0
    sampling: Mapping[str, Any] | None = None
    micro_batch: int | None = None
    token_budget: int | None = None
    reference: Any = None
    on_stale: str = "drop"
    replay: str = "none"
    max_turns: int = 8
    folder: str | os.PathLike[str] | None = None
    checkpoint_every: int = 10
    keep_checkpoints: int | None = 3
    evaluate: Task | str | None = None
    every: int = 10
    evaluate_prompts: int = 32
    resume: bool | str = False
    gap_alarm: float | None = None
    keep_samples: int = 1
    sinks: Sequence[Callable[[Any], None]] = ()
    report_to: Any = None
    sync: Mapping[str, Any] | None = None
    sleep: bool | None = None
    background: bool | None = None
    progress: bool | Callable[[StepEvent], None] | None = None

    @classmethod
    def of(cls, steps: int, max_staleness: int, options: GrpoOptions) -> GrpoConfig:
        """From the arguments of `jv.grpo`; an option that does not exist is an error that names one that does."""
        known = [field.name for field in fields(cls)]
        for name in options:
            if name not in known:
                raise ConfigError(
                    f"jv.grpo has no option {name!r}",
                    remedy=meant(MEANT.get(name, name), known),
                    option=name,
                )
        return cls(steps=steps, max_staleness=max_staleness, **options)

    def __post_init__(self) -> None:
        """Raise ConfigError for options of another kind than they are."""
        check_reports(self.report_to)
        check_sampling(self.sampling)
        if self.sync is not None and not isinstance(self.sync, Mapping):
            raise ConfigError(
                f"sync is {self.sync!r}",
                remedy='options of link.sync: sync={"mode": "staged"}',
            )
        if self.folder == "" or not isinstance(
            self.folder, (str, os.PathLike, type(None))
        ):
            raise ConfigError(
                f"folder is {self.folder!r}",
                remedy='the path of a folder, for instance "runs/first"',
            )
        if not isinstance(self.sinks, (tuple, list)) or not all(
            map(callable, self.sinks)
        ):
            raise ConfigError(
                f"sinks is {self.sinks!r}",
                remedy="a tuple of functions of an event: sinks=(function,)",
            )

    @property
    def flow(self) -> Schedule:
        """How far generation may run ahead of training."""
        return Schedule(self.prompts_per_step, self.max_staleness, self.on_stale)

    @property
    def rate(self) -> float | Callable[[Any], Any]:
        """The learning rate, or a function of the number of updates."""
        from jvlab.trainer._step import schedule

        if callable(self.learning_rate) or (
            self.schedule == "constant" and not self.warmup
        ):
            return self.learning_rate
        return schedule(self.learning_rate, self.schedule, self.warmup, self.steps)

    def sleeps(self, pool: Any) -> bool:
        """Whether the pool is to sleep while the trainer trains."""
        if self.sleep is not None:
            return self.sleep
        return pool.colocated and not self.max_staleness

    @property
    def buckets(self) -> Buckets:
        """The shapes of micro-batches, where samples are padded."""
        return Buckets(rows=self.micro_batch or MICRO_BATCH)

    @property
    def sync_options(self) -> dict[str, Any]:
        return {"verify": "full", "pause": "keep", **(self.sync or {})}

    def algorithm_for(self, task: Task) -> Algorithm:
        """The algorithm, after checking the options against it."""
        chosen = self.algorithm
        if not isinstance(chosen, Algorithm):
            longest = self.max_tokens or task.sampling.get("max_tokens")
            known = longest and chosen == "dr_grpo"
            options = {"constant_length": longest} if known else {}
            chosen = Algorithm.named(chosen, **options)
        self._check(chosen)
        return chosen

    def _check(self, algorithm: Algorithm) -> None:
        for name, least in WHOLE.items():
            check_whole(name, getattr(self, name), least)
        for name in ("max_tokens", "micro_batch", "token_budget", "keep_checkpoints"):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name))
        check_number("temperature", self.temperature, above=0.0)
        if self.max_grad_norm is not None:
            check_number("max_grad_norm", self.max_grad_norm, above=0.0)
        if self.gap_alarm is not None and self.gap_alarm != math.inf:
            check_number("gap_alarm", self.gap_alarm, above=0.0)
        check_choice("resume", self.resume, (True, False, "auto"))
        for name in ("sleep", "background", "progress"):
            if name != "progress" or not callable(self.progress):
                check_choice(name, getattr(self, name), (True, False, None))
        if self.group_size == 1 and algorithm.advantages != "reinforce++":
            raise ConfigError(
                "group_size=1: a sample is compared with others of its prompt, and alone its advantage is always 0",
                remedy='group_size=8, or algorithm="reinforce++", which compares with the whole batch',
                option="group_size",
            )
        if self.micro_batch is not None and self.token_budget is not None:
            raise ConfigError(
                f"micro_batch={self.micro_batch} and token_budget={self.token_budget}",
                remedy="give one: the samples of a micro-batch, padded, or its tokens, packed",
            )
        _ = self.flow  # raises if the bound is wrong
        check_replay(self.replay)
        self._check_rate()
        if self.optimizer is not None and not (
            hasattr(self.optimizer, "init") and hasattr(self.optimizer, "update")
        ):
            raise ConfigError(
                f"optimizer is {self.optimizer!r}",
                remedy="one of optax: optimizer=optax.adam(1e-4)",
            )
        if self.sleep and self.max_staleness:
            raise ConfigError(
                f"sleep=True with max_staleness={self.max_staleness}: the pool generates while the trainer trains",
                remedy="max_staleness=0, or leave sleep out",
            )
        if self.reference is not None and not algorithm.needs_reference:
            raise ConfigError(
                "a reference without a KL term would not be used",
                remedy='algorithm=jv.Algorithm.named("grpo", kl_coef=0.05)',
            )
        if hasattr(self.reference, "score") and self.temperature != 1.0:
            raise ConfigError(
                f"a reference pool scores at temperature 1, the policy samples at {self.temperature}",
                remedy="temperature=1.0, or give the reference as a tree of parameters",
            )

    def check_replay_of(
        self, policy: Any, logprobs_fn: Callable[..., Any], pool: Any, task: Task
    ) -> None:
        """Raise ConfigError if the pool cannot deliver, or the policy not use, the experts that are to be replayed."""
        if self.replay == "none":
            return
        asked = f"replay={self.replay!r}"
        if getattr(getattr(policy, "config", None), "experts", None) == 0:
            raise ConfigError(
                f"{asked}, but the policy has no experts: {policy}",
                remedy='replay="none"',
            )
        if "routes" not in inspect.signature(logprobs_fn).parameters:
            raise ConfigError(
                f"{asked}, but logprobs_fn takes no routes",
                remedy='a jv.Policy, or replay="none"',
            )
        if task.environment is not None:
            raise ConfigError(
                f"{asked} is not available for a task with turns",
                remedy='replay="none"',
            )
        delivers = pool.facts().routed_experts
        if not delivers:
            raise ConfigError(
                f"{asked}, but the pool does not return the experts that it chose",
                remedy='lab.launch(..., engine={"enable_return_routed_experts": True})',
            )
        if delivers == "ids" and self.replay == "full":
            raise ConfigError(
                f"{asked}, but vLLM returns no weights of experts on a GPU",
                remedy='replay="ids", or a pool on a CPU',
            )
        if delivers == "ids" and self.max_staleness:
            raise ConfigError(
                f"{asked} with max_staleness={self.max_staleness}: vLLM loses the experts of a request that is in "
                "flight when weights change",
                remedy="max_staleness=0, or a pool on a CPU",
            )

    def _check_rate(self) -> None:
        if callable(self.learning_rate):
            check_number("learning_rate(0)", _first_rate(self.learning_rate), least=0.0)
        else:
            check_number("learning_rate", self.learning_rate, least=0.0)
        if self.schedule == "constant" and not self.warmup:
            return
        if self.optimizer is not None or callable(self.learning_rate):
            raise ConfigError(
                f"schedule={self.schedule!r}, warmup={self.warmup}, but optimizer or learning_rate has its own",
                remedy="learning_rate=1e-5, schedule=..., without optimizer=; or put the schedule there",
            )
        _ = self.rate  # raises if its name or its length is wrong

    def sampling_for(self, task: Task) -> dict[str, Any]:
        """vLLM's sampling parameters for rollouts of this task."""
        more = self.sampling or {}
        if reserved := sorted(set(RESERVED) & set(more)):
            raise ConfigError(
                f"sampling holds {', '.join(reserved)}",
                remedy="these are arguments of jv.grpo itself, or fixed",
            )
        options = {**task.sampling, **more, "temperature": self.temperature}
        if self.max_tokens is not None:
            options["max_tokens"] = self.max_tokens
        if "max_tokens" not in options:
            raise ConfigError(
                f"task {task.name!r} does not set max_tokens",
                remedy="jv.grpo(..., max_tokens=64)",
            )
        return options

    def check_engine(self, pool: Any, sampling: Mapping[str, Any]) -> None:
        """Raise ConfigError for sampling parameters that this pool's engines cannot take."""
        facts = pool.facts()
        longest = sampling["max_tokens"]
        if facts.max_model_len and longest >= facts.max_model_len:
            raise ConfigError(
                f"max_tokens={longest}, but the engine's context holds {facts.max_model_len} tokens, prompt included",
                remedy="fewer tokens, or lab.launch(..., engine={'max_model_len': ...})",
                option="max_tokens",
            )
        known = facts.sampling_names
        for name in sampling:
            if known and name not in known:
                raise ConfigError(
                    f"sampling holds {name!r}, which vLLM does not know",
                    remedy=meant(name, sorted(known)),
                    option="sampling",
                )

    def alarm_for(self, pool: Any) -> float:
        """The logprob_gap that is recorded as a fault."""
        if self.gap_alarm is not None:
            return self.gap_alarm
        half = pool.status().get("dtype") not in (None, "", "float32")
        return GAP_ALARM_HALF if half else GAP_ALARM_FLOAT32

    def to_record(
        self, task: Task, pool: Any, algorithm: Algorithm, sampling: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The run's configuration as its record stores it."""
        return {
            "task": task.name,
            **{name: getattr(self, name) for name in RECORDED},
            "algorithm": asdict(algorithm),
            "sampling": sampling,
            "learning_rate": self.learning_rate
            if isinstance(self.learning_rate, float)
            else str(self.learning_rate),
            "model": Path(pool.model).name,
        }


def _first_rate(learning_rate: Callable[[Any], Any]) -> Any:
    """The learning rate of the first update."""
    try:
        found = learning_rate(0)
        return found if isinstance(found, str) else float(found)
    except Exception as error:
        raise ConfigError(
            f"learning_rate(0) raised {type(error).__name__}: {error}",
            remedy="a function of the number of updates",
        ) from error


def signature_with_options(function: Callable[..., Any]) -> inspect.Signature:
    """A function's signature with the fields of `GrpoConfig` in place of **options."""
    signature = inspect.signature(function)
    *own, _ = signature.parameters.values()
    named = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=field.type,
        )
        for field in fields(GrpoConfig)
        if field.name not in signature.parameters
    ]
    return signature.replace(parameters=[*own, *named])
