"""A worker extension that fakes a rank's part of an ipc sync without a GPU: nothing written, constant digests."""

from __future__ import annotations

from typing import Any

import numpy as np

from jvlab.engine.worker._extension import WorkerExtension

NAMES, DIGESTS = ["a", "b"], [7, 9]
SECONDS = 4321.0  # `bucket_seconds` that marks a sync to be faked


class Extension(WorkerExtension):
    """The real extension, except for syncs with that mark."""

    def jv_prepare(self, terms: dict[str, Any]) -> dict[str, Any]:
        fake = terms["bucket_seconds"] == SECONDS
        self.__dict__["_jv_fake"] = fake
        return (
            {"rank": 0, "need": 0, "handles": []}
            if fake
            else super().__getattr__("jv_prepare")(terms)
        )

    def jv_commit(self) -> dict[str, Any]:
        return (
            {"rank": 0, "bytes": 8}
            if self.__dict__.get("_jv_fake")
            else super().__getattr__("jv_commit")()
        )

    def jv_move(self, terms: dict[str, Any] | None = None) -> dict[str, Any]:
        fake = terms is not None and terms["bucket_seconds"] == SECONDS
        self.__dict__["_jv_fake"] = fake
        return (
            {"rank": 0, "seconds": 1e-6}
            if fake
            else super().__getattr__("jv_move")(terms)
        )

    def jv_verify(self, wait: float) -> dict[str, Any]:
        if not self.__dict__.get("_jv_fake"):
            return super().__getattr__("jv_verify")(wait)
        values = np.array(DIGESTS, np.uint64).tobytes()
        return {
            "rank": 0,
            "values": values,
            "seconds": {"digest": 1e-6},
            "bytes": 8,
            "done": True,
        }
