"""Numbers for people: bytes."""

from __future__ import annotations


def human_bytes(n: float) -> str:
    """1536 → `1.5 KB`; decimal units, as links are quoted in."""
    for unit in ("B", "KB", "MB", "GB"):
        if abs(n) < 1000:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1000
    return f"{n:.1f} TB"
