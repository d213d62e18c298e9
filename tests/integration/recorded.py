"""``mopd`` as ever, with a journal of what was really trained on: ``python -m tests.integration.recorded train …``.

Each rank of the student appends one line a step to ``$MOPD_JOURNAL`` (a folder), in a file of its own: process id, step
and the samples whose gradients the optimizer has just applied. It is written where the weights change, and knows
nothing of the controller, its accounts or the data plane.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mopd.cli import main
from mopd.launch import failure, launch
from mopd.launch.nodes import Nodes
from mopd.student.worker import StudentWorker

JOURNAL = "MOPD_JOURNAL"
"""Environment variable: folder of the journal."""
_optim_step = StudentWorker.optim_step
_RankAgent = launch.RankAgent


def _recorded_step(self: StudentWorker) -> dict[str, float]:
    plan = self._plan
    values = _optim_step(self)
    assert plan is not None
    samples = [asdict(sample) for micro in plan.micro_batches[self.layout.dp_rank] for sample in micro]
    line = {"pid": os.getpid(), "step": self.weight_version, "samples": samples}
    with Path(os.environ[JOURNAL], f"{self.layout.rank}.jsonl").open("ab", buffering=0) as file:
        file.write(json.dumps(line).encode() + b"\n")
    return values


def _agent_of_recorded(nodes: Nodes, command: Sequence[str], **options: Any) -> launch.RankAgent:
    """Ranks are what this process is."""
    python, option, _, *arguments = command
    return _RankAgent(nodes, [python, option, __spec__.name, *arguments], **options)


if __name__ == "__main__":
    if failure.is_rank():
        StudentWorker.optim_step = _recorded_step  # type: ignore[method-assign]
    else:
        launch.RankAgent = _agent_of_recorded  # type: ignore[misc, assignment]
    sys.exit(main(sys.argv[1:]))
