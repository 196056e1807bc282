"""Workers that answer the core's part of a sync by ipc without a card: nothing is written, digests are constants."""

from __future__ import annotations

from typing import Any

import numpy as np

from jvlab.worker._extension import WorkerExtension

NAMES, HOLDS = ["a", "b"], [7, 9]
SECONDS = 4321.0  # of a sync that is meant for the stand-in, as its `bucket_seconds`


class Extension(WorkerExtension):
    """jvlab's own, except for syncs with that mark."""

    def jv_prepare(self, terms: dict[str, Any]) -> dict[str, Any]:
        stands_in = terms["bucket_seconds"] == SECONDS
        self.__dict__["_jv_stands_in"] = stands_in
        return {"rank": 0, "need": 0, "handles": []} if stands_in else super().jv_prepare(terms)

    def jv_commit(self) -> dict[str, Any]:
        return {"rank": 0, "bytes": 8} if self.__dict__.get("_jv_stands_in") else super().jv_commit()

    def jv_move(self, terms: dict[str, Any] | None = None) -> dict[str, Any]:
        stands_in = terms is not None and terms["bucket_seconds"] == SECONDS
        self.__dict__["_jv_stands_in"] = stands_in
        return {"rank": 0, "seconds": 1e-6} if stands_in else super().jv_move(terms)

    def jv_verify(self, wait: float) -> dict[str, Any]:
        if not self.__dict__.get("_jv_stands_in"):
            return super().jv_verify(wait)
        values = np.array(HOLDS, np.uint64).tobytes()
        return {"rank": 0, "values": values, "seconds": {"digest": 1e-6}, "bytes": 8, "done": True}
