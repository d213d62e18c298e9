"""What Megatron's pipeline schedules are given. That they compute the right thing is ``tests/parity/student``'s."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mopd.student import schedule


@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize("num_chunks", [1, 2])
def test_stages_have_neighbours_that_know_whether_chunks_take_turns(
    num_stages: int, num_chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = SimpleNamespace(pp=SimpleNamespace(size=lambda: num_stages))
    given: dict[str, Any] = {}
    monkeypatch.setattr(schedule, "schedule_groups", lambda: groups)
    monkeypatch.setattr(schedule, "get_forward_backward_func", lambda: given.update)
    monkeypatch.setattr(schedule, "Neighbours", lambda *args, **kwargs: (args, kwargs))
    chunks: Any = [SimpleNamespace(module=SimpleNamespace(config="config"))] * num_chunks
    shapes = [(4, 1, 8)] * 2
    schedule.run_schedule(chunks, iter("ab"), shapes, str, forward_only=True, has_experts=False)  # type: ignore[arg-type]
    assert (given["num_microbatches"], given["forward_only"], len(given["model"])) == (2, True, num_chunks)
    if num_chunks > 1:
        assert [list(micro_batches) for micro_batches in given["data_iterator"]] == [["a", "b"]] * num_chunks
    else:
        assert list(given["data_iterator"]) == ["a", "b"]
    if num_stages == 1:
        assert "p2p_communicator" not in given
    else:
        neighbours = ((groups.pp, "config", shapes), {"is_interleaved": num_chunks > 1})
        assert given["p2p_communicator"] == neighbours and given["pg_collection"] is groups
