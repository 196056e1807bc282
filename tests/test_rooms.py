"""The house: no circle of imports, not even inside functions; no room too full; each room says what it answers.

Which room may import which is import-linter's contract in pyproject.toml, run by `make lint`.
"""

from __future__ import annotations

import ast
import graphlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "jvlab"
MOST_MODULES = 28
SHARED_WORDS = {"_deadline", "_errors", "_faces", "_files", "_names", "_progress", "_units", "_version"}


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}
ROOMS = sorted(path.parent for path in PACKAGE.glob("*/__init__.py"))


def imports_of(path: Path) -> dict[str, bool]:
    """Module of this package -> whether it is imported inside a function only. What types alone need is left out."""
    found: dict[str, bool] = {}

    def visit(node: ast.AST, inside: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            names = []
            if isinstance(child, ast.Import):
                names = [alias.name for alias in child.names]
            elif isinstance(child, ast.ImportFrom) and child.module:
                names = [
                    full if (full := f"{child.module}.{alias.name}") in MODULES else child.module
                    for alias in child.names
                ]
            for name in names:
                if name in MODULES:
                    found[name] = found.get(name, True) and inside
            visit(child, inside or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)))

    visit(ast.parse(path.read_text()), False)
    return found


def graph(deferred: bool) -> dict[str, set[str]]:
    """Who imports whom; with `deferred`, imports inside functions count too. The public face stands apart."""
    return {
        name: {target for target, inside in imports_of(path).items() if target not in (name, "jvlab")}
        if deferred
        else {target for target, inside in imports_of(path).items() if not inside and target not in (name, "jvlab")}
        for name, path in MODULES.items()
        if name != "jvlab"
    }


@pytest.mark.parametrize("deferred", [False, True], ids=["at the top", "inside functions too"])
def test_no_circle(deferred: bool):
    """So no import inside a function is there to break one: those that there are put heavy libraries off."""
    try:
        tuple(graphlib.TopologicalSorter(graph(deferred)).static_order())
    except graphlib.CycleError as error:
        pytest.fail(f"a circle: {' -> '.join(error.args[1])}")


def test_the_check_sees_a_circle():
    circle = {"a": {"b"}, "b": {"a"}}
    with pytest.raises(graphlib.CycleError):
        tuple(graphlib.TopologicalSorter(circle).static_order())
    deferred = {name for name, path in MODULES.items() if any(imports_of(path).values())}
    assert deferred, "imports inside functions are seen"


def test_the_package_itself_holds_names_and_shared_words_only():
    loose = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__", "__main__"}
    assert loose == SHARED_WORDS


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.name)
def test_a_room_says_what_it_answers_and_is_not_too_full(room: Path):
    words = ast.get_docstring(ast.parse((room / "__init__.py").read_text())) or ""
    assert "import" in words.lower() or "Programs over the public names" in words
    assert len(list(room.glob("*.py"))) <= MOST_MODULES


def test_every_room_is_in_the_contract():
    import tomllib

    contract = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]
    layers = {name.strip() for layer in contract["layers"] for name in layer.split("|")}
    assert layers == {room.name for room in ROOMS} | SHARED_WORDS


def test_tests_mirror_the_rooms():
    besides = {"baselines", "browser", "engine", "gpu"}
    folders = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders - besides <= {room.name for room in ROOMS}
