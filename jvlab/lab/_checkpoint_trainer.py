"""The helper process of `notify_update`: a trainer whose parameters are a checkpoint.

Reads one JSON object per line, replies with one per line, and ends when its input closes. Other output goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jvlab._errors import (
    ConfigError,
    JvlabError,
    LayoutError,
    ModelError,
    NonFiniteError,
    SyncError,
)
from jvlab._files import Plain
from jvlab.layout._checkpoint import DTYPES, read_header
from jvlab.wire.processes._identity import read_secret

# the first match; else 500
STATUS = ((ConfigError, 400), (LayoutError, 422), (NonFiniteError, 422))


def read_checkpoint(path: str) -> dict[str, np.ndarray]:
    """The tensors of a folder of safetensors files by name, memory-mapped."""
    folder = Path(path)
    if not folder.is_absolute():
        raise ModelError(
            f"path {path!r} is relative, but the gateway runs in a different folder",
            remedy="give the absolute path",
        )
    if not folder.is_dir():
        raise ModelError(
            f"{folder} is not a folder here",
            remedy="write it where the gateway sees it",
            path=path,
        )
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(
            f"{folder} holds no safetensors files",
            remedy="save with safetensors, then notify",
            path=path,
        )
    found: dict[str, np.ndarray] = {}
    for file in files:
        for name, array in _tensors(file):
            if name in found:
                raise ModelError(
                    f"{name} is in two files of {folder}",
                    remedy="remove what an older save left",
                )
            found[name] = array
    return found


def _tensors(file: Path) -> list[tuple[str, np.ndarray]]:
    try:
        entries = read_header(file)
        memory = np.memmap(file, np.uint8, mode="r")
        for entry in entries:
            if entry.dtype not in DTYPES:
                raise ValueError(f"its dtype {entry.dtype!r} is not known")
        return [(entry.name, entry.array(memory)) for entry in entries]
    except (ValueError, TypeError) as error:  # ModelError is a ValueError
        text = getattr(error, "message", str(error))
        raise ModelError(
            f"{file} is not a complete safetensors file: {text}",
            remedy="notify after the file is written and closed",
        ) from error


class Updater:
    """A trainer's view of a pool, without holding its lab; plans of earlier updates are cached."""

    def __init__(self, address: str, token: str, pool: str) -> None:
        from jvlab.lab._pool import Pool
        from jvlab.sync._connections import Connections
        from jvlab.wire import jvlab_pb2 as pb
        from jvlab.wire._client import Client

        self._client = Client(address, token)
        self._pool = Pool(
            self._client, self._client.call("Status", pb.PoolRequest(pool=pool))
        )
        self._connections = Connections()

    def update(self, fields: Mapping[str, Any]) -> Plain:
        """Sync the checkpoint at `fields["path"]`."""
        tensors = read_checkpoint(fields["path"])
        self._pool.status()  # replicas may have joined since
        options = dict(fields)
        del options["path"]
        transport = options.pop("transport", "auto")
        link = self._connections.connect(
            tensors,
            self._pool,
            "checkpoint",
            transport,
            options.get("mode", "direct"),
        )
        try:
            return _reply(link.sync(tensors, progress=False, **options))
        finally:
            link.close()

    def close(self) -> None:
        self._client.close()


def _reply(report: Any) -> Plain:
    digests: dict[str, dict[str, str]] = {}
    for (parameter, rank), value in report.digests.items():
        digests.setdefault(parameter, {})[str(rank)] = f"{value:016x}"
    return {
        "version": report.version,
        "verified": report.verified,
        "meaning": report.meaning,
        "bytes": report.bytes,
        "transport": report.transport,
        "seconds": dict(report.seconds),
        "digests": digests,
        "outcomes": [
            {
                "replica": o.replica,
                "state": o.state,
                "version": o.version,
                "error": o.error,
            }
            for o in report.outcomes
        ],
    }


def _failure(error: Exception) -> Plain:
    """The answer for an error; one that is not ours is a fault, whose traceback the log has."""
    if not isinstance(error, JvlabError):
        traceback.print_exception(error)
        error = SyncError(f"{type(error).__name__}: {error}")
    status = next((status for kind, status in STATUS if isinstance(error, kind)), 500)
    message = error.message
    outcomes = error.fields.get("outcomes")
    if isinstance(outcomes, dict):
        message += f" ({', '.join(f'{k}: {v}' for k, v in outcomes.items())})"
    return {
        "error": {
            "kind": type(error).__name__,
            "status": status,
            "message": message,
            "remedy": error.remedy,
        }
    }


def main() -> int:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not mix with replies
    order = json.loads(os.environ.pop("JVLAB_ORDER"))
    token = read_secret()
    updater: Updater | None = None
    try:
        for line in sys.stdin:
            try:
                updater = updater or Updater(order["address"], token, order["pool"])
                answer = updater.update(json.loads(line))
            # whatever it is, reply: the caller is not left waiting
            except Exception as error:
                answer = _failure(error)
            print(json.dumps(answer), file=out, flush=True)
    finally:
        # the gateway is gone: nothing may keep this process alive
        watchdog = threading.Timer(3.0, os._exit, [1])
        watchdog.daemon = True
        watchdog.start()
        if updater is not None:
            updater.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
