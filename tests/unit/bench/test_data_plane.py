"""``mopd bench data_plane``: 8 real ranks receive what they need, and the goals say what they mean."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from mopd.bench.data_plane.command import is_met, report, worst_ratio
from mopd.bench.data_plane.ranks import GOAL, RankBytes, measure_ranks
from mopd.bench.data_plane.steps import UNIT, checksum, make_step, padded
from mopd.bench.data_plane.transport import Carrier, SizeResult


def test_a_step_has_the_size_that_was_asked_for_and_units_of_all_its_samples() -> None:
    step = make_step(2**20, top_k=8, mean_response=64)
    assert 2**20 <= step.num_bytes < 1.01 * 2**20 + 2000
    again = make_step(2**20, top_k=8, mean_response=64)
    assert all(
        torch.equal(a, b) for name in step.fields for a, b in zip(step.fields[name], again.fields[name], strict=True)
    )
    lengths = [len(step.metas[unit]) for unit in step.units()]
    assert sum(lengths) == len(step.metas) and set(lengths[:-1]) == {UNIT}
    batch = padded({name: step.fields[name][step.units()[0]] for name in step.fields})
    assert batch["teacher_ids"].shape == (UNIT, max(meta.response_length for meta in step.metas[:UNIT]), 8)
    assert checksum(padded(step.fields)) == sum(int(t.sum()) for n in ("tokens", "loss_mask") for t in step.fields[n])


@pytest.mark.multirank
def test_eight_ranks_receive_what_they_need() -> None:
    make = partial(make_step, 2**20, top_k=8, mean_response=64)
    step, found = make(), measure_ranks(make)
    rows = found["local"]
    assert [(row.tp_rank, row.pp_rank, row.dp_rank) for row in rows] == [
        (rank % 2, rank // 4, rank // 2 % 2) for rank in range(8)
    ]
    assert 1.0 < worst_ratio(rows) <= GOAL
    # The samples are shared by two data-parallel ranks, each of which has two tensor-parallel ranks.
    last = [row.needed for row in rows if row.pp_rank == 1]
    assert sum(last) == 2 * step.num_bytes
    first = [row.needed for row in rows if row.pp_rank == 0]
    assert sum(first) == 2 * sum(tensor.nbytes for tensor in step.fields["tokens"])
    assert [row.received for row in found["broadcast"]] == [0] + 7 * [step.num_bytes]


def row(**changes: int) -> RankBytes:
    given = RankBytes(rank=0, tp_rank=0, pp_rank=0, dp_rank=0, received=100, needed=100, seconds=1.0)
    return replace(given, **changes)


def test_a_rank_that_needs_nothing_must_receive_nothing() -> None:
    assert worst_ratio([row(), row(received=104)]) == 1.04
    assert worst_ratio([row(received=0, needed=0), row()]) == 1.0
    assert worst_ratio([row(received=1, needed=0)]) == float("inf")


def test_ratios_are_of_the_same_round() -> None:
    queue = Carrier(name="transfer_queue", put_s=[1.0, 2.0, 9.0], get_s=[1.0, 2.0, 9.0])
    store = Carrier(name="ray_object_store", put_s=[2.0, 3.0, 9.0], get_s=[2.0, 3.0, 9.0])
    lists = Carrier(name="pickled_lists", put_s=[0.0], get_s=[1.0])
    local = Carrier(name="local", put_s=[0.0] * 3, get_s=[1.0] * 3)
    result = SizeResult(num_bytes=1, num_samples=1, carriers={one.name: one for one in (queue, store, lists, local)})
    assert queue.ratio_to(store) == pytest.approx(2 / 3) and queue.ratio_to(lists) == 2.0
    said = report({"local": [row()], "broadcast": [row()]}, [result])
    assert said["transport"][0]["ratios"]["transfer_queue"]["ray_object_store"] == queue.ratio_to(store)
    assert not said["transport"][0]["is_met"]  # slower than pickled lists
    assert is_met(replace(result, carriers=result.carriers | {"pickled_lists": store}))
