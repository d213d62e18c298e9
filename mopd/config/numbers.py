"""Range checks of config fields; each error names the field, its value and what to set."""

from __future__ import annotations

import math


def require_at_least(name: str, value: float, low: float) -> None:
    """Raise ``ValueError`` unless ``value`` is finite and ``>= low``."""
    if not math.isfinite(value) or value < low:
        raise ValueError(f"{name} is {value}: set {low} or more")


def require_positive(name: str, value: float) -> None:
    """Raise ``ValueError`` unless ``value`` is finite and ``> 0``."""
    if not math.isfinite(value) or value <= 0:
        raise ValueError(f"{name} is {value}: set a positive number")


def require_fraction(name: str, value: float, *, low_open: bool = False, high_open: bool = False) -> None:
    """Raise ``ValueError`` unless ``value`` lies in [0, 1], ends excluded where named open."""
    if not (value > 0 if low_open else value >= 0) or not (value < 1 if high_open else value <= 1):
        low, high = "(" if low_open else "[", ")" if high_open else "]"
        raise ValueError(f"{name} is {value}: set a number in {low}0, 1{high}")
