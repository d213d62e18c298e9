"""Losses of the sampled token alone: KL estimators, the policy gradient, and corrections for samples of another policy.

With y sampled from the student and Delta = log p_y - log q_y:

    k2         = Delta^2 / 2                E[grad] = grad KL(student || teacher), the reverse KL
    k3         = exp(-Delta) - 1 + Delta    E[grad] = grad KL(teacher || student), the forward KL
    k3_reverse = k3 in value, k2 in gradient (straight-through): the reverse KL with the low-variance value

As *values* all of them estimate KL(student || teacher). k1 = Delta is not offered as a loss: see ``check_estimator``.
It is the detached advantage of the policy gradient:

    A    = -(log p_y - log q_y) - b + alpha * task advantage                    (detached)
    rho  = p_y / p_old                                                          (p_old = sg(p_y) when none is given)
    loss = -w * min(rho A, clip(rho, 1 - low, 1 + high) A),  with dual clip c:  never more than -w c A where A < 0

b is a baseline, which must not see y: the expected gradient is the same with any, its variance is not
(``kl_baseline``, ``domain_baselines``).

w, which also multiplies the estimators, corrects for samples that another policy has drawn: the rollout engine with its
other rounding, or weights of some steps ago. It is detached:

    tis     min(x, high)                       x = p_old / p_rollout     truncated importance sampling
    icepop  x inside [low, high], else 0       x = p_old / p_rollout     IcePop's mask
    gate    x inside [low, high], else 0       x = sg(p_y) / p_rollout   MiMo's gate; carries the ratio itself: rho = 1

The estimators have no p_old: sg(p_y) takes its place. ``kept_sequences`` decides over whole responses.

A top-k loss takes a task advantage too (``TaskTerm``), with p_old = sg(p_y): -w A in value and as the gradient at
log p_y, one more coefficient on the row.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from mopd.losses.topk import TeacherRows

ESTIMATORS = ("k2", "k3", "k3_reverse")
CORRECTIONS = ("tis", "icepop", "gate")
TASK_METRICS = ("task_loss", "correction_weight")
"""What a top-k loss with a ``TaskTerm`` reports beside the divergence's metrics."""
SMALLEST_TAIL = 1e-6
"""Least mass that a baseline takes a teacher's tail for."""
LARGEST_EXPONENT = 80.0
"""Largest exponent of k3: exp of more overflows fp32, so beyond it, from 5e34, k3 continues on its tangent."""


def check_estimator(estimator: str) -> None:
    """Raise ValueError for an unknown estimator, and for k1 with the reason."""
    if estimator == "k1":
        raise ValueError(
            "estimator 'k1' cannot be a differentiable loss: E[grad log p_y] = 0, the student would not learn; "
            "choose k2 (reverse KL), k3 (forward KL), k3_reverse, or parallel_policy_gradient (k1 as the advantage)"
        )
    if estimator not in ESTIMATORS:
        raise ValueError(f"estimator is {estimator!r}: choose one of {', '.join(ESTIMATORS)}")


def sampled_kl(delta_T: Tensor, estimator: str) -> Tensor:
    """Return the estimator, differentiable in ``delta_T`` = student - teacher log-prob of the sampled token."""
    k2 = 0.5 * delta_T.square()
    if estimator == "k2":
        return k2
    inside = torch.expm1((-delta_T).clamp_max(LARGEST_EXPONENT)) + delta_T
    slope = math.expm1(LARGEST_EXPONENT)
    tangent = slope * (-delta_T - LARGEST_EXPONENT) + (slope - LARGEST_EXPONENT)
    k3 = torch.where(delta_T < -LARGEST_EXPONENT, tangent, inside)
    if estimator == "k3":
        return k3
    return torch.where(k2 == torch.inf, k2, k2 + (k3 - k2).detach())


def kl_baseline(logprobs_TDK: Tensor, teacher: TeacherRows) -> Tensor:
    """Return [T], the expectation of the advantage -(log p_y - log q_y) over the student's own tokens y, as far as each
    teacher's top k and one bucket for all other ids tell: -KL(student || teacher) of these K + 1 outcomes. Several
    teachers are added up with their weights; a list that is not finite gives NaN.

    ``logprobs_TDK`` are the student's of the teachers' ids.
    """
    valid = teacher.valid_TDK
    p, q = (torch.where(valid, x, -torch.inf).exp() for x in (logprobs_TDK, teacher.logprobs_TDK))
    inside = torch.where(p > 0, p * (logprobs_TDK - teacher.logprobs_TDK), 0).sum(-1)
    p_out, q_out = (1 - p.sum(-1)).clamp_min(0), (1 - q.sum(-1)).clamp_min(SMALLEST_TAIL)
    kl_TD = inside + torch.special.xlogy(p_out, p_out / q_out)
    return -torch.where(teacher.weights_TD == 0, 0, teacher.weights_TD * kl_TD).sum(-1)


def tail_advantage(logprob_T: Tensor, logprobs_TN: Tensor, teacher_logprob_T: Tensor, teacher: TeacherRows) -> Tensor:
    """Return the advantage [T] of a sampled token outside S: log(p_tail / q_tail) - log(p_y / q_y), with the masses of
    all ids outside S.

    With it the bucket's reverse KL becomes an unbiased estimate of the one over the whole vocabulary. The bucket is its
    baseline: at every id outside, the bucket has the tail's mean ratio, and the sampled token the difference to its
    own. One teacher. The tail's masses are held as the bucket's loss holds them, so that both use one number.
    """
    valid = teacher.valid_TDK.flatten(1)
    p, q = (torch.where(valid, x, -torch.inf).exp() for x in (logprobs_TN, teacher.logprobs_TDK.flatten(1)))
    p_out = (1 - p.double().sum(1)).clamp_min(torch.finfo(torch.float32).tiny)
    q_out = (1 - q.double().sum(1)).clamp_min(SMALLEST_TAIL)
    return ((p_out / q_out).log() - (logprob_T - teacher_logprob_T).double()).to(logprob_T.dtype)


def domain_baselines(domains: Sequence[str], sums: Sequence[float], counts: Sequence[int]) -> list[float]:
    """Return the baseline of each response of a batch: the mean advantage over the loss tokens of its domain's *other*
    responses, 0 where there are none. ``sums`` and ``counts`` are each response's sum of advantages and its number of
    loss tokens.

    The whole response is left out, not only the token in question: later tokens are drawn after it, so that a mean with
    them would see y, and the expected gradient would be another. The mean of earlier steps would be unbiased too, but
    is state that checkpoints must keep, and lags. Float64 sums in the order given: the same numbers at every layout.

    A response whose sum is not finite is in no mean: the step stops at it, and its message is to name it alone.
    """
    total, num = defaultdict[str, float](float), defaultdict[str, int](int)
    own = [(sum_, count) if math.isfinite(sum_) else (0.0, 0) for sum_, count in zip(sums, counts, strict=True)]
    for domain, (sum_, count) in zip(domains, own, strict=True):
        total[domain] += sum_
        num[domain] += count
    return [
        (total[domain] - sum_) / (num[domain] - count) if num[domain] > count else 0.0
        for domain, (sum_, count) in zip(domains, own, strict=True)
    ]


def check_correction(correction: tuple[str, float, float] | None, *, rollout: bool) -> None:
    """Raise ValueError for an unknown kind, bounds out of order, and a correction without ``rollout_logprobs``."""
    if correction is None:
        return
    kind, low, high = correction
    if kind not in CORRECTIONS:
        raise ValueError(f"correction is {kind!r}: choose one of {', '.join(CORRECTIONS)}")
    if not 0 <= low < high:
        raise ValueError(f"correction {kind!r} has low {low} and high {high}: set 0 <= low < high")
    if not rollout:
        raise ValueError(f"correction {kind!r} needs rollout_logprobs: pass them")


def check_task(has_advantage: bool, weight: float, has_target: bool) -> None:
    """Raise ValueError for an advantage without a weight or a sampled token, or a weight without an advantage."""
    if has_advantage != (weight != 0):
        given = "is given" if has_advantage else "is missing"
        raise ValueError(f"task_advantage {given} and task_reward_weight is {weight}: set both or neither")
    if has_advantage and not has_target:
        raise ValueError("task_advantage is given without target, the sampled tokens: pass both")


def correction_weight(
    correction: tuple[str, float, float] | None, current_T: Tensor, old_T: Tensor, rollout_T: Tensor | None
) -> Tensor:
    """Return w by row, from detached log-probs of the sampled token; 1 without a correction."""
    if correction is None or rollout_T is None:
        return torch.ones_like(current_T)
    kind, low, high = correction
    x = torch.exp((current_T if kind == "gate" else old_T) - rollout_T)
    if kind == "tis":
        return x.clamp_max(high)
    return torch.where((x < low) | (x > high), 0, x)


@dataclass(frozen=True)
class TaskTerm:
    """Policy gradient of a task advantage, which joins a divergence of the same rows."""

    advantage_T: Tensor
    """A, times its weight in the loss."""
    rollout_T: Tensor | None
    """The sampler's log-probs; needed by a correction."""
    correction: tuple[str, float, float] | None

    @property
    def for_kernel(self) -> tuple[Tensor, Tensor | None, float, float, float]:
        """Advantage and rollout log-probs; bounds of the ratio, and the weight beyond the upper one; 0 below."""
        if self.correction is None:
            return self.advantage_T.contiguous(), None, 0.0, math.inf, 0.0
        assert self.rollout_T is not None
        kind, low, high = self.correction
        bounds = (0.0, high, high) if kind == "tis" else (low, high, 0.0)
        return self.advantage_T.contiguous(), self.rollout_T.contiguous(), *bounds

    def pull(self, logprobs_T: Tensor) -> tuple[Tensor, Tensor]:
        """Return -w A [T], the term's value and its gradient at log p_y, NaN where that is not finite; and w [T]."""
        current = logprobs_T.detach()
        weight = correction_weight(self.correction, current, current, self.rollout_T)
        return torch.where(current.isfinite(), -weight * self.advantage_T, torch.nan), weight


@torch.no_grad()
def kept_sequences(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    loss_mask: Tensor,
    *,
    low: float,
    high: float,
    sample_index: Tensor | None = None,
    num_samples: int = 0,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Return which responses stay in the loss: those whose geometric mean of p_y / p_rollout over their loss tokens
    lies in [low, high]. Multiply the losses of the others by 0; denominators do not change.

    Args:
        logprobs: ``[B, S]``, one response a row: the student's log-probs of the sampled tokens.
        rollout_logprobs: ``[B, S]``, the sampler's.
        loss_mask: bool ``[B, S]``; the other arguments are not read where it is off.
        sample_index: int64, the shape of ``loss_mask``, which then may be any: number of each token's response.
        num_samples: B, beside ``sample_index``.
        group: ranks that hold parts of the same responses; None for whole ones.

    Returns:
        bool ``[B]``, equal on the ranks of ``group``. A response with a NaN stays, so that its loss is not finite and
        the fault is seen.

    Raises:
        ValueError: wrong shapes, or bounds out of order.
    """
    if not 0 <= low < high:
        raise ValueError(f"low is {low} and high {high}: set 0 <= low < high")
    if loss_mask.dtype != torch.bool or (sample_index is None and loss_mask.dim() != 2):
        raise ValueError(f"loss_mask is {loss_mask.dtype} {list(loss_mask.shape)}: pass bool [B, S]")
    if sample_index is not None and (sample_index.shape != loss_mask.shape or num_samples < 1):
        raise ValueError(
            f"sample_index is {list(sample_index.shape)} and num_samples {num_samples}: pass the shape of loss_mask, "
            f"{list(loss_mask.shape)}, and at least 1"
        )
    if not logprobs.shape == rollout_logprobs.shape == loss_mask.shape:
        raise ValueError(
            f"logprobs is {list(logprobs.shape)} and rollout_logprobs {list(rollout_logprobs.shape)}: "
            f"pass both as {list(loss_mask.shape)}, the shape of loss_mask"
        )
    log_ratio = torch.where(loss_mask, logprobs.double() - rollout_logprobs.double(), 0)
    if sample_index is None:
        sums = torch.stack([log_ratio.sum(1), loss_mask.sum(1)])
    else:
        both = torch.stack([log_ratio.flatten(), loss_mask.flatten().double()])
        sums = both.new_zeros(2, num_samples).index_add_(1, sample_index.flatten(), both)
    if group is not None:
        dist.all_reduce(sums, group=group)
    ratio_B = torch.exp(sums[0] / sums[1].clamp_min(1))
    return ~((ratio_B < low) | (ratio_B > high))


@dataclass(frozen=True)
class Surrogate:
    """Parameters of the policy-gradient loss: PPO clip, dual clip and correction ``(kind, low, high)``."""

    clip_ratio_low: float
    clip_ratio_high: float
    dual_clip: float | None
    correction: tuple[str, float, float] | None

    def check(self, *, old: bool, rollout: bool) -> None:
        """Raise ValueError for values out of range and for a correction without its inputs."""
        for name in ("clip_ratio_low", "clip_ratio_high"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}: set it above 0")
        if self.dual_clip is not None and not self.dual_clip > 1:
            raise ValueError(f"dual_clip is {self.dual_clip}: set it above 1")
        check_correction(self.correction, rollout=rollout)
        if old and self.correction is not None and self.correction[0] == "gate":
            raise ValueError("correction 'gate' already holds the ratio to the rollout: leave old_logprobs unset")


def policy_gradient(
    logprobs_T: Tensor,
    advantage_T: Tensor,
    surrogate: Surrogate,
    old_logprobs_T: Tensor | None,
    rollout_logprobs_T: Tensor | None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return loss rows, differentiable in ``logprobs_T`` only, and detached row metrics."""
    advantage, current = advantage_T.detach(), logprobs_T.detach()
    old = current if old_logprobs_T is None else old_logprobs_T.detach()
    ratio = torch.exp(logprobs_T - old)
    plain = ratio * advantage
    clipped = ratio.clamp(1 - surrogate.clip_ratio_low, 1 + surrogate.clip_ratio_high) * advantage
    bites = clipped < plain
    value = torch.where(bites, clipped, plain)  # torch.minimum would halve the gradient at a tie
    if surrogate.dual_clip is not None:
        floor = surrogate.dual_clip * advantage
        deeper = (advantage < 0) & (value < floor)
        value, bites = torch.where(deeper, floor, value), bites | deeper
    weight = correction_weight(surrogate.correction, current, old, rollout_logprobs_T)
    metrics = {
        "ratio": ratio.detach(),
        "clip_fraction": bites.detach().to(ratio.dtype),
        "correction_weight": weight,
        "advantage": advantage,
    }
    return -weight * value, metrics
