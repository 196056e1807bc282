"""Binds rules, declared or inferred, to a tree: what `rules=` accepts, and the leaf shapes that rules imply."""

from __future__ import annotations

from collections.abc import Mapping as Dict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jvlab._errors import ConfigError

if TYPE_CHECKING:
    from jvlab.layout._types import Binding, CheckpointTensor
    from jvlab.layout.rules._ruleset import Rules


def bind(
    rules: Any,
    shapes: Dict[str, Any],
    tensors: list[CheckpointTensor],
    config: Dict[str, Any],
    values: Dict[str, Any] | None = None,
    checkpoint: Dict[str, Any] | None = None,
) -> list[Binding]:
    """The bindings of `bind_rules`."""
    return bind_rules(rules, shapes, tensors, config, values, checkpoint)[1]


def bind_rules(
    rules: Any,
    shapes: Dict[str, Any],
    tensors: list[CheckpointTensor],
    config: Dict[str, Any],
    values: Dict[str, Any] | None = None,
    checkpoint: Dict[str, Any] | None = None,
) -> tuple[Rules, list[Binding]]:
    """The rules in force, declared or inferred, and their bindings; "auto" compares `values` with `checkpoint`."""
    from jvlab.layout.rules._auto import infer
    from jvlab.layout.rules._ruleset import Rules

    auto, listed = _listed(rules)
    given = Rules(())
    for part in listed:
        found = rules_of(part, tensors, config, shapes)
        if _is_set(part):  # of a set for many models, what concerns this one
            found = found.effective(shapes, [t.name for t in tensors])
        given = given + found
    if auto:
        return infer(shapes, tensors, config, values, checkpoint, given)
    return given, given.bind(shapes, tensors, config, all_of_them=True)


def _listed(rules: Any) -> tuple[bool, list[Any]]:
    """Whether "auto" is among the rules, and the others; lines of a list are one text, so that they have numbers."""
    parts = list(rules) if isinstance(rules, (tuple, list)) else [rules]
    parts = [x for part in parts for x in (part if isinstance(part, (tuple, list)) else [part])]
    auto = any(isinstance(part, str) and part == "auto" for part in parts)
    lines = [part for part in parts if isinstance(part, str) and "->" in part]
    others = [part for part in parts if not (isinstance(part, str) and (part == "auto" or "->" in part))]
    return auto, [*others, *(["\n".join(lines)] if lines else [])]


def _is_set(rules: Any) -> bool:
    """Is it the name of a set for many models, or one of these sets? Not all of its rules concern every model."""
    from jvlab.layout.rules._ruleset import Rules

    if isinstance(rules, str):
        return "->" not in rules and not _is_file(rules)
    return any(rules is Rules.named(name) for name in Rules.names())


def rules_of(
    rules: Any, tensors: list[CheckpointTensor], config: Dict[str, Any], leaves: Dict[str, Any] | None = None
) -> Rules:
    """Declared rules: "policy", the name of a set, a file, rule text, or a Rules object; or a list of these.

    A named set is adapted to the model's family and to the prefixes of the checkpoint and the `leaves`.
    """
    from jvlab.layout.rules._builtin import numbers_layers, policy_rules
    from jvlab.layout.rules._presets import fit_leaves, preset_rules
    from jvlab.layout.rules._ruleset import Rules

    if isinstance(rules, Rules):
        return rules
    if isinstance(rules, (tuple, list)):
        return sum((rules_of(part, tensors, config, leaves) for part in _listed(rules)[1]), Rules(()))
    if not isinstance(rules, str):
        raise ConfigError(
            f"rules must be text, a list of lines, or jv.Rules, not {type(rules).__name__}",
            remedy='pass "auto", a name, a file, lines such as "leaf -> tensor", jv.Rules; or ("auto", line, line, …)',
        )
    if rules == "policy":
        found = policy_rules(config, [t.name for t in tensors], scanned=False if numbers_layers(leaves or ()) else None)
        return fit_leaves(found, leaves or {})
    if "->" in rules:
        return Rules.parse(rules)
    if _is_file(rules):
        return Rules.load(rules)
    if rules.startswith("policy.") and leaves and not numbers_layers(leaves) and f"{rules}.scanned" in Rules.names():
        rules = f"{rules}.scanned"  # the same layout with stacked layers, as jv.Policy has them
    return preset_rules(rules, config, tensors, leaves)


def _is_file(path: str) -> bool:
    try:
        return Path(path).is_file()
    except (OSError, ValueError):  # for example, too long for a file name
        return False


def shapes_for(rules: Any, config: Dict[str, Any], tensors: list[CheckpointTensor]) -> Dict[str, Any]:
    """Leaf shapes for a plan without parameters: those that declared rules imply; for "auto", the Policy's."""
    from jvlab.layout.rules._policy_shapes import leaf_shapes_for

    if _listed(rules)[0]:
        try:
            return policy_shapes(config, tensors)
        except ConfigError as e:
            raise ConfigError(
                f"{e.message}, so there is no tree to plan for",
                remedy='plan for the checkpoint\'s own tree, --rules checkpoint (rules="checkpoint"), which works for '
                f"every family; or pass parameters; {e.remedy}",
            ) from e
    return leaf_shapes_for(rules_of(rules, tensors, config), tensors, config)


def policy_shapes(
    config: Dict[str, Any], tensors: list[CheckpointTensor], dtype: str | None = None, scanned: bool | None = None
) -> Dict[str, Any]:
    """Leaf shapes of jvlab's own Policy for a model, from its config and tensors alone."""
    from jvlab.layout.rules._builtin import policy_rules
    from jvlab.layout.rules._policy_shapes import leaf_shapes_for

    return leaf_shapes_for(policy_rules(config, [t.name for t in tensors], scanned), tensors, config, dtype)
