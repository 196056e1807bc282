"""A `Run` as one line, and as a card with its curves and its best and worst sample."""

from __future__ import annotations

import math
from collections.abc import Mapping
from html import escape
from typing import TYPE_CHECKING

from jvlab._errors import JvlabError
from jvlab._states import state
from jvlab._units import human_seconds
from jvlab.record._run_feed import RunFeed
from jvlab.record._token_pieces import TokenSplitter, visible
from jvlab.views._palette import PHASES
from jvlab.views._run_charts import charts_html
from jvlab.views._style import BAD, BOX, FAINT, FILL, MONO, bar, headlines, state_html

if TYPE_CHECKING:
    from jvlab.record._run_status import RunStatus
    from jvlab.record._samples import SampleRecord
    from jvlab.trainer._run import Run

PROMPT, ANSWER = 300, 700  # characters that are shown


def run_line(name: str, status: RunStatus) -> str:
    """One line, without anything that depends on the machine."""
    reward = f", reward {status.reward:.3f}" if status.reward == status.reward else ""
    bound = "on-policy" if not status.max_staleness else f"staleness ≤ {status.max_staleness}"
    why = f": {status.error.splitlines()[0]}" if status.error else ""
    return f"Run({name!r}, {status.state}, step {status.step}/{status.steps}{reward}, {bound}{why})"


def head_html(name: str, status: RunStatus, alarm: float = math.inf, feed: RunFeed | None = None) -> str:
    """Title, progress bar, the headline numbers large and the others small."""
    last = feed.last if feed is not None else lambda _: math.nan
    gap = number(status.logprob_gap, ".2e")
    if status.logprob_gap > alarm:
        gap = f'<b style="color:{BAD}">{gap}, over the alarm at {alarm:.1e}</b>'
    spread, active = last("reward_std"), status.state not in ("finished", "stopped", "failed", "interrupted")
    large = [
        (number(status.reward, ".3f"), f"± {spread:.2f}" if spread == spread else "", "reward"),
        (str(status.step), f"of {status.steps}", "step"),
        (number(last("tokens_per_s"), ",.0f"), "", "tokens/s"),
        (number(last("seconds"), ".2f"), "", "seconds per step"),
    ]
    small = {
        "version": str(status.version),
        "loss": number(last("loss"), ".3g"),
        "entropy": number(last("entropy"), ".3f"),
        "KL": number(last("kl"), ".3g"),
        "response length": number(last("length"), ".0f"),
        "clipped": number(last("clip"), ".1%"),
        "largest logprob gap": gap,
        "effective samples": number(status.effective_samples, ".1%"),
        "masked": number(status.masked_fraction, ".1%"),
        **_experts(status.experts),
        "staleness": f"at most {status.max_staleness}; {status.dropped} dropped, {status.regenerated} made again",
        "groups": _groups(status) if active else "–",
    }
    small = {k: v for k, v in small.items() if v != "–"}
    cells = "".join(f'<span data-jv="fact"><span style="color:{FAINT}">{k}</span> {v}</span>' for k, v in small.items())
    if status.error:
        cells += f'<div style="color:{BAD};white-space:pre-wrap;width:100%">{escape(status.error)}</div>'
    title = f"<b>{escape(name)}</b> {run_state(status, feed)}"
    progress = bar(status.step / max(status.steps, 1), width="100%")
    facts = f'<div style="display:flex;flex-wrap:wrap;gap:0 20px">{cells}</div>'
    return f'<div style="{BOX};max-width:900px">{title}{progress}{headlines(large)}{facts}</div>'


def _groups(status: RunStatus) -> str:
    discarded = f", {status.lost} discarded" if status.lost else ""
    return f"{status.flying} being made, {status.ready} ready{discarded}"


def number(value: float, form: str) -> str:
    return "–" if value != value else format(value, form)


def run_state(status: RunStatus, feed: RunFeed | None) -> str:
    """The run's state. Before its first step: what it waits for, and how long already."""
    if status.waiting:
        return state_html(state(status.state), status.waiting)
    if status.state == "running" and status.step == 0:
        phase = "compiling the first step" if feed is not None and feed.rollouts else "first rollouts"
        return state_html(state("compiling"), f"{phase}, {human_seconds(status.seconds)}")
    compiled = feed.compile_seconds if feed is not None else 0.0
    took = f' <span style="color:{FAINT}">compiled in {human_seconds(compiled)}</span>' if compiled else ""
    return state_html(state(status.state)) + took


def _experts(worst: Mapping[str, float]) -> dict[str, str]:
    """How unevenly the experts of the most uneven layers were used; nothing without experts."""
    if not worst:
        return {}
    return {"experts": f"busiest {worst['max']:.1%}, idlest {worst['min']:.1%}, entropy {worst['entropy']:.2f}"}


def extremes_html(status: RunStatus, model: str = "") -> str:
    """Both samples side by side; empty before the first step. `model`: the folder whose tokenizer decodes chats."""
    best, worst = status.best, status.worst
    if best is None or worst is None:
        return ""
    splitter = TokenSplitter(model)
    if best.reward == worst.reward:
        cards = _card("every reward of this step is equal", best, splitter, PHASES["reward"])
    else:
        cards = _card("best", best, splitter, PHASES["reward"]) + _card("worst", worst, splitter, BAD)
    grid = "display:grid;grid-template-columns:repeat(auto-fit,minmax(260px,1fr));gap:8px"
    title = f'<div style="color:{FAINT};margin-top:6px">samples of step {best.step}</div>'
    return f'{title}<div style="{grid}">{cards}</div>'


def _card(name: str, sample: SampleRecord, splitter: TokenSplitter, colour: str) -> str:
    prompt = splitter.prompt_text_of(sample.prompt or None, sample.prompt_tokens)
    prompt = "…" + prompt[1 - PROMPT :] if len(prompt) > PROMPT else prompt  # a question is at a prompt's end
    answer = sample.text if len(sample.text) <= ANSWER else sample.text[: ANSWER - 1] + "…"
    text = "white-space:pre-wrap;overflow-wrap:anywhere;unicode-bidi:isolate;max-height:12em;overflow:auto"
    finish = f", {sample.finish_reason}" if sample.finish_reason else ""
    return (
        f'<div data-jv="sample" style="min-width:0;padding:4px 10px;border-left:3px solid {colour};background:{FILL}">'
        f'<div style="display:flex;flex-wrap:wrap;gap:0 10px"><b>{escape(name)}</b>'
        f'<span style="white-space:nowrap">reward {sample.reward:.3f}</span>'
        f'<span style="color:{FAINT};white-space:nowrap">{len(sample.tokens)} tokens{escape(finish)}</span></div>'
        f'<div style="color:{FAINT};font-family:{MONO};{text}">{escape(visible(prompt))}</div>'
        f'<div style="font-family:{MONO};{text}">{escape(visible(answer)) or "(empty)"}</div></div>'
    )


def run_html(name: str, status: RunStatus, feed: RunFeed | None = None, model: str = "") -> str:
    """The static card: the dashboard's layout, without its buttons."""
    head = head_html(name, status, feed.alarm if feed else math.inf, feed)
    drawn = charts_html(feed) if feed is not None and len(feed.rows) else ""
    return f'<div style="{BOX}">{head}{drawn}{extremes_html(status, model)}</div>'


def card(run: Run) -> str:
    """The card of a run, from its record."""
    try:
        feed = RunFeed(run.record)
        feed.read()
    except JvlabError:  # nothing recorded yet
        return run_html(run.name, run.status)
    return run_html(run.name, run.status, feed, run.model)
