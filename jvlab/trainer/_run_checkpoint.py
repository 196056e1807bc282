"""Checkpoints of a run: parameters and optimiser with Orbax, the rest as JSON; written atomically, by one rename."""

from __future__ import annotations

import dataclasses
import errno
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jvlab._errors import ConfigError, MissingDependency, StorageError
from jvlab._files import read_json_object, writing
from jvlab._units import human_bytes
from jvlab.trainer._step import TrainState

FORMAT = 1
WHAT = "a checkpoint of the run"  # in errors
LONGEST_POSITION = 1 << 26  # bytes; includes the task's state


@dataclass(frozen=True)
class Position:
    """The position of a run as plain values: everything but the arrays."""

    step: int  # steps done, and the number of the next one
    version: int  # the trainer's version
    seed: int  # of the run; every other seed is derived from it and the group's number
    groups: int  # number of the next new group
    # (group, attempt) in progress, to be regenerated after a resume
    pending: tuple[tuple[int, int], ...] = ()
    task: Mapping[str, Any] = field(default_factory=dict)
    updates: int = 0
    skipped: int = 0


class Checkpoints:
    """The checkpoints in a run's folder; the newest `keep` are kept (None: all)."""

    def __init__(self, folder: str | os.PathLike[str], keep: int | None = 3) -> None:
        self.folder = Path(folder).absolute() / "checkpoints"
        self._keep = keep
        self._orbax: Any = None

    def _checkpointer(self) -> Any:
        if self._orbax is None:
            try:
                import orbax.checkpoint as ocp
            except ImportError as error:
                raise MissingDependency(
                    "checkpoints of a run need orbax-checkpoint",
                    remedy="pip install orbax-checkpoint, or jv.grpo(..., checkpoint_every=0)",
                ) from error
            # Orbax logs every file there
            logging.getLogger("absl").setLevel(logging.ERROR)
            self._orbax = ocp.StandardCheckpointer()
        return self._orbax

    def prepare(self, state: TrainState) -> None:
        """Raise StorageError if a checkpoint of this state cannot be written here."""
        import jax

        arrays = jax.tree.leaves((state.params, state.opt_state))
        needed = sum(array.nbytes for array in arrays)
        with writing(self.folder, WHAT):
            self.folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=self.folder).close()
            free = shutil.disk_usage(self.folder).free
        if free < needed:
            raise StorageError(
                f"one checkpoint takes {human_bytes(needed)}, but {self.folder} has room for {human_bytes(free)}",
                remedy="make room, choose a folder on another disk, or checkpoint_every=0",
                path=str(self.folder),
                number=errno.ENOSPC,
            )

    def save(
        self,
        state: TrainState,
        position: Position,
        write_arrays: Callable[[TrainState, Path], None] | None = None,
    ) -> Path:
        """Write a checkpoint; it is complete on disk when this returns. If it fails, earlier ones are as before.

        `write_arrays` writes the arrays instead of `self.write_arrays`, which every process that holds some must call.
        """
        target = self.folder / f"step-{position.step:06d}"
        fresh = self.folder / f"{target.name}.part"
        try:
            with writing(target, WHAT):
                shutil.rmtree(fresh, ignore_errors=True)
                fresh.mkdir(parents=True)
                (write_arrays or self.write_arrays)(state, fresh / "state")
                _write_position(position, fresh)
                # exists if the run was resumed from an earlier step
                shutil.rmtree(target, ignore_errors=True)
                os.rename(fresh, target)
        except BaseException:
            shutil.rmtree(fresh, ignore_errors=True)
            raise
        for old in self.paths()[: -self._keep] if self._keep else ():
            shutil.rmtree(old, ignore_errors=True)
        return target

    def write_arrays(self, state: TrainState, path: Path) -> None:
        """Write the shards that this process holds; Orbax waits for those of the others."""
        orbax = self._checkpointer()
        orbax.save(path, {"params": state.params, "optimizer": state.opt_state})
        orbax.wait_until_finished()

    def paths(self) -> list[Path]:
        """The complete checkpoints, oldest first."""
        written = self.folder.glob("step-*/position.json")
        return sorted(file.parent for file in written if file.parent.suffix != ".part")

    def position(self, path: Path) -> Position:
        """The position that a checkpoint stores."""
        remedy = f"remove {path.name}: the checkpoint before it is then used"
        try:
            fields = read_json_object(
                path / "position.json",
                LONGEST_POSITION,
                "a run's position",
                remedy=remedy,
            )
            if fields.pop("format") != FORMAT:
                raise ConfigError(
                    f"{path} has a different format",
                    remedy="resume with the jvlab version that wrote it",
                )
            kinds = {field.name: int for field in dataclasses.fields(Position)}
            for name, kind in {**kinds, "pending": list, "task": dict}.items():
                if type(fields.get(name, kind())) is not kind:
                    raise TypeError(f"{name} is {fields[name]!r}")
            fields["pending"] = tuple((int(i), int(a)) for i, a in fields["pending"])
            return Position(**fields)
        except ConfigError:
            raise
        except (OSError, KeyError, TypeError, ValueError, OverflowError) as error:
            raise ConfigError(
                f"{path} holds no valid position: {error}",
                remedy=remedy,
                path=str(path),
            ) from error

    def latest(self) -> Path | None:
        """The newest complete checkpoint."""
        return max(self.paths(), default=None)

    def load(self, path: Path, like: TrainState) -> TrainState:
        """The state, with the shapes, dtypes and shardings of `like`."""
        import jax

        place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
        wanted = jax.tree.map(
            place, {"params": like.params, "optimizer": like.opt_state}
        )
        orbax = self._checkpointer()
        try:
            # the tree of what it holds, with shapes instead of values
            kept = orbax.metadata(path / "state")
            kept = getattr(kept, "item_metadata", kept)
            kept = getattr(kept, "tree", kept)
            _check_shapes(kept["params"], wanted["params"])
            found = orbax.restore(path / "state", wanted)
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{path} does not fit this policy and optimiser: {str(error)[:300]}",
                remedy="resume with the model and the optimiser that the run was started with",
                path=str(path),
            ) from error
        position = self.position(path)
        return TrainState(
            found["params"], found["optimizer"], position.updates, position.skipped
        )

    def close(self) -> None:
        """End Orbax's threads."""
        if self._orbax is not None:
            self._orbax.close()
            self._orbax = None


def _write_position(position: Position, folder: Path) -> None:
    text = json.dumps({"format": FORMAT, **vars(position)}, indent=1)
    with open(folder / "position.json", "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _check_shapes(kept: Any, wanted: Any) -> None:
    """Raise ValueError before anything is read: Orbax leaves tasks behind if it fails in the middle."""
    import jax

    shapes = lambda tree: {
        jax.tree_util.keystr(k): tuple(v.shape)
        for k, v in jax.tree_util.tree_leaves_with_path(tree)
    }
    ours = shapes(wanted)
    theirs = shapes(kept)
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            raise ValueError(
                f"{name} is {theirs.get(name, 'missing')} there and {ours.get(name, 'missing')} here"
            )
