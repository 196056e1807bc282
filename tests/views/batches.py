"""Batches for tests of views: real token boundaries, chosen texts, rewards, versions, a trainer's numbers."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

import jvlab as jv

EVIL = (
    '<script>window.jvHacked=1</script><img src=x onerror="window.jvHacked=2"> **bold** '
    '\u202eRTL\u202c [a](http://evil.example/x) 日本é &amp; <b>&"'
)


@functools.cache
def tokenizer(model: str) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(f"{model}/tokenizer.json")


def make_sample(
    model: str,
    prompt: str,
    text: str,
    at: int = 0,
    index: int = 0,
    cut: int = 0,
    **more: Any,
) -> jv.Sample:
    """A sample of `text`; tokens from `cut` on were made by the next version."""
    encode = lambda words: tokenizer(model).encode(words, add_special_tokens=False).ids
    ids = encode(text)
    cut = min(cut or len(ids), len(ids))
    spans = [(3, 0, cut), (4, cut, len(ids))]
    return jv.Sample(
        at,
        index,
        encode(prompt),
        ids,
        -8.0 * np.abs(np.sin(np.arange(len(ids)) + index)),
        prompt=prompt,
        text=text,
        versions=tuple(s for s in spans if s[1] < s[2]),
        replica="pool-1/0",
        **more,
    )


def make_batch(
    model: str, prompts: int = 3, samples: int = 4, evil: bool = True
) -> jv.RolloutBatch:
    """Prompts with samples side by side; the first completion is what a model says at its worst."""
    out = []
    for at in range(prompts):
        for index in range(samples):
            plain = (
                f"It says {index}: the lamp was lit, and nobody came to see what the sea had brought. "
                * (1 + index)
            )
            text = EVIL if evil and at == index == 0 else plain
            out.append(
                make_sample(
                    model,
                    f"Prompt {at}: once upon a time",
                    text,
                    at,
                    index,
                    cut=9 * index,
                )
            )
    batch = jv.RolloutBatch(out, model=model, seconds=2.0)
    return batch.with_rewards([(s.sample_index % 3) / 2 for s in batch])


def compared(batch: jv.RolloutBatch) -> jv.RolloutBatch:
    """The same, with a trainer that is a little off."""
    return batch.compare(
        [s.logprobs + 0.01 * np.sin(np.arange(len(s.token_ids))) for s in batch]
    )
