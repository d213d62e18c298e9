"""The objective of supervised training: cross entropy of the teachers' own answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mopd.config.losses import Loss, TopKLossConfig
from mopd.student.batch import LossRows
from mopd.student.model.gpt import LMHead
from mopd.student.objective import DIAGNOSTICS, Objective, Sums
from mopd.student.parallel import Layout


class CrossEntropy(Objective):
    """Cross entropy of the response's own tokens, for supervised training on the teachers' answers.

    It is the forward KL from a teacher that is certain of each token: top-k with one id of log-prob 0 and no tail.
    Takes the recipe's aggregation, and the kernels of the other losses.
    """

    field_names = ("tokens", "loss_mask")

    def __init__(self, loss: Loss, layout: Layout, **options: Any) -> None:
        """Set up, as ``Objective``; ``loss`` is the recipe's."""
        certain = TopKLossConfig(top_k=1, tail="none", aggregation=loss.aggregation, domain_budget=loss.domain_budget)
        super().__init__(certain, layout, **options)

    def new_sums(
        self, *, diagnostics: bool, domain_factors: Tensor | None = None, own_samples: bool = False, **sizes: int
    ) -> Sums:
        """Return empty sums: no metric compares with a teacher."""
        names = ["num_tokens", "weight", "loss", "weighted_loss", *(DIAGNOSTICS[:1] if diagnostics else ())]
        return Sums(names, **sizes, device=self._layout.device, domain_factors=domain_factors)

    def __call__(self, head: LMHead, *, rows: LossRows, sums: Sums) -> Tensor:
        certain = torch.zeros_like(rows.targets, dtype=torch.float32)
        fields: Mapping[str, Tensor] = {
            "teacher_ids": rows.targets[:, None].int(),
            "teacher_logprobs": certain[:, None],
            "teacher_token_logprobs": certain,
        }
        return super().__call__(head, rows=replace(rows, fields=fields), sums=sums)
