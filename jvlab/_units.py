"""Numbers for people: bytes, seconds, how many."""

from __future__ import annotations


def human_bytes(n: float) -> str:
    """1536 → `1.5 KB`; decimal units, as link speeds are quoted in."""
    for unit in ("B", "KB", "MB", "GB"):
        if abs(n) < 1000:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1000
    return f"{n:.1f} TB"


def human_seconds(seconds: float) -> str:
    """0.0123 → `12.3 ms`; 75 → `1 min 15 s`."""
    if 0 < seconds < 1e-6:
        return f"{seconds * 1e9:.0f} ns"
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    if seconds < 1:
        return f"{seconds * 1e3:.1f} ms"
    if seconds < 60:
        return f"{seconds:.2f} s"
    return f"{int(seconds // 60)} min {int(seconds % 60)} s"


def how_many(number: int, one: str, several: str = "") -> str:
    """1 → `1 link`; 1200 → `1,200 links`. `several`: where it is not just an s more."""
    return f"{number:,} {one if number == 1 else several or f'{one}s'}"
