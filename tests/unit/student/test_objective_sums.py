from __future__ import annotations

import torch

from mopd.student.batch import LossRows
from mopd.student.objective import Sums


def make_rows() -> LossRows:
    """Two samples, and filler: domain 1 with rows 0 and 2, domain 0 with row 3."""
    return LossRows(
        loss_mask=torch.tensor([True, False, True, True, False]),
        loss_rows=torch.tensor([0, 2, 3]),
        targets=torch.zeros(5, dtype=torch.int64),
        samples=torch.tensor([0, 1, 0, 1, 2]),
        domains=torch.tensor([1, 0, 0]),
        sample_positions=torch.tensor([4, 2, -1]),
        num_loss_tokens=torch.tensor([2, 1, 0]),
    )


def test_a_bad_loss_marks_its_sample_and_no_other_domain() -> None:
    sums = Sums(("num_tokens", "loss"), num_domains=2, num_samples=5, num_loss_tokens=3, device=torch.device("cpu"))
    rows = make_rows()
    loss = torch.tensor([1.0, 0.0, float("inf"), 4.0, 0.0])
    sums.add(rows, {"num_tokens": rows.loss_mask, "loss": loss})
    assert sums._is_bad.nonzero().flatten().tolist() == [4]
    assert sums._totals[0].tolist() == [1, 4]
