"""`make notebooks`: executes notebooks in place, each in a fresh kernel, and saves what may be committed.

python .ci/notebooks.py                        every notebook
python .ci/notebooks.py notebooks/02_*.ipynb   some of them

A notebook is saved only if all its cells ran. Live widgets are saved as their static face: their state belongs to a
kernel that is gone, and a viewer without one would show "model not found". Cards of pools and labs are saved as they
were when they lived, not as `lab.close()` leaves them.
"""

from __future__ import annotations

import copy
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

# a line about imports would be there on a slow machine only
os.environ.setdefault("JVLAB_IMPORTS", "quiet")
FOLDER = Path(__file__).resolve().parent.parent / "notebooks"
WIDGET = "application/vnd.jupyter.widget-view+json"
CELL_SECONDS = 3600  # a cell that waits for a run of real weights
CLOSES = re.compile(r"^(lab|local|pool)\.close\(\)", re.MULTILINE)


def main(arguments: list[str]) -> int:
    paths = [Path(a) for a in arguments] or sorted(FOLDER.glob("*.ipynb"))
    if not paths:
        print(f"no notebooks in {FOLDER.name}/", file=sys.stderr)
        return 1
    began = time.perf_counter()
    failed = [path for path in paths if not execute(path)]
    print(
        f"{len(paths) - len(failed)} of {len(paths)} notebooks, {time.perf_counter() - began:.0f} s"
    )
    return 1 if failed else 0


def execute(path: Path) -> bool:
    """Run one and save it; a failure leaves the file as it was and says what happened."""
    notebook = nbformat.read(path, as_version=4)
    started = time.perf_counter()
    alive = Alive(notebook)
    client = NotebookClient(
        notebook,
        timeout=CELL_SECONDS,
        kernel_name="python3",
        resources={"metadata": {"path": str(path.parent)}},
        on_cell_start=alive.before,
    )
    try:
        client.execute()
    except CellExecutionError as error:
        print(
            f"{path.name}: failed after {time.perf_counter() - started:.0f} s\n{error}",
            file=sys.stderr,
        )
        return False
    alive.restore()
    settle(notebook)
    nbformat.validate(notebook)
    fresh = path.with_suffix(".new")
    nbformat.write(notebook, fresh)
    os.replace(fresh, path)  # never half a notebook
    print(f"{path.name}: {time.perf_counter() - started:.0f} s", flush=True)
    return True


class Alive:
    """Keeps the outputs of earlier cells as they are when the first cell that closes a lab or a pool begins."""

    def __init__(self, notebook: Any) -> None:
        self._cells = notebook.cells
        self._kept: list[Any] = []

    def before(self, cell: Any, cell_index: int) -> None:
        if not self._kept and cell.cell_type == "code" and CLOSES.search(cell.source):
            self._kept = [
                copy.deepcopy(c.get("outputs")) for c in self._cells[:cell_index]
            ]

    def restore(self) -> None:
        for cell, outputs in zip(self._cells, self._kept, strict=False):
            if outputs is not None:
                cell.outputs = outputs


def settle(notebook: Any) -> None:
    """Leave out what changes from run to run and means nothing later: times of cells, widget models, frames."""
    notebook.metadata.pop("widgets", None)
    # without the version of whoever ran it last
    notebook.metadata["language_info"] = {"name": "python"}
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = [
                output for output in cell.outputs if not bare_widget(output)
            ]
            for output in cell.outputs:
                output.get("data", {}).pop(WIDGET, None)
                # a lesson: its words count; its frames name folders of this machine
                if output.output_type == "error":
                    output.traceback = [f"{output.ename}: {output.evalue}"]


def bare_widget(output: Any) -> bool:
    """A progress bar, say: without its widget nothing of it is worth keeping; its seconds differ from run to run."""
    if output.get("metadata", {}).get("jvlab") == "progress":
        return True
    return WIDGET in output.get("data", {}) and "text/html" not in output["data"]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
