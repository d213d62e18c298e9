"""``mopd bench data_plane``: a step has the size that was asked for, and comes again."""

from __future__ import annotations

import torch

from mopd.bench.data_plane import VOCAB_SIZE, checksum, step_lengths
from mopd.bench.models import make_samples


def test_a_step_has_the_size_that_was_asked_for() -> None:
    lengths = step_lengths(2**20, top_k=8, mean=64)
    step, again = (make_samples(lengths, vocab_size=VOCAB_SIZE, top_k=8) for _ in range(2))
    assert 2**20 <= step.num_bytes < 1.01 * 2**20 + 2000
    for name, tensors in step.fields.items():
        assert all(torch.equal(a, b) for a, b in zip(tensors, again.fields[name], strict=True))
    assert checksum(step.fields) == sum(int(t.sum()) for name in ("tokens", "loss_mask") for t in step.fields[name])
