"""A disk that fills up at any moment costs one line, and nothing once there is space again.

Invariant: whatever a run was writing, it ends with the file's path and "No space left on device", and the command that
this line names ends with the weights, metrics and validations of a run that was never cut off, bit for bit.
``MOPD_DISK_FULL_MOMENTS`` sets how many random moments are tried (``make disk-full``: 30), ``MOPD_DISK_FULL_SEED``
which. Not exercised here: several ranks (how their errors become one line: ``tests/unit/launch/test_launch.py``), the
files of vLLM and Ray, network disks that tell at ``close``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fixtures.chance import seed_of
from tests.fixtures.mounts import private_mounts
from tests.integration.world import REPOSITORY, World, environment

pytestmark = pytest.mark.slow
SHORT_FORM = 1
TIMEOUT_S = 180.0
"""For each moment, and once for the start: for a busy machine."""


@pytest.mark.long
def test_a_full_disk_costs_one_line_and_nothing_more(world: World, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    number = int(os.environ.get("MOPD_DISK_FULL_MOMENTS", SHORT_FORM))
    seed = seed_of("MOPD_DISK_FULL_SEED", is_new=number > SHORT_FORM)
    command = [*private_mounts(disk), sys.executable, "-W", "ignore", "-m", "tests.integration.disk_full"]
    done = subprocess.run(
        [*command, str(world.folder), str(disk), str(number), str(seed)],
        cwd=REPOSITORY,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S * (number + 1),
        check=False,
    )
    assert done.returncode == 0, f"MOPD_DISK_FULL_SEED={seed}\n{done.stdout}\n{done.stderr}"
    print(done.stdout)
    assert len([json.loads(line) for line in done.stdout.splitlines()]) == number
