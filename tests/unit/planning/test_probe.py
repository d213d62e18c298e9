"""What a probe counts as a machine's own time."""

from __future__ import annotations

import time

from mopd.planning import probe


def test_time_in_which_others_had_the_processors_is_not_the_machines() -> None:
    """A wait stands for them; work counts whole."""

    def work() -> None:
        until = time.process_time() + 0.05
        while time.process_time() < until:
            pass

    assert probe._spent_s(lambda: time.sleep(0.3)) < 0.1
    assert probe._spent_s(work) >= 0.05
