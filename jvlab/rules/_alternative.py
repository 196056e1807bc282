"""Another reading of some leaves, as the rules to write for it."""

from __future__ import annotations

from dataclasses import dataclass, field

from jvlab.layout._types import Binding
from jvlab.rules._ruleset import Rules
from jvlab.rules._syntax import Rule

KINDS = {
    "transposed": "the leaf lies the other way round",
    "axis order": "the leaf's axes come in another order",
    "head order": "heads and the numbers within a head come in another order",
    "rotary order": "rotary pairs are interleaved on one side and halves on the other",
    "head groups": "query heads are counted by group first, or by key/value head first",
    "offset": "the leaf holds the scale, or the scale less or more one",
    "swapped": "two leaves of one shape stand for each other",
    "layer order": "layers are counted in another order",
    "scale": "the leaf is a multiple of the checkpoint's tensor",
}


@dataclass(frozen=True)
class Alternative:
    """Another reading of some leaves: `rules` to write in the place of those in `replaces` (none: beside a `{x*}`)."""

    kind: str  # one of KINDS
    rules: tuple[str, ...]  # none: no rule can say it, the leaf itself has to be changed
    replaces: tuple[str, ...]
    reason: str
    now: tuple[Binding, ...] = field(repr=False)  # how the rules in force read these leaves
    bindings: tuple[Binding, ...] = field(repr=False)  # how this reads them
    op: str = ""  # what was changed; alternatives of the same op may be meant together
    factor: float = 1.0  # the checkpoint's value is so many times the leaf's
    part: bool = False  # of a rule with choices, only one is read otherwise

    @property
    def rule_text(self) -> str:
        """The rules to write, one a line."""
        return "\n".join(self.rules)

    @property
    def leaves(self) -> tuple[str, ...]:
        """The leaves that are read otherwise."""
        old = {index_map(b) for b in self.now}
        changed = dict.fromkeys(b.leaf for b in self.bindings if index_map(b) not in old)
        return tuple(changed) or tuple(dict.fromkeys(b.leaf for b in self.now))

    def apply(self, rules: Rules) -> Rules:
        """The rules in force with these written in."""
        new = Rules.parse(self.rule_text).rules if self.rules else ()
        texts = [str(r) for r in rules]
        first = next((j for j, t in enumerate(texts) if t in self.replaces), len(texts)) if new else len(texts)
        out: list[Rule] = []
        for j, rule in enumerate(rules):
            out += new if j == first else ()
            out += [rule] if texts[j] not in self.replaces or not new else []
        out += new if first == len(texts) else ()
        kept = {str(r) for r in out}
        return Rules(tuple(out), {k: v for k, v in rules.notes.items() if k in kept})


def index_map(b: Binding) -> tuple[object, ...]:
    """What a binding does, whoever asked for it."""
    return (b.leaf, b.tensor, b.leaf_start, b.tensor_start, b.axes, b.add)
