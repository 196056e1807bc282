"""Completions cut into the text of each token, and text made harmless to look at."""

from __future__ import annotations

import functools
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jvlab.samples._sample import Sample

CONTEXT = 8  # prompt tokens that a completion is decoded after, as the engine does it
# Marks that turn the reading order of what stands beside them, or that cannot be seen at all.
_HIDDEN = {"Cf", "Cc", "Cs", "Co", "Cn", "Zl", "Zp"}


def visible(text: str) -> str:
    """The text with every character that cannot be seen, or that moves others, written as its code: `\\u202e`."""
    if text.isprintable():
        return text
    return "".join(c if c in "\n\t" or unicodedata.category(c) not in _HIDDEN else _code(c) for c in text)


def _code(c: str) -> str:
    number = ord(c)
    return f"\\x{number:02x}" if number < 256 else f"\\u{number:04x}" if number < 65536 else f"\\U{number:08x}"


@dataclass(frozen=True)
class TokenTexts:
    """The text of each token; `why` says why it is not known, and `texts` is empty then."""

    texts: tuple[str, ...] = ()
    special: frozenset[int] = frozenset()  # places of tokens that have a name and no text, like the end of a sequence
    why: str = ""


class Cutter:
    """Cuts completions of one model into tokens, with the tokenizer in the model's folder."""

    def __init__(self, model: str) -> None:
        self._tokenizer, self.why = _tokenizer(model)

    def __call__(self, sample: Sample) -> TokenTexts:
        """The pieces, whose joined text is the sample's; without a tokenizer, why there are none."""
        if self._tokenizer is None:
            return TokenTexts(why=self.why)
        ids = sample.token_ids.tolist()
        context = sample.prompt_token_ids[-CONTEXT:].tolist()
        for start in (context, []):  # the engine falls back to a decode of the completion alone, too
            found = cut(lambda part: self._tokenizer.decode(part, skip_special_tokens=True), start, ids)
            if "".join(found) == sample.text:
                return self._named(found, ids)
        if sample.finish_reason == "stop" and "".join(found).startswith(sample.text):  # a stop text was taken off
            return self._named(found, ids)
        return TokenTexts(why="the tokenizer of the model's folder does not give this text")

    def _named(self, found: list[str], ids: list[int]) -> TokenTexts:
        special, named = set(), list(found)
        for place, (text, token) in enumerate(zip(found, ids, strict=True)):
            if not text and not self._tokenizer.decode([token], skip_special_tokens=True):
                special.add(place)
                named[place] = self._tokenizer.id_to_token(token) or f"⟨{token}⟩"
        return TokenTexts(tuple(named), frozenset(special))


def cut(decode: Callable[[Sequence[int]], str], context: Sequence[int], ids: Sequence[int]) -> list[str]:
    """What each token adds to the text after `context`; a character of several tokens counts for the last of them."""
    known, begin, end = [*context, *ids], 0, len(context)
    out: list[str] = []
    for at in range(len(context), len(known)):
        before, after = decode(known[begin:end]), decode(known[begin : at + 1])
        whole = len(after) > len(before) and not after.endswith("\N{REPLACEMENT CHARACTER}")
        if whole or at + 1 == len(known):
            out.append(after[len(before) :])
            begin, end = end, at + 1
        else:
            out.append("")
    return out


@functools.lru_cache(4)
def _tokenizer(model: str) -> tuple[Any, str]:
    """The model's fast tokenizer, or None and why."""
    file = Path(model) / "tokenizer.json"
    if not model or not file.is_file():
        return None, "the model's folder, which holds the tokenizer, is not here"
    try:
        from tokenizers import Tokenizer
    except ImportError:
        return None, "the package tokenizers is not installed"
    try:
        return Tokenizer.from_file(str(file)), ""
    except Exception as error:  # tokenizers raises plain Exceptions
        return None, f"the tokenizer can't be read: {error}"
