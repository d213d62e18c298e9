"""The sequence of prompts where some responses are stored ones: which places are theirs, and in what order."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from mopd.base.types import FIRST_STORED, Prompt, UserError
from mopd.data.stream import PromptStream


class MixedStream(PromptStream):
    """A stream of which place n is a stored prompt's where ``floor((n + 1) s)`` is above ``floor(n s)``, for the share
    s of stored ones: every stretch has the share to within one prompt, whatever is taken at a time.

    Stored prompts come in their order, again from the first once all are used. ``row`` is their number, and their
    sample ids count from ``FIRST_STORED``, so that the others have the ids, and the responses, that they have without.
    """

    def __init__(
        self,
        rows: Mapping[str, Sequence[int]],
        weights: Mapping[str, float],
        seed: int,
        *,
        stored: Sequence[str],
        on_policy_fraction: float,
    ) -> None:
        """``stored``: the domain of each stored prompt; at least one."""
        super().__init__(rows, weights, seed)
        self._stored = stored
        self._share = 1 - Fraction(on_policy_fraction).limit_denominator(10**9)
        self._place = 0

    def next(self, num_prompts: int) -> list[Prompt]:
        prompts = []
        for _ in range(num_prompts):
            number = math.floor(self._place * self._share)
            self._place += 1
            is_stored = math.floor(self._place * self._share) > number
            prompts += [self._prompt(number)] if is_stored else super().next(1)
        return prompts

    def prompt(self, sample_id: int, domain: str, row: int) -> Prompt:
        if sample_id < FIRST_STORED:
            return super().prompt(sample_id, domain, row)
        prompt = self._prompt(sample_id - FIRST_STORED)
        if (prompt.domain, prompt.row) != (domain, row):
            raise UserError(
                f"the checkpoint's stored prompt {row} of domain {str(domain)[:80]!r} is not in data.scored: restore "
                "it, or start a new run_dir"
            )
        return prompt

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"place": self._place, **self._origin()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        for name, value in self._origin().items():
            if state.get(name) != value:
                raise UserError(
                    f"the checkpoint's stream had {name} {str(state.get(name))[:80]}, this recipe gives {value}: "
                    "restore data.scored and schedule.on_policy_fraction, or start a new run_dir"
                )
        if type(state.get("place")) is not int or state["place"] < 0:
            raise UserError("the checkpoint's stream holds no place: resume from another checkpoint")
        self._place = state["place"]

    def _origin(self) -> dict[str, Any]:
        return {"stored_share": str(self._share), "num_stored": len(self._stored)}

    def _prompt(self, number: int) -> Prompt:
        row = number % len(self._stored)
        return Prompt(sample_id=FIRST_STORED + number, domain=self._stored[row], row=row)
