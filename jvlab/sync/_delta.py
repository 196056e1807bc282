"""What changed since the engines' version: the trainer's copy of what they hold, and one sync's changes to it.

    Held       the bytes of every bucket as last committed, in the engine's dtypes, and the mark of that sync
    Changes    one sync: find() → (PREPARE: which ranks hold that mark?) agree() → sent → committed()

The copy is never ahead of the engines: a sync's changes are added to it once its commit is known. If that is never
known, the engines hold another mark than the copy, or none, and the next sync is whole. Nothing is assumed about a
replica: each rank says in its reply to PREPARE whether it holds the mark.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from jvlab._deadline import Deadline
from jvlab._errors import SyncDeadline
from jvlab.layout._digest import Flawed
from jvlab.sync._pack import Encoded, LinkPack
from jvlab.transport._ipc_kernels import cupy
from jvlab.transport._shm import available_bytes

Key = tuple[bytes, int]  # fingerprint of a link's pack, bucket
THREADS = 4


@dataclass
class Held:
    """What the engines hold as of one sync. It takes as much memory as one replica's weights."""

    mark: str = ""  # empty: nothing is held
    buckets: dict[Key, Any] = field(default_factory=dict, repr=False)

    @property
    def nbytes(self) -> int:
        return sum(bucket.nbytes for bucket in self.buckets.values())

    def of_version(self, version: int) -> bool:
        return self.mark.startswith(f"{version}-")

    def clear(self) -> None:
        self.mark = ""
        self.buckets = {}


@dataclass(frozen=True)
class Found:
    """One bucket of a sync."""

    pack: LinkPack
    bucket: int
    encoded: Encoded
    digests: dict[int, int]
    flawed: Flawed


class Changes:
    """What one sync changes. `mark` names what it leaves; `base` what it changes, if anything is held."""

    def __init__(self, held: Held, version: int, deadline: Deadline) -> None:
        self.mark = f"{version}-{secrets.token_hex(8)}"
        self.base = held.mark
        self._held = held
        self._deadline = deadline
        self._found: dict[Key, Found] = {}
        self._holders: set[tuple[str, int]] = set()
        self.without: list[str] = []  # replicas that hold another base, or none

    def find(self, jobs: Iterable[tuple[LinkPack, int, bool]], source: Any) -> None:
        """Encode every bucket, before the engines pause; the flag: take its digest too."""
        todo: dict[Key, tuple[LinkPack, int, bool]] = {}
        for pack, bucket, digest in jobs:
            todo.setdefault((pack.fingerprint, bucket), (pack, bucket, digest))

        def one(key: Key) -> tuple[Key, Found]:
            pack, bucket, digest = todo[key]
            values = pack.values(bucket, source)
            held = self._held.buckets.get(key) if self.base else None
            encoded = pack.encode(bucket, values, held)
            flawed: Flawed = set()
            digests = pack.digests(bucket, values, flawed) if digest else {}
            return key, Found(pack, bucket, encoded, digests, flawed)

        threads = ThreadPoolExecutor(THREADS, "jvlab-changes")
        try:
            self._found = dict(threads.map(one, todo, timeout=self._deadline.left()))
        except TimeoutError:
            raise SyncDeadline(
                f"the sync's deadline of {self._deadline.seconds:g} s passed while its changes were sought",
                remedy='pass a larger timeout=; nothing was sent. delta="never" seeks none',
            ) from None
        finally:
            threads.shutdown(wait=False, cancel_futures=True)

    def agree(self, replies: Mapping[str, Iterable[Mapping[str, Any]]]) -> None:
        """Take the ranks' replies to PREPARE: who holds the base."""
        for replica, ranks in replies.items():
            held = {int(r["rank"]): bool(r["holds_base"]) for r in ranks}
            self._holders |= {(replica, rank) for rank, holds in held.items() if holds}
            if not all(held.values()):
                self.without.append(replica)

    def found(self, pack: LinkPack, bucket: int) -> Found:
        return self._found[pack.fingerprint, bucket]

    def sparse_for(self, found: Found, replica: str, rank: int) -> bool:
        """Whether this rank gets only what changed in this bucket."""
        return found.encoded.sparse and (replica, rank) in self._holders

    @property
    def share(self) -> float | None:
        """The share of values that changed; None if nothing was held to compare with."""
        if not self.base:
            return None
        all_found = [found.encoded for found in self._found.values()]
        return sum(e.changed for e in all_found) / max(
            1, sum(e.elements for e in all_found)
        )

    def why_full(self, sparse: int, buckets: int) -> str:
        """Why not every bucket was sparse; empty if all were."""
        if not self.base:
            return "no earlier sync's values are held"
        if self.without:
            names = ", ".join(self.without)
            return f"{names} did not hold the base (new, dirty, or written by another link)"
        if not sparse:
            return f"{self.share:.0%} of the values changed: whole buckets are smaller"
        if sparse < buckets:
            return f"{buckets - sparse} of {buckets} buckets are smaller whole"
        return ""

    def committed(self) -> None:
        """The commit is known: what the engines hold is now held here."""
        held = self._held
        held.mark = ""  # if this is interrupted, nothing is held
        held.buckets = {
            key: found.pack.advance(found.bucket, held.buckets.get(key), found.encoded)
            for key, found in self._found.items()
        }
        held.mark = self.mark


def no_room(held: Held, nbytes: int, on_gpu: bool) -> str:
    """Why a copy of so many bytes can't be held where the shards are packed; empty if it can."""
    # the copy, and a sync that changes everything
    need = 2 * nbytes - held.nbytes
    if on_gpu:
        free = int(cupy().cuda.runtime.memGetInfo()[0])
    else:
        free = available_bytes()
    if need <= free:
        return ""
    where = "GPU" if on_gpu else "host"
    return f"the copy needs {need / 2**30:.1f} GiB of {where} memory, {free / 2**30:.1f} are free"
