"""The autograd function of a loss that its user writes: the function sees log-probs, never the vocabulary's shards.

Forward computes the statistics of the other losses (one pass over the logits, one all-reduce), calls the user's
function on them under autograd, and turns its gradients at the log-probs into those at the logits:

    dz_j = [j in S] g_j + [j not in S] g_tail p_j / p_tail - G p_j,        G = sum g_k + g_tail - g_lse

A sampled token outside S adds its own gradient to its entry. Backward is that of the other losses.

Shape legend: T rows, K ids of the teacher, N = K, or K + 1 with the sampled token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mopd.losses.call import LossCall
from mopd.losses.chunked.functions import saved_gradient, select_ids
from mopd.losses.chunked.passes import LogProbs, collect
from mopd.losses.divergences import SMALLEST
from mopd.losses.topk import TeacherRows, group_ids

EMPTY = -1e4
"""Log-prob of a place without an id, on both sides, and the least that a row holds: its probability is 0, and so is
each of its terms, without a NaN."""
CUSTOM = "custom_"
"""Start of the names of a custom loss's own metrics."""


class LossProblem(ValueError):
    """What is wrong with a custom loss, in words that follow the function's name."""


@dataclass(frozen=True)
class TopKRows:
    """What a custom loss is computed from: one row for each response token, equal on all tensor-parallel ranks.

    R rows, K ids of the teacher. All are fp32 (float64 in tests), at the loss's temperature. Those of the student carry
    the gradient; ``student_log_tail`` and ``student_logprobs`` are independent inputs, the K + 1 outcomes of a row.
    """

    ids: Tensor
    """[R, K] int64: token ids that the teacher scored."""
    valid: Tensor
    """[R, K] bool: False where a place holds no id; both sides' log-probs are then ``EMPTY``, their probabilities 0."""
    teacher_logprobs: Tensor
    """[R, K]: log-probs over the teacher's whole vocabulary."""
    teacher_log_tail: Tensor
    """[R]: log of the teacher's mass on all other ids, at least log 1e-30."""
    student_logprobs: Tensor
    """[R, K]: the student's log-probs of ``ids``, with gradient."""
    student_log_tail: Tensor
    """[R]: log of the student's mass on all other ids, with gradient; at least ``EMPTY``."""
    lse: Tensor
    """[R]: log-sum-exp of the student's logits over the temperature, with gradient."""
    student_token_logprobs: Tensor | None = None
    """[R]: the student's log-probs of the sampled tokens, with gradient; with ``own_samples`` alone, as the next."""
    teacher_token_logprobs: Tensor | None = None
    """[R]: the teacher's log-probs of the sampled tokens."""
    rollout_logprobs: Tensor | None = None
    """[R]: the sampler's log-probs of the sampled tokens, under the weights that drew them."""

    def leaves(self) -> dict[str, Tensor]:
        """Return the inputs that carry a gradient, by name."""
        names = ("student_logprobs", "student_log_tail", "lse", "student_token_logprobs")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


RowFunction = Callable[[TopKRows], Tensor | tuple[Tensor, Mapping[str, Tensor]]]
"""A custom loss whose options are bound: rows -> losses [R], perhaps with numbers [R] by name."""


@dataclass(frozen=True)
class SampledTokens:
    """The sampled tokens' log-probs [T]: the teacher's and the sampler's."""

    teacher_T: Tensor
    rollout_T: Tensor


def result_of(function: RowFunction, rows: TopKRows) -> tuple[Tensor, dict[str, Tensor]]:
    """Call a custom loss. ``LossProblem`` for what is no loss of the rows."""
    answer = function(rows)
    loss, metrics = answer if isinstance(answer, tuple) and len(answer) == 2 else (answer, {})
    num_rows = len(rows.ids)
    if not isinstance(loss, Tensor) or not isinstance(metrics, Mapping):
        raise LossProblem(
            f"returns {type(answer).__name__}: return losses [R], or losses [R] and numbers [R] in a dictionary"
        )
    for what, value in (("losses", loss), *metrics.items()):
        if not isinstance(value, Tensor) or value.shape != (num_rows,):
            shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise LossProblem(f"returns {what} of shape {shape} for {num_rows} rows: return one number for each row")
    if not loss.requires_grad:
        raise LossProblem(
            "returns losses that do not depend on the student's log-probs by autograd (.item(), .detach(), numpy?): "
            "compute them with torch from the tensors of rows"
        )
    return loss, {name: value.detach() for name, value in metrics.items()}


def custom_rows(
    inp: Tensor, call: LossCall, function: RowFunction, teacher: TeacherRows, sampled: SampledTokens | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return weighted losses [T] and metrics [T]; ``CUSTOM`` begins the names of the function's own."""
    metrics: dict[str, Tensor] = {}
    loss = CustomDistill.apply(inp, call, function, teacher, sampled, metrics)
    return loss, metrics


class CustomDistill(torch.autograd.Function):
    """``apply(inp, call, function, teacher, sampled, metrics)`` -> loss rows [T]; fills ``metrics``."""

    @staticmethod
    def forward(
        ctx: Any,
        inp: Tensor,
        call: LossCall,
        function: RowFunction,
        teacher: TeacherRows,
        sampled: SampledTokens | None,
        metrics: dict[str, Tensor],
    ) -> Tensor:
        assert teacher.target_T is not None
        valid, ids = teacher.valid_TDK.flatten(1), teacher.ids_TDK.flatten(1)
        selection = select_ids(teacher, group_ids(ids, valid, 1).first_TN, call.shard)
        stats, local_T = collect(inp, selection, call)
        rows = _rows(call, stats, teacher, sampled)
        with torch.enable_grad():
            loss, own = result_of(function, rows)
            leaves = rows.leaves()
            found = torch.autograd.grad(loss.sum(), list(leaves.values()), allow_unused=True)
        pairs = zip(leaves.items(), found, strict=True)
        g = {name: torch.zeros_like(leaf) if one is None else one for (name, leaf), one in pairs}
        broken = teacher.broken_TD.flatten() | stats.log_tail_T.isnan()
        if sampled is not None:  # a token outside the vocabulary has no log-prob
            broken = broken | ~_known(teacher, call)
        entry, dense, far = _at_logits(g, stats, teacher, call, broken)
        value = torch.where(broken, torch.nan, loss.detach().to(call.dtype))
        p = torch.where(valid, stats.logprobs_TN[:, : ids.size(1)], -torch.inf).exp()
        metrics |= {f"{CUSTOM}{name}": number for name, number in own.items()}
        metrics |= {
            "unweighted_loss": value,
            "teacher_mass": torch.where(valid, teacher.logprobs_TDK.flatten(1), -torch.inf).double().exp().sum(1),
            "student_mass": p.sum(1),
            "student_logprobs": torch.where(_known(teacher, call), stats.logprobs_TN[:, -1], -torch.inf),
        }
        metrics |= {name: call.only_active(number.to(call.dtype)) for name, number in metrics.items()}
        factor = torch.ones_like(value) if call.weight_T is None else call.weight_T
        n = entry.size(1)
        written = valid if n == ids.size(1) else torch.cat([valid, _known(teacher, call)[:, None]], 1)
        column, owned = selection.column_TN[:, :n], selection.owned_TN[:, :n] & written
        ctx.save_for_backward(inp, entry, dense * local_T, column, owned, factor, far, stats.tail_lse_T)
        ctx.call, ctx.spent = call, False
        return call.only_active(value * factor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        return saved_gradient(ctx, grad_loss), None, None, None, None, None


def _known(teacher: TeacherRows, call: LossCall) -> Tensor:
    """Mark the rows of a weight whose sampled token is in the vocabulary [T]."""
    assert teacher.target_T is not None
    known = (teacher.target_T >= 0) & (teacher.target_T < call.shard.vocab_size)
    return known if call.active_T is None else known & call.active_T


def _rows(call: LossCall, stats: LogProbs, teacher: TeacherRows, sampled: SampledTokens | None) -> TopKRows:
    """Return the function's input. Rows of weight 0 hold no ids, and a tail of probability 1 on both sides."""
    valid, ids = teacher.valid_TDK.flatten(1), teacher.ids_TDK.flatten(1)
    logprobs = torch.where(valid, teacher.logprobs_TDK.flatten(1), -torch.inf)
    tail = (1 - logprobs.double().exp().sum(1)).clamp_min(SMALLEST).log().to(call.dtype)  # fp32 has no digits of 1 - Q
    tokens: dict[str, Tensor] = {}
    if sampled is not None:
        own = torch.where(_known(teacher, call), stats.logprobs_TN[:, -1], EMPTY)
        tokens = {
            "student_token_logprobs": _leaf(call.only_active(own)),
            "teacher_token_logprobs": call.only_active(sampled.teacher_T).clamp_min(EMPTY),
            "rollout_logprobs": call.only_active(sampled.rollout_T).clamp_min(EMPTY),
        }
    return TopKRows(
        ids=ids,
        valid=valid,
        teacher_logprobs=logprobs.clamp_min(EMPTY),
        teacher_log_tail=tail,
        student_logprobs=_leaf(torch.where(valid, stats.logprobs_TN[:, : ids.size(1)], EMPTY)),
        student_log_tail=_leaf(call.only_active(stats.log_tail_T)),
        lse=_leaf(call.only_active(stats.lse_T)),
        **tokens,
    )


def _leaf(values: Tensor) -> Tensor:
    """Return values, at least ``EMPTY``, as an input that autograd knows."""
    return values.clamp_min(EMPTY).detach().requires_grad_()


def _at_logits(
    g: Mapping[str, Tensor], stats: LogProbs, teacher: TeacherRows, call: LossCall, broken: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradient at the logits, from ``g`` at the inputs by name: its entries [T, N], the factor of p_j at all
    other ids [T], and the pull on tails without digits in fp32 [T], shared out by ``FarTail``."""
    valid, ids = teacher.valid_TDK.flatten(1), teacher.ids_TDK.flatten(1)
    log_tail = stats.log_tail_T
    g_tail = torch.where(log_tail == -torch.inf, 0, g["student_log_tail"])  # an empty tail has no ids to pull
    is_far = log_tail < math.log(SMALLEST)
    rate = torch.where(is_far, 0, g_tail / log_tail.exp())
    far = torch.where(is_far, g_tail, 0)
    at_ids = torch.where(valid, g["student_logprobs"], 0)
    logprobs, in_tail = stats.logprobs_TN[:, : ids.size(1)], None
    if "student_token_logprobs" in g:
        assert teacher.target_T is not None
        known = _known(teacher, call)
        token = torch.where(known, g["student_token_logprobs"], 0).unsqueeze(1)
        in_tail = known & ~teacher.is_target_TN.any(1)
        at_ids, valid = torch.cat([at_ids, token], 1), torch.cat([valid, known.unsqueeze(1)], 1)
        ids, logprobs = torch.cat([ids, teacher.target_T.unsqueeze(1)], 1), stats.logprobs_TN
    total = at_ids.sum(1) + g_tail - g["lse"]
    p = torch.where(valid, logprobs, -torch.inf).exp()
    entry = group_ids(ids, valid, 1).sum_equal(at_ids) - p * total.unsqueeze(1)
    if in_tail is not None:
        pull = p[:, -1] * rate + torch.where(is_far, far * torch.exp(logprobs[:, -1] - log_tail), 0)
        entry[:, -1] += torch.where(in_tail, pull, 0)
    return entry.masked_fill(broken.unsqueeze(1), torch.nan), (rate - total).masked_fill(broken, torch.nan), far
