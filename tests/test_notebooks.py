"""The committed notebooks: executed, clean, and fit to be compared."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))


def code_cells(path: Path) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_cell_was_executed_in_order_and_without_error(path: Path):
    assert [cell["execution_count"] for cell in code_cells(path)] == list(range(1, len(code_cells(path)) + 1))
    kinds = [output["output_type"] for cell in code_cells(path) for output in cell["outputs"]]
    assert "error" not in kinds


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_enough_outputs_are_compared(path: Path):
    compared = [
        cell for cell in code_cells(path) if cell["outputs"] and "NBVAL_IGNORE_OUTPUT" not in "".join(cell["source"])
    ]
    assert len(compared) >= 4


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_name_no_machine(path: Path):
    text = json.dumps([cell["outputs"] for cell in code_cells(path)])
    assert not re.search(r"/(root|home|tmp|Users)/|127\.0\.0\.1:\d+|Bearer|token=", text)
