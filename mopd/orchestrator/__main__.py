"""Life of the orchestrator's process, which rank 0 starts: ``python -m mopd.orchestrator DESCRIPTOR < TASK``. It reads
its task, does it, and reports to rank 0 how that ended. The descriptor is that of its end of the link.

Rank 0's end of the link closes with it, which is how its death reaches this process: it then ends its engine servers in
order and goes.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from mopd.base.types import UserError
from mopd.launch.failure import close_standard_input, ignore_library_warnings
from mopd.launch.link import LinkEnded, RankLink
from mopd.launch.preparing import recipe_of_task
from mopd.launch.signals import ENDING
from mopd.orchestrator.leading import Orchestrator, RunParts
from mopd.orchestrator.preflight.checks import Preflight
from mopd.orchestrator.preflight.showing import print_checks, print_failures
from mopd.orchestrator.tasks.evaluation import evaluate
from mopd.orchestrator.training import train_task
from mopd.report.terminal import log_to_terminal
from mopd.run.manifests import make_manifests


def check(orchestrator: Orchestrator, *, as_json: bool, beside: Mapping[str, str]) -> str | None:
    """Do the last part of ``mopd check``: run the preflight, which writes nothing, and print its outcomes."""
    log_to_terminal()
    recipe = orchestrator.loaded.recipe
    manifests = make_manifests(recipe)

    async def work(parts: RunParts) -> None:
        await parts.student.publish(0)
        preflight = Preflight(recipe, parts.workers, parts.student, manifests, is_fresh=True, beside=beside)
        checks = [outcome async for outcome in preflight.run()]
        failed = [check for check in checks if check.status == "failed"]
        print_checks(checks, as_json=as_json)
        print_failures(failed[:-1])
        if failed:
            raise UserError(failed[-1].detail)

    return orchestrator.with_workers(work, None)


Task = Callable[..., str | None]
"""Called with an ``Orchestrator`` and the task's options; returns the line of a run that was asked to stop."""
TASKS: dict[str, Task] = {"train": train_task, "check": check, "eval": evaluate}


def run(descriptor: int) -> int:
    """Do the task that standard input names; return the exit code of the process."""
    for number in ENDING:
        # For rank 0, which closes the link. A child would inherit it if they were ignored.
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)  # rank 0 has blocked them
    ignore_library_warnings()
    link = RankLink(socket.socket(fileno=descriptor), "rank 0")
    task = json.load(sys.stdin)
    close_standard_input()
    loaded = recipe_of_task(task)
    log = None if task["log"] is None else Path(task["log"])
    orchestrator = Orchestrator(loaded, link, log)
    try:
        with orchestrator.heartbeat:
            line = TASKS[task["what"]](orchestrator, **task["options"])
            sys.stdout.flush()
        link.send({"end": line})
    except LinkEnded:
        pass
    except BaseException as error:
        orchestrator.report(error)
        _give_up_output()
    link.close()
    return 0


def _give_up_output() -> None:
    """Discard what standard output cannot take (its reader left, its disk is full), so that Python does not try
    again."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(run(int(sys.argv[1])))
