"""A pool and a link without an engine, for what an integration asks of them: every call is kept."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np

from jvlab.layout._tree import flatten
from jvlab.record._batch import RolloutBatch, Scores
from jvlab.record._sample import Sample
from jvlab.sync._transaction import Outcome, SyncReport

EOS = 2


class FakeLink:
    """Takes parameters for arrived; `on_sync` is called with them."""

    closed = False

    def __init__(self, pool: FakePool, trainer: Any, options: dict[str, Any]) -> None:
        self.pool = pool
        self.trainer = trainer
        self.options = options
        self.version = 0
        self.held: dict[str, np.ndarray] = {}
        self.on_sync: Any = lambda params: None

    def sync(self, params: Any, **_: Any) -> SyncReport:
        self.on_sync(params)
        self.held = {k: np.array(a) for k, a in flatten(params).arrays.items()}
        self.version += 1
        self.pool.version = self.version
        outcome = Outcome("fake/0", "committed", self.version)
        return SyncReport(self.version, 64, {"total": 0.001, "pause": 0.0}, (outcome,))


class FakePool:
    """Answers with tokens that depend on the prompt, the sample's number and the seed; every third ends by EOS."""

    name = model = "fake"
    snapshot: Any = None
    version = 0

    def __init__(self, max_model_len: int = 64, together: int = 1) -> None:
        self.calls: list[dict[str, Any]] = []
        self.scored: list[list[list[int]]] = []
        self.links: list[FakeLink] = []
        self._room = max_model_len
        self.on_call: Any = lambda number: None
        # calls that must be there at once before any of them is answered
        self._together = threading.Barrier(together, timeout=300)
        self._numbering = threading.Lock()

    def wait(self, timeout: Any = None, progress: Any = None) -> FakePool:
        return self

    def facts(self, timeout: Any = None) -> Any:
        return SimpleNamespace(max_model_len=self._room, max_adapters=0)

    def connect(self, trainer: Any, **options: Any) -> FakeLink:
        self.links.append(FakeLink(self, trainer, options))
        return self.links[-1]

    def generate(
        self, prompts: Any, n: int = 1, *, max_tokens: int, **options: Any
    ) -> RolloutBatch:
        call = {"prompts": prompts, "n": n, "max_tokens": max_tokens, **options}
        with self._numbering:
            self.calls.append(call)
            number = len(self.calls)
        self.on_call(number)
        self._together.wait()
        made = []
        for index, prompt in enumerate(prompts):
            for k in range(n):
                number = sum(prompt) + k + options.get("seed", 0)
                tokens = [30 + (number + t) % 60 for t in range(max_tokens)]
                if k % 3 == 2:
                    tokens = [*tokens[: max_tokens // 2], EOS]
                made.append(
                    Sample(
                        prompt_index=index,
                        sample_index=k,
                        prompt_token_ids=np.array(prompt),
                        token_ids=np.array(tokens),
                        logprobs=-np.arange(1, len(tokens) + 1) / 10,
                        versions=((self.version, 0, len(tokens)),),
                        finish_reason="stop" if tokens[-1] == EOS else "length",
                        replica="fake/0",
                    )
                )
        return RolloutBatch(made)

    def score(self, sequences: Any, **_: Any) -> Scores:
        self.scored.append(sequences)
        rows = [np.array([np.nan, *(-t / 100 for t in s[1:])]) for s in sequences]
        return Scores(rows, np.full(len(rows), self.version))
