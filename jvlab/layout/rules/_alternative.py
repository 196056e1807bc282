"""An alternative interpretation of some leaves, as rules."""

from __future__ import annotations

from dataclasses import dataclass, field

from jvlab.layout._types import Binding
from jvlab.layout.rules._ruleset import Rules
from jvlab.layout.rules._syntax import Rule

KINDS = {
    "transposed": "the leaf is transposed",
    "axis order": "the leaf's axes are in another order",
    "head order": "heads and head dimension are in another order",
    "rotary order": "rotary pairs are interleaved on one side and halves on the other",
    "head groups": "query heads are counted by group first, or by key/value head first",
    "offset": "the leaf holds the scale itself, or the scale plus or minus one",
    "swapped": "two leaves of one shape are exchanged",
    "layer order": "layers are counted in another order",
    "scale": "the leaf is a multiple of the checkpoint's tensor",
}


@dataclass(frozen=True)
class Alternative:
    """Another reading of some leaves: `rules` that replace those in `replaces` (empty: in addition to a `{x*}`)."""

    kind: str  # one of KINDS
    rules: tuple[str, ...]  # empty: no rule can express it, the leaf itself has to change
    replaces: tuple[str, ...]
    reason: str
    now: tuple[Binding, ...] = field(repr=False)  # under the current rules
    bindings: tuple[Binding, ...] = field(repr=False)  # under this alternative
    op: str = ""  # what was changed; alternatives with the same op may apply together
    factor: float = 1.0  # checkpoint value / leaf value
    part: bool = False  # only one choice of a rule with choices changes

    @property
    def rule_text(self) -> str:
        """The rules, one per line."""
        return "\n".join(self.rules)

    @property
    def leaves(self) -> tuple[str, ...]:
        """The leaves that are interpreted differently."""
        old = {index_map(b) for b in self.now}
        changed = dict.fromkeys(b.leaf for b in self.bindings if index_map(b) not in old)
        return tuple(changed) or tuple(dict.fromkeys(b.leaf for b in self.now))

    def apply(self, rules: Rules) -> Rules:
        """The current rules with these substituted."""
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
    """What a binding does, without the rule and reason behind it."""
    return (b.leaf, b.tensor, b.leaf_start, b.tensor_start, b.axes, b.add)
