"""The suggested split of GPUs against every other one, each run by the real controller and routers on a simulated
clock."""

from __future__ import annotations

import pytest

from tests.unit.planning.simulated import all_splits, reached

GOAL = 0.9


def test_every_split_is_tried() -> None:
    assert len({(gpus, *replicas.values()) for gpus, replicas in all_splits()}) == 15


@pytest.mark.parametrize("world", range(0, 20, 4))
def test_the_suggested_split_is_nearly_the_best_of_all(world: int) -> None:
    """Every fourth of the twenty worlds that ``simulated.py`` measures; the three kinds of schedules are among them."""
    share, _ = reached(world)
    assert GOAL <= share <= 1.1
