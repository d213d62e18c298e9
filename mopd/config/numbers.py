"""Range checks of config fields; each error names the field, its value and what to set.

Every number of a recipe passes one of these, so that none is left that a rank, a timer or a fp32 tensor cannot hold.
"""

from __future__ import annotations

import math

MAX_COUNT = 2**31 - 1
"""Of rows, tokens, steps: what 32-bit indices hold."""
MAX_TOKENS = 2**24
"""Of one sequence; sixteen times the longest context of any model."""
MAX_BYTES = 2**50
MAX_PROCESSES = 65_536
"""Ranks, CPUs or GPUs, whatever the cluster."""
MAX_REPLICAS = 1024
MAX_NUMBER = 1e30
"""Largest number that is no count; fp32 ends at 3.4e38, and numbers are multiplied."""
MIN_POSITIVE = 1e-30
"""Smallest number above 0, as fp32 ends at 1.2e-38."""
MIN_SECONDS, MAX_SECONDS = 0.001, 2_000_000.0
"""A millisecond, below which gloo takes a deadline for none, and 23 days, as poll(2) counts milliseconds in 32 bits."""
MAX_SEED = 2**63 - 1
"""torch takes 64 bits, and Megatron adds a rank's number."""


def require_at_least(name: str, value: float, low: float, high: float | None = None) -> None:
    """Raise ``ValueError`` unless ``low <= value <= high``; ``high`` is ``MAX_COUNT`` or ``MAX_NUMBER`` by type."""
    if not math.isfinite(value) or value < low:
        raise ValueError(f"{name} is {value}: set {low} or more")
    if high is None:
        high = MAX_COUNT if isinstance(value, int) else MAX_NUMBER
    if value > high:
        raise ValueError(f"{name} is {value}: set at most {high:.15g}")


def require_positive(name: str, value: float) -> None:
    """Raise ``ValueError`` unless ``value`` is from ``MIN_POSITIVE`` to ``MAX_NUMBER``."""
    if not math.isfinite(value) or value <= 0:
        raise ValueError(f"{name} is {value}: set a positive number")
    if not MIN_POSITIVE <= value <= MAX_NUMBER:
        raise ValueError(f"{name} is {value}: set a number from {MIN_POSITIVE} to {MAX_NUMBER}")


def require_seconds(name: str, value: float) -> None:
    """Raise ``ValueError`` unless ``value`` is from ``MIN_SECONDS`` to ``MAX_SECONDS``."""
    require_positive(name, value)
    if not MIN_SECONDS <= value <= MAX_SECONDS:
        raise ValueError(f"{name} is {value}: set {MIN_SECONDS} to {MAX_SECONDS:.0f} seconds")


def require_seed(name: str, value: int) -> None:
    """Raise ``ValueError`` unless torch takes ``value`` for a seed."""
    if not -(2**63) <= value <= MAX_SEED:
        raise ValueError(f"{name} is {value}: set a whole number of 64 bits, at most {MAX_SEED}")


def require_fraction(name: str, value: float, *, low_open: bool = False, high_open: bool = False) -> None:
    """Raise ``ValueError`` unless ``value`` lies in [0, 1], ends excluded where named open."""
    if not (value > 0 if low_open else value >= 0) or not (value < 1 if high_open else value <= 1):
        low, high = "(" if low_open else "[", ")" if high_open else "]"
        raise ValueError(f"{name} is {value}: set a number in {low}0, 1{high}")
    if 0 < value < MIN_POSITIVE:
        raise ValueError(f"{name} is {value}: set {MIN_POSITIVE} or more")
