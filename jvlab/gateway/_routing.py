"""Which replica takes the next prompt: pure functions over a board of who may take it and what each has in flight.

    "least"     the fewest requests in flight; among equals the first by name
    "prefix"    the replica that the prompt's beginning belongs to, so that its KV is there already, unless that one is
                busier than the bound allows; then the next on the ring

Who may take it at all is decided before: `at_least_version`, or the gateway's own rule, the pool's version.
"""

from __future__ import annotations

import heapq
from bisect import bisect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b

from jvlab._errors import SamplingError

PREFIX_CHARACTERS = 256  # so much of a prompt's beginning decides its home; a shorter prompt counts whole
PREFIX_TOKENS = 64
ROOM = 16  # requests in flight below which nobody counts as busy: an engine runs so many side by side
IMBALANCE = 1.25  # above that, a home takes no more than this many times its fair share
POINTS = 32  # places of each replica on the ring: enough that shares differ little


@dataclass(frozen=True)
class Ask:
    """What is to be placed: so many requests with one prompt."""

    parts: int = 1
    key: int = 0  # of the prompt's beginning
    avoid: frozenset[str] = frozenset()


class Board:
    """Replicas that may take work, with their requests in flight; answers in the logarithm of their number."""

    def __init__(self, in_flight: Mapping[str, int]) -> None:
        self._load = dict(in_flight)
        self.total = sum(self._load.values())
        self._ring: tuple[list[int], list[str]] | None = None
        self._sort()

    def _sort(self) -> None:
        self._heap = [(count, _order(name), name) for name, count in self._load.items()]
        heapq.heapify(self._heap)

    def __len__(self) -> int:
        return len(self._load)

    def __contains__(self, name: str) -> bool:
        return name in self._load

    def load(self, name: str) -> int:
        return self._load[name]

    def count(self, name: str, change: int) -> None:
        """So many more (or fewer) are in flight there; nothing for a replica that is not on the board."""
        if name not in self._load or not change:
            return
        self._load[name] += change
        self.total += change
        # The old entry stays in the heap and is skipped when it comes up; now and then all are swept out.
        heapq.heappush(self._heap, (self._load[name], _order(name), name))
        if len(self._heap) > 4 * len(self._load) + 64:
            self._sort()

    def least(self, avoid: frozenset[str]) -> str | None:
        """Fewest in flight, first by name among equals; None if all are to be avoided."""
        heap, aside = self._heap, []
        while heap:
            count, _, name = heap[0]
            if count == self._load[name] and name not in avoid:
                break
            entry = heapq.heappop(heap)
            if count == self._load[name]:
                aside.append(entry)
        found = heap[0][2] if heap else None
        for entry in aside:
            heapq.heappush(heap, entry)
        return found

    def walk(self, key: int) -> Iterable[str]:
        """Every replica once, beginning with the key's home: the same while no replica comes or goes.

        When one does, only the keys that were its own, or become its own, have another home.
        """
        if self._ring is None:
            points = sorted((_hash(f"{name}#{k}".encode()), name) for name in self._load for k in range(POINTS))
            self._ring = [point for point, _ in points], [name for _, name in points]
        points, names = self._ring
        seen: set[str] = set()
        start = bisect(points, key)
        for step in range(len(names)):
            name = names[(start + step) % len(names)]
            if name not in seen:
                seen.add(name)
                yield name


def least_in_flight(board: Board, ask: Ask) -> str | None:
    """Policy "least"."""
    return board.least(ask.avoid)


def prefix_affinity(board: Board, ask: Ask) -> str | None:
    """Policy "prefix": consistent hashing with bounded loads. Where nobody is below the bound, the least busy."""
    fair = (board.total + ask.parts) / max(1, len(board))
    bound = max(ROOM, ask.parts, IMBALANCE * fair)
    for name in board.walk(ask.key):
        if name not in ask.avoid and board.load(name) + ask.parts <= bound:
            return name
    return board.least(ask.avoid)


def keep_home(home: str, otherwise: Policy) -> Policy:
    """The home takes all while it may take work, however busy: what it keeps in its KV cache is worth the wait."""

    def choose(board: Board, ask: Ask) -> str | None:
        return home if home in board and home not in ask.avoid else otherwise(board, ask)

    return choose if home else otherwise


def at_least_version(versions: Mapping[str, int], version: int) -> list[str]:
    """Those that hold this version or a later one; `versions` names only replicas that hold one version throughout."""
    return [name for name, held in versions.items() if held >= version]


Policy = Callable[[Board, Ask], str | None]
POLICIES: dict[str, Policy] = {"least": least_in_flight, "prefix": prefix_affinity}


def unknown_policy(name: str) -> SamplingError:
    """What to say of a name that is no policy."""
    return SamplingError(f"routing={name!r} is not known", remedy=f"one of {', '.join(map(repr, POLICIES))}")


def prefix_key(content: str | Iterable[int]) -> int:
    """The key of a prompt's beginning: text, or token ids."""
    if isinstance(content, str):
        return _hash(content[:PREFIX_CHARACTERS].encode())
    ids = [token for token, _ in zip(content, range(PREFIX_TOKENS), strict=False)]
    return _hash(b"".join(token.to_bytes(4, "little", signed=True) for token in ids))


class Loads:
    """Requests in flight of every replica of a gateway, and the boards made of them."""

    KEPT = 8  # boards of one pool: one per version that callers ask for

    def __init__(self) -> None:
        self._in_flight: dict[str, int] = {}
        self._boards: dict[str, dict[int, Board]] = {}  # by pool, by least version

    def of(self, replica: str) -> int:
        return self._in_flight.get(replica, 0)

    def count(self, pool: str, replica: str, change: int) -> None:
        self._in_flight[replica] = self.of(replica) + change
        for board in self._boards.get(pool, {}).values():
            board.count(replica, change)

    def board(self, pool: str, version: int, names: Callable[[], Iterable[str]]) -> Board:
        """The board of a pool's replicas that may serve this; made anew after `changed`."""
        boards = self._boards.setdefault(pool, {})
        if version not in boards:
            if len(boards) >= self.KEPT:
                boards.clear()
            boards[version] = Board({name: self.of(name) for name in names()})
        return boards[version]

    def changed(self, pool: str) -> None:
        """Replicas came, went, or hold another version."""
        self._boards.pop(pool, None)

    def forget(self, replica: str) -> None:
        """This replica is gone; what is still counted for it will be counted back."""
        if not self.of(replica):
            self._in_flight.pop(replica, None)


def _hash(content: bytes) -> int:
    return int.from_bytes(blake2b(content, digest_size=8).digest(), "little")


def _order(name: str) -> tuple[int, str]:
    return len(name), name  # p/2 before p/10
