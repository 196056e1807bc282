"""The helper of `notify_update`: `python -m jvlab.control._http_updater`, a trainer whose parameters are a checkpoint.

Reads one JSON object a line, answers one a line, ends when its input closes. Everything else it prints goes to stderr.
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

from jvlab._errors import ConfigError, JvlabError, LayoutError, MissingDependency, ModelError

STATUS = ((ConfigError, 400), (LayoutError, 422))  # the first that fits; else 500
BUCKET_MIB = 16.0
NUMPY = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U8": "u1",
    "BOOL": "?",
}  # fmt: skip
EXTENDED = {"BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}
OPTIONS = ("version", "mode", "verify", "require", "pause", "kv", "timeout")


def read_checkpoint(path: str) -> dict[str, np.ndarray]:
    """The tensors of a folder of safetensors files by name, mapped into memory, not read."""
    folder = Path(path)
    if not folder.is_absolute():
        raise ModelError(f"path {path!r} is relative, and the gateway has another folder", remedy="give the whole path")
    if not folder.is_dir():
        raise ModelError(f"{folder} is no folder here", remedy="write it where the gateway sees it", path=path)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{folder} holds no safetensors files", remedy="save with safetensors, then notify", path=path)
    found: dict[str, np.ndarray] = {}
    for file in files:
        for name, array in _tensors(file):
            if name in found:
                raise ModelError(f"{name} is in two files of {folder}", remedy="remove what an older save left")
            found[name] = array
    return found


def _tensors(file: Path) -> list[tuple[str, np.ndarray]]:
    try:
        memory = np.memmap(file, np.uint8, mode="r")
        size = int.from_bytes(memory[:8].tobytes(), "little")
        header = json.loads(memory[8 : 8 + size].tobytes())
        return [(name, _tensor(memory[8 + size :], entry)) for name, entry in header.items() if name != "__metadata__"]
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise ModelError(
            f"{file} is no whole safetensors file: {error}", remedy="notify after the file is written and closed"
        ) from error


def _tensor(data: np.ndarray, entry: Mapping[str, Any]) -> np.ndarray:
    begin, end = entry["data_offsets"]
    if not 0 <= begin <= end <= len(data):
        raise ValueError(f"it ends at byte {len(data)} of its data, and a tensor at {end}")
    return data[begin:end].view(_dtype(entry["dtype"])).reshape(entry["shape"])


def _dtype(code: str) -> np.dtype[Any]:
    if code in NUMPY:
        return np.dtype(NUMPY[code])
    if code not in EXTENDED:
        raise ValueError(f"its dtype {code!r} is not known")
    try:
        import ml_dtypes
    except ImportError as error:
        raise MissingDependency(f"{code} needs ml_dtypes: {error}", remedy="pip install ml_dtypes") from error
    return np.dtype(getattr(ml_dtypes, EXTENDED[code]))


class Updater:
    """A pool as a trainer sees it, without holding its lab; plans of earlier updates are kept."""

    def __init__(self, address: str, token: str, pool: str) -> None:
        from jvlab._pool import Pool
        from jvlab.control import jvlab_pb2 as pb
        from jvlab.control._client import Client

        self._client = Client(address, token)
        self._version: str = self._client.call("Describe", pb.DescribeRequest()).version
        self._pool = Pool(self._client, self._client.call("Status", pb.PoolRequest(pool=pool)))
        self._agreements: dict[Any, Any] = {}

    def update(self, said: Mapping[str, Any]) -> dict[str, Any]:
        """One sync of the checkpoint that was written."""
        from jvlab import _connect
        from jvlab._link import Link

        tensors = read_checkpoint(said["path"])
        self._pool.status()  # a replica that came since
        agreed = _connect.negotiate(
            tensors, self._pool, "checkpoint", said.get("transport", "auto"), BUCKET_MIB, {}, self._agreements,
            self._version, same_host=True,
        )  # fmt: skip
        options = {name: said[name] for name in OPTIONS if name in said}
        link = Link(self._pool, agreed, options.get("mode", "direct"), None, lambda _: None)
        try:
            return _answer(link.sync(tensors, progress=False, **options))
        finally:
            link.close()

    def close(self) -> None:
        self._client.close()


def _answer(report: Any) -> dict[str, Any]:
    digests: dict[str, dict[str, str]] = {}
    for (parameter, rank), value in report.digests.items():
        digests.setdefault(parameter, {})[str(rank)] = f"{value:016x}"
    return {
        "version": report.version, "verified": report.verified, "bytes": report.bytes, "transport": report.transport,
        "seconds": dict(report.seconds), "digests": digests,
        "outcomes": [
            {"replica": o.replica, "state": o.state, "version": o.version, "error": o.error} for o in report.outcomes
        ],
    }  # fmt: skip


def _failure(error: JvlabError) -> dict[str, Any]:
    status = next((status for kind, status in STATUS if isinstance(error, kind)), 500)
    outcomes = error.fields.get("outcomes")
    states = f" ({', '.join(f'{k}: {v}' for k, v in outcomes.items())})" if isinstance(outcomes, dict) else ""
    message = f"{error.message}{states}"
    return {"error": {"kind": type(error).__name__, "status": status, "message": message, "remedy": error.remedy}}


def main() -> int:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints is no answer
    order, token = json.loads(os.environ.pop("JVLAB_ORDER")), os.environ.pop("JVLAB_TOKEN")
    updater: Updater | None = None
    try:
        for line in sys.stdin:
            try:
                updater = updater or Updater(order["address"], token, order["pool"])
                answer = updater.update(json.loads(line))
            except JvlabError as error:
                answer = _failure(error)
            except Exception as error:  # answered, so that whoever asked is not left waiting; the log has the rest
                traceback.print_exc()
                text = f"{type(error).__name__}: {error}"
                answer = {"error": {"kind": "SyncError", "status": 500, "message": text, "remedy": ""}}
            print(json.dumps(answer), file=out, flush=True)
    finally:
        last_word = threading.Timer(3.0, os._exit, [1])  # the gateway has gone: nothing may keep this alive
        last_word.daemon = True
        last_word.start()
        if updater is not None:
            updater.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
