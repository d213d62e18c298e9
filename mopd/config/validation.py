"""Validation section of a recipe: when, on how much, and the reward by which responses are judged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from mopd.config.numbers import require_at_least, require_seconds

MAX_EXAMPLES = 10_000


@dataclass(frozen=True, kw_only=True, slots=True)
class ExactMatchConfig:
    """1 when the response equals the ground truth after stripping surrounding white space, else 0."""

    type: Literal["exact_match"] = "exact_match"
    """Reward type."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CustomRewardConfig:
    """A Python function of yours, run in a process of its own with a clean environment.

    The function takes ``prompt, response, ground_truth, extra_info, domain`` as keywords and returns a number.
    """

    type: Literal["custom"]
    """Reward type."""
    path: str
    """Python file that holds the function."""
    function: str
    """Name of the function in that file."""
    timeout_s: float = 60.0
    """Deadline for one batch of calls."""
    max_memory_gib: float = 8.0
    """Memory of the function's processes together, in GiB; more ends the run."""

    def __post_init__(self) -> None:
        require_seconds("timeout_s", self.timeout_s)
        require_at_least("max_memory_gib", self.max_memory_gib, 0.25, 1024.0)


Reward = ExactMatchConfig | CustomRewardConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class ValidationConfig:
    """Reward per domain on held-out prompts, greedy unless a temperature is set."""

    every_steps: int = 50
    """Optimizer steps between validations; step 0 and the last step are always validated."""
    reward: Reward = ExactMatchConfig()
    """Reward of a domain that ``domain_rewards`` does not name."""
    domain_rewards: Mapping[str, Reward] = field(default_factory=dict)
    """Reward by domain."""
    temperature: float = 0.0
    """Sampling temperature; 0 is greedy."""
    max_samples_per_domain: int | None = None
    """Only the first rows of each domain; absent means all."""
    num_examples: int = 4
    """Generations per domain that are kept for the report."""

    def __post_init__(self) -> None:
        require_at_least("every_steps", self.every_steps, 1)
        require_at_least("temperature", self.temperature, 0)
        require_at_least("num_examples", self.num_examples, 0, MAX_EXAMPLES)
        if self.max_samples_per_domain is not None:
            require_at_least("max_samples_per_domain", self.max_samples_per_domain, 1)
