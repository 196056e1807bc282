"""`Certificate`: what `jv.certify` found, check by check, as text, HTML and JSON."""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from html import escape
from typing import Any

from jvlab._errors import UnknownName
from jvlab._names import model_words
from jvlab._units import human_seconds
from jvlab.views._style import BAD, BOX, CELL, FAINT, GOOD, IDLE, dot, table

# A `Certificate` as a text table and as HTML: one row per check.

DOTS = {"pass": GOOD, "fail": BAD, "not applicable": IDLE, "not run": BAD}
WIDTH = 100
SHOWN = 600  # characters of a detail in HTML; to_dict has all


def certificate_text(found: Certificate) -> str:
    """A line for each check and what it saw, below it the first tensor that was wrong."""
    name = max((len(row.name) for row in found.rows), default=0)
    indent = name + 34
    lines = [repr(found), "  " + _engine(found)]
    for row in found.rows:
        head = (
            f"  {row.name:<{name}}  {row.state:<14}  {human_seconds(row.seconds):>10}  "
        )
        words = row.detail + (
            f" First wrong: {row.first_wrong}." if row.first_wrong else ""
        )
        body = textwrap.wrap(words, WIDTH) or [""]
        lines.append(head + body[0])
        lines += [" " * (indent - 2) + line for line in body[1:]]
    lines += [f"  note: {note}" for note in found.notes]
    return "\n".join(lines)


def certificate_html(found: Certificate) -> str:
    """A table, with the configuration above it and notes below."""
    rows = [
        [
            f'<span title="{escape(row.question)}">{escape(row.name)}</span>',
            f"{dot(DOTS[row.state])} {escape(row.state)}",
            f'<div style="white-space:normal;max-width:56em">{_detail(row)}</div>',
            human_seconds(row.seconds),
        ]
        for row in found.rows
    ]
    notes = "".join(f"<div>{escape(note)}</div>" for note in found.notes)
    return (
        f'<div style="{BOX}"><b>{escape(repr(found))}</b><div style="{CELL};color:{FAINT};white-space:normal">'
        f"{escape(_engine(found))}</div>{table(('check', 'result', 'what was seen', 'took'), rows, numbers=(3,))}"
        f'<div style="color:{FAINT}">{notes}</div></div>'
    )


def _engine(found: Certificate) -> str:
    parts = [
        f"{name.replace('_', ' ')} {value}"
        for name, value in found.engine.items()
        if value not in ("", None)
    ]
    return f"weight version {found.version}; " + ", ".join(parts)


def _detail(row: CertificateRow) -> str:
    text = row.detail if len(row.detail) <= SHOWN else row.detail[: SHOWN - 1] + "…"
    wrong = (
        f"<br><b>first wrong: {escape(row.first_wrong)}</b>" if row.first_wrong else ""
    )
    return escape(text) + wrong


# ----------------------------------------------------------------------------------------------------

PASS = "pass"
FAIL = "fail"
NOT_APPLICABLE = "not applicable"
NOT_RUN = "not run"
CHECKS: dict[str, str] = {  # name -> what it asks
    "unchanged": "Does the engine hold what was last committed, or loaded?",
    "scored": "Are sampled tokens scored with the log-probabilities that they were sampled with?",
    "reference": "Does the engine compute what transformers computes with the same weights?",
    "arrives direct": "Does a direct sync of known values arrive bit for bit, read back from live memory?",
    "arrives staged": "Does a staged sync of known values arrive bit for bit, read back from live memory?",
    "prefix cache": "Is a prefix cache of old weights dead after a sync?",
    "graphs": "Does a CUDA graph that was captured before see weights that were written after?",
    "failed staged": "Does a staged sync that fails half-way leave the old version, and is it served?",
    "failed direct": "After a direct sync that fails half-way, does the engine serve no mixture of two versions?",
    "sleep 1": "Do sleep and wake at level 1 keep the weights?",
    "sleep 2": "Do sleep and wake at level 2 drop the weights, until a sync brings new ones?",
    "adapters": "Does an adapter arrive in its slot bit for bit, and compute what merged weights do?",
    "restored": "Does the engine hold the weights of the beginning again?",
}


@dataclass(frozen=True)
class Finding:
    """What one check saw: its state, the evidence or the reason, and the first tensor (or token) that was wrong."""

    state: str
    detail: str
    first_wrong: str = ""

    @classmethod
    def passed(cls, detail: str) -> Finding:
        return cls(PASS, detail)

    @classmethod
    def failed(cls, detail: str, first_wrong: str = "") -> Finding:
        return cls(FAIL, detail, first_wrong)

    @classmethod
    def skipped(cls, reason: str) -> Finding:
        return cls(NOT_APPLICABLE, reason)

    @classmethod
    def late(cls, seen: str = "") -> Finding:
        """The time was up before the check, or in the middle of it."""
        return cls(
            NOT_RUN,
            f"the time was up{f'; {seen}' if seen else ''}: pass a longer timeout",
        )


@dataclass(frozen=True)
class CertificateRow:
    """One check: its name, what it asks, and what was found."""

    name: str
    question: str
    state: str  # "pass", "fail", "not applicable" or "not run" (out of time)
    detail: str
    first_wrong: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, repr=False)
class Certificate:
    """What `jv.certify(pool)` saw; true if none failed, none ran out of time, and at least one passed.

    >>> certificate = jv.certify(pool, checks=["arrives direct", "scored"])
    >>> certificate
    Certificate(llama: 3 pass, 0 fail, 0 not applicable; no independent reference)
    >>> bool(certificate), certificate["arrives direct"].state
    (True, 'pass')
    """

    model: str
    # what was certified: device, dtype, parallel size, quantisation, graphs, versions
    engine: Mapping[str, Any]
    rows: tuple[CertificateRow, ...]
    version: int  # of the weights, when it ended
    seconds: float = 0.0
    notes: tuple[str, ...] = field(default=())

    @property
    def ok(self) -> bool:
        """Did no check fail or run out of time, and at least one pass?"""
        counts = self.counts
        return not counts[FAIL] and not counts.get(NOT_RUN) and bool(counts[PASS])

    @property
    def referenced(self) -> bool:
        """Was the engine's computation compared with transformers', and equal?"""
        return any(row.name == "reference" and row.state == PASS for row in self.rows)

    @property
    def counts(self) -> dict[str, int]:
        """The number of checks by state."""
        found = Counter(row.state for row in self.rows)
        always = {state: found[state] for state in (PASS, FAIL, NOT_APPLICABLE)}
        return always | ({NOT_RUN: found[NOT_RUN]} if found[NOT_RUN] else {})

    @property
    def failed(self) -> tuple[CertificateRow, ...]:
        """The checks that failed."""
        return tuple(row for row in self.rows if row.state == FAIL)

    def __getitem__(self, name: str) -> CertificateRow:
        known = {row.name: row for row in self.rows}
        if name not in known:
            raise UnknownName(
                f"{name!r} is none of the checks: {', '.join(known)}", known=list(known)
            )
        return known[name]

    def __bool__(self) -> bool:
        return self.ok

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values."""
        return {
            "model": self.model,
            "ok": self.ok,
            "referenced": self.referenced,
            "counts": self.counts,
            "engine": dict(self.engine),
            "version": self.version,
            "seconds": round(self.seconds, 3),
            "notes": list(self.notes),
            "checks": [
                {**asdict(row), "seconds": round(row.seconds, 3)} for row in self.rows
            ],
        }

    def to_json(self, indent: int | None = None) -> str:
        """`to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=indent)

    def __repr__(self) -> str:
        counts = ", ".join(f"{count} {state}" for state, count in self.counts.items())
        compared = (
            "computes as transformers does"
            if self.referenced
            else "no independent reference"
        )
        return f"Certificate({model_words(self.model)}: {counts}; {compared})"

    def __str__(self) -> str:

        return certificate_text(self)

    def _repr_html_(self) -> str:

        return certificate_html(self)
