"""Dashboards for a run, if installed: TensorBoard and Weights & Biases. Each is called with every event."""

from __future__ import annotations

import importlib
import os
from typing import Any

from jvlab._errors import MissingDependency
from jvlab.record._events import Event, RolloutEvent, StepEvent, SyncEvent

STEP_SCALARS = {
    "reward/mean": "reward_mean",
    "reward/std": "reward_std",
    "train/loss": "loss",
    "train/kl": "kl",
    "train/entropy": "entropy",
    "train/grad_norm": "grad_norm",
    "train/clip_fraction": "clip_fraction",
    "train/learning_rate": "learning_rate",
    "health/logprob_gap": "logprob_gap",
}


class Scalars:
    """Converts events to named scalars per step."""

    def __init__(self) -> None:
        self.step = 0

    def __call__(self, event: Event) -> dict[str, float]:
        """The scalars that an event measured; none for most events."""
        match event:
            case StepEvent():
                self.step = event.step
                found = {name: getattr(event, field) for name, field in STEP_SCALARS.items()}
                found |= {f"ratio/{key}": value for key, value in event.ratios.items()}
                found |= {"health/skipped": float(event.skipped), "time/train_s": event.seconds}
                if total := sum(event.versions.values()):
                    found["staleness/mean"] = sum(s * n for s, n in event.staleness.items()) / total
                    found["staleness/max"] = max(event.staleness)
            case SyncEvent():
                found = {"sync/gb_per_s": event.gb_per_s, "sync/seconds": event.seconds, "sync/pause_s": event.pause}
            case RolloutEvent() if event.seconds > 0:
                found = {"rollout/tokens_per_s": event.tokens / event.seconds}
            case _:
                found = {}
        return {name: float(value) for name, value in found.items() if value == value}


class TensorBoardSink:
    """Scalars as TensorBoard event files in a folder; needs tensorboardX, or torch and tensorboard."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._scalars, self._writer = Scalars(), _summary_writer()(str(folder))

    def __call__(self, event: Event, *, wall: float | None = None) -> None:
        for name, value in self._scalars(event).items():
            self._writer.add_scalar(name, value, self._scalars.step, walltime=wall)

    def close(self) -> None:
        """Flush and close the files."""
        self._writer.close()


def _summary_writer() -> Any:
    for module in ("tensorboardX", "torch.utils.tensorboard"):
        try:
            return importlib.import_module(module).SummaryWriter
        except ImportError:
            continue
    raise MissingDependency("TensorBoard files need a writer", remedy="pip install tensorboardX")


class WandbSink:
    """Scalars to a Weights & Biases run; `init` goes to wandb.init, for instance project="...", mode="offline"."""

    def __init__(self, **init: Any) -> None:
        try:
            import wandb
        except ImportError as e:
            raise MissingDependency("logging to Weights & Biases needs wandb", remedy="pip install wandb") from e
        self._scalars = Scalars()
        self._run: Any = wandb.init(**init)

    def __call__(self, event: Event, *, wall: float | None = None) -> None:
        numbers = self._scalars(event)
        if numbers:
            self._run.log(numbers | {"step": self._scalars.step} | ({} if wall is None else {"wall": wall}))

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()
