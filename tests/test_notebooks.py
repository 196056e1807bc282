"""The committed notebooks: executed, clean, fit to be compared; and the gate that compares them does bite."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
# cells whose outputs nbval compares: fewer than that, and a notebook would test less than it did
FLOORS = {
    "01_first_rollout": 9,
    "02_where_tensors_live": 10,
    "03_stepping_a_sync": 12,
    "04_grpo_on_a_laptop": 7,
    "05_staleness": 4,
    "06_prefix_cache_and_groups": 4,
    "07_topologies": 4,
    "08_when_things_break": 13,
    "09_bring_your_own_model": 9,
    "10_on_a_gpu": 5,
    "11_long_answers": 8,
    "12_experts_and_eight_bits": 16,
    "13_a_real_task": 7,
    "14_what_if": 6,
    "15_your_own_trainer": 3,
    "16_across_hosts": 6,
}
STATE = "application/vnd.jupyter.widget-state+json"
VIEW = "application/vnd.jupyter.widget-view+json"
PRIVATE = re.compile(
    r"/(root|home|tmp|Users|work|private|var/folders)/|\b\d+\.\d+\.\d+\.\d+:\d+"
    r"|Bearer |\btoken=|JVLAB_TOKEN|api[_-]?key",
    re.IGNORECASE,
)
RANDOM = re.compile(r"[A-Za-z0-9_-]{43,}")  # as long as a lab's token
# whole lines, and the last
PICTURE = re.compile(
    r"data:image/png;base64,\s?(?:[A-Za-z0-9+/]{60,}\s)*[A-Za-z0-9+/=]+"
)
each = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def code_cells(path: Path) -> list[dict[str, Any]]:
    return [
        cell
        for cell in json.loads(path.read_text())["cells"]
        if cell["cell_type"] == "code"
    ]


def source(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


def is_compared(cell: dict[str, Any]) -> bool:
    """Whether nbval compares what it puts out."""
    return "nbval-ignore-output" not in cell["metadata"].get("tags", [])


def is_lesson(cell: dict[str, Any]) -> bool:
    """A cell that is meant to raise."""
    return "raises-exception" in cell["metadata"].get("tags", [])


def texts(cell: dict[str, Any]) -> list[str]:
    """Everything readable that a cell put out; pictures are bytes in base64, in which any word can occur."""
    found = []
    for output in cell["outputs"]:
        found += ["".join(output.get("text", ""))]
        found += [
            "".join(v)
            for kind, v in output.get("data", {}).items()
            if kind.startswith("text/")
        ]
        found += [output.get("evalue", ""), *output.get("traceback", [])]
    return [PICTURE.sub("", text) for text in found]


def test_all_of_them_are_here():
    assert [path.stem for path in NOTEBOOKS] == sorted(FLOORS)


@each
def test_every_cell_was_executed_in_order(path: Path):
    cells = code_cells(path)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))


@each
def test_errors_are_lessons_and_lessons_are_errors(path: Path):
    for cell in code_cells(path):
        raised = any(output["output_type"] == "error" for output in cell["outputs"])
        assert raised == is_lesson(cell), source(cell)


@each
def test_enough_outputs_are_compared(path: Path):
    compared = [c for c in code_cells(path) if c["outputs"] and is_compared(c)]
    assert len(compared) >= FLOORS[path.stem]
    text = path.read_text().lower().replace("_", "-")
    assert "nbval-skip" not in text, "a cell that is not run tests nothing"


@each
def test_what_a_reader_sees_is_for_the_reader(path: Path):
    """Tags for nbval are in metadata; facts are numbers, not "...: True"; names are public; cards live."""
    for cell in code_cells(path):
        assert "NBVAL" not in source(cell), (
            "the tag nbval-ignore-output belongs into the cell's metadata"
        )
        assert not re.search(
            r"^\s*(from|import)\s+jvlab[\w.]*\._|import\s+_", source(cell), re.MULTILINE
        ), source(cell)
        for text in texts(cell):
            assert not re.search(r":\s+True\b(?!,|})", text), text
            assert not re.match(r"(Pool|Lab)\(.*closed", text) or re.search(
                r"\.close\(\)", source(cell)
            ), text


@each
def test_compared_outputs_are_plain_text(path: Path):
    """HTML and pictures of an object change with its look; facts are printed."""
    for cell in code_cells(path):
        if is_compared(cell):
            kinds = {
                kind for output in cell["outputs"] for kind in output.get("data", {})
            }
            assert kinds <= {"text/plain"}, source(cell)


@each
def test_outputs_name_no_machine_and_no_secret(path: Path):
    for cell in code_cells(path):
        for text in texts(cell):
            assert not PRIVATE.search(text), PRIVATE.search(text)
            assert len(platform.node()) < 4 or platform.node() not in text
            assert not [word for word in RANDOM.findall(text) if len(set(word)) > 20], (
                text[:400]
            )


@each
def test_it_is_valid_and_so_are_its_widgets(path: Path):
    import nbformat  # takes seconds

    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    state = notebook.metadata.get("widgets", {STATE: {"state": {}}})[STATE]["state"]
    shown = [
        output["data"][VIEW]["model_id"]
        for cell in code_cells(path)
        for output in cell["outputs"]
        if VIEW in output.get("data", {})
    ]
    assert set(shown) <= set(state), (
        "a widget without its state shows 'model not found'"
    )


@each
def test_links_lead_somewhere(path: Path):
    for cell in json.loads(path.read_text())["cells"]:
        if cell["cell_type"] == "markdown":
            for target in re.findall(r"\]\(([^)#]+)", source(cell)):
                assert target.startswith("http") or (path.parent / target).exists(), (
                    target
                )


def test_the_gallery_shows_each_of_them_with_a_picture():
    gallery = (ROOT / "notebooks" / "README.md").read_text()
    pictures = ROOT / "notebooks" / "images" / "gallery"
    for path in NOTEBOOKS:
        assert f"(images/gallery/{path.stem}.png)]({path.name})" in gallery, path.stem
        assert (pictures / f"{path.stem}.png").read_bytes()[:4] == b"\x89PNG"
    images = [
        path
        for path in (ROOT / "notebooks").rglob("*.png")
        if ".ipynb_checkpoints" not in path.parts
    ]
    # PANELS.md: before and after
    compared = [path for path in images if path.parent.name == "panels"]
    assert sum(path.stat().st_size for path in compared) < 1 << 20
    assert sum(path.stat().st_size for path in images) < 2 << 20


@pytest.mark.slow
def test_the_gate_bites(tmp_path: Path):
    """One altered output of a notebook that needs no engine: nbval fails that cell, and only in the altered copy."""
    original = ROOT / "notebooks" / "10_on_a_gpu.ipynb"
    (tmp_path / "notebooks").mkdir()
    shutil.copytree(ROOT / "tests" / "baselines", tmp_path / "tests" / "baselines")
    shutil.copy(original, tmp_path / "notebooks" / "good.ipynb")
    notebook = json.loads(original.read_text())
    cell = next(
        c
        for c in notebook["cells"]
        if c["cell_type"] == "code" and "RECORDED on" in source(c)
    )
    text = "".join(cell["outputs"][0]["text"])
    assert "H200" in text
    cell["outputs"][0]["text"] = text.replace("H200", "H201")
    (tmp_path / "notebooks" / "bad.ipynb").write_text(json.dumps(notebook))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--nbval",
        "--nbval-current-env",
        "-p",
        "no:cacheprovider",
        "-W",
        "ignore",
        "-q",
        "-rA",
        "notebooks",
    ]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=500
    )
    failed = re.findall(r"^FAILED (\S+)", done.stdout, re.MULTILINE)
    assert done.returncode == 1, done.stdout[-3000:]
    assert len(failed) == 1, done.stdout[-3000:]
    assert "bad.ipynb" in failed[0]
    assert "H201" in done.stdout
