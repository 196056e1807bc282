"""jvlab: a Jupyter-first workbench that couples JAX training with vLLM rollouts.

Names are loaded on first use, so `import jvlab` is quick and needs none of jax, torch, vllm, grpc or ipywidgets.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

_WHERE = {  # public name -> module that defines it
    "Algorithm": "jvlab.trainer._losses",
    "Bisection": "jvlab._bisection",
    "CheckReport": "jvlab._sync_report",
    "DeterminismReport": "jvlab._determinism",
    "Environment": "jvlab.trainer._environment",
    "JvlabError": "jvlab._errors",
    "Lab": "jvlab._lab",
    "Link": "jvlab._link",
    "Mapping": "jvlab.layout._mapping",
    "Policy": "jvlab.trainer._policy",
    "Pool": "jvlab._pool",
    "Record": "jvlab.record._record",
    "RolloutBatch": "jvlab.rollout._batch",
    "Rules": "jvlab.layout._ruleset",
    "Run": "jvlab.trainer._run",
    "Sample": "jvlab.rollout._batch",
    "Scores": "jvlab.rollout._scores",
    "Session": "jvlab._session",
    "Sessions": "jvlab._session",
    "Stepper": "jvlab._stepper",
    "SyncReport": "jvlab._sync_report",
    "Task": "jvlab.trainer._tasks",
    "TransferPlan": "jvlab.layout._plan",
    "grpo": "jvlab.trainer._grpo",
    "mesh": "jvlab.trainer._sharding",
    "plan": "jvlab._plan_api",
}
_MODULES = {  # public name -> module itself
    "errors": "jvlab._errors",
    "models": "jvlab.models",
    "tasks": "jvlab.trainer._task_library",
    "transport": "jvlab.transport",
}

__all__ = [
    "Algorithm",
    "Bisection",
    "CheckReport",
    "DeterminismReport",
    "Environment",
    "JvlabError",
    "Lab",
    "Link",
    "Mapping",
    "Policy",
    "Pool",
    "Record",
    "RolloutBatch",
    "Rules",
    "Run",
    "Sample",
    "Scores",
    "Session",
    "Sessions",
    "Stepper",
    "SyncReport",
    "Task",
    "TransferPlan",
    "errors",
    "grpo",
    "mesh",
    "models",
    "plan",
    "tasks",
    "transport",
]

if TYPE_CHECKING:
    from jvlab import _errors as errors
    from jvlab import models, transport
    from jvlab._bisection import Bisection
    from jvlab._determinism import DeterminismReport
    from jvlab._errors import JvlabError
    from jvlab._lab import Lab
    from jvlab._link import Link
    from jvlab._plan_api import plan
    from jvlab._pool import Pool
    from jvlab._session import Session, Sessions
    from jvlab._stepper import Stepper
    from jvlab._sync_report import CheckReport, SyncReport
    from jvlab.layout._mapping import Mapping
    from jvlab.layout._plan import TransferPlan
    from jvlab.layout._ruleset import Rules
    from jvlab.record._record import Record
    from jvlab.rollout._batch import RolloutBatch, Sample
    from jvlab.rollout._scores import Scores
    from jvlab.trainer import _task_library as tasks
    from jvlab.trainer._environment import Environment
    from jvlab.trainer._grpo import grpo
    from jvlab.trainer._losses import Algorithm
    from jvlab.trainer._policy import Policy
    from jvlab.trainer._run import Run
    from jvlab.trainer._sharding import mesh
    from jvlab.trainer._tasks import Task


def __getattr__(name: str) -> object:
    if name in _MODULES:
        value: object = importlib.import_module(_MODULES[name])
    elif name in _WHERE:
        value = getattr(importlib.import_module(_WHERE[name]), name)
    else:
        raise AttributeError(f"module 'jvlab' has no attribute {name!r}")
    globals()[name] = value
    return value


def load_ipython_extension(ipython: object) -> None:
    """`%load_ext jvlab`: adds `%jv status`, `%jv sync`, `%jv help` and `%%rollout`."""
    from jvlab._magics import load

    load(ipython)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
