"""What a teacher reads in the place of the student's prompt, and how a student that is its own teacher stays up to
date."""

from __future__ import annotations

import string
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from mopd.config.data import TEMPLATE_ARGUMENTS
from mopd.config.values import MAX_TOKENS, Checked, Count, Lines, at_least

PROMPT, GROUND_TRUTH = "prompt", "ground_truth"
"""Names in a view's texts that stand for what ``data.columns`` maps, not for a column of that name."""


def parse_view(text: str) -> list[tuple[str, str | None]]:
    """Return the parts of a view's text: each is some text as it is, and the name that follows in braces, if any.
    Example: ``"{prompt} Hint: {a.b}"`` is ``[("", "prompt"), (" Hint: ", "a.b")]``; ``{{`` and ``}}`` are braces.

    Raises:
        ValueError: braces that hold no name.
    """
    try:
        parts = list(string.Formatter().parse(text))
    except ValueError as error:
        raise ValueError(f"has a brace without its other one ({error})") from None
    for _, name, form, conversion in parts:
        if name is not None and (not name.strip() or form or conversion or set(name) & set("[]{}")):
            raise ValueError(f"has {{{name}}}, which is no column's name")
    return [(literal, name) for literal, name, *_ in parts]


@dataclass(frozen=True, kw_only=True, slots=True)
class ViewConfig(Checked):
    """What it reads instead of the student's prompt (docs/teachers.md#a-view-of-its-own)."""

    system: Lines | None = None
    """System message."""
    prompt: Lines | None = None
    """Last user message, or the plain prompt."""
    messages: str | None = None
    """Column of its conversation or text."""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """As ``data.chat_template_kwargs``."""
    max_prompt_length: Annotated[int, at_least(1, MAX_TOKENS)] | None = None
    """Longest such prompt; absent: ``data.max_prompt_length``."""

    def check(self) -> None:
        if self.system is self.prompt is self.messages is None and not self.chat_template_kwargs:
            raise ValueError(
                "the view is empty, so the teacher would read what the student does: set system, prompt, messages or "
                "chat_template_kwargs, or remove it"
            )
        if self.messages is not None and (self.system is not None or self.prompt is not None):
            raise ValueError("messages is set beside system or prompt, which it stands for: remove one of them")
        for name in sorted(TEMPLATE_ARGUMENTS & self.chat_template_kwargs.keys()):
            raise ValueError(f"chat_template_kwargs.{name} is set by mopd itself: remove it")
        for key in ("system", "prompt"):
            text = getattr(self, key)
            try:
                parse_view(text or "")
            except ValueError as error:
                raise ValueError(f"{key} {error}: write {{{{ and }}}} for braces, {{NAME}} for a column") from None

    @property
    def names(self) -> tuple[str, ...]:
        """What it reads of a row beside the prompt: ``ground_truth``, and dotted names of columns."""
        names = [name for text in (self.system, self.prompt) for _, name in parse_view(text or "")]
        return tuple(dict.fromkeys(name for name in (*names, self.messages) if name not in (None, PROMPT)))

    @property
    def columns(self) -> tuple[str, ...]:
        """Dotted names of the columns that it reads, whatever ``data.columns`` maps."""
        return tuple(name for name in self.names if name != GROUND_TRUTH)


@dataclass(frozen=True, kw_only=True, slots=True)
class RefreshConfig(Checked):
    """When ``model: student`` gets new weights (docs/teachers.md#the-student-as-teacher)."""

    every_steps: Count = 1
    """Steps between updates."""
    ema: float | None = None
    """Decay of averaged weights; absent: not averaged."""

    def check(self) -> None:
        if self.ema is not None and not 0 < self.ema < 1:
            raise ValueError(f"ema is {self.ema:g}: set a decay above 0 and below 1, for example 0.99, or every_steps")

    @property
    def told(self) -> str:
        """The keys in words."""
        every = "every step" if self.every_steps == 1 else f"every {self.every_steps} steps"
        return every if self.ema is None else f"{every}, the average of decay {self.ema:g}"
