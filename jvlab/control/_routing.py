"""Which replica takes the next prompt: pure functions over what the gateway knows."""

from __future__ import annotations

from collections.abc import Mapping


def least_in_flight(in_flight: Mapping[str, int], avoid: frozenset[str] = frozenset()) -> str | None:
    """The replica with the fewest requests in flight, first by name among equals; None if all are to be avoided."""
    candidates = [(count, name) for name, count in in_flight.items() if name not in avoid]
    return min(candidates)[1] if candidates else None


def spread(prompts: int, n: int, in_flight: Mapping[str, int], avoid: frozenset[str] = frozenset()) -> list[str | None]:
    """A replica for each prompt in turn; a prompt's n samples stay together, so that its prefix is computed once."""
    load = dict(in_flight)
    chosen: list[str | None] = []
    for _ in range(prompts):
        name = least_in_flight(load, avoid)
        if name is not None:
            load[name] += n
        chosen.append(name)
    return chosen
