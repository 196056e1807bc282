"""`Deadline`: when a call must have answered. Made once, where the call comes in; all that it waits for is given it."""

from __future__ import annotations

import math
import time

from jvlab._errors import ConfigError

LONGEST = 1e8  # seconds; what "without end" becomes, as gRPC takes no infinity
# A caller is told at his deadline. So that he is told by whoever knows best, the gateway's answer may come this much
# later: it gives up at the deadline itself and says whom it waited for, and the caller waits so long for its words.
ANSWER_SECONDS = 1.0


class Deadline:
    """A moment on this process's clock, and the seconds it was made of."""

    def __init__(self, seconds: float | None) -> None:
        seconds = LONGEST if seconds is None else seconds
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or math.isnan(seconds):
            raise ConfigError(f"timeout must be a number of seconds, not {seconds!r}")
        self.seconds = min(float(seconds), LONGEST)
        self._end = time.monotonic() + self.seconds

    @classmethod
    def of(cls, timeout: float | Deadline | None) -> Deadline:
        """The same one if it is one already: a call that is part of another shares the other's."""
        return timeout if isinstance(timeout, Deadline) else cls(timeout)

    @classmethod
    def positive(cls, timeout: float | Deadline | None) -> Deadline:
        """The same, of what must be more than nothing."""
        made = cls.of(timeout)
        if not made.seconds > 0:
            raise ConfigError(f"timeout must be positive, not {timeout!r}")
        return made

    def left(self) -> float:
        """Seconds until then; never below 0."""
        return max(0.0, self._end - time.monotonic())

    @property
    def over(self) -> bool:
        return time.monotonic() >= self._end

    def within(self, seconds: float) -> float:
        """What is left, but no more than so many seconds."""
        return min(self.left(), seconds)

    def __repr__(self) -> str:
        return f"Deadline({self.seconds:g} s)"
