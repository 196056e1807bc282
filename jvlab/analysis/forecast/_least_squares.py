"""Non-negative least squares with a prior, for many weightings at once: numpy only."""

from __future__ import annotations

import numpy as np

SWEEPS = 400  # of coordinate descent; problems have at most six unknowns
ROUNDS = 4  # of a fit, with the weights and expectations of the one before
CLOSE = 1e-6  # shares that change by less are found


def nonnegative(design: np.ndarray, target: np.ndarray, mean: np.ndarray, spread: np.ndarray) -> np.ndarray:
    """The z ≥ 0 with the least |design z − target|² + |(z − mean) / spread|², for each of B problems.

    `design` is [B, rows, k], `target` [B, rows], both divided by the noise; `mean` and `spread` [k] or [B, k].
    """
    precision = np.broadcast_to(1.0 / np.square(spread), (len(design), design.shape[2]))
    matrix = np.einsum("bri,brj->bij", design, design)
    index = np.arange(design.shape[2])
    matrix[:, index, index] += precision
    side = np.einsum("bri,br->bi", design, target) + precision * mean
    found = np.linalg.solve(matrix, side[..., None])[..., 0]
    at = np.flatnonzero((found < 0).any(axis=1))  # only these need more
    matrix, side, rest = matrix[at], side[at], np.maximum(found[at], 0.0)
    for _ in range(SWEEPS if len(at) else 0):
        before = rest.copy()
        for i in index:
            without = side[:, i] - (matrix[:, i] * rest).sum(axis=1) + matrix[:, i, i] * rest[:, i]
            rest[:, i] = np.maximum(without / matrix[:, i, i], 0.0)
        if np.abs(rest - before).max() < CLOSE:
            break
    found[at] = rest
    return found


def fit(
    features: np.ndarray, seconds: np.ndarray, mean: np.ndarray, spread: np.ndarray, noise: float, weights: np.ndarray
) -> np.ndarray:
    """Costs [B, k] per unit of each feature, from rows of features [rows, k] and seconds [B, rows].

    Errors are relative to what a row should have taken: to what it took, slow rows would count less than fast ones, and
    costs come out too low. `noise` is the standard deviation of one row. `mean` and `spread` are a prior over each
    feature's share of an average row's time. `weights` [B, rows] count rows more or less; rows far off count less
    (Huber), as a machine that was busy elsewhere makes only some rows slow.
    """
    scale = features.mean(axis=0)
    used = np.where(scale > 0, scale, 1.0)
    shares, typical = features / used, seconds.mean(axis=1)
    robust, expected = np.ones_like(seconds), seconds
    z = np.zeros((len(seconds), features.shape[1]))
    for _ in range(ROUNDS):
        factor = np.sqrt(weights * robust) / noise / expected
        units = shares[None] * typical[:, None, None]
        z = nonnegative(units * factor[..., None], seconds * factor, mean, spread)
        expected = np.maximum(np.einsum("brk,bk->br", units, z), 0.1 * seconds)
        off = np.abs(seconds / expected - 1.0)
        robust = np.minimum(1.0, 1.5 * noise / np.maximum(off, 1e-9))
    z = np.where(scale > 0, z, 0.0)
    return z * typical[:, None] / used


def residuals(features: np.ndarray, seconds: np.ndarray, costs: np.ndarray) -> np.ndarray:
    """Relative errors [B, rows] of fitted costs."""
    return 1.0 - seconds / np.maximum(costs @ features.T, 1e-9)
