"""What one replica's weights hold while a sync runs over it: a model without I/O, for fakes and the model check."""

from __future__ import annotations

from dataclasses import dataclass

from jvlab.wire._sync_words import NEXT, STAGE_AFTER, Phase, Stage


class Broken(Exception):
    """A phase failed."""


class Differs(Broken):
    """VERIFY found other bits than the trainer's."""


@dataclass
class ReplicaMemory:
    """`content` is the version whose bits are live, None for a mixture; `version` is what the replica says it holds."""

    version: int = 0
    content: int | None = 0
    shadow: int | None = None
    dirty: bool = False
    halted: bool = False
    stage: Stage = Stage.IDLE
    mode: str = ""
    target: int = -1

    def prepare(self, version: int, mode: str) -> None:
        if self.stage is not Stage.IDLE:
            raise Broken(f"version {self.target} is still {self.stage.value}")
        if version <= self.version:
            raise Broken(f"version {version} is not newer than {self.version}")
        self.target, self.mode, self.stage, self.shadow = (
            version,
            mode,
            Stage.PREPARED,
            None,
        )

    def run(self, phase: Phase, arrived: bool = True) -> None:
        """One phase after PREPARE. `arrived`: whether all bits are there by VERIFY."""
        if phase is Phase.ABANDON:
            self.stage, self.shadow, self.halted = Stage.IDLE, None, self.dirty
            return
        if phase is Phase.CHECK:
            if self.content != self.version:
                raise Differs("live memory differs")
            return
        if NEXT.get((self.mode, self.stage)) is not phase:
            raise Broken(f"{phase.name} while {self.stage.value}")
        if phase is Phase.HALT:
            self.halted = True
        elif phase is Phase.MOVE and self.mode == "direct":
            self.dirty, self.content = True, None
        elif phase is Phase.VERIFY:
            self._verify(arrived)
        elif phase is Phase.COMMIT:
            self.content = self.shadow if self.mode == "staged" else self.content
            self.version, self.dirty, self.shadow = self.target, False, None
        elif phase is Phase.GO_ON:
            self.halted = False
        self.stage = STAGE_AFTER[phase]

    def _verify(self, arrived: bool) -> None:
        if not arrived:
            raise Differs("w differs")
        if self.mode == "staged":
            self.shadow = self.target
        else:
            self.content = self.target

    @property
    def state(self) -> str:
        """Its own word for where it stands."""
        if self.stage is Stage.COMMITTED:
            return "committed"
        return (
            "ready"
            if self.stage is not Stage.IDLE
            else "dirty"
            if self.dirty
            else "old"
        )
