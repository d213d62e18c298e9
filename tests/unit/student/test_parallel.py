from __future__ import annotations

import pytest

from mopd.config.schema import Parallel
from mopd.student.parallel import check_world_size
from mopd.types import UserError


def test_world_size_must_be_divisible() -> None:
    layout = Parallel(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    with pytest.raises(UserError, match=r"world size 6 is not divisible by .*tensor_model_parallel_size 2 x"):
        check_world_size(layout, 6)


def test_world_size_must_be_the_recipes() -> None:
    layout = Parallel(tensor_model_parallel_size=2)
    with pytest.raises(UserError, match=r"start 2 ranks or set student.parallel.data_parallel_size: 2"):
        check_world_size(layout, 4)
    check_world_size(layout, 2)
