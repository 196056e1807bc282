"""Evaluation during training: the same held-out prompts, answered greedily, every few steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from typing import Any

import numpy as np

from jvlab._errors import ConfigError
from jvlab.record._events import EvaluationEvent, clock
from jvlab.trainer._rewards import RewardResult, RewardWatch, reward_result
from jvlab.trainer._tasks import Task

GREEDY = {"temperature": 0.0, "n": 1, "progress": False}


FIRST_REWARDS = 8  # of an evaluation: if these fail, and none did not, so will the others


class Evaluation:
    """Answers the first `prompts` prompts of a task, whenever asked, each once; the task's position does not move.

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
        self._pool, self._rewarder = pool, task.rewarder()
        self._examples = task.first(prompts)
        self._watch = RewardWatch(task.name, min(FIRST_REWARDS, len(self._examples)), FIRST_REWARDS * prompts)
        own = {k: v for k, v in {**sampling, **task.sampling}.items() if k not in ("temperature", "n", "seed")}
        self._sampling = {**own, **GREEDY}
        self.best = best

    def run(self, step: int, version: int, meanwhile: Callable[[], None] = lambda: None) -> EvaluationEvent:
        """One evaluation of the weights that the pool holds. `meanwhile()` is called about once a second."""
        start = clock()
        samples = list(self._pool.generate([e.prompt for e in self._examples], **self._sampling))
        result = self._rewards(samples, meanwhile)
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

    def _rewards(self, samples: Sequence[Any], meanwhile: Callable[[], None]) -> RewardResult:
        pairs = zip(samples, self._examples, strict=True)
        calls = [self._rewarder.start(i, sample, example) for i, (sample, example) in enumerate(pairs)]
        left = set(calls)
        while left:  # each call has the task's timeout
            done, left = wait(left, 1.0, FIRST_COMPLETED)
            for call in done:
                self._watch.add(call.result(0))
            meanwhile()
        return reward_result([call.result(0) for call in calls])

    def waiting(self) -> str:
        """Says how long a reward has been waited for; "" if that is not worth mentioning."""
        return self._rewarder.waiting()

    def close(self) -> None:
        """Stop the reward function's threads and processes."""
        self._rewarder.close()
