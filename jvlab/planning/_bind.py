"""Binds rules, declared or inferred, to a tree: what `rules=` accepts, and the leaf shapes that rules imply."""

from __future__ import annotations

from collections.abc import Mapping as Dict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jvlab._errors import ConfigError

if TYPE_CHECKING:
    from jvlab.layout._types import Binding, CheckpointTensor
    from jvlab.rules._ruleset import Rules


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
    from jvlab.rules._auto import infer

    given = None
    if isinstance(rules, (tuple, list)) and len(rules) == 2 and rules[0] == "auto":
        rules, given = "auto", rules_of(rules[1], tensors, config, shapes)
    if isinstance(rules, str) and rules == "auto":
        return infer(shapes, tensors, config, values, checkpoint, given)
    declared = rules_of(rules, tensors, config, shapes)
    return declared, declared.bind(shapes, tensors, config)


def rules_of(
    rules: Any, tensors: list[CheckpointTensor], config: Dict[str, Any], leaves: Dict[str, Any] | None = None
) -> Rules:
    """Declared rules: "policy", the name of a set, a file, rule text, or a Rules object.

    A named set is adapted to the model's family and to the prefixes of the checkpoint and the `leaves`.
    """
    from jvlab.rules._builtin import numbers_layers, policy_rules
    from jvlab.rules._presets import fit_leaves, preset_rules
    from jvlab.rules._ruleset import Rules

    if isinstance(rules, Rules):
        return rules
    if not isinstance(rules, str):
        raise ConfigError(
            f"rules must be text or Rules, not {type(rules).__name__}",
            remedy='pass "auto", a name, a file, rule text, jv.Rules, or ("auto", rules)',
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
    from jvlab.rules._policy_shapes import leaf_shapes_for

    auto = rules == "auto" if isinstance(rules, str) else isinstance(rules, (tuple, list))
    if auto:
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
    from jvlab.rules._builtin import policy_rules
    from jvlab.rules._policy_shapes import leaf_shapes_for

    return leaf_shapes_for(policy_rules(config, [t.name for t in tensors], scanned), tensors, config, dtype)
