"""Token counts, prefill time and KV cache savings of sessions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jvlab._units import how_many

if TYPE_CHECKING:
    from jvlab.lab._session import Session
    from jvlab.record._sample import Sample


@dataclass(frozen=True)
class SessionStats:
    """Counts over the turns of one or several sessions.

    Each turn sends the engine all tokens so far: `prompt_tokens` is their sum, of which `cached_tokens` were in the KV
    cache. `seconds_saved` is an estimate: cached tokens times the average time of a computed one.
    """

    turns: int
    generated_tokens: int
    given_tokens: int  # prompt and observations
    prompt_tokens: int
    cached_tokens: int
    prefill_seconds: float  # from when the engine schedules a turn to its first token
    seconds_per_prefill_token: float
    moves: int  # turns on a different replica than the one before
    versions: tuple[int, ...]

    @classmethod
    def of(cls, sessions: Sequence[Session]) -> SessionStats:
        turns: list[Sample] = [turn for s in sessions for turn in s.turns]
        computed = sum(len(t.prompt_token_ids) - t.cached_tokens for t in turns)
        return cls(
            turns=len(turns),
            generated_tokens=sum(len(t.token_ids) for t in turns),
            given_tokens=sum(len(s.token_ids) - s.generated for s in sessions),
            prompt_tokens=sum(len(t.prompt_token_ids) for t in turns),
            cached_tokens=sum(t.cached_tokens for t in turns),
            prefill_seconds=sum(map(_prefill, turns)),
            seconds_per_prefill_token=sum(max(0.0, _prefill(t) - _step(t)) for t in turns) / max(1, computed),
            moves=sum(turn.moved_from is not None for s in sessions for turn in s.turns),
            versions=tuple(sorted({v for t in turns for v in t.versions.tolist()})),
        )

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that were not in the KV cache."""
        return self.prompt_tokens - self.cached_tokens

    @property
    def hit_rate(self) -> float:
        """Fraction of all prompt tokens that were in the KV cache; usually 0 for a first turn."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def seconds_saved(self) -> float:
        """Roughly how long the prefill of the cached tokens would have taken."""
        return self.cached_tokens * self.seconds_per_prefill_token

    def words(self, turns: int) -> str:
        """A one-line summary, without anything that varies between runs."""
        match self.versions:
            case ():
                version = "no version"
            case (only,):
                version = f"version {only}"
            case _:
                version = f"versions {self.versions[0]} to {self.versions[-1]}"
        moved = f", moved {self.moves} times" if self.moves else ""
        return (
            f"{how_many(turns, 'turn')}, {self.generated_tokens} tokens generated, {self.given_tokens} given, "
            f"{version}, "
            f"{self.cached_tokens} of {self.prompt_tokens} prompt tokens from the KV cache{moved}"
        )


def _prefill(turn: Sample) -> float:
    """Seconds from scheduling to the first token."""
    return max(0.0, turn.seconds.get("first_token", 0.0) - turn.seconds.get("queued", 0.0))


def _step(turn: Sample) -> float:
    """Seconds of one decode step, which even an empty prefill takes."""
    rest = turn.seconds.get("total", 0.0) - turn.seconds.get("first_token", 0.0)
    return max(0.0, rest) / (len(turn.token_ids) - 1) if len(turn.token_ids) > 1 else 0.0
