"""`Session` as a table of turns and `Sessions` as a table of sessions."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from jvlab.record._sample import shorten
from jvlab.record._token_pieces import visible
from jvlab.views._style import BOX, FAINT, MONO, bar, table

if TYPE_CHECKING:
    from jvlab.lab._session import Session, Sessions
    from jvlab.lab._session_stats import SessionStats

ROWS = 20
HEADS = ("turn", "prompt tokens", "from KV cache", "generated", "version", "finish", "replica", "text")


def session_html(session: Session) -> str:
    """The turns, the latest last; only the latest ones of a long session."""
    rows = []
    first = max(0, len(session.turns) - ROWS)
    for number, turn in enumerate(session.turns[first:], first):
        share = turn.cached_tokens / max(1, len(turn.prompt_token_ids))
        moved = f" (moved from {turn.moved_from})" if turn.moved_from else ""
        rows.append(
            [
                str(number),
                f"{len(turn.prompt_token_ids):,}",
                f"{turn.cached_tokens:,} ({share:.0%})",
                f"{len(turn.token_ids):,}",
                ", ".join(str(v) for v, _, _ in turn.version_spans) or "none",
                escape(turn.finish_reason),
                escape(turn.replica + moved),
                _text(turn.text),
            ]
        )
    hidden = f'<div style="color:{FAINT}">… {first} earlier turns</div>' if first else ""
    return _card(repr(session), session.stats, hidden + table(HEADS, rows, numbers=(0, 1, 2, 3)))


def sessions_html(sessions: Sessions) -> str:
    """One row per session, with its last turn."""
    rows = []
    for s in list(sessions)[:ROWS]:
        stats = s.stats
        rows.append(
            [
                f"{s.prompt_index}.{s.sample_index}",
                str(stats.turns),
                f"{stats.prompt_tokens:,}",
                f"{stats.cached_tokens:,} ({stats.hit_rate:.0%})",
                f"{stats.generated_tokens:,}",
                ", ".join(map(str, stats.versions)) or "none",
                escape(s.turns[-1].finish_reason if s.turns else "–"),
                escape(s.replica or "–"),
                _text(s.turns[-1].text if s.turns else ""),
            ]
        )
    rest = len(sessions) - len(rows)
    more = f'<div style="color:{FAINT}">… {rest:,} more sessions</div>' if rest > 0 else ""
    heads = ("session", "turns", *HEADS[1:-1], "last text")
    return _card(repr(sessions), sessions.stats, table(heads, rows, numbers=(1, 2, 3, 4)) + more)


def _card(title: str, stats: SessionStats, body: str) -> str:
    note = (
        f"KV cache: {stats.cached_tokens:,} of {stats.prompt_tokens:,} prompt tokens not computed again "
        f"({stats.hit_rate:.0%}), about {stats.seconds_saved:.2g} s saved"
    )
    words = f'<div style="color:{FAINT}">{escape(note)}</div>{bar(stats.hit_rate)}'
    return f'<div style="{BOX}"><b>{escape(visible(title))}</b>{words}{body}</div>'


def _text(text: str) -> str:
    style = f"font-family:{MONO};unicode-bidi:isolate"
    return f'<span style="{style}">{escape(visible(shorten(text, 80)))}</span>'
