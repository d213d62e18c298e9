"""KL estimators from the sampled token alone. With y sampled from the student and Delta = log p_y - log q_y:

    k2         = Delta^2 / 2                E[grad] = grad KL(student || teacher), the reverse KL
    k3         = exp(-Delta) - 1 + Delta    E[grad] = grad KL(teacher || student), the forward KL
    k3_reverse = k3 in value, k2 in gradient (straight-through): the reverse KL with the low-variance value

As *values* all of them estimate KL(student || teacher). k1 = Delta is not offered as a loss: see ``refuse_k1``.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

Estimator = Literal["k2", "k3", "k3_reverse"]
ESTIMATORS = ("k2", "k3", "k3_reverse")
LARGEST_EXPONENT = 80.0
"""exp of more overflows fp32; k3 continues on its tangent beyond, from 5e34."""


def check_estimator(estimator: str) -> None:
    """Raises ValueError for an unknown estimator and for k1, with the reason."""
    if estimator == "k1":
        raise ValueError(
            "estimator 'k1' cannot be a differentiable loss: E[grad log p_y] = 0, the student would not learn; "
            "choose k2 (reverse KL), k3 (forward KL), k3_reverse, or parallel_policy_gradient (k1 as the advantage)"
        )
    if estimator not in ESTIMATORS:
        raise ValueError(f"estimator is {estimator!r}: choose one of {', '.join(ESTIMATORS)}")


def sampled_kl(delta_T: Tensor, estimator: str) -> Tensor:
    """The estimator as a differentiable function of ``delta_T`` = student - teacher log-prob of the sampled token."""
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
