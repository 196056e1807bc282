"""`Setting`: the sizes of a GRPO run that a forecast can change."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, fields, replace
from typing import Any

from jvlab._errors import ConfigError

PLACEMENTS = ("shared", "trainer apart", "apart")
MOST_PROMPT_TOKENS = 1 << 24
LIMITS = {"prompts_per_step": 4096, "group_size": 4096, "max_tokens": 1 << 20, "max_staleness": 64, "replicas": 1024}


@dataclass(frozen=True)
class Setting:
    """A run's sizes, named as in `jv.grpo` and `lab.launch`.

    `placement` says who shares a device: "shared" (trainer and engines on one, as on a CPU), "trainer apart" (the
    trainer has one of its own, the engines share another) or "apart" (each its own). `prompt_tokens` is the mean length
    of a prompt.
    """

    prompts_per_step: int
    group_size: int
    max_tokens: int
    max_staleness: int = 0
    replicas: int = 1
    prompt_tokens: float = 0.0
    placement: str = "shared"

    def __post_init__(self) -> None:
        for name, most in LIMITS.items():
            value, least = getattr(self, name), 0 if name == "max_staleness" else 1
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
                raise ConfigError(f"{name}={value!r}", remedy=f"a whole number from {least} to {most}", field=name)
        tokens = self.prompt_tokens
        if isinstance(tokens, bool) or not isinstance(tokens, (int, float)) or not 0 <= tokens <= MOST_PROMPT_TOKENS:
            raise ConfigError(f"prompt_tokens={tokens!r}", remedy=f"a number from 0 to {MOST_PROMPT_TOKENS}")
        if self.placement not in PLACEMENTS:
            raise ConfigError(f"placement={self.placement!r}", remedy=f"one of {', '.join(map(repr, PLACEMENTS))}")

    @property
    def samples(self) -> int:
        """Samples of one step."""
        return self.prompts_per_step * self.group_size

    @property
    def devices(self) -> int:
        """How many devices it needs."""
        return {"shared": 1, "trainer apart": 2, "apart": 1 + self.replicas}[self.placement]

    def changed(self, **changes: Any) -> Setting:
        """The same with other values; a wrong name is refused with the nearest right one."""
        known = [field.name for field in fields(self)]
        for name in changes:
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                raise ConfigError(
                    f"a forecast has no setting {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""),
                    remedy=f"one of {', '.join(known)}",
                )
        return replace(self, **changes)

    def __str__(self) -> str:
        size = f"{self.prompts_per_step} × {self.group_size} samples of ≤ {self.max_tokens} tokens"
        replicas = f"{self.replicas} replica{'s' * (self.replicas > 1)}"
        return f"{size}, K = {self.max_staleness}, {replicas}, {self.placement}"
