"""How much there is to hold in the head. `make lint` runs it: more than LIMITS allow is an error.

    python .ci/weigh.py          the table, and what is over its limit
    python .ci/weigh.py sync     one real sync on this machine: how many files of jvlab its calls pass

Counted in jvlab/, without generated files. A token is a name, an operator, a number or a text; those of docstrings and
comments do not count. A pair is `a, b = x, y`; a reach-in reads `_x` of another object than `self`.
"""

from __future__ import annotations

import ast
import io
import sys
import threading
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "jvlab"
COUNTED = (tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DEFINITIONS = (ast.Module, ast.ClassDef, *FUNCTIONS)

# What was counted before 0.2.0 with this script, and what may not be exceeded.
BEFORE = {
    "rooms": 26,
    "files": 447,
    "tokens": 567_845,
    "tokens a code line": 9.97,
    "pairs": 1_023,
    "reach-ins": 354,
    "longest file": 526,
    "longest chain of rooms": 10,
    "words of README": 6_186,
}
LIMITS = {
    "rooms": 14,
    "files": 280,
    "tokens": 609_700,
    "tokens a code line": 8.0,
    "pairs": 120,
    "reach-ins": 78,
    "longest file": 1_250,  # lab/_pool.py: a pool is one class
    "longest chain of rooms": 7,
    "words of README": 1_000,
}
FILES_OF_A_SYNC = 40


@dataclass
class Weight:
    """What was counted."""

    files: int = 0
    tokens: int = 0
    code_lines: int = 0
    pairs: int = 0
    reach_ins: int = 0
    longest_file: int = 0
    rooms: dict[str, set[str]] = field(default_factory=dict)  # which it imports

    def add(self, path: Path) -> None:
        text = path.read_text()
        tree = ast.parse(text)
        described: set[int] = set()
        for node in ast.walk(tree):
            if isinstance(node, DEFINITIONS):
                described |= docstring_lines(node)
            self.pairs += is_pair(node)
            self.reach_ins += is_reach_in(node)
        used: set[int] = set()
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type in COUNTED and token.start[0] not in described:
                self.tokens += 1
                used.update(range(token.start[0], token.end[0] + 1))
        self.files += 1
        self.code_lines += len(used)
        self.longest_file = max(self.longest_file, text.count("\n"))
        self._add_imports(path.relative_to(PACKAGE).parts, tree)

    def _add_imports(self, place: tuple[str, ...], tree: ast.Module) -> None:
        if len(place) == 1:
            return  # a module that all rooms share
        wanted = self.rooms.setdefault(place[0], set())
        for name, inside in imported(tree):
            parts = name.split(".")
            if inside:
                continue
            if parts[0] == "jvlab" and len(parts) > 1 and parts[1] != place[0]:
                wanted.add(parts[1])

    def longest_chain(self) -> int:
        @cache
        def below(room: str) -> int:
            inner = [name for name in self.rooms[room] if name in self.rooms]
            return 1 + max((below(name) for name in inner), default=0)

        return max(below(room) for room in self.rooms)

    def numbers(self) -> dict[str, float]:
        return {
            "rooms": len(self.rooms),
            "files": self.files,
            "tokens": self.tokens,
            "tokens a code line": round(self.tokens / self.code_lines, 2),
            "pairs": self.pairs,
            "reach-ins": self.reach_ins,
            "longest file": self.longest_file,
            "longest chain of rooms": self.longest_chain(),
            "words of README": len((ROOT / "README.md").read_text().split()),
        }


def docstring_lines(node: Any) -> set[int]:
    first = node.body[0] if node.body else None
    if not isinstance(first, ast.Expr) or not isinstance(first.value, ast.Constant):
        return set()
    if not isinstance(first.value.value, str):
        return set()
    return set(range(first.lineno, (first.end_lineno or first.lineno) + 1))


def is_pair(node: ast.AST) -> bool:
    if not isinstance(node, ast.Assign):
        return False
    return isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple)


def is_reach_in(node: ast.AST) -> bool:
    if not isinstance(node, ast.Attribute):
        return False
    if not node.attr.startswith("_") or node.attr.startswith("__"):
        return False
    owner = node.value
    if isinstance(owner, ast.Name):
        return owner.id not in ("self", "cls")
    if isinstance(owner, ast.Call) and isinstance(owner.func, ast.Name):
        return owner.func.id != "super"
    return True


def imported(tree: ast.AST, inside: bool = False) -> Iterator[tuple[str, bool]]:
    """What is imported, and whether inside a function; what is only for a type checker is left out."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.expr):
            continue  # no statement is inside
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        if isinstance(child, ast.Import):
            yield from ((alias.name, inside) for alias in child.names)
        elif isinstance(child, ast.ImportFrom) and child.module:
            for alias in child.names:
                yield f"{child.module}.{alias.name}", inside
        yield from imported(child, inside or isinstance(child, FUNCTIONS))


def weigh() -> Weight:
    weight = Weight()
    for path in sorted(PACKAGE.rglob("*.py")):
        if "_pb2" not in path.name:
            weight.add(path)
    return weight


def files_of_a_sync() -> set[str]:
    """The files of jvlab in which something is called during one sync with an engine in this process."""
    import jvlab as jv

    seen: set[str] = set()
    syncing = threading.Event()

    def look(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and syncing.is_set():
            seen.add(frame.f_code.co_filename)

    # before any thread is started: those of gateway and engine are looked at too
    threading.setprofile(look)
    path = jv.models.tiny("llama")
    with jv.Pool.in_process(path, load="dummy") as pool:
        policy = jv.Policy.from_pretrained(path)
        link = pool.connect(policy.params)
        link.sync(policy.params, progress=False)
        syncing.set()
        sys.setprofile(look)
        report = link.sync(policy.params, progress=False)
        sys.setprofile(None)
        syncing.clear()
        assert report.verified
    threading.setprofile(None)
    return {name for name in seen if name.startswith(str(PACKAGE))}


def main() -> int:
    if sys.argv[1:] == ["sync"]:
        files = sorted(Path(name).relative_to(PACKAGE) for name in files_of_a_sync())
        print(*files, f"{len(files)} files, at most {FILES_OF_A_SYNC}", sep="\n")
        return int(len(files) > FILES_OF_A_SYNC)
    numbers = weigh().numbers()
    print(f"{'':24}{'before':>10}{'now':>10}{'at most':>10}")
    for name, value in numbers.items():
        print(f"{name:24}{BEFORE[name]:>10,}{value:>10,}{LIMITS[name]:>10,}")
    over = [name for name, value in numbers.items() if value > LIMITS[name]]
    if over:
        print(f"heavier than allowed: {', '.join(over)}")
    return len(over)


if __name__ == "__main__":
    raise SystemExit(main())
