"""The text between two turns of the student: what the chat template writes around an observation, as token ids.

Token space is the truth: what the student drew is never decoded and encoded again, and nothing is rendered a second
time. After a turn the trajectory grows by given tokens alone::

    … drawn turn, its stop token | before | observation | after | next turn …

``before`` and ``after`` are what the template writes there, encoded once (``TurnFrame``); that they hold for the run's
own prompts is shown before any model is loaded (``TurnFrame.check``). An observation is encoded as plain text.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from mopd.base.types import UserError
from mopd.config.data import DataConfig
from mopd.config.environment import EnvironmentConfig
from mopd.data.prompts import PromptRow
from mopd.data.templates.rendering import Renderer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)
SAID, GIVEN = "mopdturn{}", "mopdobservation{}"
"""Stand for what is said and given in turn N while a template is looked at: one word each, which none changes."""
THOUGHT = "<think>\nmopdthought\n</think>\n\n"
MAX_SHOWN = 60
"""Characters of a text around a difference in a message."""
PROBE = [{"role": "user", "content": "1 + 1"}]


class PlainText:
    """Encoder of text in which nothing is a control token: ``<|im_end|>`` is the ten characters that it is written
    with."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, key: str = "rollout.environment") -> None:
        """Raise ``UserError`` with the ``key`` that asks for it, for a tokenizer that is not of the tokenizers
        library."""
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, Tokenizer):
            raise UserError(
                f"{key}: the tokenizer of {tokenizer.name_or_path!r} has no tokenizer.json, without "
                "which text cannot be kept apart from control tokens: convert it to the tokenizers library's form"
            )
        settings = json.loads(backend.to_str())
        added = {one["content"]: one["id"] for one in settings["added_tokens"]}
        self._backend = Tokenizer.from_str(json.dumps({**settings, "added_tokens": [], "post_processor": None}))
        self.control_ids = frozenset(added.values())
        """Ids of every token that the tokenizer finds before it splits text: special ones, and those of tools and
        thinking."""
        # Some vocabularies hold the spelling of a control token as a word of its own too.
        self._words = [text for text, number in added.items() if number in self._ids(text) and text != self._unknown]

    @property
    def _unknown(self) -> str | None:
        return getattr(self._backend.model, "unk_token", None)

    def encode(self, text: str) -> list[int]:
        """Return ids of the text, none of them a control token's but the one for unknown characters."""
        for word in self._words:
            text = text.replace(word, f"{word[0]} {word[1:]}")
        return self._ids(text)

    def _ids(self, text: str) -> list[int]:
        return list(self._backend.encode(text, add_special_tokens=False).ids)


class TurnFrame:
    """What the chat template writes between two turns, and how a trajectory goes on behind one."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, data: DataConfig, cfg: EnvironmentConfig) -> None:
        """Ask the template. ``UserError`` if it has no place for an observation."""
        self._tokenizer, self._data, self._cfg = tokenizer, data, cfg
        self._plain = PlainText(tokenizer)
        self._rendering = threading.Lock()
        self._renderer: Renderer | None = None
        with Renderer(data, tokenizer) as renderer:
            if not renderer.has_template:
                raise UserError(
                    "rollout.environment needs a chat template, which writes what stands between two turns, and the "
                    f"tokenizer of {tokenizer.name_or_path!r} has none: set data.chat_template"
                )
            (whole,) = self._rendered(renderer, PROBE, 1)
        self._texts = self._between(whole, 1, "a probe conversation")
        self._before, self._after = (
            tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] for text in self._texts
        )

    def given(self, observation: str, last: int) -> list[int]:
        """Return the ids that follow a turn whose last token is ``last``: before, observation, after.

        Where the student has ended its turn with a control token, that stands in the place of the template's.
        """
        control = self._plain.control_ids
        is_ended = last in control and bool(self._before) and self._before[0] in control
        text = self._plain.encode(observation)[: self._cfg.max_tokens_per_observation]
        return [*self._before[is_ended:], *text, *self._after]

    def said(self, tokens: Sequence[int]) -> str:
        """Return the text of a turn for the environment: all of its tokens' but the control token that ends it."""
        is_ended = bool(tokens) and tokens[-1] in self._plain.control_ids
        return str(self._tokenizer.decode(list(tokens[: len(tokens) - is_ended]), skip_special_tokens=False))

    def prompt(self, messages: list[dict[str, Any]], place: str) -> tuple[int, ...]:
        """Return the ids of a prompt's messages; ``UserError`` with ``place`` if the template refuses them. May be
        called from any thread. The template's process lives as long as this one."""
        with self._rendering:
            if self._renderer is None:
                self._renderer = Renderer(self._data, self._tokenizer)
            self._renderer.put(messages, place)
            (text,) = self._renderer.texts()
        return tuple(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def check(self, rows: Sequence[PromptRow]) -> None:
        """Show on conversations of one and two turns behind the rows' own messages that the template writes the frame
        that was found, and warn once if it rewrites earlier turns. ``UserError`` names the place where it differs."""
        rewritten = None
        with Renderer(self._data, self._tokenizer) as renderer:
            for row in rows:
                if row.conversation is None and not row.images:
                    raise UserError(
                        f"{row.place}: the prompt is plain text, behind which no turn has a place: store chat "
                        "messages, or remove rollout.environment"
                    )
                rewritten = rewritten or (row.conversation and self._rewritten(renderer, row))
        if rewritten:
            logger.warning(
                "%s: responses keep turns as they were drawn, for the student and for its teachers",
                rewritten,
            )

    def _rewritten(self, renderer: Renderer, row: PromptRow) -> str | None:
        """Return the place where the template rewrites an earlier turn, if it does."""
        assert row.conversation is not None
        incremental, problem = row.text, None
        for number, whole in enumerate(self._rendered(renderer, row.conversation, 2), start=1):
            found = self._between(whole, number, row.place)
            for own, other in zip(self._texts, found, strict=True):
                if own != other:
                    raise UserError(
                        f"{row.place}: behind turn {number} the chat template writes {_apart(other, own)}: a response "
                        "of several turns needs one that always writes the same there; set data.chat_template"
                    )
            begun = whole[: whole.index(SAID.format(number))]
            if begun != incremental:
                problem = problem or _apart(begun, incremental)
            incremental += SAID.format(number) + found[0] + GIVEN.format(number) + found[1]
        if problem is None:
            thinking = self._rendered(renderer, row.conversation, 2, thought=THOUGHT)[-1]
            problem = None if thinking.count(THOUGHT) == 2 else "no thinking in <think>"
        return problem and f"{row.place}: of earlier turns the chat template would write {problem}"

    def _rendered(
        self, renderer: Renderer, messages: Sequence[dict[str, Any]], num_turns: int, thought: str = ""
    ) -> list[str]:
        """Return the conversations of 1 to ``num_turns`` turns behind ``messages``, each with a generation prompt."""
        turns: list[dict[str, Any]] = []
        for number in range(1, num_turns + 1):
            turns += [
                {"role": "assistant", "content": thought + SAID.format(number)},
                {"role": self._cfg.observation_role, "content": GIVEN.format(number)},
            ]
            renderer.put([*messages, *turns], f"rollout.environment.observation_role {self._cfg.observation_role!r}")
        return renderer.texts()

    def _between(self, whole: str, number: int, place: str) -> tuple[str, str]:
        """Return what stands between turn ``number`` and its observation, and behind that."""
        said, given = SAID.format(number), GIVEN.format(number)
        start, end = whole.find(said) + len(said), whole.rfind(given)
        if said not in whole or end < start:
            other = "user" if self._cfg.observation_role == "tool" else "tool"
            raise UserError(
                f"{place}: the chat template writes no message of role {self._cfg.observation_role!r} behind the "
                f"student's turn: set rollout.environment.observation_role: {other}, or data.chat_template"
            )
        return whole[start:end], whole[end + len(given) :]


def _apart(one: str, other: str) -> str:
    """Return two texts from where they differ."""
    same = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    start = max(0, same - MAX_SHOWN // 3)
    return f"{one[start : start + MAX_SHOWN]!r} and not {other[start : start + MAX_SHOWN]!r}"
