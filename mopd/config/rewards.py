"""The ``rewards`` section of a recipe: how the responses of each domain are judged."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Literal

from mopd.config.values import Checked, Seconds, at_least

MAX_PATTERN = 10_000
"""Characters of a regular expression."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExactMatchConfig:
    """1 when the stripped response equals the ground truth."""

    type: Literal["exact_match"]
    """Reward type."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvironmentRewardConfig:
    """The sum of what ``rollout.environment`` gave."""

    type: Literal["environment"]
    """Reward type."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MathConfig(Checked):
    """1 when the last box, else the last expression or number, equals the ground truth."""

    type: Literal["math"]
    """Reward type."""
    timeout_s: Seconds = 5.0
    """Deadline of one response."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MultipleChoiceConfig:
    """1 when the response chooses the ground truth's letter."""

    type: Literal["multiple_choice"]
    """Reward type."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RegexConfig(Checked):
    """1 when the last match of the pattern's group equals the ground truth, or a pattern without group matches."""

    type: Literal["regex"]
    """Reward type."""
    pattern: str
    """Python regular expression."""
    timeout_s: Seconds = 2.0
    """Deadline of one response."""

    def check(self) -> None:
        if len(self.pattern) > MAX_PATTERN:
            raise ValueError(f"pattern has {len(self.pattern)} characters: use at most {MAX_PATTERN}")
        try:
            groups = re.compile(self.pattern).groups
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(f"pattern is no regular expression of Python ({error}): correct it") from error
        if groups > 1:
            raise ValueError(f"pattern has {groups} groups: keep the answer's one, and write the others as (?:...)")

    @property
    def reads_ground_truth(self) -> bool:
        """The pattern has a group, whose match is compared."""
        return re.compile(self.pattern).groups == 1


@dataclass(frozen=True, kw_only=True, slots=True)
class JsonSchemaConfig(Checked):
    """1 when the response, or its last fenced block, is JSON that the schema allows."""

    type: Literal["json_schema"]
    """Reward type."""
    path: str | None = None
    """JSON schema; absent: each row's ground truth."""
    timeout_s: Seconds = 2.0
    """Deadline of one response."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CodeConfig(Checked):
    """1 when the program in the last fenced block passes every test (docs/rewards.md#ground-truths-of-code)."""

    type: Literal["code"]
    """Reward type."""
    timeout_s: Seconds = 10.0
    """Deadline of all tests of a response."""
    max_memory_gib: Annotated[float, at_least(0.125, 64.0)] = 1.0
    """Memory of one program."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CustomRewardConfig(Checked):
    """A function of yours (docs/rewards.md#custom-rewards)."""

    type: Literal["custom"]
    """Reward type."""
    path: str
    """Python file."""
    function: str
    """Function in it."""
    timeout_s: Seconds = 60.0
    """Deadline for a batch."""
    max_memory_gib: Annotated[float, at_least(0.25, 1024.0)] = 8.0
    """Memory of its process."""


RewardConfig = (
    ExactMatchConfig
    | MathConfig
    | MultipleChoiceConfig
    | RegexConfig
    | JsonSchemaConfig
    | CodeConfig
    | EnvironmentRewardConfig
    | CustomRewardConfig
)

DEFAULT = "default"
"""The name in ``rewards`` that answers for every domain that stands not there."""
