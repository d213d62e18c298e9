"""What becomes of each prompt of a domain: its teacher's scores, the task reward, or neither."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from mopd.config.losses import Loss, TopKLossConfig
from mopd.config.values import Checked, Fraction


@dataclass(frozen=True, kw_only=True, slots=True)
class GateConfig(Checked):
    """Whether to distil, reinforce or skip a prompt (docs/teachers.md#gates)."""

    by: Literal["teacher_answers", "student_rewards"]
    """Whose responses are judged."""
    threshold: Fraction = 0.5
    """Distil if the teacher's reward reaches it, or the student's mean stays below."""
    others: Literal["reinforce", "skip"] = "reinforce"
    """Other prompts: learn from the reward, or leave out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DomainConfig:
    """What holds for one domain alone."""

    gate: GateConfig | None = None
    """Whether to distil, reinforce or skip a prompt (docs/teachers.md#gates)."""


def require_gates(gates: Mapping[str, GateConfig], loss: Loss, elsewhere: Mapping[str, bool]) -> None:
    """``ValueError`` where a gate cannot decide, or the loss not follow it. ``elsewhere``: keys whose samples nobody
    judges, and whether each is set."""
    for domain, gate in gates.items():
        key = f"domains.{domain}.gate"
        for other in [other for other, is_set in elsewhere.items() if is_set]:
            raise ValueError(f"{key} is set, but {other}, where no gate decides: remove one of them")
        if not isinstance(loss, TopKLossConfig) or loss.resolved_tail not in ("bucket", "generalized", "none"):
            tail = f" with tail {loss.resolved_tail!r}" if isinstance(loss, TopKLossConfig) else ""
            raise ValueError(
                f"{key} is set, but loss.type {loss.type!r}{tail} cannot leave a teacher out of some responses: set a "
                "top-k loss with tail: bucket"
            )
        if loss.tokens != "all":
            raise ValueError(f"{key} and loss.tokens are set, but a reinforced response has no divergence: remove one")
        if gate.others == "reinforce" and not loss.task_reward_weight:
            raise ValueError(
                f"{key}.others is 'reinforce', but loss.task_reward_weight is 0: set it, for example 1.0, or others: "
                "skip"
            )
