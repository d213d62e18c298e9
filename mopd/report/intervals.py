"""Confidence intervals of validation rewards: how far another draw of as many prompts could have moved the figures.

They answer for the prompts alone: what another seed of the training would have given shows only in runs with other
seeds. Scores are one number per prompt: the mean reward of its responses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

CONFIDENCE = 0.95
NUM_RESAMPLES = 2000
Interval = tuple[float, float]
Scores = Sequence[float]


def mean_interval(scores: Scores) -> Interval | None:
    """Return the interval of the mean: Wilson's where every score is 0 or 1, else the bootstrap's percentiles; ``None``
    without scores."""
    if not scores:
        return None
    if not set(scores) <= {0, 1}:
        return _percentiles(_resampled_means([scores])[:, 0])
    n, share = len(scores), sum(scores) / len(scores)
    z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    middle = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return max(0.0, middle - half), min(1.0, middle + half)


def recovery_interval(domains: Sequence[tuple[Scores, Scores, Scores]]) -> Interval | None:
    """Return the bootstrap interval of the head-room recovery, mean over ``domains`` of ``(before, after, teacher)``.
    Each resample draws the same prompts for all three. ``None`` where scores are missing, or where the teacher's lead
    itself is within noise: the ratio then has no bound."""
    total: NDArray[Any] = np.zeros(NUM_RESAMPLES)
    for seed, columns in enumerate(domains):
        if len({len(scores) for scores in columns}) > 1 or not columns[0]:
            return None
        before, after, teacher = _resampled_means(columns, seed).T
        lead = teacher - before
        if np.mean(lead <= 0) > (1 - CONFIDENCE) / 2:
            return None
        total += np.where(lead > 0, (after - before) / np.where(lead > 0, lead, 1.0), 0.0)
    return _percentiles(total / len(domains)) if domains else None


def difference_interval(domains: Sequence[tuple[Scores, Scores]], *, is_paired: bool) -> Interval | None:
    """Return the bootstrap interval of mean(first) - mean(second), mean over ``domains`` of ``(first, second)``.
    ``is_paired``: both answered the same prompts in the same order, which leaves the prompts' difficulty out."""
    total: NDArray[Any] = np.zeros(NUM_RESAMPLES)
    for seed, (first, second) in enumerate(domains):
        if not first or not second:
            return None
        if is_paired:
            total += np.subtract(*_resampled_means([first, second], seed).T)
        else:
            total += _resampled_means([first], 2 * seed)[:, 0] - _resampled_means([second], 2 * seed + 1)[:, 0]
    return _percentiles(total / len(domains)) if domains else None


def show_interval(interval: Sequence[float] | None, form: str = "{:.2f}") -> str:
    """Write ``[0.31, 0.48]``; empty for ``None``."""
    return "" if interval is None else f"[{form.format(interval[0])}, {form.format(interval[1])}]"


def _resampled_means(columns: Sequence[Scores], seed: int = 0) -> NDArray[Any]:
    """Return the means of each column over ``NUM_RESAMPLES`` draws of its rows with replacement, [resamples, columns];
    all columns of a draw take the same rows. Equal calls return equal numbers."""
    values, rng = np.asarray(columns, dtype=np.float64), np.random.default_rng(seed)
    size = values.shape[1]
    return np.stack([values[:, rng.integers(size, size=size)].mean(axis=1) for _ in range(NUM_RESAMPLES)])


def _percentiles(values: NDArray[Any]) -> Interval:
    low, high = np.quantile(values, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)
