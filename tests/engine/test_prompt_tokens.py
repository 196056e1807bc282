"""Prompts become token ids in slices, so that a replica that is given megabytes of them still beats."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from jvlab._errors import SamplingError
from jvlab.engine import _requests
from jvlab.engine._requests import PromptReader
from jvlab.wire import jvlab_pb2 as pb


class Letters:
    """A token for each letter; remembers how much it was given at once."""

    max_chars_per_token = 1

    def __init__(self) -> None:
        self.given: list[int] = []

    def __call__(self, texts: Any, add_special_tokens: bool = True) -> dict[str, Any]:
        if isinstance(texts, str):
            return {"input_ids": [ord(c) % 100 for c in texts]}
        self.given.append(sum(map(len, texts)))
        return {"input_ids": [[ord(c) % 100 for c in text] for text in texts]}


FACTS = pb.EngineFacts(max_model_len=64, vocab_size=100)


def test_hostile_megabytes_of_prompts_leave_turns_to_others(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(_requests, "YIELD_BYTES", 1 << 14)
    letters, beats = Letters(), 0
    prompts = [(i, pb.Prompt(text=f"{i:060d}")) for i in range(2000)]

    async def go() -> dict[int, list[int]]:
        async def beat() -> None:
            nonlocal beats
            while True:
                await asyncio.sleep(0)
                beats += 1

        beating = asyncio.create_task(beat())
        read = await PromptReader(letters, FACTS).read(prompts)
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)
        return read

    read = asyncio.run(go())
    assert read == {i: [ord(c) % 100 for c in f"{i:060d}"] for i in range(2000)}
    assert beats >= 20
    assert max(letters.given) < 10_000


@pytest.mark.parametrize(
    "prompt",
    [
        pb.Prompt(text="x" * 10**6),
        pb.Prompt(
            parts=pb.PromptParts(
                parts=[pb.Prompt(text="x"), pb.Prompt(text="y" * 10**6)]
            )
        ),
    ],
)
def test_hostile_text_that_cannot_fit_is_not_tokenised(prompt: pb.Prompt):
    letters = Letters()
    with pytest.raises(
        SamplingError, match="1000000 characters: more than max_model_len=64"
    ):
        asyncio.run(PromptReader(letters, FACTS).read([(0, prompt)]))
    assert sum(letters.given) <= 1


@pytest.mark.parametrize(
    "chat", ["[" * 100_000, "{", '[{"role": "user", "content": "\\ud800"}]']
)
def test_hostile_chats_are_the_callers_mistake(chat: str):
    with pytest.raises(ValueError, match="the chat of prompt 0"):
        asyncio.run(
            PromptReader(Letters(), FACTS).read([(0, pb.Prompt(chat_json=chat))])
        )
