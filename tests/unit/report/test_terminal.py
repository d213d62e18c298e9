"""Messages on their way to the terminal."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_messages_come_once_whatever_a_library_has_set_up_before() -> None:
    """mopd's own from ``info`` on, those of others from warnings on; nothing acts on the terminal."""
    code = (
        "import logging, sys\n"
        "logging.basicConfig(stream=sys.stdout, level=logging.DEBUG)\n"
        "from mopd.report.terminal import log_to_terminal\n"
        "log_to_terminal()\n"
        "logging.getLogger('mopd.run').info('step %d', 1)\n"
        "logging.getLogger('mopd.run').debug('a detail')\n"
        "logging.getLogger('other').info('as always')\n"
        "logging.getLogger('other').warning('beware\\x1b[31m')\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0 and done.stdout == "", done.stderr
    one, other = done.stderr.splitlines()
    assert one == "step 1" and other.startswith("beware") and "\x1b" not in other
