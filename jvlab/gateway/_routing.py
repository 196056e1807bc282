"""Which replica gets the next prompt: pure functions over a board of eligible replicas and their requests in flight.

    "least"     the fewest requests in flight; among equals the first by name
    "prefix"    the replica that the prompt's prefix hashes to, whose cache may hold its KV, unless it is busier than
                the bound allows; then the next on the ring

Eligibility is decided before: replicas that hold the pool's version, or the one that a call asks for, or a later one.
"""

from __future__ import annotations

import heapq
from bisect import bisect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b

from jvlab._errors import SamplingError

PREFIX_CHARACTERS = 256  # of a prompt that are hashed; a shorter prompt is hashed whole
PREFIX_TOKENS = 64
# requests in flight up to which no replica counts as busy: an engine runs that many in parallel
MIN_BOUND = 16
IMBALANCE = 1.25  # above that, a replica gets at most this many times its fair share
POINTS = 32  # of each replica on the ring: enough that shares differ little


@dataclass(frozen=True)
class RouteRequest:
    """What is to be routed: this many requests with one prompt."""

    parts: int = 1
    key: int = 0  # hash of the prompt's prefix
    avoid: frozenset[str] = frozenset()


class Board:
    """Replicas that may be given work, with their requests in flight; `least` takes logarithmic time."""

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

    def __iter__(self) -> Iterator[str]:
        return iter(self._load)

    def load(self, name: str) -> int:
        return self._load[name]

    def count(self, name: str, change: int) -> None:
        """Add to a replica's requests in flight; ignores a replica that is not on the board."""
        if name not in self._load or not change:
            return
        self._load[name] += change
        self.total += change
        # The old entry stays in the heap and is skipped when it surfaces; the heap is rebuilt now and then.
        heapq.heappush(self._heap, (self._load[name], _order(name), name))
        if len(self._heap) > 4 * len(self._load) + 64:
            self._sort()

    def least(self, avoid: frozenset[str]) -> str | None:
        """Fewest in flight, first by name among equals; None if all are to be avoided."""
        heap = self._heap
        aside = []
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
        """Every replica once, in ring order from the key on; the first is the key's home.

        When a replica joins or leaves, only the keys that it gains or loses change their home.
        """
        if self._ring is None:
            points = sorted(
                (_hash(f"{name}#{k}".encode()), name)
                for name in self._load
                for k in range(POINTS)
            )
            self._ring = [point for point, _ in points], [name for _, name in points]
        points, names = self._ring
        seen: set[str] = set()
        start = bisect(points, key)
        for step in range(len(names)):
            name = names[(start + step) % len(names)]
            if name not in seen:
                seen.add(name)
                yield name


def least_in_flight(board: Board, request: RouteRequest) -> str | None:
    """Policy "least"."""
    return board.least(request.avoid)


def prefix_affinity(board: Board, request: RouteRequest) -> str | None:
    """Policy "prefix": consistent hashing with bounded loads. If all are above the bound, the least busy."""
    return _first_within_bound(board, request, board.walk(request.key))


def in_turn(number: int) -> Policy:
    """For a session, which stays where it begins: each replica in turn. By requests in flight all would begin at the
    first one, if they begin one after the other; this way they differ by as much as loads may."""

    def choose(board: Board, request: RouteRequest) -> str | None:
        names = list(board)
        at = number % max(1, len(names))
        return _first_within_bound(board, request, names[at:] + names[:at])

    return choose


def _first_within_bound(
    board: Board, request: RouteRequest, order: Iterable[str]
) -> str | None:
    fair = (board.total + request.parts) / max(1, len(board))
    bound = max(MIN_BOUND, request.parts, IMBALANCE * fair)
    for name in order:
        if name not in request.avoid and board.load(name) + request.parts <= bound:
            return name
    return board.least(request.avoid)


def keep_home(home: str, otherwise: Policy) -> Policy:
    """The home gets all requests while it may be given work, however busy: its KV cache is worth the wait."""

    def choose(board: Board, request: RouteRequest) -> str | None:
        return (
            home
            if home in board and home not in request.avoid
            else otherwise(board, request)
        )

    return choose if home else otherwise


Policy = Callable[[Board, RouteRequest], str | None]
POLICIES: dict[str, Policy] = {"least": least_in_flight, "prefix": prefix_affinity}


def check_policy(name: str) -> None:
    """Raise for an unknown policy."""
    if name not in POLICIES:
        raise SamplingError(
            f"routing={name!r} is not known",
            remedy=f"one of {', '.join(map(repr, POLICIES))}",
            routing=name,
        )


def prefix_key(content: str | Iterable[int]) -> int:
    """The hash of a prompt's prefix: text, or token ids."""
    if isinstance(content, str):
        return _hash(content[:PREFIX_CHARACTERS].encode())
    ids = [token for token, _ in zip(content, range(PREFIX_TOKENS), strict=False)]
    return _hash(b"".join(token.to_bytes(4, "little", signed=True) for token in ids))


class Loads:
    """Requests in flight of every replica of a gateway, and the boards built from them."""

    MAX_BOARDS = 8  # of one pool: one per version that callers ask for

    def __init__(self) -> None:
        self._in_flight: dict[str, int] = {}
        self._boards: dict[str, dict[int, Board]] = {}  # by pool, by minimum version

    def of(self, replica: str) -> int:
        return self._in_flight.get(replica, 0)

    def count(self, pool: str, replica: str, change: int) -> None:
        self._in_flight[replica] = self.of(replica) + change
        # so that replicas that are gone leave nothing behind
        if not self._in_flight[replica]:
            del self._in_flight[replica]
        for board in self._boards.get(pool, {}).values():
            board.count(replica, change)

    def board(
        self, pool: str, version: int, names: Callable[[], Iterable[str]]
    ) -> Board:
        """The board of a pool's replicas that may serve this; rebuilt after `changed`."""
        boards = self._boards.setdefault(pool, {})
        if version not in boards:
            if len(boards) >= self.MAX_BOARDS:
                boards.clear()
            boards[version] = Board({name: self.of(name) for name in names()})
        return boards[version]

    def changed(self, pool: str) -> None:
        """Replicas joined, left, or hold another version."""
        self._boards.pop(pool, None)

    def forget(self, replica: str) -> None:
        """This replica is gone; a count above 0 stays until its calls have ended."""
        if not self.of(replica):
            self._in_flight.pop(replica, None)


def _hash(content: bytes) -> int:
    return int.from_bytes(blake2b(content, digest_size=8).digest(), "little")


def _order(name: str) -> tuple[int, str]:
    return len(name), name  # p/2 before p/10
