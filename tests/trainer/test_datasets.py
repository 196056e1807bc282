"""`jv.Task.from_dataset`: files, frames, the datasets library, streams, and the rows that people have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jvlab as jv
from jvlab._errors import ConfigError
from jvlab.trainer._tasks import Task

datasets = pytest.importorskip("datasets", reason="the datasets library is missing")
pandas = pytest.importorskip("pandas", reason="pandas is missing")

CHAT = [{"role": "user", "content": "What is 6 * 7?"}]
ROWS = [
    {"prompt": "2 + 2 = ", "answer": "4", "level": 1},
    {"prompt": "3 + 3 = ", "answer": "6", "level": 2},
]
SHAPES: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "gsm8k": (
        {"question": "How many?", "answer": "1,200 + 34\n#### 1,234"},
        "How many?",
        "1234",
    ),
    "millions": ({"question": "?", "answer": "#### 1,234,567"}, "?", "1234567"),
    "a pair": ({"question": "?", "answer": "x\n#### (1,2)\n"}, "?", "(1,2)"),
    "headings": (
        {"problem": "?", "solution": "#### Step 1\nWe add.\n#### Step 2\n$42$"},
        "?",
        "#### Step 1\nWe add.\n#### Step 2\n$42$",
    ),
    "dapo": ({"prompt": CHAT, "label": "42"}, CHAT, "42"),
    "verl": (
        {
            "data_source": "dapo",
            "prompt": CHAT,
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": "42"},
            "extra_info": {"index": 3},
        },
        CHAT,
        "42",
    ),
    "trl": ({"prompt": CHAT, "solution": "$42$"}, CHAT, "$42$"),
    "math": ({"problem": "6 * 7?", "solution": "42"}, "6 * 7?", "42"),
    "no answer": ({"prompt": "Tell a story."}, "Tell a story.", None),
    "token ids": ({"prompt": [1, 2, 3], "answer": "x"}, [1, 2, 3], "x"),
}


def zero(sample: Any, example: Any) -> float:
    return 0.0


def load(source: Any, **options: Any) -> Task:
    return Task.from_dataset(source, **{"reward": zero, **options})


def as_list(rows: list[dict[str, Any]], folder: Path) -> Any:
    return rows


def as_lines(rows: list[dict[str, Any]], folder: Path) -> Any:
    file = folder / "rows.jsonl"
    file.write_text("\n\n".join(map(json.dumps, rows)))
    return file


def as_parquet(rows: list[dict[str, Any]], folder: Path) -> Any:
    file = folder / "rows.parquet"
    datasets.Dataset.from_list(rows).to_parquet(file)
    return str(file)


def as_frame(rows: list[dict[str, Any]], folder: Path) -> Any:
    return pandas.read_parquet(as_parquet(rows, folder))


def as_dataset(rows: list[dict[str, Any]], folder: Path) -> Any:
    return datasets.Dataset.from_list(rows)


def as_saved(rows: list[dict[str, Any]], folder: Path) -> Any:
    found = {"train": as_dataset(rows, folder)}
    datasets.DatasetDict(found).save_to_disk(folder / "saved")
    return folder / "saved"


def as_folder(rows: list[dict[str, Any]], folder: Path) -> Any:
    (folder / "data").mkdir()
    as_parquet(rows, folder / "data")
    return str(folder / "data")


KINDS = [as_list, as_lines, as_parquet, as_frame, as_dataset, as_saved, as_folder]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__[3:])
def test_rows_are_recognised_wherever_they_come_from(
    kind: Any, shape: str, tmp_path: Path
) -> None:
    row, prompt, answer = SHAPES[shape]
    task = load(kind([row, row], tmp_path))
    assert "2 prompts" in repr(task)
    example = task.example(1)
    assert (example.prompt, example.answer) == (prompt, answer)
    assert example.info == {k: v for k, v in row.items() if k != "prompt"}


def test_columns_may_be_named_or_computed() -> None:
    rows = [{"ask": "6 * 7", "say": "#### 42", "n": 1}]
    named = load(rows, prompt="ask", answer="say").example(0)
    assert (named.prompt, named.answer) == ("6 * 7", "#### 42"), "as it is"
    made = load(
        rows, prompt=lambda row: f"Q: {row['ask']}\nA:", answer=lambda row: row["n"]
    ).example(0)
    assert (made.prompt, made.answer) == ("Q: 6 * 7\nA:", 1)


@pytest.mark.parametrize("kind", ["library", "generator", "file", "parquet"])
def test_a_stream_is_not_read_to_its_end(kind: str, tmp_path: Path) -> None:
    read: list[int] = []

    def endless() -> Any:
        for number in range(10_000):
            read.append(number)
            yield {"prompt": f"{number} + 1 = ", "answer": str(number + 1)}

    match kind:
        case "library":
            task = load(datasets.IterableDataset.from_generator(endless))
        case "generator":
            task = load(endless())
        case "file":
            # what follows is not even JSON
            file = tmp_path / "rows.jsonl"
            file.write_text("\n".join(map(json.dumps, ROWS * 3)) + "\nno JSON\n" * 9999)
            task = load(file, streaming=True)
        case _:
            task = load(as_parquet(list(endless()), tmp_path), streaming=True)
            read.clear()
    assert "iterator" in repr(task)
    assert [e.index for e in task.next(3)] == [0, 1, 2]
    assert len(read) < 100


def test_a_stream_that_breaks_off_does_not_begin_again(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, ROWS)) + "\nno JSON\n")
    task = load(file, streaming=True)
    task.next(2)
    for _ in range(2):  # a run that is resumed asks again
        with pytest.raises(ConfigError, match="line 3 is not JSON"):
            task.next(1)
    assert task.example(1).answer == "6"


def test_an_answer_that_is_missing_stays_missing() -> None:
    rows = [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": None}]
    frame = pandas.DataFrame(rows)
    numbers = pandas.DataFrame({"prompt": ["a", "b"], "answer": [1.0, float("nan")]})
    for source in (rows, frame, numbers):
        assert load(source).example(1).answer is None
    task = load(rows, reward=jv.rewards.regex(".", answer=True))
    assert task.reward is not None
    assert task.reward(None, task.example(1)) is None, "skipped, not zero"


def test_equal_rows_stay_unless_they_are_not_wanted() -> None:
    rows = [*ROWS, ROWS[0], {**ROWS[0], "answer": "5"}]
    assert len(load(rows).first(9)) == 4
    found = load(rows, unique=True).first(9)
    assert [e.answer for e in found] == ["4", "6", "5"]
    held = load(datasets.Dataset.from_list(rows), unique=True).first(9)
    assert [e.answer for e in held] == ["4", "6", "5"]


def test_chat_templates() -> None:
    text = {"prompt": "Hi", "answer": ""}
    assert load([text]).example(0).prompt == "Hi"
    asked = [{"role": "user", "content": "Hi"}]
    assert load([text], chat_template=True).example(0).prompt == asked
    jinja = (
        "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
        "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    for row in (text, {"prompt": asked}):
        found = load([row], chat_template=jinja).example(0)
        assert found.prompt == "<user>Hi<assistant>"
    with pytest.raises(ConfigError, match="cannot be rendered"):
        load([text], chat_template="{% for %}").example(0)


def test_a_tokenizer_renders_chats_as_the_engine_would() -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(jv.models.tiny("llama"))
    found = load([{"prompt": CHAT}], chat_template=tokenizer).example(0).prompt
    assert tokenizer.decode(found).endswith("6 * 7?<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("source", "options", "said"),
    [
        (ROWS, {"prompt": "promt"}, r"no column 'promt'; its columns: prompt, answer.*did you mean prompt='prompt'"),
        (ROWS, {"answer": "gold"}, "no column 'gold'; its columns: prompt, answer, level"),
        ([{"text": "a"}], {}, "none of the columns prompt, question, problem; its columns: text"),
        ([], {}, "has no rows"),
        (iter([]), {}, "has no rows"),
        ([1, 2], {}, "a row of dataset is int"),
        (3, {}, "a dataset is int"),
        ([*ROWS, {"prompt": 7}], {}, "the prompt of row 2 is int '7'"),
        ([{"prompt": ""}], {}, "row 0 is an empty text"),
        ([{"prompt": None}], {}, "row 0 is NoneType"),
        ([{"prompt": [1, "a"]}], {}, "row 0 is a list with int"),
        ([{"prompt": [{"content": "a"}]}], {}, "row 0 is a chat with"),
        ([{"prompt": [{"role": "user", "content": [{"type": "image"}]}]}], {}, "a chat with image, which is no text"),
        ({"test": ROWS}, {}, "no split 'train'; there are: test"),
        (ROWS, {"reward": None}, "not how good an answer is"),
        (ROWS, {"chat_template": 3}, "chat_template is int"),
        (iter(ROWS), {"unique": True}, "unique=True needs all rows"),
        ("no/such/file.jsonl", {}, "there is no file"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_said(source: Any, options: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){said}"):
        load(source, **options)


def test_a_bad_prompt_of_a_library_dataset_is_found_at_once() -> None:
    held = datasets.Dataset.from_list([{"prompt": "a"}] * 2500 + [{"prompt": ""}])
    with pytest.raises(ConfigError, match="row 2500 is an empty text"):
        load(held)


def test_broken_files_are_named(tmp_path: Path) -> None:
    lines = tmp_path / "a.jsonl"
    lines.write_text('{"prompt": "a"}\n{"prompt"')
    with pytest.raises(ConfigError, match=r"a\.jsonl line 2 is not JSON"):
        load(lines)
    (tmp_path / "a.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(ConfigError, match="not a Parquet file"):
        load(tmp_path / "a.parquet")
    array = tmp_path / "a.json"
    array.write_text(json.dumps(ROWS))
    assert load(array).example(1).answer == "6"


def test_names_on_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def hub(*args: Any, **options: Any) -> Any:
        asked.append((args, options))
        return datasets.Dataset.from_list([SHAPES["gsm8k"][0]])

    monkeypatch.setattr(datasets, "load_dataset", hub)
    task = load("openai/gsm8k", config="main", split="test")
    assert asked == [(("openai/gsm8k", "main"), {"split": "test", "streaming": False})]
    assert (task.name, task.example(0).answer) == ("gsm8k", "1234")

    def gone(*args: Any, **options: Any) -> Any:
        raise ConnectionError("Couldn't reach 'a/b' on the Hub\nlong story")

    monkeypatch.setattr(datasets, "load_dataset", gone)
    with pytest.raises(ConfigError, match=r"'a/b' cannot be loaded: .*on the Hub") as e:
        load("a/b")
    assert "long story" not in str(e.value)


def test_a_position_survives_and_shuffling_works() -> None:
    held = datasets.Dataset.from_list([{"prompt": f"p{i}"} for i in range(8)])
    task = load(held, shuffle=True, seed=3)
    drawn = [e.prompt for e in task.next(12)]
    assert sorted(drawn[:8]) == sorted(f"p{i}" for i in range(8))
    again = load(held, shuffle=True, seed=3)
    again.load_state({**task.state_dict(), "position": 4})
    assert [e.prompt for e in again.next(8)] == drawn[4:]


def test_numbers_of_numpy_become_plain() -> None:
    row = {"prompt": "a", "answer": np.int64(3), "many": np.array([1.5, 2.0])}
    example = load([row]).example(0)
    assert type(example.answer) is int
    assert example.info["many"] == [1.5, 2.0]
