"""The rollout viewer: completions coloured by token, a prompt's samples side by side, keyboard navigation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from jvlab._errors import ConfigError
from jvlab.views._batch_view import batch_data
from jvlab.views.panels._live import Panel

if TYPE_CHECKING:
    from jvlab.record._batch import RolloutBatch

COLOURS = ("logprob", "gap", "version")


class BatchPanel(Panel):
    """The viewer's Python side. Its methods do the same as the viewer's buttons and keys."""

    hz = 0.01  # a batch never changes
    moving = False
    scripts = ("diff.js", "rollout.js")
    css = ("rollout.css",)
    css_class = "jv-rollout-panel"
    # `reference`: the sample that the others are compared with; -1: none
    traits: ClassVar[dict[str, Any]] = {
        "data": {},
        "colour": "logprob",
        "prompt": 0,
        "sample": 0,
        "reference": -1,
        "query": "",
    }

    def __init__(self, batch: RolloutBatch, colour: str | None = None) -> None:
        self._data = batch_data(batch)
        self._first = colour or ("gap" if self._data["compared"] else "logprob")
        self._check(self._first)
        super().__init__(batch)

    def build(self) -> Any:
        return self.new_widget(data=self._data, colour=self._first)

    def refresh(self) -> None:
        """Nothing to refresh."""

    def _check(self, colour: str) -> None:
        if colour not in COLOURS:
            raise ConfigError(
                f"colour={colour!r}",
                remedy=f"one of {', '.join(COLOURS)}",
                colour=colour,
            )
        if colour == "gap" and not self._data["compared"]:
            raise ConfigError(
                "this batch has no log-probabilities of the trainer",
                remedy="show batch.compare(policy) instead",
            )

    @property
    def colour(self) -> str:
        """What tokens are coloured by: "logprob", "gap" or "version"."""
        return self.widget.colour

    @property
    def at(self) -> tuple[int, int]:
        """The selected (prompt, sample), each counted from 0 in the order shown."""
        return self.widget.prompt, self.widget.sample

    def colour_by(self, colour: str) -> None:
        """Colour tokens by "logprob", "gap" or "version", like the three buttons and the key c."""
        self._check(colour)
        self.widget.colour = colour

    def select(self, prompt: int, sample: int = 0) -> None:
        """Go to a prompt and one of its samples, counted from 0, like the arrow buttons and keys."""
        groups = self._data["groups"]
        if not 0 <= prompt < len(groups):
            raise ConfigError(
                f"there is no prompt {prompt}",
                remedy=f"from 0 to {len(groups) - 1}",
                prompt=prompt,
            )
        count = len(groups[prompt]["samples"])
        if not 0 <= sample < count:
            raise ConfigError(
                f"prompt {prompt} has no sample {sample}",
                remedy=f"from 0 to {count - 1}",
                sample=sample,
            )
        with self.widget.hold_sync():
            self.widget.prompt = prompt
            self.widget.sample = sample
            self.widget.reference = -1

    def diff(self, sample: int | None = 0) -> None:
        """Underline what the prompt's other samples have and this one has not, like the key d; None: no longer."""
        count = len(self._data["groups"][self.widget.prompt]["samples"])
        if sample is not None and not 0 <= sample < count:
            raise ConfigError(
                f"there is no sample {sample}",
                remedy=f"from 0 to {count - 1}",
                sample=sample,
            )
        self.widget.reference = -1 if sample is None else sample

    def search(self, text: str) -> list[tuple[int, int]]:
        """Mark a text, ignoring case, and return the (prompt, sample) that have it; sample -1 is the prompt itself."""
        self.widget.query = text
        wanted = text.lower()
        groups = self._data["groups"]
        return [
            (at, index)
            for at, group in enumerate(groups)
            for index, found in enumerate(
                [group["prompt"], *(s["text"] for s in group["samples"])], -1
            )
            if wanted and wanted in found.lower()
        ]

    def __repr__(self) -> str:
        return f"BatchPanel({self.subject!r}, {'closed' if self.closed else f'coloured by {self.colour}'})"
