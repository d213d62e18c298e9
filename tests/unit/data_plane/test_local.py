"""LocalDataPlane: written once, read by name, claimed once, gone when released; every error names the ids."""

from __future__ import annotations

import asyncio

from mopd.data_plane.local import LocalDataPlane
from tests.unit.data_plane.rules import samples, try_rules


def test_the_rules_of_every_storage() -> None:
    assert asyncio.run(try_rules(LocalDataPlane())) == [
        list(samples()[1]),
        8,
        "samples [0] are put a second time",
        "samples [8] are put a second time",
        "field 'tokens' has 0 tensors for 1 samples",
        "field 'tokens' of samples [1, 2] is written a second time",
        "samples [99] are unknown",
        "samples [99, 8] are unknown",
        "samples [1] are claimed a second time",
        "field 'teacher_ids' does not exist for samples [4]",
        "samples [99] are unknown",
        "samples [3] are discarded but claimed",
        "samples [99] are unknown",
        "samples [5] are released but not claimed",
        [0, 1],
        6,
        0,
    ]
