"""JAX's persistent compilation cache, in jvlab's cache folder: a second run of the same script compiles nothing."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

from jvlab.trainer.models._tiny import cache_dir

VARIABLE = "JVLAB_COMPILE_CACHE"  # a folder, or 0: none


def compile_cache_dir() -> Path | None:
    """The folder: by host, since programs for a CPU fit the one they were made on. None if switched off."""
    given = os.environ.get(VARIABLE)
    if given:
        return None if given == "0" else Path(given)
    return cache_dir().with_name("xla") / (platform.node() or "host")


def compile_cache_bytes() -> int:
    """How much it holds."""
    folder = compile_cache_dir()
    if folder is None or not folder.is_dir():
        return 0
    return sum(file.stat().st_size for file in folder.iterdir() if file.is_file())


def use_compile_cache() -> str:
    """Switch it on unless the user chose another, or none; returns the folder in use, "" if there is none."""
    import jax

    options: Any = jax.config  # which knows its options at run time only
    given = options.jax_compilation_cache_dir
    folder = compile_cache_dir()
    if given or folder is None or not options.jax_enable_compilation_cache:
        return given or ""
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    return str(folder)
