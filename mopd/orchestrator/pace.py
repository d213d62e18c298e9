"""Admission times of prompts: early enough that their step does not wait for them, and no earlier.

A sample ages while it waits for its step. The pace measures each batch's slack, how long it was complete before the
trainer asked for it, and shifts admission::

    admitted ──── rollout, teachers, rewards ────> batch complete ──── slack ────> asked for, taken
             <─────────────────────────── lead ──────────────────────────────────>

The first lead is the time that the first batch's slowest prompt took from admission to readiness. If the trainer
bounds the run, slack is time in which samples only age: the lead shrinks until ``MARGIN`` is left. If the rollout or a
teacher bounds it, no batch has slack: the lead grows to the ``max_staleness + 1`` steps that the bound on staleness
allows, and every prompt is admitted as soon as that bound lets it.
"""

from __future__ import annotations

import math
from collections import deque

MARGIN = 0.25
"""Slack to keep, as a share of the time between two batches: lengths and latencies vary from step to step."""
GAIN = 0.75
"""Share of the slack above the margin by which the lead shrinks at once: what varies between batches shall not make it
too short again and again."""
PENALTY = 2.0
"""Factor of the missing slack by which the lead grows: a trainer that waits costs more than samples that are older."""
NUM_STEPS = 4
"""Steps of which the shortest gives the trainer's own time: a validation or checkpoint makes single ones longer."""


class Pace:
    """Admission times of each step's prompts. Times are seconds of one clock of the caller's.

    Example: the trainer took its last batch at 100 s and asks for one every 10 s. With a lead of 4 s the prompts of the
    next batch are due at 106 s, those of the one after it at 116 s.
    """

    def __init__(self, max_staleness: int) -> None:
        self._num_in_flight = max_staleness + 1
        """Most steps' worth of prompts that are admitted at a time."""
        self._lead_s = math.inf
        self._slacks: list[float] = []
        """Slacks in seconds of the batches since the last change of the lead."""
        self._busy: deque[float] = deque(maxlen=NUM_STEPS)
        """Seconds from taking a batch to asking for the next one."""
        self._taken_at: float | None = None
        self._asked_at: float | None = None
        """Time when the trainer asked for the batch that it waits for."""
        self._complete_at: float | None = None
        """Time when the next batch was complete."""
        self._num_ahead = 0
        """Batches beyond the next one that were complete when it was asked for."""

    def completed(self, now: float) -> None:
        """Record that the next batch is complete. Only the first call before ``taken`` counts."""
        if self._complete_at is None:
            self._complete_at = now

    def asked(self, now: float, num_complete: int) -> None:
        """Record that the trainer waits for its next batch; ``num_complete`` batches are complete."""
        self._asked_at, self._num_ahead = now, max(0, num_complete - 1)
        if self._taken_at is not None:
            self._busy.append(now - self._taken_at)

    def taken(self, now: float, longest_s: float) -> None:
        """Note that the trainer has its batch, whose slowest prompt was ready ``longest_s`` after its admission, and
        adapt the lead."""
        if self._asked_at is not None and self._busy:
            complete_at = now if self._complete_at is None else self._complete_at
            # batches that are complete beyond this one are slack as well, each of one step
            self._adapt(self._asked_at - complete_at + self._num_ahead * self._busy_s, longest_s)
        self._taken_at, self._asked_at, self._complete_at = now, None, None

    def due(self, steps_ahead: int, now: float) -> float:
        """Return the time from which prompts may be admitted for the batch ``steps_ahead`` (0: the next) batches on."""
        if self._taken_at is None or not self._busy:
            return now
        next_at = now if self._asked_at is not None else self._taken_at + self._busy_s
        return next_at + steps_ahead * self._busy_s - self._lead_s

    @property
    def _busy_s(self) -> float:
        return min(self._busy)

    def _adapt(self, slack_s: float, longest_s: float) -> None:
        most_s, margin_s = self._num_in_flight * self._busy_s, MARGIN * self._busy_s
        if math.isinf(self._lead_s):
            self._lead_s = longest_s + margin_s
        self._lead_s = min(self._lead_s, most_s)
        self._slacks.append(slack_s)
        if slack_s < margin_s:
            self._lead_s = min(most_s, self._lead_s + PENALTY * (margin_s - slack_s))
            self._slacks.clear()
        elif len(self._slacks) > self._num_in_flight:  # the last of them was admitted with this lead
            self._lead_s = max(0.0, self._lead_s - GAIN * (min(self._slacks) - margin_s))
            self._slacks.clear()
