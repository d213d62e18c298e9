"""The endless, seeded, domain-mixed sequence of prompts that training consumes.

Prompt n of the stream is a function of the data, the weights and the seed, and, where the weights follow the student's
head-room, of the validations so far. It does not depend on how many prompts are taken at a time, or on whether the run
was stopped and restored in between.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, TypeGuard

import numpy as np

from mopd.base.types import FIRST_STORED, Prompt, UserError


class PromptStream:
    """Sequence that mixes domains by weight and shuffles each domain anew in every epoch of its rows.

    The next prompt comes from the domain that is furthest behind its share; equals are drawn by lot. Any stretch of the
    stream holds each domain in proportion to within one prompt or so. Empty ``weights`` stand for the row counts.
    ``reweigh`` changes the shares from some prompt on, which counts anew from there.
    """

    def __init__(self, rows: Mapping[str, Sequence[int]], weights: Mapping[str, float], seed: int) -> None:
        """``rows`` are the row numbers of each domain, ascending (``PromptDataset.rows_by_domain``). Raise
        ``UserError`` unless ``weights`` is empty or names exactly the domains."""
        self._rows = {domain: rows[domain] for domain in sorted(rows)}
        self._seed = seed
        if weights and set(weights) != set(self._rows):
            raise UserError(
                f"data.domain_weights names {sorted(weights)}, the data has {list(self._rows)}: "
                "name every domain or none"
            )
        raw = {domain: float(weights[domain]) if weights else len(rows) for domain, rows in self._rows.items()}
        total = sum(raw.values())
        self._mixes = [(0, {domain: weight / total for domain, weight in raw.items()})]
        """Shares, each with the number of the first prompt that is drawn by them, ascending. Prompts that were replaced
        by another one do not count."""
        self._before = dict.fromkeys(self._rows, 0)
        """Number of prompts of each domain that were drawn before the shares that the last prompt was drawn by."""
        self._position = 0
        self._drawn = dict.fromkeys(self._rows, 0)
        self._replaced = dict.fromkeys(self._rows, 0)
        """Number of prompts of each domain that were replaced by another one; the shares do not count them."""
        self._orders: dict[str, tuple[int, np.ndarray]] = {}

    def reweigh(self, start: int, shares: Mapping[str, float]) -> None:
        """Draw the prompts from number ``start`` on by ``shares``, which add up to 1. ``ValueError`` if that prompt is
        drawn already, or shares from a later one on are known."""
        if start < max(sum(self._kept().values()), self._mixes[-1][0]):
            raise ValueError(f"shares from prompt {start} on come too late: {self._kept()} are drawn")
        self._mixes = [mix for mix in self._mixes if mix[0] != start] + [(start, dict(shares))]

    def shares(self, number: int) -> dict[str, float]:
        """Return the shares that prompt ``number`` is drawn by; replaced ones do not count."""
        return self._mix(number)[1]

    def _mix(self, number: int) -> tuple[int, dict[str, float]]:
        return next(mix for mix in reversed(self._mixes) if mix[0] <= max(number, 0))

    def _kept(self) -> dict[str, int]:
        return {domain: drawn - self._replaced[domain] for domain, drawn in self._drawn.items()}

    def next(self, num_prompts: int) -> list[Prompt]:
        """Return the next prompts; ``sample_id`` counts from 0 through the whole stream."""
        return [self._next() for _ in range(num_prompts)]

    def next_of(self, domain: str) -> Prompt:
        """Return the next prompt of one domain, out of turn, to replace one whose sample could not be finished."""
        self._replaced[domain] += 1
        return self._take(domain)

    def prompt(self, sample_id: int, domain: str, row: int) -> Prompt:
        """Return a prompt that was drawn before. Raise ``UserError`` if the data has no such row of this domain."""
        rows = self._rows.get(domain, ())
        place = bisect_left(rows, row)
        if rows[place : place + 1] != [row] or sample_id >= self._position:
            raise UserError(
                f"the checkpoint's prompt {sample_id} is row {row} of domain {str(domain)[:80]!r}, which is not in the "
                "data: restore data.train, or start a new run_dir"
            )
        return Prompt(sample_id=sample_id, domain=domain, row=row)

    def state_dict(self) -> dict[str, Any]:
        """Return the position, JSON-able, with the data, weights and seed that it belongs to."""
        return {
            "position": self._position,
            "drawn": dict(self._drawn),
            "replaced": dict(self._replaced),
            "seed": self._seed,
            "num_rows": self._num_rows(),
            "shares": self.shares(sum(self._kept().values()) - 1),
            "before": dict(self._before),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position. Raise ``UserError`` if data, weights or seed are not those that it was saved with;
        ``reweigh`` must have told the shares up to there."""
        position, drawn, replaced = state.get("position"), state.get("drawn"), state.get("replaced")
        # Checkpoints of versions without ``reweigh`` lack it.
        before = state.get("before", dict.fromkeys(self._rows, 0))
        if not (
            type(position) is int
            and self._are_counts(drawn)
            and self._are_counts(replaced)
            and self._are_counts(before)
            and sum(drawn.values()) == position
            and all(replaced[domain] + before[domain] <= num for domain, num in drawn.items())
        ):
            raise UserError("the checkpoint's prompt stream holds no position: resume from another checkpoint")
        start, shares = self._mix(position - sum(replaced.values()) - 1)
        own = {"seed": self._seed, "num_rows": self._num_rows(), "shares": shares}
        for name, value in own.items():
            if name not in state:
                raise UserError(f"the checkpoint's prompt stream has no {name}: resume from another checkpoint")
            if state[name] != value:
                raise UserError(
                    f"the checkpoint's prompt stream had {name} {str(state[name])[:300]}, this recipe gives "
                    f"{str(value)[:300]}: restore "
                    "data.train, data.domain_weights and the seed, or start a new run_dir"
                )
        if sum(before.values()) != start:
            raise UserError(
                f"the checkpoint's prompt stream changed its shares at prompt {sum(before.values())}, by "
                f"validation.jsonl at {start}: restore that file and the schedule, or start a new run_dir"
            )
        self._position, self._drawn, self._replaced = position, dict(drawn), dict(replaced)
        self._before = dict(before)

    def _are_counts(self, found: Any) -> TypeGuard[Mapping[str, int]]:
        return (
            isinstance(found, Mapping)
            and found.keys() == self._rows.keys()
            and all(type(count) is int and count >= 0 for count in found.values())
        )

    def _next(self) -> Prompt:
        kept = self._kept()
        start, shares = self._mix(sum(kept.values()))
        if start == sum(kept.values()):
            self._before = kept
        num_prompts = sum(kept.values()) + 1 - start
        # Lag behind the share that the domain should have after this prompt, in prompts.
        lags = {d: share * num_prompts - (kept[d] - self._before[d]) for d, share in shares.items()}
        largest = max(lags.values())
        behind = [domain for domain, lag in lags.items() if largest - lag < 1e-9]  # equal but for rounding
        if len(behind) == 1:
            return self._take(behind[0])
        return self._take(behind[int(_generator(self._seed, "mix", self._position).integers(len(behind)))])

    def _take(self, domain: str) -> Prompt:
        epoch, place = divmod(self._drawn[domain], len(self._rows[domain]))
        row = self._rows[domain][self._order(domain, epoch)[place]]
        prompt = Prompt(sample_id=self._position, domain=domain, row=row)
        self._position += 1
        self._drawn[domain] += 1
        return prompt

    def _order(self, domain: str, epoch: int) -> np.ndarray:
        """Return the permutation of the domain's rows in this epoch; the latest one is kept."""
        if domain not in self._orders or self._orders[domain][0] != epoch:
            order = _generator(self._seed, "shuffle", domain, epoch).permutation(len(self._rows[domain]))
            self._orders[domain] = (epoch, order)
        return self._orders[domain][1]

    def _num_rows(self) -> dict[str, int]:
        return {domain: len(rows) for domain, rows in self._rows.items()}


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


def headroom_shares(student: Mapping[str, float], teacher: Mapping[str, float], *, floor: float) -> dict[str, float]:
    """Return each domain's share of the prompts: ``floor`` of them go to all domains equally, the others where the
    student's reward is below the teacher's, in proportion to the difference (equally where it is nowhere below)."""
    gaps = {domain: max(0.0, reward - student[domain]) for domain, reward in sorted(teacher.items())}
    total, equal = math.fsum(gaps.values()), 1 / len(gaps)
    return {d: floor * equal + (1 - floor) * (gap / total if total > 0 else equal) for d, gap in gaps.items()}


def _generator(*key: str | int) -> np.random.Generator:
    """Return a generator that is a function of ``key`` alone, so that none has a state to be saved."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))
