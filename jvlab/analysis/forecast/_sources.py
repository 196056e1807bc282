"""What `jv.whatif` may be given, as observations: runs, records, folders, results of `jvlab bench`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jvlab._errors import ConfigError
from jvlab.analysis.forecast._observe import ABSURD, GroupRow, Observation, StepRow, SyncRow
from jvlab.analysis.forecast._setting import Setting

SAMPLES = 8  # of each prompt, in `jvlab bench grpo --model`
BENCHES = "pass the JSON of `jvlab bench grpo --model` or `jvlab bench whatif`, a run, or a jv.Record"
PROMPT_TOKENS = 40.0  # about, of its prompts


@dataclass(frozen=True)
class Measured:
    """The step time of a setting, and which steps it is of."""

    setting: Setting
    step_s: float
    first: int
    steps: int


def observations(source: Any) -> list[Observation]:
    """What a source shows; of the result of a bench, its on-policy runs, or those it was to be fitted to."""
    if not (isinstance(source, Mapping) and "runs" in source):
        return [Observation.of(source)]
    rows = _rows(source)
    if any("observation" in row for row in rows):
        return [Observation.of(row["observation"]) for row in rows if row.get("use") == "fit"]
    with _understood():
        return [_observation(row, source) for row in rows if not row["max_staleness"]]


def measured(source: Any) -> list[Measured]:
    """The settings of a source with their step times; of the result of a bench, all of them."""
    if isinstance(source, Mapping) and "runs" in source:
        rows = _rows(source)
        if any("observation" in row for row in rows):
            return [m for row in rows for m in measured(row["observation"])]
        with _understood():
            return [Measured(_setting(row, source), float(row["step_s"]), 1, len(row["steps_s"])) for row in rows]
    seen = Observation.of(source)
    return [Measured(seen.setting, seen.step_s, seen.first, len(seen.counted))]


@contextlib.contextmanager
def _understood() -> Iterator[None]:
    """Raises ConfigError for values of another kind than a bench writes."""
    try:
        yield
    except ConfigError:
        raise
    except ABSURD as error:
        raise ConfigError(f"a run of this bench cannot be read: {error!r}", remedy=BENCHES) from error


def _rows(result: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """jvlab's own runs in the result of a bench."""
    runs = result["runs"]
    if not isinstance(runs, Sequence) or not all(isinstance(row, Mapping) for row in runs):
        raise ConfigError(
            "this is not the result of `jvlab bench grpo --model` or `jvlab bench whatif`",
            remedy=BENCHES,
        )
    rows = [row for row in runs if row.get("who", "jvlab") == "jvlab"]
    if not rows or not all({"observation"} <= set(row) or {"tokens", "steps_s"} <= set(row) for row in rows):
        raise ConfigError("no run in it says how long its steps were", remedy="pass a run, or a jv.Record")
    return rows


def _setting(row: Mapping[str, Any], result: Mapping[str, Any]) -> Setting:
    prompts = int(result.get("samples_per_step", SAMPLES * SAMPLES)) // SAMPLES
    return Setting(prompts, SAMPLES, int(row["tokens"]), int(row["max_staleness"]), 1, PROMPT_TOKENS)


def _observation(row: Mapping[str, Any], result: Mapping[str, Any]) -> Observation:
    """An on-policy row: its phases follow each other, so that means of their seconds say when each began."""
    setting = _setting(row, result)
    part, length, start = row["seconds"], row["tokens"] + PROMPT_TOKENS, 0.0
    groups: list[GroupRow] = []
    steps: list[StepRow] = []
    syncs: list[SyncRow] = []
    for window in row["steps_s"]:
        syncs.append(SyncRow(start, start + part["sync"], part["sync"], 1))
        begin = start + part["sync"]
        end = begin + part["generate"]
        rewarded = end + max(part["reward"] - part["overlap"], 0.0)
        own = tuple(range(len(groups), len(groups) + setting.prompts_per_step))
        sizes = (setting.max_tokens,) * SAMPLES
        groups += [GroupRow(i, "pool/0", begin, end, rewarded, sizes, PROMPT_TOKENS, PROMPT_TOKENS) for i in own]
        trained = rewarded + part["idle"]
        start = trained + part["train"]
        computed = setting.samples * length / (1 - row["padding"])
        steps.append(StepRow(trained, start, computed, length, own, True, window, 0.0))
    name = f"{setting.max_tokens} tokens"
    return Observation(name, setting, tuple(groups), tuple(steps), tuple(syncs), padding=row["padding"])
