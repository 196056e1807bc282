"""The adapter that a link syncs into this engine: which requests use it, and which versions are its own."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import Any

from jvlab.engine import _vllm

LINKED_PREFIX = "adapter."  # of an adapter's memory in a plan; as in engine/tracing/_lora_slots.py, which imports torch
NAME = "jvlab-link"


class LinkedAdapter:
    """Once an adapter's link was opened, requests that name no adapter use it. It is zero until its first sync.

    So a request in flight goes on with each version that a sync commits, and its spans say so, as with base weights. A
    request that began before the link was opened, or that names an adapter of a folder, computes without it:
    `spans` gives it the version of the base. A sync of the base makes the adapter zero again.
    """

    def __init__(self) -> None:
        self.request: Any = None  # vLLM's LoRARequest
        self.open = False  # whether the open link is an adapter's
        self._base_versions = [0]  # versions of the base; those in between are the adapter's

    def opened(self, number: int, version: int) -> None:
        """A link to the adapter was opened, while the engine holds this version."""
        if self.request is None:
            self.request = _vllm.lora_request(NAME, number, NAME)
            self._base_versions = [version]
        self.open = True

    def committed(self, version: int) -> None:
        """A sync of the open link made this version."""
        if self.request is not None and not self.open:
            self._base_versions.append(version)

    def spans(self, found: Iterable[Any], adapted: bool) -> list[tuple[int, int, int]]:
        """(version, start, stop) of a sample, given vLLM's spans, and whether it was made with the linked adapter."""
        out: list[tuple[int, int, int]] = []
        for span in found:
            version = int(span.version) if adapted or self.request is None else self._base(int(span.version))
            if out and out[-1][0] == version and out[-1][2] == span.start:
                out[-1] = version, out[-1][1], span.end
            else:
                out.append((version, span.start, span.end))
        return out

    def _base(self, version: int) -> int:
        at = bisect_right(self._base_versions, version)
        return self._base_versions[at - 1] if at else version
