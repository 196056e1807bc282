"""How many examples a property test tries: a quarter in `make test`, all of them, and new ones, in `make soak`."""

from __future__ import annotations

import os

NEW_EXAMPLES = bool(os.environ.get("JVLAB_FUZZ"))  # set by `make soak`: explore instead of repeating


def examples(full: int) -> int:
    """For hypothesis's `max_examples`."""
    return full if NEW_EXAMPLES else max(full // 4, 10)
