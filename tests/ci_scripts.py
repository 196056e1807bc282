"""The programs of `.ci/` as modules: they are no package."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).resolve().parent.parent / ".ci"


def ci_script(name: str) -> ModuleType:
    """`.ci/NAME.py`, executed anew."""
    spec = importlib.util.spec_from_file_location(
        f"jvlab_{name}", FOLDER / f"{name}.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
