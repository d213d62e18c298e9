"""Policy gradient with the distillation signal as a detached advantage.

    A    = -(log p_y - log q_y) + alpha * task advantage                        (detached)
    rho  = p_y / p_old                                                          (p_old = sg(p_y) when none is given)
    loss = -w * min(rho A, clip(rho, 1 - low, 1 + high) A),  with dual clip c:  never more than -w c A where A < 0

w corrects for the difference between trainer and rollout engine; it is detached:

    tis     min(x, high)                       x = p_old / p_rollout     truncated importance sampling
    icepop  x inside [low, high], else 0       x = p_old / p_rollout     IcePop's mask
    gate    x inside [low, high], else 0       x = sg(p_y) / p_rollout   MiMo's gate; carries the ratio itself: rho = 1
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

CORRECTIONS = ("tis", "icepop", "gate")


@dataclass(frozen=True)
class Surrogate:
    """PPO clip, dual clip and mismatch correction ``(kind, low, high)``."""

    clip_ratio_low: float
    clip_ratio_high: float
    dual_clip: float | None
    correction: tuple[str, float, float] | None

    def check(self, *, old: bool, rollout: bool) -> None:
        """Raises ValueError for values out of range and for a correction without its inputs."""
        for name in ("clip_ratio_low", "clip_ratio_high"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}: set it above 0")
        if self.dual_clip is not None and not self.dual_clip > 1:
            raise ValueError(f"dual_clip is {self.dual_clip}: set it above 1")
        if self.correction is None:
            return
        kind, low, high = self.correction
        if kind not in CORRECTIONS:
            raise ValueError(f"correction is {kind!r}: choose one of {', '.join(CORRECTIONS)}")
        if not 0 <= low < high:
            raise ValueError(f"correction {kind!r} has low {low} and high {high}: set 0 <= low < high")
        if not rollout:
            raise ValueError(f"correction {kind!r} needs rollout_logprobs: pass them")
        if kind == "gate" and old:
            raise ValueError("correction 'gate' already holds the ratio to the rollout: leave old_logprobs unset")


def policy_gradient(
    logprobs_T: Tensor,
    advantage_T: Tensor,
    surrogate: Surrogate,
    old_logprobs_T: Tensor | None,
    rollout_logprobs_T: Tensor | None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss rows, differentiable in ``logprobs_T`` only, and detached row metrics."""
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
    weight = _correction(surrogate.correction, current, old, rollout_logprobs_T)
    metrics = {
        "ratio": ratio.detach(),
        "clip_fraction": bites.detach().to(ratio.dtype),
        "correction_weight": weight,
        "advantage": advantage,
    }
    return -weight * value, metrics


def _correction(
    correction: tuple[str, float, float] | None, current: Tensor, old: Tensor, rollout: Tensor | None
) -> Tensor:
    if correction is None or rollout is None:
        return torch.ones_like(current)
    kind, low, high = correction
    x = torch.exp((current if kind == "gate" else old) - rollout.detach())
    if kind == "tis":
        return x.clamp_max(high)
    return torch.where((x < low) | (x > high), 0, x)
