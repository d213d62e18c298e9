"""The orchestrator's life: it reads what it is to do, does it, and tells rank 0 how that ended.

Rank 0's end of the link closes with it, which is how its death reaches this process: it then ends its engine servers in
order and goes.
"""

from __future__ import annotations

import json
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

from mopd.launch.failure import close_standard_input, ignore_library_warnings
from mopd.launch.link import Link, LinkEnded
from mopd.orchestrator.checking import check
from mopd.orchestrator.evaluation import evaluate
from mopd.orchestrator.leading import Lead
from mopd.orchestrator.training import train_task
from mopd.report.terminal import log_to_terminal
from mopd.run.preparing import recipe_of_task

Task = Callable[..., str | None]
"""Called with a ``Lead`` and the task's options; returns the line of a run that was asked to stop."""
TASKS: dict[str, Task] = {"train": train_task, "check": check, "eval": evaluate}


def run(descriptor: int) -> int:
    """Do what standard input says; the exit code of the process."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # For rank 0, which closes the link. A child would inherit it if they were ignored.
        signal.signal(number, lambda *_: None)
    ignore_library_warnings()
    log_to_terminal()
    link = Link(socket.socket(fileno=descriptor), "rank 0")
    task = json.load(sys.stdin)
    close_standard_input()
    loaded = recipe_of_task(task)
    log = None if task["log"] is None else Path(task["log"])
    lead = Lead(loaded, link, log)
    try:
        with lead.heartbeat:
            line = TASKS[task["what"]](lead, **task["options"])
            sys.stdout.flush()
        link.send({"end": line})
    except LinkEnded:
        pass
    except BaseException as error:
        lead.tell(error)
    link.close()
    return 0
