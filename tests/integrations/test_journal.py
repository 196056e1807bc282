"""The record of a training that another trainer runs: which samples a step trained on, and how stale they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jvlab as jv
from jvlab.integrations._journal import Journal
from jvlab.record._events import RolloutTally, clock
from jvlab.sync._transaction import Outcome, SyncReport


def generate(journal: Journal, version: int, *texts: str, prompt: str = "p") -> None:
    """One call: a sample of each text, three tokens of this version."""
    tally = RolloutTally()
    samples = [
        jv.Sample(
            prompt_index=0,
            sample_index=k,
            prompt_token_ids=np.array([1, 2]),
            token_ids=np.array([3, 4, 5]),
            versions=((version, 0, 3),),
            text=text,
        )
        for k, text in enumerate(texts)
    ]
    for sample in samples:
        tally.add(sample)
    prompts = [f"<user>{prompt}<assistant>"] * len(texts)
    journal.generated(tally, samples, prompts, texts, {"temperature": 1.0})


def sync(journal: Journal, version: int, first: bool = False) -> None:
    outcome = Outcome("fake/0", "committed", version)
    report = SyncReport(version, 8, {"total": 0.1, "pause": 0.0}, (outcome,))
    journal.synced(report, clock(), None if first else version - 1)


def reward(journal: Journal, texts: list[str], *rewards: float, prompt: str = "p"):
    given = list(rewards)
    return journal.rewarded([prompt] * len(texts), texts, given, [0.0] * len(given))


def steps(journal: Journal) -> list[Any]:
    return journal.record.events("step")


def test_a_step_trains_on_what_came_since_the_last():
    journal = Journal("run")
    sync(journal, 1, first=True)
    generate(journal, 1, "a", "b")
    sync(journal, 2)
    generate(journal, 2, "c")
    sync(journal, 3)
    sync(journal, 4)  # before an evaluation, say: no step
    assert [(e.version, e.versions, e.samples) for e in steps(journal)] == [
        (1, {1: 6}, 2),
        (2, {2: 3}, 1),
    ]
    summary = journal.record.summary()
    assert (summary["syncs"], summary["samples"], summary["max_staleness"]) == (4, 3, 0)
    assert np.isnan(steps(journal)[0].reward_mean)


def test_of_an_off_policy_learner_the_first_come_are_trained_first():
    journal = Journal("run", per_step=2)
    sync(journal, 1, first=True)
    generate(journal, 1, "a", "b")
    generate(journal, 1, "c", "d")
    sync(journal, 2)
    generate(journal, 2, "e", "f")
    sync(journal, 3)
    sync(journal, 4)
    assert [e.staleness for e in steps(journal)] == [{0: 6}, {1: 6}, {1: 6}]


def test_rewards_tell_the_order_and_what_was_cut_short_counts():
    journal = Journal("run", per_step=2)
    sync(journal, 1, first=True)
    generate(journal, 1, "same", prompt="one")
    generate(journal, 1, "same", prompt="two")
    generate(journal, 1, "other", prompt="two")
    found = reward(journal, ["same", ""], 0.5, 0.0, prompt="two")
    assert len(found) == 1, "an episode without a text was never a sample"
    reward(journal, ["same", "other"], 0.25, 1.0, prompt="one")
    sync(journal, 2)
    (event,) = steps(journal)
    assert (event.samples, event.tokens, event.reward_mean) == (2, 3, 0.25)
    assert event.groups == (1,), "the one of this prompt"
    sync(journal, 3)
    assert steps(journal)[1].reward_mean == pytest.approx(0.625)


@pytest.mark.parametrize("folder", [False, True])
def test_its_panel_draws_it(tmp_path: Path, folder: bool):
    """Nobody told losses, gaps and, in memory, samples."""
    from jvlab.views._run_view import RecordPanel

    journal = Journal("run", tmp_path / "run" if folder else None)
    sync(journal, 1, first=True)
    for version in (1, 2, 3):
        generate(journal, version, "a", "b")
        reward(journal, ["a", "b"], 0.5, 1.0)
        sync(journal, version + 1)
    panel = RecordPanel(journal.record)
    panel.refresh_now()
    assert panel.status().step == 3
    assert panel.name == "run"
    panel.close()
    assert "mean 0, at most 0" in journal.record._repr_html_()
    journal.close()


def test_calls_of_their_own_become_a_group(tmp_path: Path):
    journal = Journal("run", tmp_path)
    sync(journal, 1, first=True)
    for text in ("a", "b", "c"):
        generate(journal, 1, text)
    generate(journal, 1, "an evaluation's")
    reward(journal, ["c", "a", "b"], 3.0, 1.0, 2.0)
    sync(journal, 2)
    journal.close()
    record = jv.Record.open(tmp_path)
    found = [(s.text, s.group, s.index, s.reward) for s in record.samples()]
    assert found == [("c", 2, 0, 3.0), ("a", 2, 1, 1.0), ("b", 2, 2, 2.0)]
    assert record.summary()["ended"] == "finished"
    assert record.samples()[0].sampling == {"temperature": 1.0}
