"""Sampling seeds: functions of the run's seed and the sample, never of order or time."""

from __future__ import annotations

import hashlib
from typing import Literal


def derive_seed(seed: int, sample_id: int, purpose: Literal["rollout", "validation"] = "rollout") -> int:
    """63-bit seed of one sample. Training and validation draw from separate families."""
    digest = hashlib.sha256(f"{purpose}:{seed}:{sample_id}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
