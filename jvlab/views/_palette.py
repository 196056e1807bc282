"""The one palette, by meaning: phases of a step, states, versions; used by panels, HTML, matplotlib and timelines."""

from __future__ import annotations

import json
from collections.abc import Sequence

# Okabe and Ito's palette, ordered so that neighbours are distinct for every kind of colour blindness.
SERIES = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#CC79A7",
    "#56B4E9",
    "#D55E00",
    "#F0E442",
    "#999999",
)
TONES = {"good": "#009E73", "wait": "#E69F00", "bad": "#D55E00", "idle": "#888888"}
PHASES = {
    "generate": "#0072B2",
    "train": "#E69F00",
    "sync": "#009E73",
    "reward": "#CC79A7",
    "score": "#56B4E9",
    "idle": "#999999",
}
# Dark blue is hard to see on black: what is drawn as a line or as text gets a lighter blue in a dark theme, and so does
# its neighbour, so that the two stay apart.
ON_DARK = {"#0072B2": "#4C9BE8", "#56B4E9": "#A6DDF8"}
# Text and axes of figures: legible on white and on black; in a page it becomes the page's own text colour. No other
# grey is this one, not even matplotlib's "gray".
NEUTRAL = "#7F8080"
# Versions: shades of generation's blue, light to full; none that a white or a black page would hide.
OLDEST = (0.68, 0.83, 0.93)
NEWEST = (0.0, 114 / 255, 178 / 255)


def version_colour(version: int, low: int, high: int) -> tuple[float, ...]:
    """The colour of a version among those from `low` to `high`."""
    share = (version - low) / max(high - low, 1)
    return tuple(a + (b - a) * share for a, b in zip(OLDEST, NEWEST, strict=True))


def hex_colour(colour: Sequence[float]) -> str:
    return "#" + "".join(f"{round(255 * float(v)):02x}" for v in colour[:3])


def javascript() -> str:
    """The palette for a panel's module: one constant."""
    names = {"series": SERIES, "tones": TONES, "phases": PHASES, "onDark": ON_DARK}
    return f"const PALETTE = {json.dumps(names)};"


def stylesheet() -> str:
    """The palette for stylesheets: one custom property per meaning. `:host` is the root where marimo draws widgets."""
    lines = [
        f"--jv-{name}:{colour}"
        for name, colour in (
            TONES | {f"phase-{n}": c for n, c in PHASES.items()}
        ).items()
    ]
    return f":root,:host{{{';'.join(lines)}}}"
