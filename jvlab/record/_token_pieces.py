"""Splits completions into the text of each token, and escapes invisible characters."""

from __future__ import annotations

import functools
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jvlab.record._sample import Sample

CONTEXT = 8  # prompt tokens before the completion when decoding it, as in the engine
# Unicode categories of invisible characters and of those that change the reading order.
_INVISIBLE = {"Cf", "Cc", "Cs", "Co", "Cn", "Zl", "Zp"}


def visible(text: str) -> str:
    """The text with invisible and direction-changing characters written as escapes: `\\u202e`."""
    if text.isprintable():
        return text
    return "".join(
        c if c in "\n\t" or unicodedata.category(c) not in _INVISIBLE else _escape(c)
        for c in text
    )


def _escape(c: str) -> str:
    number = ord(c)
    return (
        f"\\x{number:02x}"
        if number < 256
        else f"\\u{number:04x}"
        if number < 65536
        else f"\\U{number:08x}"
    )


@dataclass(frozen=True)
class TokenTexts:
    """The text of each token; if it is not known, `texts` is empty and `why` says why."""

    texts: tuple[str, ...] = ()
    # positions of special tokens, which have a name and no text
    special: frozenset[int] = frozenset()
    why: str = ""


class TokenSplitter:
    """Splits completions of one model into tokens, with the tokenizer in the model's folder."""

    def __init__(self, model: str) -> None:
        self._tokenizer, self.why = _tokenizer(model)

    def __call__(self, sample: Sample) -> TokenTexts:
        """The pieces, which join to the sample's text; without a tokenizer, why there are none."""
        if self._tokenizer is None:
            return TokenTexts(why=self.why)
        ids = sample.token_ids.tolist()
        context = sample.prompt_token_ids[-CONTEXT:].tolist()
        # like the engine, fall back to decoding the completion alone
        for start in (context, []):
            found = split_tokens(
                lambda part: self._tokenizer.decode(part, skip_special_tokens=True),
                start,
                ids,
            )
            if "".join(found) == sample.text:
                return self._named(found, ids)
        # a stop string was removed
        if sample.finish_reason == "stop" and "".join(found).startswith(sample.text):
            return self._named(found, ids)
        return TokenTexts(
            why="the tokenizer of the model's folder does not give this text"
        )

    def prompt_text(self, sample: Sample) -> str:
        """The prompt as text: as it was given, or decoded with its special tokens (a chat, a list of token ids)."""
        return self.prompt_text_of(sample.prompt, sample.prompt_token_ids.tolist())

    def prompt_text_of(self, prompt: str | None, tokens: Sequence[int]) -> str:
        """The same, from the parts of a sample that a record keeps."""
        if prompt is not None:
            return prompt
        ids = list(tokens)
        if self._tokenizer is None:
            return f"{len(ids)} tokens"
        try:
            return self._tokenizer.decode(ids, skip_special_tokens=False)
        # tokenizers raises plain Exceptions, e.g. for an id that is out of range
        except Exception as error:
            return f"{len(ids)} tokens ({error})"

    def _named(self, found: list[str], ids: list[int]) -> TokenTexts:
        special = set()
        named = list(found)
        for position, (text, token) in enumerate(zip(found, ids, strict=True)):
            if not text and not self._tokenizer.decode(
                [token], skip_special_tokens=True
            ):
                special.add(position)
                named[position] = self._tokenizer.id_to_token(token) or f"⟨{token}⟩"
        return TokenTexts(tuple(named), frozenset(special))


def split_tokens(
    decode: Callable[[Sequence[int]], str], context: Sequence[int], ids: Sequence[int]
) -> list[str]:
    """What each token adds to the text after `context`; a character made of several tokens belongs to the last one."""
    known = [*context, *ids]
    begin = 0
    end = len(context)
    out: list[str] = []
    for at in range(len(context), len(known)):
        before = decode(known[begin:end])
        after = decode(known[begin : at + 1])
        whole = len(after) > len(before) and not after.endswith(
            "\N{REPLACEMENT CHARACTER}"
        )
        if whole or at + 1 == len(known):
            out.append(after[len(before) :])
            begin = end
            end = at + 1
        else:
            out.append("")
    return out


@functools.lru_cache(4)
def _tokenizer(model: str) -> tuple[Any, str]:
    """The model's fast tokenizer, or None and why."""
    file = Path(model) / "tokenizer.json"
    if not model or not file.is_file():
        return (
            None,
            "the model's folder, which holds the tokenizer, is not on this machine",
        )
    try:
        from tokenizers import Tokenizer
    except ImportError:
        return None, "the package tokenizers is not installed"
    try:
        return Tokenizer.from_file(str(file)), ""
    except Exception as error:  # tokenizers raises plain Exceptions
        return None, f"the tokenizer cannot be read: {error}"
