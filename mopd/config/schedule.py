"""Sections ``schedule`` and ``preflight`` of a recipe: how long and in what rhythm to train, and what is checked before
the first step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from mopd.config.values import Checked, Count, Fraction, Positive, Seconds, at_least

MAX_SAMPLES = 1_000_000
"""Responses of one optimizer step."""
MAX_STALENESS = 1000
"""Steps; asynchronous training in use stays below ten."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmUpConfig(Checked):
    """First steps, on the teachers' answers."""

    objective: Literal["sft_on_teacher", "off_policy_scores"]
    """As ``objective``."""
    steps: Count
    """Their number, within ``schedule.steps``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleConfig(Checked):
    """Steps and their rhythm."""

    steps: Count
    """Optimizer steps; all keys of steps count these."""
    prompts_per_step: Annotated[int, at_least(1, MAX_SAMPLES)]
    """Prompts of one step, over all ranks."""
    max_staleness: Annotated[int, at_least(0, MAX_STALENESS)] = 0
    """Steps that a sample's weights may lag (docs/pipeline.md)."""
    on_expiry: Literal["hold", "redraw"] = "hold"
    """For a sample almost too old: wait, or draw it again."""
    on_policy_fraction: Fraction | None = None
    """Share of prompts that the student answers; the others come from ``data.scored``."""
    warm_up: WarmUpConfig | None = None
    """First steps, on the teachers' answers."""
    sync_every_steps: Count = 1
    """Steps between updates of the rollout's weights; at most ``max_staleness`` + 1."""
    wait_timeout_s: Seconds = 3600.0
    """Deadline of waits between workers."""

    def learning_rate_steps(self, weight_version: int) -> tuple[int, int]:
        """Return how many steps of the learning-rate schedule are done after ``weight_version`` optimizer steps, and of
        how many. It begins again after ``warm_up``."""
        before = 0 if self.warm_up is None or weight_version < self.warm_up.steps else self.warm_up.steps
        return weight_version - before, self.steps - before

    def check(self) -> None:
        if self.warm_up is not None and self.warm_up.steps >= self.steps:
            raise ValueError(
                f"warm_up.steps is {self.warm_up.steps} and steps is {self.steps}, which counts them: set fewer, or "
                f"for a run without on-policy steps objective: {self.warm_up.objective}"
            )
        oldest = self.sync_every_steps - 1
        if self.max_staleness < oldest:
            raise ValueError(
                f"sync_every_steps is {self.sync_every_steps}, so samples become {oldest} steps old, but max_staleness "
                f"is {self.max_staleness}: set max_staleness to {oldest} or more"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class PreflightConfig(Checked):
    """Checks before the first step, those of ``mopd check``."""

    allow_same_weights: bool = False
    """Permit a teacher with the student's weights."""
    require_better_teacher: bool = True
    """Refuse a teacher that does not beat the student in validation."""
    compare_with_transformers: bool | Literal["auto"] = "auto"
    """Compare teachers' scores with their folders' (docs/teachers.md#is-it-the-right-model); ``auto``: up to 80 GiB
    that host memory holds."""
    max_self_kl: Positive | None = None
    """Largest mean KL (nats) between them; absent: 1e-5 in float32, else 5e-3."""
    max_logprob_difference: Positive | None = None
    """The same of log-probs, also between student and rollout; absent: 1e-3 in float32, else 5e-2."""

    def self_kl_limit(self, *dtypes: str) -> float:
        """``max_self_kl`` for an engine and weights of ``dtypes``."""
        if self.max_self_kl is not None:
            return self.max_self_kl
        return 1e-5 if set(dtypes) == {"float32"} else 5e-3

    def logprob_limit(self, *dtypes: str) -> float:
        """``max_logprob_difference`` between two that compute in ``dtypes``."""
        if self.max_logprob_difference is not None:
            return self.max_logprob_difference
        return 1e-3 if set(dtypes) == {"float32"} else 5e-2
