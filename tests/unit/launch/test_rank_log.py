"""A rank's log: its output, and the stacks of its threads once nothing goes on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
RANK = """
import sys, threading, time
from pathlib import Path
from mopd.launch.rank_log import rank_log

def waits_for_a_collective():
    time.sleep(60)

threading.Thread(target=waits_for_a_collective, daemon=True).start()
logs, rank, what = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
with rank_log(logs, rank, deadline_s=5.0 if what == "works" else 0.5) as watch:
    print("as it was written", flush=True)
    if what == "works":  # for longer than stacks are waited for, 4 s
        for _ in range(7):
            time.sleep(0.7)
            watch.alive()
    else:
        give_up_at = time.monotonic() + 30
        while "Timeout (" not in (logs / f"rank_{rank}.log").read_text() and time.monotonic() < give_up_at:
            time.sleep(0.1)
"""


@pytest.mark.parametrize(("rank", "what"), [(0, "hangs"), (1, "hangs"), (1, "works")])
def test_output_and_stacks(tmp_path: Path, rank: int, what: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", RANK, str(tmp_path / "logs"), str(rank), what],
        env={"PYTHONPATH": str(ROOT), "MOPD_LAUNCH_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    log = (tmp_path / "logs" / f"rank_{rank}.log").read_text()
    assert ("as it was written" in (done.stdout if rank == 0 else log)) and done.stderr == ""
    assert ("in waits_for_a_collective" in log) == (what == "hangs")
    assert log.count("Timeout (") == (what == "hangs")
