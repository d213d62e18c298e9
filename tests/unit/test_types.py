from __future__ import annotations

from mopd.data.stream import PromptStream
from mopd.ledger import Ledger


def test_attempts_count_the_draws_before() -> None:
    (prompt,) = PromptStream({"math": [0]}, {"math": 1}, 0).next(1)
    ledger = Ledger(prompts_per_step=1, max_staleness=0, step=0)
    (slot,) = ledger.admit([prompt])
    for draws_before in range(3):
        assert slot.prompt.attempt == draws_before
        ledger.again(slot)
