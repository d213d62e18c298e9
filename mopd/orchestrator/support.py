"""Rows of ids with log-probs, made of what a teacher was asked for, and how much of the teacher they hold.

A row has the teacher's own ids first, then the student's, then ``loss.always_ids``. A place whose id stands before it
already, or that this teacher is not asked for, holds ``NO_ID`` and -inf, which every loss leaves out.
Shapes: R response tokens, K places of a row, G ids that the teacher was given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mopd.config.payloads import Asked
from mopd.engines.interface import Scores

NO_ID = 2**31 - 1
"""Id of a place without one, above every vocabulary."""
LOW = 0.01
"""Quantile of the teacher's mass that is told beside the mean."""


def given_ids(asked: Asked, student_ids: Tensor | None, always_ids: Sequence[int], num_rows: int) -> Tensor | None:
    """Return the ids [R, G] int32 that a teacher is given; ``None`` for none. ``student_ids`` are [R, k]."""
    if not asked.given:
        return None
    always = torch.tensor(always_ids, dtype=torch.int32).expand(num_rows, asked.always)
    if not asked.student:
        return always.contiguous()
    assert student_ids is not None, "the rollout tells the student's ids where a payload asks for them"
    return torch.cat([student_ids, always], 1)


def support_rows(scores: Scores, given: Tensor | None, width: int) -> tuple[Tensor, Tensor]:
    """Return ids [R, K] int32 and log-probs [R, K] fp32 of ``width`` K, without repeats."""
    ids, logprobs = scores.ids, scores.logprobs
    if given is not None and scores.given_logprobs is not None:
        ids, logprobs = torch.cat([ids, given], 1), torch.cat([logprobs, scores.given_logprobs], 1)
        in_order, order = ids.sort(dim=1, stable=True)
        is_repeat = torch.zeros_like(ids, dtype=torch.bool)
        is_repeat.scatter_(1, order[:, 1:], in_order[:, 1:] == in_order[:, :-1])
        ids, logprobs = ids.masked_fill(is_repeat, NO_ID), logprobs.masked_fill(is_repeat, -torch.inf)
    return widened(ids, logprobs, width)


def widened(ids: Tensor, logprobs: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return rows [R, K] with empty places up to ``width``."""
    missing = width - ids.shape[1]
    if missing:
        ids = torch.nn.functional.pad(ids, (0, missing), value=NO_ID)
        logprobs = torch.nn.functional.pad(logprobs, (0, missing), value=-torch.inf)
    return ids, logprobs


@dataclass(frozen=True, kw_only=True, slots=True)
class Coverage:
    """Numbers of each of R rows: what of a teacher its support holds."""

    mass_R: Tensor
    """Teacher's probability of the ids together."""
    outside_R: Tensor
    """Whether some token of ``loss.always_ids`` would be in no list of the row, were it not asked for by itself."""
    decision_mass_R: Tensor
    """Teacher's probability of those."""
    has_always: bool
    """Whether there are such tokens."""

    @classmethod
    def of(cls, logprobs: Tensor, asked: Asked) -> Coverage:
        """Measure the log-probs [R, K] of ``support_rows``."""
        always = logprobs[:, asked.own + asked.student : asked.width]
        added = always > -torch.inf
        return cls(
            mass_R=logprobs.exp().sum(1),
            outside_R=added.any(1) if asked.always else torch.zeros(len(logprobs), dtype=torch.bool),
            decision_mass_R=always.exp().sum(1),
            has_always=asked.always > 0,
        )


def coverage_metrics(by_domain: Mapping[str, Sequence[Coverage]]) -> dict[str, float]:
    """Return metrics of each domain: the lowest hundredth of the teacher's mass on the support; with
    ``loss.always_ids`` the share of positions where one of them is in no list, and the teacher's mass there."""
    values: dict[str, float] = {}
    for domain, rows in sorted(by_domain.items()):
        values[f"support_mass_p01/{domain}"] = low_quantile(torch.cat([own.mass_R for own in rows]))
        if any(own.has_always for own in rows):
            values[f"decision_outside/{domain}"] = torch.cat([own.outside_R for own in rows]).double().mean().item()
            added = torch.cat([own.decision_mass_R for own in rows])
            values[f"decision_mass/{domain}"] = added.double().mean().item()
    return values


def low_quantile(values: Tensor) -> float:
    """Return the value that a hundredth of all values does not reach (of fewer than 100 the smallest)."""
    return values.sort().values[int(LOW * len(values))].item()
