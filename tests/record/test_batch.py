"""RolloutBatch and Sample: list-likeness, arrays for a loss, files, and how they look."""

from __future__ import annotations

import html.parser
import itertools
import math
import pickle
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jvlab._errors import ConfigError
from jvlab.record._batch import LOGPROBS_MODES, RolloutBatch
from jvlab.record._sample import FINISH_REASONS, Sample
from tests.fuzzing import examples


def sample(
    at: int = 0, index: int = 0, prompt_ids=(5, 6), ids=(7, 8, 9), **more
) -> Sample:
    settings = {
        "logprobs": [-0.5] * len(ids),
        "versions": [(3, 0, len(ids))] if len(ids) else [],
        "text": "abc",
        **more,
    }
    return Sample(
        prompt_index=at,
        sample_index=index,
        prompt_token_ids=np.array(prompt_ids),
        token_ids=np.array(ids),
        **settings,
    )


def batch(**more) -> RolloutBatch:
    samples = [
        sample(0, 0),
        sample(0, 1, ids=(7,)),
        sample(1, 0, prompt_ids=(1, 2, 3, 4)),
        sample(1, 1, (1, 2, 3, 4), ()),
    ]
    return RolloutBatch(tuple(samples), model="/somewhere/tiny", seconds=2.0, **more)


def test_versions_are_of_each_sampled_token():
    s = sample(ids=(1, 2, 3, 4), versions=[(6, 0, 1), (7, 1, 4)])
    assert len(s.versions) == len(s.logprobs) == len(s.token_ids)
    assert s.versions.tolist() == s.token_versions.tolist() == [6, 7, 7, 7]
    assert s.versions.dtype == np.int64
    assert s.version_spans == ((6, 0, 1), (7, 1, 4))
    assert sample(ids=()).versions.tolist() == []
    assert sample(ids=()).version_spans == ()
    with pytest.raises(ValueError, match="read-only"):
        s.versions[0] = 9


def test_versions_can_be_given_one_by_one():
    s = sample(ids=(1, 2, 3, 4), versions=[6, 7, 7, 7])
    assert (
        s
        == sample(ids=(1, 2, 3, 4), versions=[(6, 0, 1), (7, 1, 4)])
        != sample(ids=(1, 2, 3, 4), versions=[6] * 4)
    )
    assert sample(ids=(1,), versions=np.array([5])).version_spans == ((5, 0, 1),)
    with pytest.raises(ConfigError, match="2 versions for 3 tokens"):
        sample(versions=[1, 2])
    with pytest.raises(ConfigError, match="versions"):
        sample(versions=[(1, 2), (3, 4)])
    with pytest.raises(ConfigError, match="versions"):
        sample(versions=["a", "b", "c"])


@pytest.mark.parametrize(
    "spans",
    [
        [(1, 0, 2)],
        [(1, 0, 4)],
        [(1, 1, 3)],
        [(1, 0, 1), (2, 2, 3)],
        [(1, 0, 2), (2, 1, 3)],
        [(1, 0, 3), (2, 3, 3)],
        [],
    ],
)
def test_spans_that_do_not_cover_the_tokens_are_refused(spans):
    with pytest.raises(ConfigError, match="do not cover 3 tokens"):
        sample(versions=spans)


def test_a_wrong_sample_is_refused():
    with pytest.raises(ConfigError, match="2 logprobs for 3 tokens"):
        sample(logprobs=[-1.0, -1.0])
    with pytest.raises(ConfigError, match="finish_reason='eos'"):
        sample(finish_reason="eos")
    with pytest.raises(ConfigError, match=r"token_ids has shape \(1, 3\)"):
        sample(ids=((1, 2, 3),))
    with pytest.raises(ConfigError, match="logprobs_mode"):
        RolloutBatch((), logprobs_mode="raw")  # type: ignore[arg-type]


def test_arrays_of_a_sample_cannot_be_written_and_are_copies():
    ids = np.array([1, 2, 3])
    s = sample(ids=ids)
    ids[0] = 99
    assert s.token_ids.tolist() == [1, 2, 3]
    with pytest.raises(ValueError, match="read-only"):
        s.token_ids[0] = 5


def test_without_logprobs_they_are_nan():
    s = sample(logprobs=None)
    assert s.logprobs is not None
    assert np.isnan(s.logprobs).all()
    assert math.isnan(s.mean_logprob)


def test_it_is_like_a_list():
    b = batch()
    assert len(b) == 4
    assert b[-1] is b.samples[3]
    assert [s.sample_index for s in b] == [0, 1, 0, 1]
    assert isinstance(b[1:3], RolloutBatch)
    assert b[1:3].samples == b.samples[1:3]
    assert b[0] in b
    with pytest.raises(IndexError):
        _ = b[4]


def test_tokens_and_rate():
    b = batch()
    assert b.tokens == 7
    assert b.tokens_per_s == 3.5
    assert b[:1].tokens_per_s is None, (
        "a slice was not generated alone, so it has no rate"
    )


def test_adding_slices_gives_the_batch_again():
    b = batch(notes=("replica 1 lost",))
    joined = b[:2] + b[2:]
    assert joined.samples == b.samples
    assert joined.notes == b.notes
    assert (b + b).seconds == 4.0


def test_adding_other_prompts_keeps_their_groups_apart():
    other = RolloutBatch(
        (sample(0, 0, prompt_ids=(40, 41)), sample(1, 0, prompt_ids=(42,))),
        model="/somewhere/tiny",
    )
    joined = batch() + other
    assert [len(g) for g in joined.groups()] == [2, 2, 1, 1]
    assert [s.prompt_index for s in joined] == [0, 0, 1, 1, 2, 3]


def test_adding_other_logprobs_is_refused():
    with pytest.raises(ConfigError, match="processed_logprobs and raw_logprobs"):
        _ = batch() + RolloutBatch((), logprobs_mode="raw_logprobs")


def test_groups_are_ordered_whatever_the_order_of_arrival():
    b = batch()
    shuffled = RolloutBatch(tuple(b.samples[i] for i in (3, 1, 2, 0)))
    assert shuffled.groups() == b.groups()
    assert [[s.sample_index for s in g] for g in b.groups()] == [[0, 1], [0, 1]]


def test_arrays():
    a = batch().arrays(pad_to=8, pad_id=-7)
    assert {k: v.shape for k, v in a.items()} == {
        **dict.fromkeys(
            ("tokens", "prompt_mask", "completion_mask", "logprobs", "versions"), (4, 8)
        ),
        **dict.fromkeys(("lengths", "prompt_lengths", "prompt_index"), (4,)),
    }
    assert a["tokens"].tolist() == [
        [5, 6, 7, 8, 9, -7, -7, -7],
        [5, 6, 7, -7, -7, -7, -7, -7],
        [1, 2, 3, 4, 7, 8, 9, -7],
        [1, 2, 3, 4, -7, -7, -7, -7],
    ]
    assert a["completion_mask"].astype(int).tolist()[0] == [0, 0, 1, 1, 1, 0, 0, 0]
    assert (
        a["prompt_mask"].sum(1).tolist() == a["prompt_lengths"].tolist() == [2, 2, 4, 4]
    )
    assert a["lengths"].tolist() == [5, 3, 7, 4]
    assert a["versions"].tolist()[1] == [-1, -1, 3, -1, -1, -1, -1, -1]
    assert a["logprobs"].tolist()[1] == [0, 0, -0.5, 0, 0, 0, 0, 0]
    assert a["tokens"].dtype == np.int32
    assert a["logprobs"].dtype == np.float32


@pytest.mark.parametrize(
    ("pad_to", "width"),
    [(None, 7), (7, 7), (9, 9), ("power_of_two", 8), ([16, 4, 8], 8), ((32,), 32)],
)
def test_width_of_arrays(pad_to, width):
    assert batch().arrays(pad_to)["tokens"].shape == (4, width)


@pytest.mark.parametrize("pad_to", [6, [2, 4]])
def test_too_narrow_is_an_error_with_both_numbers(pad_to):
    with pytest.raises(
        ConfigError, match=r"too small: the longest sample has 7 tokens"
    ) as e:
        batch().arrays(pad_to)
    assert e.value.fields["longest"] == 7
    assert "7" in e.value.remedy


@pytest.mark.parametrize("pad_to", ["power", True])
def test_unknown_width_is_an_error(pad_to):
    with pytest.raises(ConfigError, match="pad_to"):
        batch().arrays(pad_to)


def test_an_empty_batch_works():
    b = RolloutBatch(())
    assert b.arrays()["tokens"].shape == (0, 0)
    assert b.groups() == []
    assert repr(b) == "RolloutBatch(0 samples, 0 prompts, 0 tokens, no version)"
    assert "<table" in b._repr_html_()


def texts() -> st.SearchStrategy[str]:
    # unpaired surrogates and NUL included
    return st.text(st.characters(codec=None), max_size=20)


@st.composite
def any_sample(draw: st.DrawFn) -> Sample:
    count = draw(st.integers(0, 6))
    cuts = (
        sorted(draw(st.sets(st.integers(1, count - 1), max_size=2)))
        if count > 1
        else []
    )
    edges = [0, *cuts, count] if count else []
    spans = [(draw(st.integers(0, 2**40)), a, b) for a, b in itertools.pairwise(edges)]
    return Sample(
        prompt_index=draw(st.integers(0, 5)),
        sample_index=draw(st.integers(0, 5)),
        prompt=draw(st.none() | texts()),
        prompt_token_ids=np.array(
            draw(st.lists(st.integers(0, 2**31 - 1), max_size=5)), np.int32
        ),
        text=draw(texts()),
        token_ids=np.array(
            draw(st.lists(st.integers(0, 2**31 - 1), min_size=count, max_size=count)),
            np.int32,
        ),
        logprobs=np.array(
            draw(st.lists(st.floats(width=32), min_size=count, max_size=count)),
            np.float32,
        ),
        finish_reason=draw(st.sampled_from(FINISH_REASONS)),
        versions=tuple(spans),
        replica=draw(texts()),
        retried=draw(st.integers(0, 9)),
        seconds=draw(
            st.dictionaries(
                st.sampled_from(["queued", "first_token", "total"]), st.floats(0, 1e6)
            )
        ),
        error=draw(st.none() | texts()),
    )


@settings(max_examples=examples(60), deadline=None)
@given(
    samples=st.lists(any_sample(), max_size=4),
    model=texts(),
    mode=st.sampled_from(LOGPROBS_MODES),
    notes=st.lists(texts(), max_size=3),
    seconds=st.none() | st.floats(0, 1e9),
)
def test_files_lose_nothing(tmp_path_factory, samples, model, mode, notes, seconds):
    before = RolloutBatch(tuple(samples), model, mode, tuple(notes), seconds)
    path = tmp_path_factory.mktemp("batch") / "b.npz"
    assert before.save(path) == str(path)
    assert RolloutBatch.load(path) == before


def test_equality_sees_every_difference():
    b = batch()
    assert b == batch()
    assert b != batch(notes=("x",))
    assert sample() != sample(ids=(7, 8, 1))
    assert sample() != sample(logprobs=[-0.5, -0.5, -0.25])
    assert sample() != sample(text="abd")


def test_files_keep_experts(tmp_path):
    ids = np.arange(5 * 3 * 2, dtype=np.int16).reshape(5, 3, 2) - 1
    weighed = sample(0, 0, expert_ids=ids, expert_weights=ids / 7)
    before = RolloutBatch([weighed, sample(0, 1), sample(1, 0, expert_ids=ids[:, :1])])
    after = RolloutBatch.load(before.save(tmp_path / "batch.npz"))
    assert after == before
    weights = after[0].expert_weights
    assert weights is not None
    assert weights.dtype == np.float32
    assert after[2].expert_weights is None
    assert before[:1] != RolloutBatch(
        [sample(0, 0, expert_ids=ids, expert_weights=ids / 8)]
    )


def test_other_files_are_refused(tmp_path):
    other, text, pickled = tmp_path / "a.npz", tmp_path / "b.npz", tmp_path / "c.npz"
    np.savez(other, x=np.zeros(2))
    text.write_text("hello")
    pickled.write_bytes(pickle.dumps({"header": 1}))
    for path in (other, text, pickled):
        with pytest.raises(ConfigError, match="is not a rollout batch"):
            RolloutBatch.load(path)
    with pytest.raises(FileNotFoundError):
        RolloutBatch.load(tmp_path / "none.npz")


def test_a_damaged_file_is_refused_and_a_failed_save_leaves_nothing(tmp_path):
    path = tmp_path / "b.npz"
    batch().save(path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match="is not a rollout batch"):
        RolloutBatch.load(path)
    with pytest.raises(TypeError):
        RolloutBatch((), notes=(object(),)).save(tmp_path / "other.npz")  # type: ignore[arg-type]
    assert [p.name for p in tmp_path.iterdir()] == ["b.npz"]


def test_repr_is_one_stable_line():
    assert (
        repr(batch())
        == "RolloutBatch(4 samples, 2 prompts, 7 tokens, version 3, 4 stop, model tiny)"
    )
    mixed = RolloutBatch(
        (sample(), sample(1, versions=[(3, 0, 1), (5, 1, 3)], finish_reason="length"))
    )
    assert (
        repr(mixed)
        == "RolloutBatch(2 samples, 2 prompts, 6 tokens, versions 3 to 5, 1 stop, 1 length)"
    )
    assert "\n" not in repr(sample(text="a\nb"))


def test_table_has_one_line_per_sample():
    b = RolloutBatch(
        tuple(sample(i, text="line\nline " + "x" * 100, prompt="p") for i in range(12)),
        notes=("retried 1",),
    )
    lines = b.table(rows=3).splitlines()
    assert lines[0] == repr(b)
    assert lines[1].split()[:2] == ["prompt", "sample"]
    assert "line\\nline" in lines[2]
    assert "x" * 41 not in lines[2]
    assert lines[5:] == ["… 9 more", "note: retried 1"]


class Tags(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)


def test_html_escapes_everything_a_model_can_say():
    evil = "<script>alert(1)</script><img src=x onerror='y'>&amp;"
    b = RolloutBatch(
        (sample(text=evil, prompt=evil, error=evil),), model=evil, notes=(evil,)
    )
    page = b._repr_html_()
    tags = Tags()
    tags.feed(page)
    assert set(tags.seen) <= {
        "div",
        "b",
        "table",
        "thead",
        "tbody",
        "tr",
        "th",
        "td",
        "ul",
        "li",
    }
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "&amp;amp;" in page


def test_html_shows_the_first_samples_and_no_fixed_colours():
    b = RolloutBatch(tuple(sample(i, text=f"text {i}") for i in range(12)))
    page = b._repr_html_()
    assert "text 9<" in page
    assert "text 10<" not in page
    assert "2 more" in page
    assert "-0.500" in page
    assert not re.search(r"(?<![-\w])(color|background):#", page), (
        "a fixed colour is unreadable on light or on dark"
    )


def test_a_batch_as_a_data_frame():
    pytest.importorskip("pandas")
    rewards = [1.0, 0.5, {"right": 1.0, "short": -0.25}, None]
    made = (
        batch()
        .with_rewards(rewards)
        .compare([[-0.25] * len(s.token_ids) for s in batch()])
    )
    frame: Any = made.to_pandas()
    assert len(frame) == 4
    assert frame["text"].tolist() == ["abc"] * 4
    assert frame["tokens"].tolist() == [3, 1, 3, 0]
    assert frame["reward"].tolist()[:3] == [1.0, 0.5, 0.75]
    assert math.isnan(frame["reward"].iloc[3])
    assert frame["reward_right"].tolist()[2] == 1.0
    assert frame["gap"].tolist() == [0.25, 0.25, 0.25, 0.0]
    assert frame["first_version"].tolist() == frame["last_version"].tolist()
    assert frame["token_ids"].iloc[1].tolist() == [7]
    assert frame.groupby("prompt_index")["tokens"].sum().tolist() == [4, 3]
    assert len(RolloutBatch([]).to_pandas()) == 0
