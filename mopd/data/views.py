"""Teachers' own views of a row's prompt: its messages, or its text, as one teacher reads them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mopd.base.types import UserError
from mopd.config.groups import Assignment
from mopd.config.views import GROUND_TRUTH, PROMPT, ViewConfig, parse_view
from mopd.data.columns import Fields, as_messages
from mopd.data.files import MISSING, described, listed, lookup

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Views:
    """The views of a recipe's teachers, and the domains that each teacher answers for."""

    by_teacher: Mapping[str, ViewConfig | None]
    """Teachers with a view of their own; ``None`` for the student's prompts in other tokens."""
    assignment: Assignment
    tokenizers: Mapping[str, PreTrainedTokenizerBase] = field(default_factory=dict)
    """Those of teachers that read other tokens than the student."""

    def of(self, domain: str) -> list[str]:
        """Return the teachers of a domain that have a view; none where nobody teaches it."""
        default = self.assignment.default
        teachers = self.assignment.by_domain.get(domain, () if default is None else (default,))
        return [name for name in teachers if name in self.by_teacher]

    @property
    def columns(self) -> list[str]:
        """Top-level columns that the views read."""
        return [key.split(".")[0] for view in self.by_teacher.values() if view is not None for key in view.columns]

    def check(self, row: Mapping[str, Any], found: Fields, place: str) -> None:
        """Raise ``UserError`` if a row lacks what a view of its domain's teachers names."""
        for teacher in self.of(found.domain):
            view = self.by_teacher[teacher]
            if view is not None:
                _values(view, row, found, f"{place}: teachers.{teacher}.view")

    def prompt(self, teacher: str, row: Mapping[str, Any], found: Fields, prompt: Any, place: str) -> Any:
        """Return a row's prompt as a teacher reads it: chat messages or a text, as ``prompt``, the student's, is.

        Raises:
            UserError: file, row and key of what a view names and the row lacks, or of a prompt without a place for it.
        """
        view, where = self.by_teacher[teacher], f"{place}: teachers.{teacher}.view"
        if view is None:
            return prompt
        values = _values(view, row, found, where)
        if view.messages is not None:
            return as_messages(values[view.messages])
        if isinstance(prompt, str):
            if view.system is not None:
                raise UserError(
                    f"{where}.system: the prompt is plain text, which has no place for it: store chat messages, or "
                    "write it into view.prompt"
                )
            return prompt if view.prompt is None else _filled(view.prompt, values | {PROMPT: prompt})
        users = [i for i, message in enumerate(prompt) if message.get("role") == "user"]
        if not users:
            raise UserError(f"{where}: the prompt has no user message: correct the row, or set view.messages")
        messages = [dict(message) for message in prompt]
        values |= {PROMPT: str(messages[users[-1]].get("content"))}
        if view.prompt is not None:
            messages[users[-1]]["content"] = _filled(view.prompt, values)
        if view.system is None:
            return messages
        rest = messages[1:] if messages[0].get("role") == "system" else messages
        return [{"role": "system", "content": _filled(view.system, values)}, *rest]


NO_VIEWS = Views({}, Assignment({}))


def _filled(text: str, values: Mapping[str, Any]) -> str:
    return "".join(literal + ("" if name is None else values[name]) for literal, name in parse_view(text))


def _values(view: ViewConfig, row: Mapping[str, Any], found: Fields, where: str) -> dict[str, Any]:
    """Return what stands for each name of a view but the prompt: text as it is, any other value as JSON; of
    ``messages`` the conversation."""
    values: dict[str, Any] = {}
    for name in view.names:
        value = found.ground_truth if name == GROUND_TRUTH else lookup(row, name)
        if value is MISSING or value is None or value in ("", []):
            there = "" if value is MISSING else f" but {described(value)}"
            what = "reference answer (data.columns.ground_truth)" if name == GROUND_TRUTH else f"column {name!r}"
            columns: Sequence[str] = [*row]
            raise UserError(f"{where}: the row has no {what}{there} (it has {listed(columns)}): correct the view or it")
        is_text = isinstance(value, str) or (name == view.messages and isinstance(value, list))
        values[name] = value if is_text else json.dumps(value, ensure_ascii=False, default=str)
    return values
