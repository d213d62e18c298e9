"""``python -m mopd.orchestrator DESCRIPTOR < TASK``: rank 0 starts it; the number is that of its end of the link."""

import sys

from mopd.orchestrator.process import run

if __name__ == "__main__":
    sys.exit(run(int(sys.argv[1])))
