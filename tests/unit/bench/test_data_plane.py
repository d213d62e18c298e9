"""``mopd bench data_plane``: 8 real ranks receive what they need, and the goal says what it means."""

from __future__ import annotations

import pytest
import torch

from mopd.bench.data_plane import MOST_RECEIVED, VOCAB_SIZE, checksum, measure_ranks, step_lengths
from mopd.bench.models import make_samples

LENGTHS = step_lengths(2**20, top_k=8, mean=64)


def test_a_step_has_the_size_that_was_asked_for() -> None:
    step, again = (make_samples(LENGTHS, vocab_size=VOCAB_SIZE, top_k=8) for _ in range(2))
    assert 2**20 <= step.num_bytes < 1.01 * 2**20 + 2000
    for name, tensors in step.fields.items():
        assert all(torch.equal(a, b) for a, b in zip(tensors, again.fields[name], strict=True))
    assert checksum(step.fields) == sum(int(t.sum()) for name in ("tokens", "loss_mask") for t in step.fields[name])


@pytest.mark.multirank
def test_eight_ranks_receive_what_they_need() -> None:
    step = make_samples(LENGTHS, vocab_size=VOCAB_SIZE, top_k=8)
    part, goals = measure_ranks(LENGTHS, top_k=8)
    layout = [f"{rank} ({rank % 2}, {rank // 4}, {rank // 2 % 2})" for rank in range(8)]
    assert [row["name"] for row in part.rows] == layout
    assert 1.0 < goals["received_over_needed"]["value"] <= MOST_RECEIVED
    # The samples are shared by two data-parallel ranks, each of which has two tensor-parallel ranks.
    assert sum(row["needed"] for row in part.rows[4:]) == 2 * step.num_bytes
    assert sum(row["needed"] for row in part.rows[:4]) == 2 * sum(tensor.nbytes for tensor in step.fields["tokens"])
