"""Is what this container runs alive? Exit code 0 for yes.

``MOPD_HEALTH_URL`` names the ``/health`` of a server; without it mopd has to start.
"""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.error
import urllib.request

TIMEOUT_S = 8.0


def is_healthy(url: str | None) -> bool:
    """Whether the server answers 200, or, without one, ``mopd --version`` runs."""
    if url is None:
        return subprocess.run(["mopd", "--version"], timeout=TIMEOUT_S, check=False).returncode == 0
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
            return answer.status == 200
    except (urllib.error.URLError, TimeoutError):
        return False


if __name__ == "__main__":
    sys.exit(0 if is_healthy(os.environ.get("MOPD_HEALTH_URL")) else 1)
