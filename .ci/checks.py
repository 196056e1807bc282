"""Rules of this project that no linter has. `python .ci/checks.py [FILES]` prints what breaks one; `make lint` runs it.

waits   every wait has a deadline: calls that can block for ever, seen by their names and arguments. A call that cannot
        block, or that is ended in another way, says so where it is: `# no deadline: REASON`, on its line or above it.
"""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REASON = re.compile(r"#.*\bno deadline: \S")

# How many positional arguments a call needs until one of them is its timeout.
TIMEOUT_AT = {
    "acquire": 2,
    "wait": 1,
    "join": 1,
    "result": 1,
    "exception": 1,
    "communicate": 2,
    "get": 2,
    "put": 3,
}
TIMEOUT_AT |= {"wait_for": 2, "as_completed": 2, "select": 4}
SUBPROCESS = {"run", "call", "check_call", "check_output"}  # of the module `subprocess`
# take none
NO_TIMEOUT = {"accept", "recv_bytes", "recvmsg", "recv_into", "recvfrom", "sigwait"}
# an argument of ours that is one
SECONDS = re.compile(r"seconds|deadline|timeout|left")
# the option without which they wait
NOT_NOW = {"waitpid": "WNOHANG", "flock": "LOCK_NB"}
# of a stream, whose other end may be silent
AWAITED = {"read", "readline", "readexactly", "readuntil", "receive"}
LATER = {"create_task", "ensure_future"}  # what they are given is waited for elsewhere
EXECUTOR = re.compile(r"(Thread|Process)PoolExecutor$|^Pool$")


@dataclass(frozen=True)
class Found:
    """A line that breaks a rule."""

    path: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}"


def name_of(call: ast.AST) -> str:
    """What a call calls: `get` of `queue.get()`; empty for anything else."""
    if not isinstance(call, ast.Call):
        return ""
    return (
        call.func.attr
        if isinstance(call.func, ast.Attribute)
        else getattr(call.func, "id", "")
    )


def is_none(value: ast.expr) -> bool:
    """None, also as one branch of `a if b else None`."""
    if isinstance(value, ast.IfExp):
        return is_none(value.body) or is_none(value.orelse)
    return isinstance(value, ast.Constant) and value.value is None


def is_false(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is False


def has_timeout(call: ast.Call, at: int) -> bool:
    """A timeout that is not None, by its keyword or as argument number `at`; or not blocking at all."""
    options = {keyword.arg: keyword.value for keyword in call.keywords}
    if None in options or any(isinstance(value, ast.Starred) for value in call.args):
        return True  # *args, **options: not to be seen here
    if is_false(options.get("block", options.get("blocking", ast.Constant(None)))):
        return True
    if "timeout" in options:
        return not is_none(options["timeout"])
    return len(call.args) >= at and not is_none(call.args[at - 1])


def blocks(call: ast.AST, awaited: bool) -> bool:
    """Whether this call can wait without a deadline, as far as its name and arguments tell."""
    assert isinstance(call, ast.Call)
    name = name_of(call)
    module = getattr(getattr(call.func, "value", None), "id", "")
    given = len(call.args)
    if name == "select" and module != "select":
        return not given and not call.keywords  # of a selector
    # of futures, after the first
    if name == "wait" and (module == "asyncio" or isinstance(call.func, ast.Name)):
        return not has_timeout(call, 2)
    if name == "get" and given:
        return False  # of a mapping
    if name in ("acquire", "put") and given and is_false(call.args[-1]):
        return False
    if name == "wait" and (
        name_of(getattr(call.func, "value", call)) == "launch" or module == "pool"
    ):
        # `Pool.wait` has a timeout unless told otherwise
        return is_none(call.args[0]) if given else False
    if name in TIMEOUT_AT:
        return not has_timeout(call, TIMEOUT_AT[name])
    if name == "recv":
        return given < 3 and not (given and SECONDS.search(ast.unparse(call.args[0])))
    if name in NOT_NOW:
        return not (given == 2 and NOT_NOW[name] in ast.unparse(call.args[1]))
    if name == "connect":
        return given == 1 and not call.keywords
    if name == "poll":
        return any(is_none(value) for value in call.args)
    if name == "shutdown":
        options = {keyword.arg: keyword.value for keyword in call.keywords}
        return (
            not given
            and "timeout" not in options
            and not is_false(options.get("wait", ast.Constant(None)))
        )
    if name in SUBPROCESS and module == "subprocess":
        return not has_timeout(call, 99)
    # not a number of bytes
    other = given and isinstance(call.args[0], (ast.List, ast.ListComp))
    return name in NO_TIMEOUT or (awaited and name in AWAITED and not other)


def waiting_calls(tree: ast.AST) -> Iterator[ast.expr]:
    """The calls that can wait without a deadline."""
    parents: dict[ast.AST, ast.AST] = {}
    nodes = [tree]
    for node in nodes:  # it grows meanwhile
        for child in ast.iter_child_nodes(node):
            parents[child] = node
            nodes.append(child)
    # else no put waits
    bounded = any(
        node.args or node.keywords
        for node in nodes
        if isinstance(node, ast.Call) and name_of(node).endswith("Queue")
    )
    for node in nodes:
        if isinstance(node, (ast.With, ast.AsyncWith)):
            yield from (
                item.context_expr
                for item in node.items
                if EXECUTOR.search(name_of(item.context_expr))
            )
        if not isinstance(node, ast.Call):
            continue
        above = parents[node]
        if name_of(node) == "put" and not bounded:
            continue
        if name_of(above) in LATER or (
            name_of(above) == "wait_for" and not blocks(above, False)
        ):
            continue
        if blocks(node, isinstance(above, ast.Await)) and not within_timeout(
            node, parents
        ):
            yield node


def within_timeout(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> bool:
    """Inside `async with asyncio.timeout(...)`, in the same function."""
    while not isinstance(
        node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.Module)
    ):
        node = parents[node]
        if isinstance(node, ast.AsyncWith) and any(
            name_of(item.context_expr) == "timeout" for item in node.items
        ):
            return True
    return False


def waits(path: str, source: str) -> Iterator[Found]:
    """The calls of a file that can wait for ever and give no reason, and reasons without such a call."""
    lines = source.splitlines()
    reasons = {number for number, line in enumerate(lines, 1) if REASON.search(line)}
    used = set()
    for call in waiting_calls(ast.parse(source)):
        first, last = call.lineno, call.end_lineno or call.lineno
        above = first - 1
        while above > 0 and lines[above - 1].lstrip().startswith("#"):
            above -= 1
        own = reasons & set(range(above + 1, last + 1))
        used |= own
        if not own:
            text = f"{name_of(call)} waits without a deadline: pass a timeout, or write `# no deadline: REASON`"
            yield Found(path, first, text)
    for number in sorted(reasons - used):
        yield Found(
            path, number, "`no deadline:` stands at nothing that waits: remove it"
        )


CHECKS = [waits]


def main(names: list[str]) -> int:
    paths = [Path(name) for name in names] or sorted((ROOT / "jvlab").rglob("*.py"))
    found = [
        one
        for path in paths
        for check in CHECKS
        for one in check(os.path.relpath(path), path.read_text())
    ]
    print(
        "\n".join(map(str, found)) or f"{len(paths)} files: every wait has a deadline"
    )
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
