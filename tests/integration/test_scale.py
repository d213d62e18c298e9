"""``make scale`` at a small size: the orchestrator's real loop, link and data plane over ranks and engines that are
stand-ins. What it measures hangs on the machine, and is not looked at."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.integration.world import REPOSITORY, TIMEOUT_S, environment

pytestmark = [pytest.mark.slow, pytest.mark.multirank]


def test_stand_ins_follow_the_orchestrator_to_the_end() -> None:
    size = ["--ranks=4", "--prompts=64", "--steps=2", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "tests.integration.scale", *size],
        cwd=REPOSITORY,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert "Traceback" not in done.stderr, done.stderr
    assert json.loads(done.stdout)["num_samples"] == 128
