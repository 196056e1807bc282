"""A `Subject` without an engine: a model of three matrices in numpy, and the faults that a GPU engine could have."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np

from jvlab._deadline import Deadline
from jvlab._errors import EngineDirty, Unsupported
from jvlab.analysis.certification._subject import Subject
from jvlab.layout._types import CheckpointTensor, Parameter, RankLayout
from jvlab.record._sample import Sample

WORDS, WIDTH = 60, 16
NAMES = ("embed.weight", "scale.weight", "head.weight")
FAULTS = (
    "graph sees the old head",
    "sleep negates the head",
    "sleep 1 is ignored",
    "dropped weights are served",
    "a mixture is served",
    "staged writes live memory",
    "staged changes the version",
)


def identity(values: dict[str, np.ndarray]) -> RankLayout:
    """Each tensor is a parameter of its own."""
    tensors = tuple(CheckpointTensor(n, v.shape, "float32") for n, v in values.items())
    parameters = tuple(
        Parameter(n, v.shape, "float32", (1,)) for n, v in values.items()
    )
    count = np.array([[v.size] for v in values.values()], np.int64)
    order, zero, one = (
        np.arange(len(values), dtype=np.int32),
        np.zeros(len(values), np.int64),
        np.ones_like(count),
    )
    return RankLayout(
        0, (("tp", 0),), tensors, parameters, order, order, count, zero, one, zero, one
    )


class FakeSubject(Subject):
    """One replica on a GPU with graphs, sleep mode and ipc; `fault` is one of FAULTS or empty."""

    def __init__(
        self, fault: str = "", device: str = "cuda", graph_tokens: int = 16
    ) -> None:
        assert fault in ("", *FAULTS)
        drawn = np.random.default_rng(0)
        shapes = {
            "embed.weight": (WORDS, WIDTH),
            "scale.weight": (WIDTH,),
            "head.weight": (WORDS, WIDTH),
        }
        first = {
            n: drawn.standard_normal(s).astype(np.float32) for n, s in shapes.items()
        }
        self.fault, self.device, self.seed, self.half, self.deadline = (
            fault,
            device,
            0,
            False,
            Deadline(60),
        )
        self.facts = SimpleNamespace(
            graph_tokens=graph_tokens,
            max_model_len=128,
            vocab_size=WORDS,
            block_size=16,
            prefix_caching=True,
        )
        self.replicas = ["fake/0"]
        self.refused = self.no_direct = ""
        self.unreadable, self.through_loader = {}, {}
        self.live, self.captured = dict(first), dict(first)
        self.number, self.dirty, self.asleep = 0, False, 0
        self.layouts = [identity(first)]
        self.loaded = self.read(0)
        self._sets = {"original": first}
        self.held = "original"
        self.pool: Any = SimpleNamespace(
            sleep=self._sleep,
            wake=self._wake,
            status=lambda **_: {"replicas": [{"sleeping": bool(self.asleep)}]},
        )

    # What an engine does ----------------------------------------------------------------------------------------

    def _sleep(self, level: int, **_: Any) -> None:
        if self.device == "cpu":
            raise Unsupported("sleep and wake are not supported on CPU")
        self.asleep = 0 if self.fault == "sleep 1 is ignored" else level

    def _wake(self, **_: Any) -> None:
        if self.asleep == 1 and self.fault == "sleep negates the head":
            self.live["head.weight"] = -self.live["head.weight"]
        if self.asleep == 2:
            self.live = {n: np.zeros_like(v) for n, v in self.live.items()}
            self.dirty = self.fault != "dropped weights are served"
        self.asleep = 0

    def read(self, replica: int) -> Any:
        return {(0, n): v.reshape(-1).copy() for n, v in self.live.items()}

    def sync_values(self, values: Any, mode: str | None = None) -> None:
        self.held = None
        self.live = dict(values)
        stale = {"head.weight"} if self.fault == "graph sees the old head" else set()
        self.captured = {
            n: self.captured[n] if n in stale else v for n, v in values.items()
        }
        self.number, self.dirty = self.number + 1, False

    @property
    def version(self) -> int:
        return self.number

    @property
    def link(self) -> Any:
        return SimpleNamespace(
            transport="ipc",
            stepper=lambda tree, mode, timeout: FakeStepper(self, tree, mode),
        )

    def on_device(self, which: Any) -> Any:
        return dict(self.values(which) if isinstance(which, str) else which)

    # What it says -------------------------------------------------------------------------------------------------

    def _logprobs(self, weights: Any, token: int) -> np.ndarray:
        logits = (weights["embed.weight"][token] * weights["scale.weight"]) @ weights[
            "head.weight"
        ].T
        return logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()

    def say(
        self, prompt: Any, replica: str = "", tokens: int = 8, seconds: float = 120.0
    ) -> Sample:
        if self.dirty:
            raise EngineDirty("an engine may hold parts of two versions")
        drawn, last = np.random.default_rng(1), int(prompt[-1])
        made, logprobs = [], []
        for _ in range(tokens):
            row = self._logprobs(self.captured, last)
            last = int(drawn.choice(WORDS, p=np.exp(row) / np.exp(row).sum()))
            made.append(last)
            logprobs.append(row[last])
        said = np.asarray(made), np.asarray(logprobs)
        return Sample(
            0, 0, prompt, *said, versions=((self.number, 0, tokens),), replica="fake/0"
        )

    def score(self, samples: Any) -> list[np.ndarray]:
        out = []
        for sample in samples:
            whole = [int(sample.prompt_token_ids[-1]), *sample.token_ids.tolist()]
            out.append(
                np.array([self._logprobs(self.live, a)[b] for a, b in pairwise(whole)])
            )
        return out


class FakeStepper:
    """Writes tensor by tensor; staged into buffers that are dropped when it is given up."""

    def __init__(
        self, subject: FakeSubject, tree: dict[str, np.ndarray], mode: str
    ) -> None:
        self.subject, self.mode, self.steps = subject, mode, []
        self._tree = tree
        self._waiting = list(tree)

    def __len__(self) -> int:
        return len(self._tree) + 2

    def step(self) -> None:
        name = self._waiting.pop(0)
        if self.mode == "direct" or self.subject.fault == "staged writes live memory":
            self.subject.live = {**self.subject.live, name: self._tree[name]}
        self.steps.append(name)

    def abort(self) -> None:
        if self.mode == "direct":
            self.subject.dirty = self.subject.fault != "a mixture is served"
        elif self.subject.fault == "staged changes the version":
            self.subject.number += 1
