"""`GrpoConfig`: the options of `jv.grpo`, their checks, and values derived from them for a task."""

from __future__ import annotations

import difflib
import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jvlab._errors import ConfigError
from jvlab.record._events import StepEvent
from jvlab.samples._expert_routes import check_replay
from jvlab.trainer._losses import Algorithm
from jvlab.trainer._schedule import Schedule

if TYPE_CHECKING:
    from jvlab.trainer._tasks import Task

GAP_ALARM_FLOAT32 = 1e-3  # default gap_alarm for a float32 engine
GAP_ALARM_HALF = 0.3  # for 16-bit floats, where single tokens differ by as much in a healthy run
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
RESERVED = ("seed", "max_tokens", "temperature", "n", "logprobs")  # sampling parameters that jv.grpo sets itself


@dataclass(frozen=True)
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
    resume: bool = False
    gap_alarm: float | None = None
    keep_samples: int = 1
    sinks: tuple[Callable[[Any], None], ...] = ()
    sync: Mapping[str, Any] | None = None
    sleep: bool | None = None
    background: bool | None = None
    progress: bool | Callable[[StepEvent], None] | None = None

    @classmethod
    def of(cls, steps: int, max_staleness: int, options: Mapping[str, Any]) -> GrpoConfig:
        """From the arguments of `jv.grpo`; an option that does not exist is an error that names one that does."""
        known = [field.name for field in fields(cls)]
        if unknown := [name for name in options if name not in known]:
            meant = MEANT.get(unknown[0]) or next(iter(difflib.get_close_matches(unknown[0], known, 1)), "")
            raise ConfigError(
                f"jv.grpo has no option {unknown[0]!r}",
                remedy=f"did you mean {meant!r}?" if meant else f"options: {', '.join(known)}",
                option=unknown[0],
            )
        return cls(steps, max_staleness, **options)

    @property
    def flow(self) -> Schedule:
        """How far generation may run ahead of training."""
        return Schedule(self.prompts_per_step, self.max_staleness, self.on_stale)

    @property
    def rate(self) -> float | Callable[[Any], Any]:
        """The learning rate, or a function of the number of updates."""
        from jvlab.trainer._step import schedule

        if callable(self.learning_rate) or (self.schedule == "constant" and not self.warmup):
            return self.learning_rate
        return schedule(self.learning_rate, self.schedule, self.warmup, self.steps)

    def sleeps(self, pool: Any) -> bool:
        """Whether the pool is to sleep while the trainer trains."""
        return bool(getattr(pool, "colocated", False) and not self.max_staleness) if self.sleep is None else self.sleep

    @property
    def sync_options(self) -> dict[str, Any]:
        return {"verify": "full", "pause": "keep", **(self.sync or {})}

    def algorithm_for(self, task: Task) -> Algorithm:
        """The algorithm, after checking the options against it."""
        longest = self.max_tokens or task.sampling.get("max_tokens")
        if isinstance(self.algorithm, Algorithm):
            chosen = self.algorithm
        elif self.algorithm == "dr_grpo" and longest:
            chosen = Algorithm.named(self.algorithm, constant_length=longest)
        else:
            chosen = Algorithm.named(self.algorithm)
        self._check(chosen)
        return chosen

    def _check(self, algorithm: Algorithm) -> None:
        for name in ("steps", "max_staleness", "group_size", "prompts_per_step", "checkpoint_every"):
            if isinstance(given := getattr(self, name), bool) or not isinstance(given, (int, np.integer)):
                raise ConfigError(f"{name}={given!r}", remedy=f"{name} is a whole number")
        if self.steps < 1 or self.group_size < 1 or self.checkpoint_every < 0 or not self.temperature > 0:
            names = ("steps", "group_size", "checkpoint_every", "temperature")
            raise ConfigError(
                ", ".join(f"{name}={getattr(self, name)}" for name in names),
                remedy="steps and group_size at least 1, checkpoint_every at least 0, temperature above 0",
            )
        if self.micro_batch is not None and self.token_budget is not None:
            raise ConfigError(
                f"micro_batch={self.micro_batch} and token_budget={self.token_budget}",
                remedy="give one: the samples of a micro-batch, padded, or its tokens, packed",
            )
        for name in ("micro_batch", "token_budget", "every", "evaluate_prompts"):
            if (given := getattr(self, name)) is not None and given < 1:
                raise ConfigError(f"{name}={given}", remedy="pass a number of at least 1")
        _ = self.flow  # raises if the bound is wrong
        check_replay(self.replay)
        self._check_rate()
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

    def check_replay_of(self, policy: Any, logprobs_fn: Callable[..., Any], pool: Any, task: Task) -> None:
        """Raise ConfigError if the pool cannot deliver, or the policy not use, the experts that are to be replayed."""
        if self.replay == "none":
            return
        asked = f"replay={self.replay!r}"
        if getattr(getattr(policy, "config", None), "experts", None) == 0:
            raise ConfigError(f"{asked}, and the policy has no experts: {policy}", remedy='replay="none"')
        if "routes" not in inspect.signature(logprobs_fn).parameters:
            raise ConfigError(f"{asked}, and logprobs_fn takes no routes", remedy='a jv.Policy, or replay="none"')
        if task.environment is not None:
            raise ConfigError(f"{asked} of a task with turns is not there", remedy='replay="none"')
        delivers = pool._facts().routed_experts if hasattr(pool, "_facts") else ""
        if not delivers:
            raise ConfigError(
                f"{asked}, and the pool does not return the experts that it chose",
                remedy='lab.launch(..., engine={"enable_return_routed_experts": True})',
            )
        if delivers == "ids" and self.replay == "full":
            raise ConfigError(
                f"{asked}, and vLLM returns no weights of experts on a GPU", remedy='replay="ids", or a pool on a CPU'
            )
        if delivers == "ids" and self.max_staleness:
            raise ConfigError(
                f"{asked} with max_staleness={self.max_staleness}: vLLM loses the experts of a request that is in "
                "flight when weights change",
                remedy="max_staleness=0, or a pool on a CPU",
            )

    def _check_rate(self) -> None:
        if self.warmup < 0:
            raise ConfigError(f"warmup={self.warmup}", remedy="a number of updates, 0 for none")
        if self.schedule == "constant" and not self.warmup:
            return
        if self.optimizer is not None or callable(self.learning_rate):
            owner = "the optimizer" if self.optimizer is not None else "learning_rate, a function,"
            raise ConfigError(
                f"schedule={self.schedule!r}, warmup={self.warmup}, but {owner} has its own learning rate",
                remedy="learning_rate=1e-5, schedule=..., without optimizer=; or put the schedule there",
            )
        _ = self.rate  # raises if its name or its length is wrong

    def sampling_for(self, task: Task) -> dict[str, Any]:
        """vLLM's sampling parameters for rollouts of this task."""
        more = self.sampling or {}
        if reserved := sorted(set(RESERVED) & set(more)):
            raise ConfigError(
                f"sampling holds {', '.join(reserved)}", remedy="these are arguments of jv.grpo itself, or fixed"
            )
        options = {**task.sampling, **more, "temperature": self.temperature}
        if self.max_tokens is not None:
            options["max_tokens"] = self.max_tokens
        if "max_tokens" not in options:
            raise ConfigError(f"task {task.name!r} does not set max_tokens", remedy="jv.grpo(..., max_tokens=64)")
        return options

    def alarm_for(self, pool: Any) -> float:
        """The logprob_gap that is recorded as a fault."""
        if self.gap_alarm is not None:
            return self.gap_alarm
        return GAP_ALARM_FLOAT32 if (pool.status().get("dtype") or "float32") == "float32" else GAP_ALARM_HALF

    def to_record(self, task: Task, pool: Any, algorithm: Algorithm, sampling: Mapping[str, Any]) -> dict[str, Any]:
        """The run's configuration as its record stores it."""
        return {
            "task": task.name,
            "steps": self.steps,
            "max_staleness": self.max_staleness,
            "algorithm": asdict(algorithm),
            "group_size": self.group_size,
            "prompts_per_step": self.prompts_per_step,
            "seed": self.seed,
            "sampling": sampling,
            "learning_rate": self.learning_rate if isinstance(self.learning_rate, float) else str(self.learning_rate),
            "schedule": self.schedule,
            "warmup": self.warmup,
            "on_stale": self.on_stale,
            "replay": self.replay,
            "micro_batch": self.micro_batch,
            "token_budget": self.token_budget,
            "model": Path(str(getattr(pool, "model", ""))).name,
        }


def signature_with_options(function: Callable[..., Any]) -> inspect.Signature:
    """A function's signature with the fields of `GrpoConfig` in place of **options."""
    signature = inspect.signature(function)
    own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    more = [
        inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=field.type)
        for field in fields(GrpoConfig)
        if field.name not in signature.parameters
    ]
    return signature.replace(parameters=[*own, *more])
