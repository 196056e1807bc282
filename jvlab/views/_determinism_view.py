"""A `DeterminismReport` as HTML: one row per way the prompts were run."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from jvlab.views._style import BAD, BOX, FAINT, GOOD, WAIT, dot, table

if TYPE_CHECKING:
    from jvlab.lab._determinism import Case, DeterminismReport


def report_html(report: DeterminismReport) -> str:
    """A table, with the conditions of the comparison above it."""
    rows = [
        [
            escape(case.name),
            _verdict(case),
            f"{case.equal} of {case.prompts}",
            f"{case.same_bits} of {case.prompts}",
            f"{case.gap:.1e}" if case.gap else "0",
            "–" if case.first is None else str(case.first),
        ]
        for case in (*report.cases, *([report.scored] if report.scored else []))
    ]
    heads = (
        "the same prompts",
        "against each alone",
        "tokens equal",
        "equal to the bit",
        "largest logprob gap",
        "from token",
    )
    sampling = ", ".join(f"{k}={v}" for k, v in report.sampling.items())
    note = f"on {report.device}, weight version {report.version}; {sampling}"
    causes = "".join(f"<li>{escape(cause)}</li>" for cause in report.causes)
    why = f'<div style="color:{FAINT}">known causes:<ul>{causes}</ul></div>' if causes else ""
    return (
        f'<div style="{BOX}"><b>{escape(repr(report))}</b><div style="color:{FAINT}">{escape(note)}</div>'
        f"{table(heads, rows, numbers=(2, 3, 4, 5))}{why}</div>"
    )


def _verdict(case: Case) -> str:
    if case.exact:
        return f"{dot(GOOD)} the same"
    if case.equal == case.prompts:
        return f"{dot(WAIT)} the same tokens"
    return f"{dot(BAD)} differs"
