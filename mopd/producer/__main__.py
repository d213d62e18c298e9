"""``python -m mopd.producer LOGS DESCRIPTOR < RECIPE``: the process beside rank 0, which starts it."""

import sys
from pathlib import Path

from mopd.producer.process import run

if __name__ == "__main__":
    sys.exit(run(Path(sys.argv[1]), int(sys.argv[2])))
