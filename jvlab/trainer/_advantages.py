"""Advantages from rewards, and which groups carry a learning signal. numpy only."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jvlab._errors import ConfigError

ADVANTAGES = ("group", "mean", "rloo", "reinforce++")


def advantages(
    rewards: Sequence[float] | np.ndarray, group_ids: Sequence[int] | np.ndarray, kind: str = "group", eps: float = 1e-4
) -> np.ndarray:
    """One advantage per sample, float32. With r the rewards, G the group of sample i (its n samples of one prompt):

    | kind | advantage of sample i |
    | --- | --- |
    | "group" | (r_i − mean(G)) / (std(G) + eps), GRPO; std divides by n |
    | "mean" | r_i − mean(G), Dr. GRPO |
    | "rloo" | r_i − mean of the other rewards of G = n / (n − 1) · (r_i − mean(G)) |
    | "reinforce++" | (r_i − mean(batch)) / (std(batch) + eps), REINFORCE++ |

    A group of one sample has no baseline: its advantage is 0, except for "reinforce++".
    """
    values, groups = _checked(rewards, group_ids)
    match kind:
        case "group":
            out = _centred(values, groups) / (_per_sample(values, groups, np.std) + eps)
        case "mean":
            out = _centred(values, groups)
        case "rloo":
            size = _per_sample(values, groups, len)
            out = _centred(values, groups) * size / np.maximum(size - 1, 1)
        case "reinforce++":
            out = (values - values.mean()) / (values.std() + eps) if len(values) else values
        case _:
            raise ConfigError(f"advantages={kind!r}", remedy=f"one of {', '.join(ADVANTAGES)}", advantages=kind)
    return out.astype(np.float32)


def groups_with_spread(
    rewards: Sequence[float] | np.ndarray, group_ids: Sequence[int] | np.ndarray, tolerance: float = 0.0
) -> np.ndarray:
    """Dynamic sampling (DAPO): True for each sample whose group has max − min reward above `tolerance`.

    A group whose rewards are all equal has zero advantages: it costs a forward and a backward pass for no gradient.
    """
    values, groups = _checked(rewards, group_ids)
    return _per_sample(values, groups, np.ptp) > tolerance


def _checked(rewards: object, group_ids: object) -> tuple[np.ndarray, np.ndarray]:
    values, groups = np.asarray(rewards, np.float64), np.asarray(group_ids)
    if values.ndim != 1 or groups.shape != values.shape:
        raise ConfigError(
            f"rewards of shape {values.shape} and group ids of shape {groups.shape}",
            remedy="pass one reward and one group id per sample",
            rewards=values.shape,
            group_ids=groups.shape,
        )
    if not np.isfinite(values).all():
        raise ConfigError(
            f"reward {int(np.flatnonzero(~np.isfinite(values))[0])} is {values[~np.isfinite(values)][0]}",
            remedy="exclude samples whose reward failed; train_batch() does so",
        )
    return values, groups


def _centred(values: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Reward minus its group's mean; exactly 0 where the rewards are equal, whatever the mean's rounding."""
    centred = values - _per_sample(values, groups, np.mean)
    return np.where(_per_sample(values, groups, np.ptp) == 0, 0.0, centred)


def _per_sample(values: np.ndarray, groups: np.ndarray, statistic) -> np.ndarray:
    """A statistic of each group, broadcast to its samples."""
    out = np.zeros(len(values))
    for group in np.unique(groups):
        at = groups == group
        out[at] = statistic(values[at])
    return out
