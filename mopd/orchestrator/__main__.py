"""Entry point of the process that rank 0 starts: ``python -m mopd.orchestrator DESCRIPTOR < TASK``. The descriptor is
that of its end of the link."""

import sys

from mopd.orchestrator.process import run

if __name__ == "__main__":
    sys.exit(run(int(sys.argv[1])))
