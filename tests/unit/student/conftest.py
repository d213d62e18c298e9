from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from mopd.config.student import ParallelConfig
from mopd.student import parallel


@pytest.fixture(scope="module")
def layout() -> Iterator[parallel.Layout]:
    """A world of one rank in this process."""
    yield parallel.initialize(ParallelConfig(), timeout_s=60, seed=0)
    parallel.destroy()
    dist.destroy_process_group()
