from __future__ import annotations

from mopd.base.types import Prompt
from mopd.orchestrator.ledger import Ledger


def test_attempts_count_the_draws_before() -> None:
    ledger = Ledger(prompts_per_step=1, max_staleness=0, step=0)
    (slot,) = ledger.admit([Prompt(sample_id=0, domain="math", row=0)])
    for draws_before in range(3):
        assert slot.prompt.attempt == draws_before
        ledger.again(slot)
