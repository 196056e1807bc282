"""Methods that jvlab adds to every vLLM worker, called with collective_rpc: plain lists, dicts and numbers only.

vLLM imports this module in each worker before it builds the model, so patches that must come first are applied here.
"""

from __future__ import annotations

import faulthandler
import os
from typing import Any

from jvlab.engine import _patches

_patches.install("worker")
if os.environ.get("VLLM_TARGET_DEVICE") == "cpu":
    _patches.install("CPU worker")
# a worker that dies of a signal writes which: vLLM may ask for its exit code before there is one
if not faulthandler.is_enabled():
    faulthandler.enable(2, all_threads=False)


class WorkerExtension:
    """Mixed into vLLM's worker class; `self` is the worker.

    `jv_open` is `open` of its `WorkerSync`, and so on: names start with jv_ so that they can't collide.
    """

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("jv_"):
            raise AttributeError(f"{type(self).__name__} has no {name}")
        from jvlab.engine.worker._rank_sync import WorkerSync

        if "_jv_sync" not in self.__dict__:
            self.__dict__["_jv_sync"] = WorkerSync(self)
        return getattr(self.__dict__["_jv_sync"], name.removeprefix("jv_"))
