"""The sync state of one replica: which phase may come next, what it holds, whether it may generate. No I/O.

The order of phases is that of `jvlab.wire._sync_words`. In direct mode live memory is written from MOVE on: the replica
is dirty until COMMIT, and an abandoned one stays dirty and halted until a later sync commits. In staged mode only
COMMIT itself writes live memory, so it is dirty for that moment, and stays so if the swap fails midway. A failed phase
changes nothing else here: the gateway then sends ABANDON.
"""

from __future__ import annotations

from dataclasses import dataclass

from jvlab._errors import EngineDirty, SyncError
from jvlab.wire._sync_words import ORDER, STAGE_AFTER, Stage, Terms


@dataclass
class SyncState:
    """The replica's own state; the engine changes it only through these methods."""

    version: int = 0
    dirty: bool = False
    link: str = ""
    terms: Terms | None = None
    done: int = 0  # phases of this sync that are done
    halted: bool = False  # generation is paused for a sync, or because the replica is dirty
    discarded: bool = False  # a sleep discarded the weights

    @property
    def stage(self) -> str:
        """idle, prepared, halted, moving, verified or committed."""
        stage = Stage.IDLE if self.terms is None else STAGE_AFTER[ORDER[self.terms.mode][self.done - 1]]
        return stage.value

    @property
    def standing(self) -> str:
        """What is reported to the gateway: ready for the next phase, committed, old or dirty."""
        if self.stage == "committed":
            return "committed"
        if self.terms is not None:
            return "ready"
        return "dirty" if self.dirty else "old"

    def opened(self, link: str) -> None:
        """A link was opened; it replaces an older one."""
        self.link = link

    def closed(self) -> None:
        """The link was closed."""
        self.link = ""

    def check_link(self, link: str) -> None:
        """Refuse orders of a link that is not this replica's."""
        if link != self.link:
            raise SyncError(
                f"order of link {link or '(none)'}; this replica is linked to {self.link or 'nobody'}",
                remedy="open the link on this replica first",
            )

    def check(self, phase: str, terms: Terms | None = None) -> None:
        """Raise unless `phase` may run now."""
        if phase in ("abandon", "check"):
            return
        if phase == "prepare":
            if self.terms is not None:
                raise SyncError(
                    f"version {self.terms.version} is still {self.stage}", remedy="commit or abandon that sync first"
                )
            if terms is None:
                raise SyncError("a prepare without terms", remedy="send SyncTerms with PREPARE")
            if terms.version <= self.version:
                raise SyncError(
                    f"version {terms.version} is not newer than the {self.version} that this replica holds",
                    remedy=f"use {self.version + 1} or above",
                )
            return
        if self.terms is None and phase == "go_on" and not self.dirty:
            return  # repeated by a gateway that missed our answer
        if self.terms is None:
            raise SyncError(f"{phase} without a prepare", remedy="a sync begins with prepare")
        wanted = ORDER[self.terms.mode][self.done].word
        if phase != wanted:
            raise SyncError(f"{phase} cannot follow {self.stage} in {self.terms.mode} mode", remedy=f"{wanted} is next")

    def enter(self, phase: str) -> None:
        """The phase is about to run: mark what it may break before it begins.

        A halt too: a cancelled one may still take effect, and an abandon must undo it.
        """
        if phase == "halt":
            self.halted = True
        if self.terms is not None and phase == ("move" if self.terms.mode == "direct" else "commit"):
            self.dirty = True

    def did(self, phase: str, terms: Terms | None = None) -> None:
        """The phase is done."""
        if phase in ("check", "abandon"):
            return
        if phase == "prepare":
            self.terms, self.done = terms, 0
        self.done += 1
        if phase == "commit":
            assert self.terms is not None
            self.version, self.dirty, self.discarded = self.terms.version, False, False
        elif phase == "go_on":
            self.terms, self.done, self.halted = None, 0, False

    def abandoned(self) -> bool:
        """The sync is abandoned; True if generation is to resume (with the committed version)."""
        self.terms, self.done = None, 0
        go_on = self.halted and not self.dirty
        self.halted = self.halted and self.dirty
        return go_on

    def discard(self) -> None:
        """The weights are gone (sleep level 2): what memory holds after a wake is not a version."""
        self.dirty = self.discarded = True

    def need_clean(self) -> None:
        """Raise if generation would read parts of two versions, or no weights at all."""
        if self.discarded:
            raise EngineDirty(
                f"dirty: a sleep at level 2 discarded the weights of version {self.version}",
                remedy='pool.wake(["weights"]), sync, then pool.wake(["kv_cache"])',
                version=self.version,
            )
        if self.dirty:
            raise EngineDirty(
                f"dirty: a sync after version {self.version} did not commit, so the weights are parts of two versions",
                remedy="sync again; generation goes on when a sync commits",
                version=self.version,
            )
