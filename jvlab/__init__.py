"""jvlab: a Jupyter-first workbench that couples JAX training with vLLM rollouts.

Begin with `help(jv.Lab)`, which starts an engine, generates and syncs weights into it. Without an engine:

>>> import jvlab as jv
>>> jv.tasks.add().example(0).prompt                # help(jv.tasks), help(jv.Task): what to learn
'8+6='
>>> len(jv.Rules.parse("head -> lm_head.weight : d v -> v d"))   # help(jv.plan): where each tensor goes
1

Names are loaded on first use, so `import jvlab` is quick and needs none of jax, torch, vllm, grpc or ipywidgets.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from jvlab._version import __version__ as __version__

_WHERE = {  # public name -> module that defines it
    "Algorithm": "jvlab.trainer._losses",
    "Bisection": "jvlab.sync.diagnose._bisect",
    "Certificate": "jvlab.analysis.certification._certificate",
    "ChaosReport": "jvlab.analysis._chaos",
    "CheckReport": "jvlab.sync._transaction",
    "DeterminismReport": "jvlab.lab._determinism",
    "Environment": "jvlab.trainer._environment",
    "EnvironmentTurn": "jvlab.trainer._environment",
    "Follower": "jvlab.sync._publish",
    "JvlabError": "jvlab._errors",
    "Lab": "jvlab.lab._lab",
    "Link": "jvlab.sync._link",
    "Mapping": "jvlab.sync._mapping",
    "Meaning": "jvlab.sync._meaning",
    "Policy": "jvlab.trainer._policy",
    "Pool": "jvlab.lab._pool",
    "PublishReport": "jvlab.sync._publish",
    "Publisher": "jvlab.sync._publish",
    "Record": "jvlab.record._record",
    "RolloutBatch": "jvlab.record._batch",
    "Rules": "jvlab.layout.rules._ruleset",
    "Run": "jvlab.trainer._run",
    "Sample": "jvlab.record._batch",
    "Scores": "jvlab.record._batch",
    "Session": "jvlab.lab._session",
    "Sessions": "jvlab.lab._session",
    "Stepper": "jvlab.sync._stepper",
    "SyncReport": "jvlab.sync._transaction",
    "Task": "jvlab.trainer._tasks",
    "TransferPlan": "jvlab.layout._plan",
    "certify": "jvlab.analysis.certification._certify",
    "chaos": "jvlab.analysis._chaos",
    "grpo": "jvlab.trainer._grpo",
    "mesh": "jvlab.trainer.decoder._sharding",
    "plan": "jvlab.sync._mapping",
    "whatif": "jvlab.analysis.forecast._whatif",
}
_MODULES = {  # public name -> module itself
    "errors": "jvlab._errors",
    "integrations": "jvlab.integrations",
    "models": "jvlab.trainer.models",
    "rewards": "jvlab.trainer._reward_library",
    "tasks": "jvlab.trainer._task_library",
    "transport": "jvlab.transport",
}

__all__ = [
    "Algorithm",
    "Bisection",
    "Certificate",
    "ChaosReport",
    "CheckReport",
    "DeterminismReport",
    "Environment",
    "EnvironmentTurn",
    "Follower",
    "JvlabError",
    "Lab",
    "Link",
    "Mapping",
    "Meaning",
    "Policy",
    "Pool",
    "PublishReport",
    "Publisher",
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
    "certify",
    "chaos",
    "errors",
    "grpo",
    "integrations",
    "mesh",
    "models",
    "plan",
    "rewards",
    "tasks",
    "transport",
    "whatif",
]

if TYPE_CHECKING:
    from jvlab import _errors as errors
    from jvlab import integrations, transport
    from jvlab._errors import JvlabError
    from jvlab.analysis._chaos import ChaosReport, chaos
    from jvlab.analysis.certification._certificate import Certificate
    from jvlab.analysis.certification._certify import certify
    from jvlab.analysis.forecast._whatif import whatif
    from jvlab.lab._determinism import DeterminismReport
    from jvlab.lab._lab import Lab
    from jvlab.lab._pool import Pool
    from jvlab.lab._session import Session, Sessions
    from jvlab.layout._plan import TransferPlan
    from jvlab.layout.rules._ruleset import Rules
    from jvlab.record._batch import RolloutBatch, Scores
    from jvlab.record._record import Record
    from jvlab.record._sample import Sample
    from jvlab.sync._link import Link
    from jvlab.sync._mapping import Mapping, plan
    from jvlab.sync._meaning import Meaning
    from jvlab.sync._publish import Follower, Publisher, PublishReport
    from jvlab.sync._stepper import Stepper
    from jvlab.sync._transaction import CheckReport, SyncReport
    from jvlab.sync.diagnose._bisect import Bisection
    from jvlab.trainer import _reward_library as rewards
    from jvlab.trainer import _task_library as tasks
    from jvlab.trainer import models
    from jvlab.trainer._environment import Environment, EnvironmentTurn
    from jvlab.trainer._grpo import grpo
    from jvlab.trainer._losses import Algorithm
    from jvlab.trainer._policy import Policy
    from jvlab.trainer._run import Run
    from jvlab.trainer._tasks import Task
    from jvlab.trainer.decoder._sharding import mesh


def __getattr__(name: str) -> object:
    if name in _MODULES:
        value: object = importlib.import_module(_MODULES[name])
    elif name in _WHERE:
        from jvlab._progress import importing

        with importing(f"what jv.{name} needs"):  # jax takes seconds
            value = getattr(importlib.import_module(_WHERE[name]), name)
    else:
        # modules that are not loaded yet, and Python's own questions
        if name.startswith("_"):
            raise AttributeError(f"module 'jvlab' has no attribute {name!r}")
        from jvlab._errors import UnknownName

        raise UnknownName.of("name of jvlab", name, __all__, "help(jv) lists all")
    globals()[name] = value
    return value


def load_ipython_extension(ipython: object) -> None:
    """`%load_ext jvlab`: adds `%jv status`, `%jv sync`, `%jv help` and `%%rollout`."""
    from jvlab.lab._magics import load

    load(ipython)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
