"""Pictures for notebooks/README.md: for each notebook one of its own committed outputs, as a small PNG.

python .ci/gallery.py          all
python .ci/gallery.py 05 06    some

A figure is scaled down; printed text is set in a monospaced font; two panels are the screenshots that README.md shows.
"""

from __future__ import annotations

import base64
import io
import json
import sys
from pathlib import Path
from typing import Any

import matplotlib
from PIL import Image, ImageDraw, ImageFont

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = ROOT / "notebooks"
FOLDER = NOTEBOOKS / "images" / "gallery"
PICTURES = {  # notebook: an image, or words of the cell whose output is its picture
    "01_first_rollout": "images/rollout.png",
    "02_where_tensors_live": "mapping.figure(",
    "03_stepping_a_sync": "images/stepper.png",
    "04_grpo_on_a_laptop": "run.plot()",
    "05_staleness": "throughput against staleness",
    "06_prefix_cache_and_groups": 'ylabel="tokens/s"',
    "07_topologies": "zip(both, (0, 1)",
    "08_when_things_break": "faults = jv.transport.Faults(flip=3)",
    "09_bring_your_own_model": "binding.confidence",
    "10_on_a_gpu": "engine asleep",
    "11_long_answers": "padded.plot(packed)",
    "12_experts_and_eight_bits": "share of a batch's choices",
    "13_a_real_task": "learns word problems",
    "14_what_if": "plan.figure()",
    "15_your_own_trainer": "Tunix trains, vLLM generates",
    "16_across_hosts": "how long until every replica",
}
WIDTH, HEIGHT, COLOURS = 600, 350, 64
LETTERS = 88  # of a line of text
FONT = Path(matplotlib.get_data_path(), "fonts", "ttf", "DejaVuSansMono.ttf")


def main(wanted: list[str]) -> int:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, where in PICTURES.items():
        if wanted and not name.startswith(tuple(wanted)):
            continue
        picture = (
            Image.open(NOTEBOOKS / where)
            if where.endswith(".png")
            else output(name, where)
        )
        target = FOLDER / f"{name}.png"
        small(picture).save(target, optimize=True)
        print(f"{target.relative_to(ROOT)}: {target.stat().st_size / 1024:.0f} KB")
    print(
        f"{sum(path.stat().st_size for path in FOLDER.glob('*.png')) / 1024:.0f} KB in all"
    )
    return 0


def output(name: str, words: str) -> Image.Image:
    """The figure, else the text, that the cell with these words put out."""
    cells: list[dict[str, Any]] = json.loads((NOTEBOOKS / f"{name}.ipynb").read_text())[
        "cells"
    ]
    outputs = [
        o for c in cells if words in "".join(c["source"]) for o in c.get("outputs", ())
    ]
    for found in outputs:
        if "image/png" in found.get("data", {}):
            return Image.open(io.BytesIO(base64.b64decode(found["data"]["image/png"])))
    text = "".join("".join(found.get("text", "")) for found in outputs)
    if not text.strip():
        raise SystemExit(f"{name}: no cell with {words!r} has a figure or a text")
    return typed([line for line in text.splitlines() if line.strip()])


def typed(lines: list[str]) -> Image.Image:
    """Text as a terminal would show it, at twice the size; long lines end in dots."""
    shown = [
        line if len(line) <= LETTERS else f"{line[: LETTERS - 1]}…"
        for line in lines[:20]
    ]
    # a letter is 0.6 of its height wide
    size = min(44, int((2 * WIDTH - 40) / (0.61 * max(map(len, shown)))))
    font, step = ImageFont.truetype(str(FONT), size), int(1.5 * size)
    sheet = Image.new("RGB", (2 * WIDTH, 40 + step * len(shown)), "white")
    draw = ImageDraw.Draw(sheet)
    for row, line in enumerate(shown):
        draw.text((20, 20 + step * row), line, "#24292f", font)
    return sheet


def small(picture: Image.Image) -> Image.Image:
    """Fitted into one size on white, the top of what is too tall, in few colours."""
    picture = picture.convert("RGBA")
    picture.thumbnail((WIDTH, HEIGHT * 4), Image.Resampling.LANCZOS)
    picture = picture.crop((0, 0, picture.width, min(picture.height, HEIGHT)))
    sheet = Image.new("RGBA", (WIDTH, HEIGHT), "white")
    sheet.paste(
        picture, ((WIDTH - picture.width) // 2, (HEIGHT - picture.height) // 2), picture
    )
    # thin lines keep their colours
    return sheet.convert("RGB").quantize(COLOURS, Image.Quantize.MAXCOVERAGE)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
