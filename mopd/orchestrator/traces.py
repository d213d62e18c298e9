"""What teachers say of drawn tokens: turn by turn, and of one response of each domain token by token.

A token's divergence is log p - log q at the token itself, p the rollout's when it drew it and q its teacher's (several:
their weighted geometric mean). Its mean estimates KL(student || teacher); single ones may be negative.
Shapes: L tokens of one sample, R of its response.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from mopd.base.text import encodable
from mopd.base.types import SampleMeta
from mopd.config.schema import Recipe
from mopd.data_plane.interface import Storage

MAX_TOKENS = 512
"""Tokens of a response that are shown."""
MOST_NATS = 99.0
"""Bound of a token's divergence: a teacher may rule a token out."""
LONGEST_CHARACTER = 8
"""Tokens after which text is shown as it is: a byte-level token may be a part of a character, never of so many."""


class Traces:
    """Collects them from the samples that teachers have scored."""

    def __init__(self, plane: Storage, tokenizer: PreTrainedTokenizerBase, *, has_turns: bool) -> None:
        """``has_turns``: responses have several, which are counted apart."""
        self._plane, self._tokenizer, self._has_turns = plane, tokenizer, has_turns
        self._sums: defaultdict[tuple[str, int], list[float]] = defaultdict(lambda: [0.0, 0.0])
        """Domain and turn -> sum of divergences, number of tokens, since ``take_numbers``."""
        self._shown: dict[str, dict[str, Any]] = {}

    async def note(self, metas: Sequence[SampleMeta], said: Mapping[int, Tensor]) -> None:
        """Take in what teachers ``said`` of drawn tokens, log-probs [R] by sample id; samples that nobody scored are
        left out."""
        scored = [meta for meta in metas if meta.sample_id in said]
        first = {meta.domain: meta.sample_id for meta in reversed(scored) if meta.domain not in self._shown}
        wanted = scored if self._has_turns else [meta for meta in scored if meta.sample_id in first.values()]
        if not wanted:
            return
        names = ("tokens", "loss_mask", "rollout_logprobs")
        fields = await self._plane.get([meta.sample_id for meta in wanted], names)
        for meta, tokens, mask, drawn in zip(wanted, *(fields[name] for name in names), strict=True):
            divergence = (drawn.double() - said[meta.sample_id].double()).clamp(-MOST_NATS, MOST_NATS)
            if self._has_turns:
                self._count(meta.domain, turns_of(mask), divergence, mask)
            if meta.sample_id in first.values():
                self._shown[meta.domain] = self._trace(tokens, meta.prompt_length, mask, divergence)

    def take_numbers(self) -> dict[str, float]:
        """Return ``turn_TURN_kl/DOMAIN``, nats a token, since the last call."""
        values = {
            f"turn_{turn}_kl/{domain}": total / num for (domain, turn), (total, num) in sorted(self._sums.items())
        }
        self._sums.clear()
        return values

    def take_shown(self) -> dict[str, list[dict[str, Any]]]:
        """Return the response of each domain that came first since the last call, as JSON: its prompt and its segments,
        one a drawn token, with its divergence."""
        shown = {domain: [trace] for domain, trace in sorted(self._shown.items())}
        self._shown.clear()
        return shown

    def _count(self, domain: str, turns_R: Tensor, divergence_R: Tensor, mask_R: Tensor) -> None:
        for turn in turns_R[mask_R].unique().tolist():
            own = divergence_R[mask_R & (turns_R == turn)]
            total = self._sums[domain, turn]
            total[0] += float(own.sum())
            total[1] += len(own)

    def _trace(self, tokens_L: Tensor, prompt_length: int, mask_R: Tensor, divergence_R: Tensor) -> dict[str, Any]:
        segments: list[dict[str, Any]] = []
        ids: list[int] = []
        total = 0.0
        response = tokens_L[prompt_length:][:MAX_TOKENS].tolist()
        drawn = mask_R[:MAX_TOKENS].tolist()
        for i, (token, is_drawn) in enumerate(zip(response, drawn, strict=True)):
            ids.append(token)
            total += float(divergence_R[i]) if is_drawn else 0.0
            is_last = i + 1 == len(response) or drawn[i + 1] != is_drawn
            text = self._text(ids)
            if is_last or (is_drawn and (not text.endswith("\ufffd") or len(ids) == LONGEST_CHARACTER)):
                segments.append({"text": text, "is_given": not is_drawn, "kl": round(total, 3) if is_drawn else None})
                ids, total = [], 0.0
        return {"prompt": self._text(tokens_L[:prompt_length].tolist()), "segments": segments}

    def _text(self, ids: Sequence[int]) -> str:
        return encodable(str(self._tokenizer.decode([*ids])))


def traces_of(recipe: Recipe, plane: Storage, tokenizer: PreTrainedTokenizerBase) -> Traces | None:
    """Return the traces of a run; ``None`` where teachers score what the student has not drawn."""
    if recipe.data.scored or "off_policy_scores" in recipe.objectives or recipe.objective != "on_policy":
        return None
    return Traces(plane, tokenizer, has_turns=recipe.rollout.environment is not None)


def turns_of(mask: Tensor) -> Tensor:
    """Return the turn [R] int64, from 1, of each token of a response: it begins where drawn ones follow given ones."""
    begins = mask & ~torch.cat([mask.new_zeros(1), mask[:-1]])
    return begins.long().cumsum(0).clamp(min=1)
