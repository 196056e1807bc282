"""Evaluation during training: the same held-out prompts, answered greedily, every few steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from jvlab._errors import ConfigError
from jvlab.record._events import EvaluationEvent, clock
from jvlab.trainer._tasks import Task

GREEDY = {"temperature": 0.0, "n": 1, "progress": False}


class Evaluation:
    """Answers the first `prompts` prompts of a task, whenever asked; the task's position does not move.

    `best` is the highest mean reward so far, of a run that is resumed too.
    """

    def __init__(
        self, task: Task, pool: Any, prompts: int, sampling: Mapping[str, Any], best: float = -math.inf
    ) -> None:
        if not isinstance(task, Task):
            raise ConfigError(f"evaluate is {type(task).__name__}", remedy="pass a jv.Task of held-out prompts")
        if task.environment is not None:
            raise ConfigError(
                f"task {task.name!r} has several turns, and an evaluation answers once",
                remedy="evaluate=jv.Task(prompts, reward) with a reward function",
            )
        if prompts < 1:
            raise ConfigError(f"evaluate_prompts={prompts}", remedy="at least 1")
        self._pool, self._rewarder = pool, task.rewarder()
        self._examples = [task.example(i) for i in range(prompts)]
        own = {k: v for k, v in {**sampling, **task.sampling}.items() if k not in ("temperature", "n", "seed")}
        self._sampling = {**own, **GREEDY}
        self.best = best

    def run(self, step: int, version: int) -> EvaluationEvent:
        """One evaluation of the weights that the pool holds."""
        start = clock()
        samples = list(self._pool.generate([e.prompt for e in self._examples], **self._sampling))
        result = self._rewarder.score(samples, self._examples)
        good = result.rewards[np.isfinite(result.rewards)]
        mean = float(good.mean()) if len(good) else math.nan
        best = mean > self.best  # not if it is NaN
        self.best = mean if best else self.best
        return EvaluationEvent(
            start=start,
            stop=clock(),
            actor=getattr(self._pool, "name", "pool"),
            step=step,
            version=version,
            reward_mean=mean,
            reward_std=float(good.std()) if len(good) else math.nan,
            samples=len(samples),
            failed=len(samples) - len(good),
            tokens=sum(len(s.token_ids) for s in samples),
            best=best,
        )

    def close(self) -> None:
        """Stop the reward function's threads and processes."""
        self._rewarder.close()
