"""The mapping inspector: search thousands of tensors, inspect one, edit a rule and see what it covers."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from jvlab._errors import ConfigError, MeaningError
from jvlab.views._mapping_view import (
    DOTS,
    detail_html,
    dtype_text,
    mapping_headline,
)
from jvlab.views.panels._live import Panel, open_panels

if TYPE_CHECKING:
    from jvlab.sync._compile_tree import Coverage, MappingRow
    from jvlab.sync._mapping import Mapping
    from jvlab.sync._meaning import Meaning

HEAD = 64  # rows that fill the first screen
HOW = "Click a row to see its rule, axes, shardings and values."


class InspectorPanel(Panel):
    """The inspector's Python side. Its methods do the same as the inspector's fields and buttons."""

    hz = 0.5  # only the result of the meaning check changes, at the first sync
    moving = False
    scripts = ("table.js", "inspector.js")
    css = ("inspector.css",)
    css_class = "jv-inspector-panel"
    traits: ClassVar[dict[str, Any]] = {
        # `table` is sent once per set of rows
        "table": b"",
        "head": b"",
        "count": 0,
        "headline": "",
        "line": "",
        "state": "",
        "note": "",
        "bad": False,
        "selected": -1,
        "detail": "",
        "query": {"text": "", "status": "", "rule": "", "rank": ""},
        "values": "",
        "rule": "",
        "editable": True,
        "no_values": "",
        "ask": False,
    }

    def __init__(self, mapping: Mapping, params: Any = None) -> None:
        self.mapping = mapping
        self.params = params
        self.coverage: Coverage | None = None
        # the row that was selected last, also while no row shows it
        self._kept: MappingRow | None = None
        # what values say about the edited rules; None: they were not compared
        self.found: Meaning | None = None
        self.rows: Sequence[MappingRow] = mapping.rows
        self._meaning = mapping.meaning
        super().__init__(mapping)

    def build(self) -> Any:
        widget = self.new_widget(
            table=self._table(self.rows),
            head=self._table(self.rows[:HEAD]),
            count=len(self.rows),
            headline=mapping_headline(self.mapping),
            line=_line(self.mapping),
            note=HOW,
            editable=self.mapping.editable,
            no_values=self._why_no_values(),
        )
        widget.observe(lambda change: self._chosen(change["new"]), "selected")
        widget.on_msg(self._pressed)
        return widget

    def refresh(self) -> None:
        """Update the rows' flags once the meaning has been checked."""
        self.widget.no_values = self._why_no_values()
        if self.mapping.meaning is not self._meaning:
            self._meaning = self.mapping.meaning
            self._show_rows()

    def _why_no_values(self) -> str:
        """Why values cannot be compared; empty if they can."""
        if self.mapping.link is not None:
            return ""
        return "no open link uses this mapping; link = lab.connect(params, pool), then link.mapping"

    def _table(self, rows: Sequence[MappingRow]) -> bytes:
        shown = self.shown
        if self.found is not None and self.found.state == "checked":
            return table_bytes(rows, dict(self.found.ambiguous))
        return table_bytes(rows, shown.ambiguous if shown is not None else {})

    def say(self, text: str, bad: bool = False) -> None:
        self.widget.note = text
        self.widget.bad = bad

    def _pressed(self, _: Any, message: dict[str, Any], __: Any) -> None:
        match message.get("do"):
            case "edit":
                self.act(lambda: self.edit(message["rule"], replace=message["replace"]))
            case "reset":
                self.act(self.reset)
            case "save":
                self.act(lambda: self.save_rules(message["path"]))
            case "values":
                self.act(self.values)
            case "params":
                self.act(lambda: self.values_of(str(message["name"])))

    # Actions of fields and buttons --------------------------------------------------------------------------------

    def select(self, name: str) -> MappingRow:
        """Show one row by name, as in `mapping.explain`: a leaf or a slice of it, a tensor or a vLLM parameter."""
        exact = [
            i
            for i, r in enumerate(self.rows)
            if name in (r.leaf, r.name, r.tensor, r.parameter)
        ]
        if not exact:
            found = self.mapping.explain(name).place
            exact = [
                i for i, r in enumerate(self.rows) if found.name in (r.leaf, r.name)
            ]
        self.widget.selected = exact[0]
        return self.rows[exact[0]]

    @property
    def selected(self) -> MappingRow | None:
        """The row that is shown below."""
        at = self.widget.selected
        return self.rows[at] if 0 <= at < len(self.rows) else None

    def edit(self, rule: str, *, replace: str = "") -> Coverage:
        """`mapping.edit`, on top of earlier edits; the table and the coverage show the outcome."""
        before = self.coverage if self.coverage is not None else self.mapping
        self.coverage = before.edit(rule, replace=replace)
        self.rows = self.coverage.rows
        said, bad = self._judge(self.coverage)
        self._show_rows()
        self.say(said, bad=bad)
        return self.coverage

    def _judge(self, coverage: Coverage) -> tuple[str, bool]:
        """What is known of edited rules, and whether they are wrong: what they cover, then what values say."""
        self.found = None
        if coverage.made is None:
            more = (
                f"\n… {len(coverage.problems) - 5} more"
                if len(coverage.problems) > 5
                else ""
            )
            return "\n".join(coverage.problems[:5]) + more, True
        covered = "everything is covered, each element once"
        later = "the link keeps its old rules until you connect with these"
        link = coverage.made.link
        if link is None:
            why = self._why_no_values()
            return (
                f"{covered}; values are compared when you connect with these rules, not now: {why}",
                False,
            )
        try:
            found: Meaning = link.meaning_of(coverage.made, self.params)
        except MeaningError as error:
            self.found = error.fields["meaning"]  # type: ignore[assignment]
            return f"everything is covered, but wrong: {error.message}", True
        except ConfigError as error:
            return (
                f"{covered}; values were not compared: {error.message}; {later}",
                False,
            )
        self.found = found
        return f"{covered}; {found.text} ({found.why}); {later}", False

    def reset(self) -> None:
        """Discard the edits."""
        self.coverage = None
        self.rows = self.mapping.rows
        self.found = None
        self._show_rows()
        self.say("edits discarded")

    def save_rules(self, path: str | Path) -> Path:
        """Write the rules, including edits, to a file for `rules=path`."""
        if not str(path).strip():
            raise ConfigError("no file is named", remedy="give a path, e.g. rules.txt")
        saved = (
            self.coverage if self.coverage is not None else self.mapping
        ).save_rules(path)
        self.say(f"saved; use them: lab.connect(params, pool, rules={str(saved)!r})")
        return saved

    def values(self) -> list[Any]:
        """`mapping.values` of the selected row: histograms of both sides and their difference."""
        from jvlab.views._mapping_view import values_html

        row = self.selected
        if row is None or not row.leaf:
            raise ConfigError(
                "no tensor is selected",
                remedy="click a row that has a leaf, or panel.select(name)",
            )
        try:
            found = self.mapping.values(row.name, self.params)
        except ConfigError as error:
            self.widget.ask = error.fields.get("ask") == "params"
            raise
        of_row = [v for v in found if v.parameter == row.parameter] or found
        self.widget.values = values_html(*of_row)
        self.widget.ask = False
        self.say(
            ""
            if self.coverage is None
            else "these are the values by the link's rules, not by the edited ones"
        )
        return of_row

    def values_of(self, name: str) -> list[Any]:
        """`values`, compared with a variable of the notebook: "policy", or "state.params"."""
        self.params = notebook_variable(name)
        return self.values()

    # Display ------------------------------------------------------------------------------------------------------

    @property
    def shown(self) -> Mapping | None:
        """The mapping that is displayed; None while edited rules do not cover the model."""
        return self.mapping if self.coverage is None else self.coverage.made

    def _chosen(self, at: int) -> None:
        row = self.rows[at] if 0 <= at < len(self.rows) else None
        self._kept = row
        with self.widget.hold_sync():
            self.widget.values = ""
            if row is not None and self.widget.note == HOW:
                self.widget.note = ""
            known = self.mapping.meaning if self.coverage is None else self.found
            self.widget.detail = (
                detail_html(self.shown, row, known) if row is not None else ""
            )
            self.widget.rule = (
                (row.rule or f"{row.leaf or '~'} -> {row.tensor or '~'}")
                if row is not None
                else ""
            )

    def _show_rows(self) -> None:
        """Replace the rows; the selected one stays selected, or is selected again once it is back."""
        keep = self._kept
        at = -1 if keep is None else _row_like(self.rows, keep)
        with self.widget.hold_sync():
            self.widget.head = self._table(self.rows[:HEAD])
            self.widget.count = len(self.rows)
            self.widget.table = self._table(self.rows)
            self.widget.headline = mapping_headline(self.shown or self.mapping)
            self.widget.line, self.widget.state = self._line_and_state()
            self.widget.selected = at
            self._chosen(at)
        self._kept = keep  # not the row that stands for it

    def _line_and_state(self) -> tuple[str, str]:
        """The line above the table, and its colour: green only for edited rules that values agree with."""
        if self.coverage is None:
            return _line(self.mapping), ""
        line = f"edited: {self.coverage.line}"
        if not self.coverage.complete:
            return line, "problems"
        if self.found is None:
            return f"{line}; values not compared", "edited"
        colours = {"checked": "checked", "failed": "problems"}
        wrong = "wrong by value" if self.found.state == "failed" else self.found.text
        return f"{line}; {wrong}", colours.get(self.found.state, "edited")

    def __repr__(self) -> str:
        return f"InspectorPanel({len(self.rows):,} rows)"


def _row_like(rows: Sequence[MappingRow], keep: MappingRow) -> int:
    """The row that shows the same after an edit: the same way, else the same slice, leaf, or tensor; -1 without one."""
    same: list[Callable[[MappingRow], bool]] = [
        lambda r: (
            (r.name, r.tensor, r.parameter) == (keep.name, keep.tensor, keep.parameter)
        ),
        lambda r: (r.name, r.tensor) == (keep.name, keep.tensor),
        lambda r: bool(keep.leaf) and r.name == keep.name,
        lambda r: bool(keep.leaf) and r.leaf == keep.leaf,
        lambda r: bool(keep.tensor) and r.tensor == keep.tensor,
    ]
    return next((i for fits in same for i, r in enumerate(rows) if fits(r)), -1)


def notebook_variable(name: str) -> Any:
    """A variable of the notebook, or an attribute of one: "policy.params"."""
    from IPython.core.getipython import get_ipython

    shell = get_ipython()
    names: dict[str, Any] = shell.user_ns if shell is not None else {}
    first, *rest = name.strip().split(".")
    if first not in names:
        raise ConfigError(
            f"the notebook has no variable {first!r}",
            remedy="name one that holds parameters",
        )
    found = names[first]
    for attribute in rest:
        if not hasattr(found, attribute):
            raise ConfigError(
                f"{first} has no attribute {attribute!r}",
                remedy="policy, or policy.params",
            )
        found = getattr(found, attribute)
    return found


def select_everywhere(mapping: Mapping, name: str) -> None:
    """Select a leaf, or a slice of one, in every open inspector of a mapping."""
    for panel in open_panels(mapping):
        if isinstance(panel, InspectorPanel):
            panel.select(name)


def _line(mapping: Mapping) -> str:
    meaning = mapping.meaning
    return meaning.text if meaning is not None else ""


def table_bytes(
    rows: Sequence[MappingRow], ambiguous: dict[str, str] | None = None
) -> bytes:
    """The rows as columns for the browser: the header's length, a JSON header, the columns' bytes.

    `ambiguous`: leaf -> the readings of it that are still open.
    Long names are lines of text, repeated ones are named once and numbered; JSON alone took three times as long.
    """
    columns: list[dict[str, Any]] = []
    parts: list[bytes] = []

    def add(kind: str, key: str, title: str, values: list[Any], **more: Any) -> None:
        if kind == "text":
            data = "\n".join(v.replace("\n", " ") for v in values).encode()
        elif kind == "number":
            data = np.array(values, "<f8").tobytes()
        else:
            at = {name: i for i, name in enumerate(dict.fromkeys(values))}
            data = np.array([at[v] for v in values], "<u4").tobytes()
            more["names"] = list(at)
        where = {"at": sum(map(len, parts)), "length": len(data)}
        parts.append(data)
        columns.append(
            {"kind": kind, "key": key, "title": title, **more, "bytes": where}
        )

    sets = {r.rank_text: list(r.ranks) for r in rows}
    colours = [DOTS[name] for name in dict.fromkeys(r.status for r in rows)]
    ranks = {"sets": list(sets.values()), "searched": False}
    open_ = {leaf: f"ambiguous: {why}" for leaf, why in (ambiguous or {}).items()}
    add("text", "leaf", "JAX leaf", [r.name for r in rows])
    add("code", "rule", "rule", [r.rule for r in rows])
    add("text", "tensor", "checkpoint tensor", [r.tensor for r in rows])
    add("text", "parameter", "vLLM parameter", [r.parameter for r in rows])
    add("code", "ranks", "ranks", [r.rank_text for r in rows], **ranks)
    add("code", "dtype", "dtype", [dtype_text(r) for r in rows])
    add("number", "bytes", "bytes", [r.nbytes for r in rows])
    add("code", "status", "status", [r.status for r in rows], colours=colours)
    add("code", "meaning", "meaning", [open_.get(r.leaf, "") for r in rows])
    if any(r.numbered for r in rows):
        # searched, not shown
        add("text", "numbered", "", [r.numbered for r in rows])
    every = sorted({r for held in sets.values() for r in held})
    about = {"count": len(rows), "columns": columns, "ranks": every}
    header = json.dumps(about, ensure_ascii=False).encode()
    return b"".join((len(header).to_bytes(4, "little"), header, *parts))
