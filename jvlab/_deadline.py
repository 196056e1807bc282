"""`Deadline`: when a call must return. Created once, at the public call, and passed down to everything it waits for."""

from __future__ import annotations

import math
import time

from jvlab._errors import ConfigError

LONGEST = 1e8  # seconds; stands for "no timeout", since gRPC accepts no infinity
# The gateway gives up at the deadline and reports which replicas it waited for; the client waits this much longer, so
# that it receives that report and not a bare timeout.
ANSWER_SECONDS = 1.0


class Deadline:
    """A point in time on this process's monotonic clock, and the timeout in seconds that it was created from."""

    def __init__(self, seconds: float | None) -> None:
        seconds = LONGEST if seconds is None else seconds
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or math.isnan(seconds):
            raise ConfigError(f"timeout must be a number of seconds, not {seconds!r}")
        self.seconds = min(float(seconds), LONGEST)
        self._end = time.monotonic() + self.seconds

    @classmethod
    def of(cls, timeout: float | Deadline | None) -> Deadline:
        """A Deadline as it is, so that nested calls share one; seconds become a new one."""
        return timeout if isinstance(timeout, Deadline) else cls(timeout)

    @classmethod
    def positive(cls, timeout: float | Deadline | None) -> Deadline:
        """As `of`, but the timeout must be above 0."""
        made = cls.of(timeout)
        if not made.seconds > 0:
            raise ConfigError(f"timeout must be positive, not {timeout!r}")
        return made

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
