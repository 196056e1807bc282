"""jvlab: a Jupyter-first workbench that couples JAX training with vLLM rollouts.

Names are loaded on first use, so `import jvlab` is quick and needs none of jax, torch, vllm, grpc or ipywidgets.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

_WHERE = {  # public name -> module that defines it
    "JvlabError": "jvlab._errors",
    "Lab": "jvlab._lab",
    "Mapping": "jvlab.layout._mapping",
    "Pool": "jvlab._pool",
    "RolloutBatch": "jvlab.rollout._batch",
    "Rules": "jvlab.layout._ruleset",
    "Sample": "jvlab.rollout._batch",
    "Scores": "jvlab.rollout._scores",
    "TransferPlan": "jvlab.layout._plan",
    "plan": "jvlab._plan_api",
}
_MODULES = {"models": "jvlab.models", "errors": "jvlab._errors"}  # public name -> module itself

__all__ = [
    "JvlabError",
    "Lab",
    "Mapping",
    "Pool",
    "RolloutBatch",
    "Rules",
    "Sample",
    "Scores",
    "TransferPlan",
    "errors",
    "models",
    "plan",
]

if TYPE_CHECKING:
    from jvlab import _errors as errors
    from jvlab import models
    from jvlab._errors import JvlabError
    from jvlab._lab import Lab
    from jvlab._plan_api import plan
    from jvlab._pool import Pool
    from jvlab.layout._mapping import Mapping
    from jvlab.layout._plan import TransferPlan
    from jvlab.layout._ruleset import Rules
    from jvlab.rollout._batch import RolloutBatch, Sample
    from jvlab.rollout._scores import Scores


def __getattr__(name: str) -> object:
    if name in _MODULES:
        value: object = importlib.import_module(_MODULES[name])
    elif name in _WHERE:
        value = getattr(importlib.import_module(_WHERE[name]), name)
    else:
        raise AttributeError(f"module 'jvlab' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
