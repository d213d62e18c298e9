"""Data sections of a recipe: training prompts, and the validation by which the student is judged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from mopd.config.values import MAX_TOKENS, require_at_least, require_positive, require_seconds

TEMPLATE_ARGUMENTS = frozenset(
    ("conversation", "messages", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize")
)
"""What every chat template gets from mopd."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Prompt files and how to read their rows."""

    train: tuple[str, ...]
    """Parquet or JSONL files of training prompts."""
    validation: tuple[str, ...] = ()
    """Parquet or JSONL files of validation prompts."""
    domain_key: str = "data_source"
    """Column that holds the domain. Dots reach into nested columns."""
    prompt_key: str = "prompt"
    """Column that holds the prompt: text, or chat messages for the chat template."""
    ground_truth_key: str = "reward_model.ground_truth"
    """Column that holds the reference answer for rewards; may be absent when nothing needs it."""
    extra_info_key: str = "extra_info"
    """Column that is handed to custom rewards; may be absent."""
    chat_template: str | None = None
    """Jinja file that replaces the tokenizer's own chat template."""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Extra arguments of the chat template (for example ``enable_thinking: false``)."""
    max_prompt_length: int = 1024
    """Longest prompt in tokens."""
    overlong_prompts: Literal["filter", "error", "truncate"] = "error"
    """What happens to a longer prompt: dropped with a count, refused, or cut from the left."""
    domain_weights: Mapping[str, float] = field(default_factory=dict)
    """Relative share of each domain in the prompt stream; empty mixes by row count. Names every domain or none."""

    def __post_init__(self) -> None:
        require_at_least("max_prompt_length", self.max_prompt_length, 1, MAX_TOKENS)
        for name in sorted(TEMPLATE_ARGUMENTS & self.chat_template_kwargs.keys()):
            raise ValueError(f"chat_template_kwargs.{name} is set by mopd itself: remove it")
        if not self.train:
            raise ValueError("train is empty: name at least one parquet or JSONL file")
        for name, weight in self.domain_weights.items():
            require_positive(f"domain_weights.{name}", weight)


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

    def __post_init__(self) -> None:
        require_at_least("every_steps", self.every_steps, 1)
        require_at_least("temperature", self.temperature, 0)
        if self.max_samples_per_domain is not None:
            require_at_least("max_samples_per_domain", self.max_samples_per_domain, 1)
