"""Keys of what is sampled: ``rollout`` (the student's responses and the replicas that draw them) and ``answers`` (the
teachers' own)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from mopd.config.environment import CustomEnvironmentConfig, PythonToolConfig
from mopd.config.groups import EngineGroupConfig, VllmEngineConfig
from mopd.config.placements import RayConfig
from mopd.config.schedule import MAX_SAMPLES
from mopd.config.values import MAX_COUNT, MAX_TOKENS, Checked, Count, NotNegative, Positive, Share, at_least


@dataclass(frozen=True, kw_only=True, slots=True)
class HorizonConfig(Checked):
    """The first tokens of a response, which are all that is drawn and trained on; validation draws whole responses."""

    start: Annotated[int, at_least(1, MAX_TOKENS)]
    """Tokens of the first step's responses."""
    end: Annotated[int, at_least(1, MAX_TOKENS)] | None = None
    """Tokens after ``steps`` steps, from where on it does not grow any more; absent: ``start``."""
    steps: Count | None = None
    """Steps over which it grows, by equal parts."""

    def check(self) -> None:
        if (self.end is None) != (self.steps is None):
            here, absent = ("end", "steps") if self.steps is None else ("steps", "end")
            raise ValueError(f"{here} is {getattr(self, here)} and {absent} is absent: set both, or remove {here}")
        if self.end is not None and self.end < self.start:
            raise ValueError(f"end is {self.end} and start is {self.start}: a horizon grows, set end to start or more")

    def at(self, step: int) -> int:
        """Return the tokens of the responses of a step, counted from 0."""
        if self.end is None or self.steps is None:
            return self.start
        return self.start + (self.end - self.start) * min(step, self.steps) // self.steps


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutConfig(EngineGroupConfig):
    """How the student samples its own responses, and the replicas that run its weights."""

    max_response_length: Annotated[int, at_least(1, MAX_TOKENS)] = 1024
    """Longest response in tokens; longer ones are cut and counted as truncated."""
    horizon: HorizonConfig | None = None
    """Tokens after which responses stop in training, so that the rest is not even drawn; absent:
    ``max_response_length``."""
    temperature: Positive = 1.0
    """Sampling temperature."""
    top_p: Share = 1.0
    """Nucleus mass."""
    top_k: int = -1
    """Keep only this many most probable tokens; -1 keeps all."""
    samples_per_prompt: Annotated[int, at_least(1, MAX_SAMPLES)] = 1
    """Responses drawn per prompt."""
    environment: PythonToolConfig | CustomEnvironmentConfig | None = None
    """What answers the student's turns, in training and in validation; absent: a response is one turn."""
    on_new_weights: Literal["auto", "finish", "continue"] = "auto"
    """What becomes of responses that are under way when new weights arrive: they end under the old ones, and the new
    ones wait (``finish``), or they go on under the new ones (``continue``: partial rollout). ``auto``: ``continue``
    with ``schedule.max_staleness`` above 0; at 0 nothing is under way then."""

    def check(self) -> None:
        if isinstance(self.placement, RayConfig) and self.placement.shared_pool is not None:
            raise ValueError(
                f"placement.shared_pool is {self.placement.shared_pool!r}: only teachers take turns; remove it"
            )
        EngineGroupConfig.check(self)
        if isinstance(self.engine, VllmEngineConfig) and self.engine.pipeline_parallel_size > 1:
            raise ValueError(
                f"engine.pipeline_parallel_size is {self.engine.pipeline_parallel_size}, but the weights of a rollout "
                "go to tensor-parallel workers alone: remove it, and set tensor_parallel_size"
            )
        longest = 0 if self.horizon is None else self.horizon.end or self.horizon.start
        if longest > self.max_response_length:
            raise ValueError(
                f"horizon ends at {longest} tokens, max_response_length is {self.max_response_length}: lower "
                "horizon.end or horizon.start, or raise max_response_length"
            )
        turn = None if self.environment is None else self.environment.max_tokens_per_turn
        if turn is not None and turn > self.max_response_length:
            raise ValueError(
                f"environment.max_tokens_per_turn is {turn}, above max_response_length {self.max_response_length} for "
                "all turns together: lower it, or raise max_response_length"
            )
        if self.top_k != -1 and not 1 <= self.top_k <= MAX_COUNT:
            raise ValueError(f"top_k is {self.top_k}: set -1 (all) or a positive number up to {MAX_COUNT}")
        if self.is_openai:
            raise ValueError("placement.protocol is 'openai': such a server takes no weight updates; set mopd")

    @property
    def is_exact(self) -> bool:
        """Responses follow softmax(logits / temperature) without a cut."""
        return self.top_p == 1.0 and self.top_k == -1


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswersConfig(Checked):
    """The teachers' own answers to the training prompts, on which ``sft_on_teacher`` and ``off_policy_scores`` train.
    Each is as long as ``rollout.max_response_length`` allows, drawn once, and kept on disk."""

    temperature: NotNegative = 0.0
    """Temperature at which the teachers draw; 0 is greedy (sequence-level distillation)."""
    folder: str | None = None
    """Folder where answers are kept and found again, also by other runs; absent: ``answers`` in the run's folder."""
