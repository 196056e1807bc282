"""The part of `Pool` with sessions, LoRA adapters, and the determinism check."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from jvlab._deadline import Deadline
from jvlab.lab import _adapters

if TYPE_CHECKING:
    from jvlab.lab._determinism import DeterminismReport
    from jvlab.lab._pool import Pool
    from jvlab.lab._session import Session, Sessions


class Turns:
    """Part of `Pool`."""

    def _pool(self) -> Pool:
        return cast("Pool", self)

    def session(
        self, prompt: Any, *, routing: str | None = None, **sampling: Any
    ) -> Session:
        """A multi-turn session with one replica: `s.generate(8)`, `s.append(observation)`, `s.generate(8)`, ..."""
        from jvlab.lab._session import Session

        return Session(self._pool(), prompt, sampling, routing=routing)

    def sessions(
        self, prompts: Any, n: int = 1, *, routing: str | None = None, **sampling: Any
    ) -> Sessions:
        """`n` sessions for each prompt, whose turns run concurrently: `group.generate(8)`."""
        from jvlab.lab._session import open_sessions

        return open_sessions(self._pool(), prompts, n, routing, sampling)

    def check_determinism(
        self, prompts: Any = None, **options: Any
    ) -> DeterminismReport:
        """Measure determinism: the same prompts alone, again, in batches of several sizes and orders, on each replica.

        prompts    default: 8 prompts of token ids, 5 to 300 long
        options    max_tokens=32, batches=(2, 4, 8), repeats=2, and sampling by name; default temperature=1.0, seed=0
        """
        from jvlab.lab._determinism import check

        return check(self._pool(), prompts, **options)

    def load_adapter(
        self,
        name: str,
        source: Any,
        *,
        config: Mapping[str, Any] | None = None,
        version: int | None = None,
        timeout: float | Deadline = 300.0,
    ) -> int:
        """Load a LoRA adapter, or a newer version of it, on every replica. Returns its version.

        source     a folder in PEFT's format that the replicas can read, or tensors by their PEFT names
        config     with tensors: PEFT's config; lora_alpha is required, r defaults to the shapes'
        version    default: one more than the last
        """
        return _adapters.load(
            self._pool(), name, source, config, version, Deadline.of(timeout)
        )

    def unload_adapter(self, name: str, *, timeout: float | Deadline = 300.0) -> None:
        """Unload an adapter; requests in flight that use it still finish."""
        _adapters.unload(self._pool(), name, Deadline.of(timeout))
