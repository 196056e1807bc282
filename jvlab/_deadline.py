"""`Deadline`: when a call must return. Created once, at the public call, and passed down to everything it waits for.

What a user may give as a timeout is decided here alone: `Deadline.of`, or `check_timeout` where no Deadline is needed.
"""

from __future__ import annotations

import math
import numbers
import time
from typing import Any

from jvlab._errors import ConfigError

LONGEST = 1e8  # seconds; stands for "no timeout", since gRPC accepts no infinity
# The gateway gives up at the deadline and reports which replicas it waited for; the client waits this much longer, so
# that it receives that report and not a bare timeout.
ANSWER_SECONDS = 1.0


def check_timeout(timeout: Any, name: str = "timeout") -> float:
    """Seconds as a user gave them, above 0; None is "no limit". Raises ConfigError for anything else."""
    if timeout is None:
        return LONGEST
    # numbers.Real: numpy's numbers are no int and no float
    is_number = isinstance(timeout, numbers.Real) and not isinstance(timeout, bool)
    seconds = float(timeout) if is_number else math.nan
    if seconds > 0:
        return min(seconds, LONGEST)
    problem = f"{name} must be a number of seconds, not {timeout!r}"
    if not math.isnan(seconds):
        problem = f"{name} must be positive, not {timeout!r}"
    raise ConfigError(
        problem,
        remedy=f"{name}=60 is a minute, {name}=None no limit; leave it out for the default",
    )


class Deadline:
    """A point in time on this process's monotonic clock, and the timeout in seconds that it was created from.

    Made of seconds that are left it may be over already; what a user gives goes through `of`.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = min(float(seconds), LONGEST)
        self._end = time.monotonic() + self.seconds

    @classmethod
    def of(cls, timeout: float | Deadline | None) -> Deadline:
        """A Deadline as it is, so that nested calls share one; seconds, which must be above 0, become a new one."""
        return timeout if isinstance(timeout, Deadline) else cls(check_timeout(timeout))

    def left(self) -> float:
        """Seconds left; never below 0."""
        return max(0.0, self._end - time.monotonic())

    @property
    def over(self) -> bool:
        return time.monotonic() >= self._end

    def within(self, seconds: float) -> float:
        """The seconds left, at most `seconds`."""
        return min(self.left(), seconds)

    def __repr__(self) -> str:
        return f"Deadline({self.seconds:g} s)"
