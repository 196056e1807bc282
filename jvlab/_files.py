"""Files: untrusted small ones are read in bounded memory; what goes wrong, also in writing, becomes a jvlab error."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jvlab._errors import ConfigError, JvlabError, StorageError

Plain = dict[str, Any]  # plain values, as they go between processes
DEEPEST = 100  # nesting of lists and objects
PARTS = 8_000_000  # values in total: about half a gigabyte at worst
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
DENIED = (errno.EROFS, errno.EACCES)
NO_FOLDER = (errno.ENOTDIR, errno.EEXIST, errno.EISDIR)
# digits; Python's own limit for an int is 4300, and a longer float is infinite
LONGEST_NUMBER = 400


def read_bounded(
    path: str | os.PathLike[str],
    limit: int,
    what: str,
    error: type[ConfigError] = ConfigError,
) -> bytes:
    """A whole file of at most `limit` bytes; its size is checked before it is read."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        text = file.read(limit + 1) if size <= limit else b""
    if size > limit or len(text) > limit:
        raise error(
            f"{os.fspath(path)}, {what}, has {max(size, len(text)):,} bytes, more than {limit:,}",
            remedy="is this the right file?",
            path=os.fspath(path),
        )
    return text


def parse_json(text: bytes, parts: int = PARTS) -> Any:
    """Parse JSON, with NaN and Infinity as Python writes them; ValueError for anything else.

    Also for too deep nesting, too long numbers or too many values: a byte of text can become 50 bytes of objects.
    """
    if (
        len(text) > parts
        and (count := sum(map(text.count, (b",", b"[", b"{")))) > parts
    ):
        raise ValueError(f"{count:,} values, more than {parts:,}")
    try:
        value = json.loads(text, parse_int=_int)
    except RecursionError:
        raise ValueError(f"nested more than {DEEPEST} deep") from None
    if max(text.count(b"["), text.count(b"{")) > DEEPEST // 2:
        _check_depth(value)
    return value


def parse_object(text: bytes, parts: int = PARTS) -> dict[str, Any]:
    """As `parse_json`, but the text must hold an object."""
    value = parse_json(text, parts)
    if not isinstance(value, dict):
        raise ValueError(
            f"it holds a value of type {type(value).__name__}, not an object"
        )
    return value


def read_json_object(
    path: str | os.PathLike[str],
    limit: int,
    what: str,
    error: type[ConfigError] = ConfigError,
    remedy: str = "",
) -> dict[str, Any]:
    """The object in a JSON file. FileNotFoundError passes through; anything else is raised as `error` with the path."""
    text = read_bounded(path, limit, what, error)
    try:
        return parse_object(text)
    except ValueError as problem:
        raise error(
            f"{os.fspath(path)}, {what}, cannot be read: {problem}",
            remedy=remedy or "it was cut off or altered: write or fetch it again",
            path=str(Path(path)),
        ) from problem


def _int(text: str) -> int:
    if len(text) > LONGEST_NUMBER:
        raise ValueError(f"a number of {len(text):,} digits")
    return int(text)


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(DEEPEST):
        parts = [part.values() if isinstance(part, dict) else part for part in level]
        level = [
            child for part in parts for child in part if isinstance(child, (dict, list))
        ]
        if not level:
            return
    raise ValueError(f"nested more than {DEEPEST} deep")


@contextlib.contextmanager
def writing(path: str | os.PathLike[str], what: str) -> Iterator[None]:
    """Raises StorageError for whatever prevents writing `what` to this path."""
    try:
        yield
    except JvlabError:
        raise
    except Exception as error:
        number = (
            error.errno or errno.EIO
            if isinstance(error, OSError)
            else _errno_in(str(error))
        )
        if number is None:
            raise
        raise _storage_error(number, Path(path), what) from error


def _errno_in(text: str) -> int | None:
    """Libraries that write files by themselves (Orbax, safetensors) say what went wrong in words alone."""
    return next(
        (number for number in (*FULL, *DENIED) if os.strerror(number) in text), None
    )


def _storage_error(number: int, path: Path, what: str) -> StorageError:
    why = os.strerror(number)
    remedy = "choose a folder that can be written"
    if number in FULL:
        remedy = "make room, or choose a folder on another disk; what was written before is kept"
    elif number in NO_FOLDER:
        file = next(
            (p for p in (path, *path.parents) if p.exists() and not p.is_dir()), path
        )
        why = f"{file} is a file, not a folder"
        remedy = "choose another folder, or move that file away"
    return StorageError(
        f"{what} cannot be written to {path}: {why}",
        remedy=remedy,
        path=str(path),
        number=number,
    )
