"""`SyncOptions`: the options of `link.sync` and `link.stepper`."""

from __future__ import annotations

from dataclasses import dataclass

from jvlab._errors import ConfigError
from jvlab.wire._sync_words import CHOICES, Terms


@dataclass(frozen=True)
class SyncOptions:
    """Validated on creation; `Link.sync` documents them."""

    mode: str = "direct"
    verify: str = "full"
    require: str = "all"
    pause: str = "keep"
    kv: str = "keep"
    nonfinite: str = "refuse"

    def __post_init__(self) -> None:
        for name, known in CHOICES.items():
            if (value := getattr(self, name)) not in known:
                raise ConfigError(f"{name} must be one of {', '.join(map(repr, known))}, not {value!r}")

    def terms(self, version: int, seconds: float) -> Terms:
        """The terms of one transaction that commits this version."""
        return Terms(version, **vars(self), bucket_seconds=seconds)
