"""How a run ends: whoever waits for a part waits longer than that part does for its own."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any

from mopd.config.rewards import ExactMatchConfig
from mopd.placement.ending import END_S, EXIT_S, TERMINATE_TIMEOUT_S
from mopd.rewards.domains import DomainRewards


class Ending:
    """A reward whose end waits for the other one's."""

    def __init__(self, both: threading.Barrier) -> None:
        self._both = both

    def close(self) -> None:
        self._both.wait(60)


def test_rewards_end_side_by_side() -> None:
    both = threading.Barrier(2)
    rewards: Any = {"math": Ending(both), "code": Ending(both)}
    DomainRewards(dict.fromkeys(rewards, ExactMatchConfig(type="exact_match")), rewards).close()


def test_the_launcher_waits_longest() -> None:
    assert EXIT_S > TERMINATE_TIMEOUT_S > END_S
    assert type(TERMINATE_TIMEOUT_S) is int  # torchrun's


def test_the_terms_are_light_to_import() -> None:
    """The launcher asks for them before it knows that anything is to be trained."""
    heavy = "[name for name in ('torch', 'zmq', 'ray', 'vllm', 'transformers') if name in sys.modules]"
    program = f"import sys, mopd.placement.ending; print(*{heavy})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "", "")
