"""What a pool scored: the log-probability of every given token. numpy only."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jvlab.record._batch import RolloutBatch


@dataclass(frozen=True, eq=False, repr=False)
class Scores:
    """`logprobs[i][t]` is log P of token t of sequence i given the tokens before it; NaN at t = 0, which has no prefix.

    `top_ids[i][t]` and `top_logprobs[i][t]` hold the most likely tokens at position t, best first, if requested.
    `versions[i]` is the weight version that scored sequence i, `token_ids[i]` its tokens.

    >>> scores = pool.score([[5, 6, 7, 8]], top=2)
    >>> scores[0].shape, scores.top_ids[0].shape
    ((4,), (4, 2))
    """

    logprobs: list[np.ndarray]
    versions: np.ndarray
    top_ids: list[np.ndarray] | None = None
    top_logprobs: list[np.ndarray] | None = None
    token_ids: list[np.ndarray] | None = None  # what was scored, also where it was given as text

    def __len__(self) -> int:
        return len(self.logprobs)

    def __getitem__(self, index: int) -> np.ndarray:
        return self.logprobs[index]

    def gap(self, batch: RolloutBatch) -> float:
        """The largest difference between these and the log-probabilities the batch was sampled with."""
        differences = [
            np.abs(scored[-len(sample.token_ids) :] - sample.logprobs)[sample.own]
            for sample, scored in zip(batch, self.logprobs, strict=True)
            if len(sample.token_ids)
        ]
        return float(np.max(np.concatenate(differences))) if differences else 0.0  # NaN stays NaN

    def __repr__(self) -> str:
        tokens = sum(len(row) for row in self.logprobs)
        return f"Scores({len(self)} sequences, {tokens} tokens)"
