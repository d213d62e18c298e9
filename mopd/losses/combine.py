"""Several teachers' log-probs of a row made those of one distribution, before any loss sees them. Formulas:
``docs/losses.md``.

Shape legend: D teachers, R rows, K places of a teacher's row, N = D * K.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

NOTHING = -torch.inf


class Combined(NamedTuple):
    """One teacher's rows, and what the rule tells of them."""

    ids: Tensor
    """[R, W] int32, W as the rule makes it; places of log-prob -inf hold no id."""
    logprobs: Tensor
    """[R, W] fp32."""
    token_logprobs: Tensor
    """[R] fp32, of the sampled token."""
    told: Tensor
    """[R] float64: nats by which the teachers disagree; of ``lowest_entropy`` int64: the teacher that was chosen."""


def mean_probability(ids: Tensor, logprobs: Tensor, token_logprobs: Tensor, weights: Sequence[float]) -> Combined:
    """Return the mixture ``sum_d w_d q_d`` on all ids [R, N] that some teacher lists; what a teacher does not list
    counts as 0 there, and in the tail.

    Args:
        ids: int32 [D, R, K]; each once in a teacher's row.
        logprobs: fp32 [D, R, K]; places of -inf hold no id.
        token_logprobs: fp32 [D, R].
        weights: add up to 1.
    """
    log_shares = torch.tensor(weights, dtype=torch.float64).log().unsqueeze(1)
    joint_ids, table = _by_id(ids, logprobs)
    joint = (table + log_shares.unsqueeze(1)).logsumexp(0)
    told = torch.zeros(ids.shape[1], dtype=torch.float64)
    if ids.shape[2]:  # sum_d w_d KL(q_d || mixture) = H(mixture) - sum_d w_d H(q_d), over ids and tail
        told = (_entropy(joint) - (log_shares.exp() * _entropy(table)).sum(0)).clamp_min(0)
    of_token = (token_logprobs.double() + log_shares).logsumexp(0)
    return Combined(joint_ids, joint.float(), of_token.float(), told)


def mean_logprob(ids: Tensor, logprobs: Tensor, token_logprobs: Tensor, weights: Sequence[float]) -> Combined:
    """Return the normalised geometric mean ``prod_d q_d^w_d / Z`` on the ids [R, K] that all teachers list; all other
    ids are one outcome, and Z the sum over these outcomes. Arguments as for ``mean_probability``."""
    shares = torch.tensor(weights, dtype=torch.float64).unsqueeze(1)
    joint_ids, table = _by_id(ids, logprobs)
    is_common = (table > NOTHING).all(0)
    log_mean = torch.where(is_common, (shares.unsqueeze(1) * table).sum(0), NOTHING)
    log_tails = torch.where(is_common, table, NOTHING).exp().sum(-1).neg().add(1).clamp_min(0).log()
    log_tail = (shares * log_tails).sum(0)
    log_z = torch.cat([log_mean, log_tail.unsqueeze(1)], 1).logsumexp(1)
    best = log_mean.topk(ids.shape[2], dim=1)  # no more ids are common than one teacher has places
    of_token = (shares * token_logprobs.double()).sum(0) - log_z
    rows = (best.values - log_z.unsqueeze(1)).float()
    return Combined(joint_ids.gather(1, best.indices), rows, of_token.float(), -log_z)


def lowest_entropy(ids: Tensor, logprobs: Tensor, token_logprobs: Tensor) -> Combined:
    """Return at each row what the teacher says whose entropy, over its own ids and one outcome for all others, is the
    lowest: of equal ones the first. Arguments as for ``mean_probability``."""
    chosen = _entropy(logprobs.double()).argmin(0)
    rows = torch.arange(ids.shape[1])
    return Combined(ids[chosen, rows], logprobs[chosen, rows], token_logprobs[chosen, rows], chosen)


def _entropy(logprobs: Tensor) -> Tensor:
    """Return the entropy, in nats, of log-probs [..., K] and one outcome that has the rest of the mass."""
    masses = logprobs.exp()
    rest = (1 - masses.sum(-1, keepdim=True)).clamp_min(0)
    entropy: Tensor = torch.special.entr(torch.cat([masses, rest], -1)).sum(-1)
    return entropy


def _by_id(ids: Tensor, logprobs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the ids [R, N] that some teacher lists, each once, and each teacher's log-probs of them, float64
    [D, R, N]: -inf of what it does not list, and behind the last id."""
    teachers, rows, places = ids.shape
    last = torch.iinfo(torch.int32).max
    flat = torch.where(logprobs > NOTHING, ids, last).transpose(0, 1).reshape(rows, -1)
    in_order, order = flat.sort(dim=1)
    number = (in_order[:, 1:] != in_order[:, :-1]).cumsum(1)
    number = torch.cat([torch.zeros_like(order[:, :1]), number], 1)
    joint = torch.full_like(in_order, last).scatter(1, number, in_order)
    place = torch.empty_like(order).scatter(1, order, number).view(rows, teachers, places).transpose(0, 1)
    table = torch.full((teachers, *joint.shape), NOTHING, dtype=torch.float64)
    return joint, table.scatter(2, place, logprobs.double())
