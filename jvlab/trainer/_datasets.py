"""Examples of a task, and how rows of the datasets that people have become examples."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from jvlab._errors import ConfigError, MissingDependency
from jvlab.trainer._checks import meant

PROMPTS = ("prompt", "question", "problem")  # columns that are taken for the prompt
ANSWERS = ("answer", "label", "solution", "ground_truth", "target")
# GSM8K's answers end in a line "#### 42", after the reasoning; before others it is a heading of Markdown
GSM8K = re.compile(r"^#### *(.+?)\s*\Z", re.MULTILINE)
FILES = (".jsonl", ".ndjson", ".json", ".parquet")
BATCH = 1000  # rows that are checked at once


@dataclass(frozen=True)
class Example:
    """One prompt of a task, with data for its reward function: an answer, or anything in `info`."""

    prompt: Any  # a text, token ids, or a chat: what `pool.generate` takes
    answer: Any = None
    info: Mapping[str, Any] = field(default_factory=dict)
    index: int = -1  # its number in the task, set by `Task.example`


Column = str | Callable[[Mapping[str, Any]], Any]


@dataclass(frozen=True)
class Reading:
    """How a row becomes an example."""

    prompt: Column
    answer: Column | None
    verl: bool = False  # the answer is reward_model["ground_truth"]
    gsm8k: bool = False  # the answer is what follows "####", where it has that
    chat_template: Any = None

    def example(self, row: Mapping[str, Any], number: int) -> Example:
        row = {str(name): plain(value) for name, value in row.items()}
        info = {name: value for name, value in row.items() if name != "prompt"}
        prompt = self._templated(self.checked_prompt(row, number))
        return Example(prompt, self._answer(row), info)

    def checked_prompt(self, row: Mapping[str, Any], number: int) -> Any:
        """As it is in the row; raises if no pool takes it."""
        given = self.prompt(row) if callable(self.prompt) else row.get(self.prompt)
        return _checked(plain(given), number)

    def _answer(self, row: Mapping[str, Any]) -> Any:
        if self.verl:
            return (row.get("reward_model") or {}).get("ground_truth")
        if self.answer is None:
            return None
        if callable(self.answer):
            return plain(self.answer(row))
        found = row.get(self.answer)
        if isinstance(found, float) and found != found:  # how pandas writes: none
            return None
        if self.gsm8k and isinstance(found, str) and (final := GSM8K.search(found)):
            # a comma of thousands, not of a pair
            return re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", final[1])
        return found

    def _templated(self, prompt: Any) -> Any:
        template = self.chat_template
        if template is None or template is False:
            return prompt
        chat = prompt
        if isinstance(prompt, str):
            chat = [{"role": "user", "content": prompt}]
        if template is True or not isinstance(next(iter(chat), None), Mapping):
            return chat
        if isinstance(template, str):
            return _rendered(template, chat)
        ids = template.apply_chat_template(
            chat, add_generation_prompt=True, tokenize=True, return_dict=False
        )
        return [int(token) for token in ids]


def _rendered(template: str, chat: Any) -> str:
    """By transformers' own renderer. `bos_token` is empty in it: an engine adds the token to a text itself."""
    try:
        from transformers.utils.chat_template_utils import render_jinja_template
    except ImportError as error:
        raise MissingDependency(
            "a chat template needs transformers", remedy="pip install transformers"
        ) from error
    try:
        texts, _ = render_jinja_template(
            [list(chat)], chat_template=template, add_generation_prompt=True
        )
    except Exception as error:  # jinja2's, of many kinds
        raise ConfigError(
            f"chat_template cannot be rendered: {type(error).__name__}: {error}",
            remedy="a Jinja text over `messages`; True takes the model's own",
        ) from error
    return texts[0]


def plain(value: Any) -> Any:
    """Arrays of numpy, as Parquet and pandas give them, as lists, and its numbers as Python's."""
    if isinstance(value, np.ndarray):
        return [plain(v) for v in value.tolist()]
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {name: plain(v) for name, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return value


def _checked(prompt: Any, number: int) -> Any:
    """The prompt, if a pool can take it."""
    wrong = ""
    if prompt == "":
        wrong = "an empty text"
    elif isinstance(prompt, list) and prompt:
        if isinstance(prompt[0], Mapping):
            wrong = next(filter(None, map(_wrong_message, prompt)), "")
        elif any(type(token) is not int for token in prompt):
            wrong = f"a list with {type(prompt[0]).__name__} {str(prompt[0])[:40]!r}"
    elif not isinstance(prompt, str):
        wrong = f"{type(prompt).__name__} {str(prompt)[:40]!r}"
    if wrong:
        raise ConfigError(
            f"the prompt of row {number} is {wrong}",
            remedy="a text, messages with 'role' and 'content', or token ids; prompt=function(row) can make one",
            row=number,
        )
    return prompt


def _wrong_message(message: Any) -> str:
    if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
        return f"a chat with {str(message)[:60]}"
    content = message["content"]
    if isinstance(content, str) or (content is None and message.get("tool_calls")):
        return ""
    for part in content if isinstance(content, list) else [content]:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text":
            return f"a chat with {kind}, which is no text"
    return ""


class Rows(Sequence[Example]):
    """Examples of rows that are read one by one, when they are asked for."""

    def __init__(self, rows: Any, reading: Reading, kept: Sequence[int] | None) -> None:
        self._rows = rows
        self._reading = reading
        self._kept = range(len(rows)) if kept is None else kept

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, index: Any) -> Any:
        number = int(self._kept[index])
        return self._reading.example(self._rows[number], number)


def examples(
    source: Any,
    *,
    prompt: Column | None = None,
    answer: Column | None = None,
    chat_template: Any = None,
    split: str = "train",
    config: str | None = None,
    streaming: bool = False,
    unique: bool = False,
) -> tuple[str, Sequence[Example] | Iterator[Example]]:
    """The name of a dataset and its examples; `Task.from_dataset` documents the arguments."""
    name, rows = _opened(source, split, config, streaming)
    counted = hasattr(rows, "__len__") and hasattr(rows, "__getitem__")
    if counted:
        first = rows[0] if len(rows) else None
    else:
        if unique:
            raise ConfigError(
                "unique=True needs all rows, and these are streamed",
                remedy="streaming=False, or unique=False",
            )
        rows = iter(rows)
        first = next(rows, None)
    if first is None:
        raise ConfigError(f"{name} has no rows", remedy="give at least one")
    if not isinstance(first, Mapping):
        raise ConfigError(
            f"a row of {name} is {type(first).__name__}",
            remedy="rows are mappings of column names to values; jv.Task(prompts, reward) takes plain prompts",
        )
    if not (
        chat_template is None
        or isinstance(chat_template, (bool, str))
        or hasattr(chat_template, "apply_chat_template")
    ):
        raise ConfigError(
            f"chat_template is {type(chat_template).__name__}",
            remedy="True for the model's own, a Jinja text, or a tokenizer",
        )
    reading = recognised(first, name, prompt, answer, chat_template)
    if not counted:
        every = itertools.chain([first], rows)
        return name, (reading.example(row, i) for i, row in enumerate(every))
    kept = _distinct(rows, reading) if unique else None
    if kept is None:
        _check_prompts(rows, reading)
    return name, Rows(rows, reading, kept)


def recognised(
    row: Mapping[str, Any],
    name: str,
    prompt: Column | None,
    answer: Column | None,
    chat_template: Any = None,
) -> Reading:
    """How the rows are to be read: by the columns that were named, or by those that GSM8K, DAPO, verl and TRL have."""
    columns = [str(column) for column in row]
    for option, given in (("prompt", prompt), ("answer", answer)):
        if given is None or callable(given) or given in columns:
            continue
        raise ConfigError(
            f"{name} has no column {given!r}; its columns: {', '.join(columns)}",
            remedy=f"{meant(given, columns, f'{option}=')} Or a function of the row",
            columns=columns,
        )
    if prompt is None:
        prompt = next((column for column in PROMPTS if column in columns), None)
    if prompt is None:
        raise ConfigError(
            f"{name} has none of the columns {', '.join(PROMPTS)}; its columns: {', '.join(columns) or 'none'}",
            remedy="prompt= one of its columns, or a function of the row",
            columns=columns,
        )
    if answer is not None:
        return Reading(prompt, answer, chat_template=chat_template)
    graded = row.get("reward_model")
    if isinstance(graded, Mapping) and "ground_truth" in graded:
        return Reading(prompt, None, verl=True, chat_template=chat_template)
    found = next((column for column in ANSWERS if column in columns), None)
    return Reading(prompt, found, gsm8k=True, chat_template=chat_template)


def _check_prompts(rows: Any, reading: Reading) -> None:
    """Raise for a prompt that no pool takes now, and not after hours."""
    if hasattr(rows, "iter") and isinstance(reading.prompt, str):  # a datasets.Dataset
        column = rows.select_columns([reading.prompt])  # the others are not decoded
        rows = itertools.chain.from_iterable(
            b[reading.prompt] for b in column.iter(BATCH)
        )
        for number, given in enumerate(rows):
            _checked(plain(given), number)
        return
    for number in range(len(rows)):
        reading.checked_prompt(rows[number], number)


def _distinct(rows: Any, reading: Reading) -> list[int]:
    """The numbers of the rows whose prompt and answer no row before has."""
    seen: dict[str, int] = {}
    for number in range(len(rows)):
        example = reading.example(rows[number], number)
        key = json.dumps([example.prompt, example.answer], sort_keys=True, default=repr)
        seen.setdefault(key, number)
    return list(seen.values())


# Where rows come from -------------------------------------------------------------------------------------------------


def _opened(
    source: Any, split: str, config: str | None, streaming: bool
) -> tuple[str, Any]:
    """A name, and rows: something with a length and numbers, or an iterable."""
    if isinstance(source, (str, os.PathLike)):
        return _from_path(os.fspath(source), split, config, streaming)
    if hasattr(source, "iloc") and hasattr(source, "to_dict"):  # a pandas.DataFrame
        return "frame", source.to_dict("records")
    if isinstance(source, Mapping):  # a datasets.DatasetDict
        if split not in source:
            raise ConfigError(
                f"no split {split!r}; there are: {', '.join(map(str, source)) or 'none'}",
                remedy="split= one of them",
            )
        source = source[split]
    if isinstance(source, Iterable) or hasattr(source, "__getitem__"):
        told = getattr(getattr(source, "info", None), "dataset_name", None)
        return str(told or "dataset"), source
    raise ConfigError(
        f"a dataset is {type(source).__name__}",
        remedy="a name on the hub, a file or folder, rows, a DataFrame or one of the datasets library",
    )


def _from_path(
    path: str, split: str, config: str | None, streaming: bool
) -> tuple[str, Any]:
    file = Path(path).expanduser()
    kind = file.suffix.lower()
    if kind in FILES:
        if not file.is_file():
            raise ConfigError(f"there is no file {path}", remedy="check the path")
        if kind == ".parquet":
            return file.stem, _parquet(file, streaming)
        if kind == ".json":
            with contextlib.suppress(ValueError):  # one of lines is taken too
                found = json.loads(file.read_text(encoding="utf-8"))
                return file.stem, found if isinstance(found, list) else [found]
        lines = (row for _, row in json_lines(file))
        return file.stem, lines if streaming else list(lines)
    try:
        import datasets
    except ImportError as error:
        raise MissingDependency(
            f"the dataset {path!r} needs the datasets library",
            remedy="pip install datasets; JSON Lines files need nothing",
        ) from error
    name = file.name or path
    try:
        if (file / "state.json").is_file() or (file / "dataset_dict.json").is_file():
            found = datasets.load_from_disk(str(file))
            return name, found[split] if isinstance(found, Mapping) else found
        where = str(file) if file.is_dir() else path
        return name, datasets.load_dataset(
            where, config, split=split, streaming=streaming
        )
    # the hub's client and the library raise many kinds
    except Exception as error:
        why = str(error).strip().splitlines()
        raise ConfigError(
            f"the dataset {path!r} cannot be loaded: {type(error).__name__}: {why[0] if why else ''}",
            remedy="a file or folder of this machine, or a name on the hub; config= and split= choose a part of it",
        ) from error


def json_lines(file: Path) -> Iterator[tuple[int, Any]]:
    """The content of each line of a file that is not empty, with its number."""
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    yield number, json.loads(line)
                except ValueError as error:
                    raise ConfigError(
                        f"{file} line {number} is not JSON: {error}",
                        remedy="one JSON object per line",
                    ) from error


def _parquet(file: Path, streaming: bool) -> Any:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise MissingDependency(
            "a Parquet file needs pyarrow", remedy="pip install pyarrow"
        ) from error
    try:
        opened = parquet.ParquetFile(file)
        batches = (b.to_pylist() for b in opened.iter_batches(BATCH))
        rows = itertools.chain.from_iterable(batches)
        return rows if streaming else list(rows)
    except (ArrowException, OSError) as error:
        raise ConfigError(
            f"{file} is not a Parquet file: {error}", remedy="check the file"
        ) from error
