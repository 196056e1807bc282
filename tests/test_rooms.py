"""The structure of the package: no import cycles, not even through functions; rooms with a docstring each.

Which room may import which is import-linter's contract in pyproject.toml, run by `make lint`.
"""

from __future__ import annotations

import ast
import graphlib
from pathlib import Path

import pytest

from tests.ci_scripts import ci_script

weigh = ci_script("weigh")
ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "jvlab"
SHARED_MODULES = {
    *("_deadline", "_errors", "_faces", "_files", "_names"),
    *("_progress", "_states", "_tracebacks", "_units", "_version"),
}


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}
ROOMS = sorted(path.parent for path in PACKAGE.glob("*/__init__.py"))
FOLDERS = sorted(
    path.parent
    for path in PACKAGE.glob("[a-z]*/**/__init__.py")
    if path.parent.name[0] != "_"
)


def imports_of(source: str) -> dict[str, bool]:
    """Module of this package -> whether it is imported inside functions only. TYPE_CHECKING blocks are skipped."""
    found: dict[str, bool] = {}
    for name, inside in weigh.imported(ast.parse(source)):
        module = name if name in MODULES else name.rpartition(".")[0]
        if module in MODULES:
            found[module] = found.get(module, True) and inside
    return found


def import_cycle(sources: dict[str, str]) -> list[str]:
    """The modules of an import cycle, those inside functions included; empty if there is none.

    jvlab/__init__.py is not part of it: it imports public names on first use.
    """
    graph = {
        name: imports_of(source).keys() - {name, "jvlab"}
        for name, source in sources.items()
        if name != "jvlab"
    }
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def test_no_import_cycle():
    """Imports inside functions only defer heavy libraries; none of them breaks a cycle."""
    assert not import_cycle({name: path.read_text() for name, path in MODULES.items()})


def test_an_import_cycle_is_found():
    below, above = "jvlab.layout._digest", "jvlab.lab._lab"
    at_the_top = {below: f"import {above}", above: f"import {below}"}
    inside = {
        below: "def f():\n    from jvlab.lab import _lab",
        above: f"import {below}",
    }
    for_types = {
        below: f"if TYPE_CHECKING:\n    import {above}",
        above: f"import {below}",
    }
    assert set(import_cycle(at_the_top)) == set(import_cycle(inside)) == {below, above}
    assert not import_cycle(for_types)
    assert imports_of(inside[below]) == {above: True}


def test_the_package_itself_holds_public_names_and_shared_modules_only():
    loose = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__", "__main__"}
    assert loose == SHARED_MODULES


def test_there_are_thirteen_rooms_and_bench():
    assert len(ROOMS) == 14


@pytest.mark.parametrize(
    "folder", FOLDERS, ids=lambda folder: folder.relative_to(PACKAGE).as_posix()
)
def test_a_room_has_a_docstring(folder: Path):
    docstring = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    assert "import" in docstring.lower() or "the public API" in docstring


def test_every_room_is_in_the_contract():
    import tomllib

    contract = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"][
        "importlinter"
    ]["contracts"][0]
    layers = {name.strip() for layer in contract["layers"] for name in layer.split("|")}
    assert layers == {room.name for room in ROOMS} | SHARED_MODULES


def test_tests_mirror_the_rooms():
    besides = {"baselines", "browser", "gpu", "hosts", "live"}
    folders = {
        path.relative_to(ROOT / "tests").parts[0]
        for path in (ROOT / "tests").glob("*/**/*.py")
    }
    assert folders - besides <= {room.name for room in ROOMS}
