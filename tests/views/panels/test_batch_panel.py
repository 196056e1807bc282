"""The rollout viewer without a browser: pieces of tokens, what is sent, twins of its buttons, the static table."""

from __future__ import annotations

import json
import math
import time

import numpy as np
import pytest

import jvlab as jv
from jvlab._errors import ConfigError
from jvlab.record._token_pieces import TokenSplitter, split_tokens, visible
from jvlab.views import _batch_view
from jvlab.views._batch_view import BatchPanel, batch_data, batch_html
from jvlab.views.panels._live import close_tree
from tests.views.batches import EVIL, compared, make_batch, make_sample

ONE = np.array([5])


@pytest.fixture(scope="module")
def model() -> str:
    return jv.models.tiny("llama")


def test_pieces_join_to_the_text_and_name_special_tokens(model: str):
    sample = make_sample(model, "p", EVIL)
    pieces = TokenSplitter(model)(sample)
    assert "".join(pieces.texts) == EVIL
    assert len(pieces.texts) == len(sample.token_ids)
    assert "日" in pieces.texts, (
        "a character of three tokens stands at the last of them"
    )
    end = 2  # the tiny models' end of a sequence
    ids = [*sample.token_ids, end]
    ended = jv.Sample(
        0, 0, ONE, np.array(ids), text=EVIL, prompt="p", versions=((1, 0, len(ids)),)
    )
    pieces = TokenSplitter(model)(ended)
    assert pieces.special == {len(sample.token_ids)}
    assert pieces.texts[-1]


def test_pieces_that_cannot_be_had_say_why(model: str):
    sample = make_sample(model, "p", "hello")
    assert "not on this machine" in TokenSplitter("/no/such/model")(sample).why
    wrong = jv.Sample(
        0,
        0,
        ONE,
        sample.token_ids,
        text="something else",
        versions=((1, 0, len(sample.token_ids)),),
    )
    assert "does not give this text" in TokenSplitter(model)(wrong).why
    data = batch_data(jv.RolloutBatch([wrong], model=model))
    assert data["groups"][0]["samples"][0]["pieces"] == [
        f"⟨{i}⟩" for i in sample.token_ids.tolist()
    ]


def test_cut_gives_a_broken_end_to_the_last_token():
    text = "aé".encode()
    decode = lambda ids: bytes(ids).decode(errors="replace")
    assert split_tokens(decode, [], list(text)) == ["a", "", "é"]
    assert split_tokens(decode, [98], list(text[:2])) == [
        "a",
        "\N{REPLACEMENT CHARACTER}",
    ]


@pytest.mark.parametrize(
    "mark",
    [
        "\u202e",
        "\u200f",
        "\u2066",
        "\u200b",
        "\x00",
        "\x1b",
        "\x7f",
        "\u2028",
        "\ud800",
    ],
)
def test_marks_that_cannot_be_seen_are_written_out(mark: str):
    shown = visible(f"a{mark}b\n\té")
    assert mark not in shown
    assert shown.startswith("a\\")
    assert shown.endswith("b\n\té")


def test_what_is_sent_is_plain_and_whole(model: str):
    batch = compared(make_batch(model))
    data = batch_data(batch)
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert [len(g["samples"]) for g in data["groups"]] == [4, 4, 4]
    first = data["groups"][0]["samples"][0]
    assert "".join(first["pieces"]) == visible(EVIL)
    assert first["versions"] == batch[0].token_versions.tolist()
    assert math.isclose(first["gap"][3], batch[0].gap[3], rel_tol=1e-4)  # type: ignore[index]
    assert data["versions"] == [3, 4]
    assert 0 < data["reach"] <= 0.0101
    none = jv.RolloutBatch(
        [
            jv.Sample(
                0,
                0,
                ONE,
                np.array([6, 7]),
                text="x",
                reward=float("nan"),
                versions=((1, 0, 2),),
            )
        ]
    )
    assert json.dumps(batch_data(none), allow_nan=False), (
        "no log-probabilities, no reward"
    )


def test_a_large_batch_is_sent_in_part_and_says_so(
    model: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(_batch_view, "WIDGET_TOKENS", 200)
    data = batch_data(make_batch(model, prompts=5))
    assert 1 <= len(data["groups"]) < 5
    assert f"{5 - len(data['groups'])} more prompts" in data["left"]


def test_cutting_is_quick(model: str):
    batch = make_batch(model, prompts=30, samples=4)
    start = time.perf_counter()
    batch_data(batch)
    seconds = time.perf_counter() - start
    print(f"{batch.tokens} tokens cut and packed in {seconds:.3f} s")
    assert seconds < 60


def test_twins_of_the_buttons(model: str):
    panel = BatchPanel(make_batch(model))
    assert panel.colour == "logprob"
    assert panel.at == (0, 0)
    panel.select(2, 3)
    assert (panel.widget.prompt, panel.widget.sample) == (2, 3)
    panel.colour_by("version")
    assert panel.widget.colour == "version"
    with pytest.raises(ConfigError, match="compare"):
        panel.colour_by("gap")
    with pytest.raises(ConfigError, match="logprob, gap, version"):
        panel.colour_by("<b>")
    for wrong in ((3, 0), (-1, 0), (0, 4)):
        with pytest.raises(ConfigError, match="from 0 to"):
            panel.select(*wrong)
    assert "\n" not in repr(panel)
    panel.close()
    panel.close()
    other = BatchPanel(compared(make_batch(model)))
    assert other.colour == "gap"
    close_tree(other.widget)


def test_compare_and_rewards_are_checked(model: str):
    batch = make_batch(model)
    with pytest.raises(ConfigError, match="rewards for 12 samples"):
        batch.with_rewards([1.0])
    with pytest.raises(ConfigError, match="2 rows for 12"):
        batch.compare([np.zeros(1), np.zeros(2)])
    with pytest.raises(ConfigError, match="trainer_logprobs for"):
        batch.compare([np.zeros(1)] * 12)
    assert batch[0].gap is None
    assert compared(batch)[2:4][0].gap is not None


def test_compare_with_a_policy(model: str):
    policy = jv.Policy.from_pretrained(model)
    batch = make_batch(model, prompts=1, samples=2).compare(policy)
    ids = np.concatenate([batch[0].prompt_token_ids, batch[0].token_ids])
    want = np.asarray(policy.logprobs(policy.params, ids[None, :]))[
        0, len(batch[0].prompt_token_ids) :
    ]
    assert np.allclose(batch[0].trainer_logprobs, want, atol=1e-4)  # type: ignore[arg-type]


def test_files_keep_rewards_and_the_trainers_numbers(model: str, tmp_path):
    plain = make_batch(model)
    both = compared(plain[:3]) + plain[3:]
    for name, batch in (("plain", plain), ("both", both)):
        assert jv.RolloutBatch.load(batch.save(tmp_path / name)) == batch
    assert plain != both


def test_static_table_is_small_coloured_and_counts_the_rest(model: str):
    batch = compared(make_batch(model, prompts=200, samples=4))
    page = batch_html(batch)
    assert len(page.encode()) < 60_000
    assert "790 more samples" in page
    assert "rgba(213,94,0," in page
    assert "reward" in page
    assert "largest gap" in page
    assert "<script" not in page
    assert "\u202e" not in page


def test_a_runs_samples_as_a_batch(model: str):
    from jvlab.record._samples import SampleRecord, batch_of

    batch = make_batch(model, prompts=2, samples=2)
    kept = [
        SampleRecord.of(s, reward=s.reward or 0.0, step=1 + s.prompt_index)
        for s in batch
    ]
    again = batch_of(kept, model)
    assert [len(group) for group in again.groups()] == [2, 2]
    assert [s.reward for s in again] == [s.reward for s in batch]
    assert again[0].prompt == "step 1, group 0: Prompt 0: once upon a time"
    assert not batch_data(again)["groups"][0]["samples"][0]["why"]


def test_a_reward_of_parts_is_their_sum_and_keeps_them(model: str, tmp_path):
    batch = make_batch(model, prompts=1, samples=2)
    scored = batch.with_rewards([{"form": 0.25, "right <b>": 1.0}, 0.5])
    assert (scored[0].reward, scored[1].reward) == (1.25, 0.5)
    assert jv.RolloutBatch.load(scored.save(tmp_path / "parts")) == scored
    assert scored != batch.with_rewards([1.25, 0.5]), "the parts are part of it"
    first, second = batch_data(scored)["groups"][0]["samples"]
    assert (first["parts"], second["parts"]) == ({"form": 0.25, "right <b>": 1.0}, {})
    assert "form 0.250" in batch_html(scored)
    assert "right &lt;b&gt; 1.000" in batch_html(scored)
    with pytest.raises(ConfigError, match="a mapping of names to numbers"):
        batch.with_rewards([{"form": "good"}, 0.5])  # type: ignore[list-item]


def test_a_selection_compares_with_nothing_of_the_prompt_before(model: str):
    panel = BatchPanel(make_batch(model))
    panel.widget.reference = 2
    panel.select(1)
    assert panel.widget.reference == -1
    panel.close()


def test_a_chat_of_a_record_is_decoded(model: str):
    from jvlab.record._samples import SampleRecord, batch_of
    from tests.views.batches import tokenizer

    ids = tokenizer(model).encode("user: how many?", add_special_tokens=False).ids
    kept = SampleRecord(
        step=3,
        group=1,
        prompt_tokens=tuple(ids),
        tokens=(5,),
        text="x",
        versions=((1, 0, 1),),
    )
    assert (
        batch_data(batch_of([kept], model))["groups"][0]["prompt"] == "user: how many?"
    )
