"""Faces of a `Run`: one line, and a small card that follows it."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

from jvlab.views._cards import BOX, CELL, DOTS, STARTING

if TYPE_CHECKING:
    from jvlab.trainer._run import Run, RunStatus

_COLOURS = {"running": DOTS["ready"], "finished": DOTS["ready"], "failed": DOTS["failed"], "stopped": DOTS["closed"]}


def run_line(name: str, status: RunStatus) -> str:
    """One line, without anything that changes from machine to machine."""
    reward = f", reward {status.reward:.3f}" if status.reward == status.reward else ""
    bound = "on-policy" if not status.max_staleness else f"staleness ≤ {status.max_staleness}"
    why = f": {status.error.splitlines()[0]}" if status.error else ""
    return f"Run({name!r}, {status.state}, step {status.step}/{status.steps}{reward}, {bound}{why})"


def run_html(name: str, status: RunStatus) -> str:
    """A small table with a bar."""
    share = 100 * status.step / max(status.steps, 1)
    dot = f'<span style="color:{_COLOURS.get(status.state, STARTING)}">●</span>'
    bar = (
        '<div style="width:16em;height:6px;background:rgba(128,128,128,.3);margin:4px 0">'
        f'<div style="width:{share:.0f}%;height:6px;background:#0072B2"></div></div>'
    )
    number = lambda value, form: "–" if value != value else format(value, form)
    rows = {
        "step": f"{status.step} of {status.steps}, version {status.version}",
        "reward": number(status.reward, ".3f"),
        "largest logprob gap": number(status.logprob_gap, ".2e"),
        "staleness": f"at most {status.max_staleness}; {status.dropped} dropped, {status.regenerated} made again",
        "groups": f"{status.flying} being made, {status.ready} ready, {status.lost} of no use",
        "time": f"{status.seconds:.0f} s",
    }
    if status.error:
        rows["error"] = status.error
    cells = "".join(
        f'<tr><th style="{CELL}">{k}</th><td style="text-align:left;white-space:pre-wrap">{escape(v)}</td></tr>'
        for k, v in rows.items()
    )
    title = f"{dot} <b>{escape(name)}</b> · {escape(status.state)}"
    return f'<div style="{BOX}">{title}{bar}<table style="border-collapse:collapse">{cells}</table></div>'


def show_live(run: Run) -> None:
    """Show the card in a notebook and keep it current until the run has ended."""
    from IPython.display import display

    def bundle() -> dict[str, Any]:
        status = run.status
        return {"text/plain": run_line(run.name, status), "text/html": run_html(run.name, status)}

    handle = display(bundle(), raw=True, display_id=True)
    if handle is None or run.done:
        return

    def follow(_: Run) -> None:
        handle.update(bundle(), raw=True)
        if run.done and follow in run._listeners:
            run._listeners.remove(follow)

    run._listeners.append(follow)
