"""What a notebook shows of an error of jvlab's: the user's own lines, the message with its remedy, and little else."""

from __future__ import annotations

import functools
import linecache
import os
import site
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_RED = "\x1b[31m"
_GREEN = "\x1b[32m"
_DIM = "\x1b[2m"
_BOLD = "\x1b[1m"
_PLAIN = "\x1b[0m"
# lines of context around the line that raised
BEFORE = 2
AFTER = 1


def _installed() -> tuple[str, ...]:
    """Folders of Python itself and of installed packages."""
    named = [
        sysconfig.get_path(name)
        for name in ("stdlib", "platstdlib", "purelib", "platlib")
    ]
    return tuple(
        {os.path.join(path, "") for path in [*named, *site.getsitepackages()] if path}
    )


def shorten(error: KeyboardInterrupt, says: str = "") -> None:
    """Let a notebook show an interrupt as it shows our own errors; `says`: what the interrupted work left behind."""
    if says and not error.args:
        error.args = (says,)
    error._render_traceback_ = functools.partial(render, error)  # type: ignore[attr-defined]  # for IPython


def brief(function: Callable[P, T]) -> Callable[P, T]:
    """A public function whose work may take long: Ctrl-C in it shows the caller's lines, and not ours."""

    @functools.wraps(function)
    def call(*args: P.args, **options: P.kwargs) -> T:
        try:
            return function(*args, **options)
        except KeyboardInterrupt as error:
            shorten(error)
            raise

    return call


def render(error: BaseException) -> list[str]:
    """The traceback as lines for IPython, which calls it as `error._render_traceback_()`.

    Frames of jvlab, of Python's library (futures, threads, event loops) and of installed packages are left out and
    counted. A user who chose another mode than IPython's default (`%xmode Verbose`, or `%tb Verbose` once) gets all.
    """
    shell = _shell()
    tb = getattr(shell, "InteractiveTB", None)
    if tb is not None and getattr(tb, "mode", "Context") != "Context":
        return tb.structured_traceback(type(error), error, error.__traceback__)
    colours = str(getattr(shell, "colors", "NoColor")).lower()
    plain = colours in ("nocolor", "no_color")
    paint = lambda code, text: text if plain else f"{code}{text}{_PLAIN}"
    frames = _frames(error.__traceback__)
    installed = _installed()
    own = [
        frame
        for frame in frames
        if not frame[0].startswith((_PACKAGE, *installed, "<frozen"))
    ]
    lines = [line for frame in own for line in _shown(frame, shell, paint)]
    name = paint(_RED + _BOLD, type(error).__name__)
    lines.append(f"{name}: {error}" if str(error) else name)
    if error.__cause__ is not None:
        lines.append(
            f"caused by {''.join(traceback.format_exception_only(error.__cause__)).strip()}"
        )
    ours = [frame for frame in frames if frame[0].startswith(_PACKAGE)]
    hint = f"%tb Verbose shows the {len(frames) - len(own)} frames left out"
    interrupted = isinstance(error, KeyboardInterrupt)  # where that was is chance
    if ours and not interrupted:
        file, number, name = ours[-1]
        place = os.path.relpath(file, os.path.dirname(_PACKAGE.rstrip(os.sep)))
        hint = f"raised at {place}:{number}, in {name}; {hint}"
    if ours or interrupted:
        lines.append(paint(_DIM, hint))
    return lines


def own_lines(error: BaseException) -> str:
    """The traceback of an error in a function of the user's that jvlab called: from the user's first line on.

    The frames before it are jvlab's and Python's (threads, futures, event loops). A function of an installed package
    keeps all of its frames.
    """
    first = _after(error.__traceback__, (_PACKAGE, *_installed(), "<frozen"))
    if first is None:
        first = _after(error.__traceback__, (_PACKAGE,))
    return "".join(traceback.format_exception(type(error), error, first)).rstrip()


def own_place(frame: FrameType | None) -> str:
    """Where a function of the user's that jvlab called in a thread is just now, from the user's first line on."""
    if frame is None:
        return ""
    stack = traceback.extract_stack(frame)
    theirs = (_PACKAGE, os.path.dirname(threading.__file__) + os.sep)
    while stack and stack[0].filename.startswith(theirs):
        del stack[0]
    return "".join(traceback.format_list(stack)).rstrip()


def _after(tb: TracebackType | None, folders: tuple[str, ...]) -> TracebackType | None:
    """The first frame that lies in none of these folders."""
    while tb is not None and tb.tb_frame.f_code.co_filename.startswith(folders):
        tb = tb.tb_next
    return tb


def _shell() -> Any:
    """IPython's shell, if there is one; never imports it."""
    module = sys.modules.get("IPython")
    return (
        module.get_ipython()
        if module is not None and hasattr(module, "get_ipython")
        else None
    )


def _frames(tb: TracebackType | None) -> list[tuple[str, int, str]]:
    """(file, line, function) of each frame, outermost first."""
    return [
        (frame.f_code.co_filename, line or 0, frame.f_code.co_qualname)
        for frame, line in traceback.walk_tb(tb)
    ]


def _shown(frame: tuple[str, int, str], shell: Any, paint: Any) -> list[str]:
    """One frame of the user's: where it is, and its line with some context."""
    file, number, name = frame
    cell = getattr(getattr(shell, "compile", None), "format_code_name", lambda _: None)(
        file
    )
    place = " ".join(cell) if cell else f"File {os.path.basename(file)}"
    inside = "" if name == "<module>" else f", in {name}"
    text = linecache.getlines(file)
    first = max(1, number - BEFORE)
    last = min(len(text), number + AFTER)
    body = []
    for at in range(first, last + 1):
        line = text[at - 1].rstrip()
        arrow = (
            f"{'-' * max(1, 5 - len(str(at)))}> {at}" if at == number else f"{at:>7}"
        )
        body.append(
            f"{paint(_GREEN, arrow) if at == number else paint(_DIM, arrow)} {line}"
        )
    return [f"{paint(_GREEN, place)}, line {number}{inside}", *body, ""]
