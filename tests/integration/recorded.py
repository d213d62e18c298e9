"""``mopd`` as ever, with a journal of what was really trained on: ``python -m tests.integration.recorded train …``.

Each rank of the student appends one line a step to ``$MOPD_JOURNAL`` (a folder), in a file of its own: process id, step
and the samples whose gradients the optimizer has just applied. It is written where the weights change, and knows
nothing of the controller, its accounts or the data plane.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mopd.cli.main import main
from mopd.launch import failure, launch
from mopd.student.worker import StudentWorker

JOURNAL = "MOPD_JOURNAL"
"""Environment variable: folder of the journal."""
_optim_step = StudentWorker.optim_step
_launch = launch.launch


def _recorded_step(self: StudentWorker) -> dict[str, float]:
    plan = self._plan
    values = _optim_step(self)
    assert plan is not None
    samples = [asdict(sample) for micro in plan.micro_batches[self.layout.dp_rank] for sample in micro]
    line = {"pid": os.getpid(), "step": self.weight_version, "samples": samples}
    with Path(os.environ[JOURNAL], f"{self.layout.rank}.jsonl").open("ab", buffering=0) as file:
        file.write(json.dumps(line).encode() + b"\n")
    return values


def run_recorded(module: str, prepare_rank: Callable[[], None] = lambda: None) -> int:
    """Be ``mopd``, whose ranks are ``module``, which calls this too; the exit code."""

    def launched(command: Sequence[str], **options: Any) -> failure.Ended:
        python, option, _, *arguments = command
        return _launch([python, option, module, *arguments], **options)

    if failure.is_rank():
        StudentWorker.optim_step = _recorded_step  # type: ignore[method-assign]
        prepare_rank()
    else:
        launch.launch = launched
    return main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(run_recorded("tests.integration.recorded"))
