"""The orchestrator's life: it reads what it is to do, does it, and tells rank 0 how that ended.

Rank 0's end of the link closes with it, which is how its death reaches this process: it then ends its engine servers in
order and goes.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

from mopd.base.types import UserError
from mopd.launch.failure import close_standard_input, ignore_library_warnings
from mopd.launch.link import LinkEnded, RankLink
from mopd.launch.preparing import recipe_of_task
from mopd.launch.signals import ENDING
from mopd.orchestrator.evaluation import evaluate
from mopd.orchestrator.leading import Lead, Led
from mopd.orchestrator.preflight.checks import Preflight
from mopd.orchestrator.preflight.showing import print_checks, print_failures
from mopd.orchestrator.training import train_task
from mopd.report.terminal import log_to_terminal
from mopd.run.manifests import make_manifests


def check(lead: Lead, *, as_json: bool) -> str | None:
    """``mopd check``, once the rest is checked: run the preflight, which writes nothing, and print its outcomes.
    ``UserError`` for the last one that failed, after the lines of the others."""
    log_to_terminal()
    recipe = lead.loaded.recipe
    manifests = make_manifests(recipe)

    async def work(led: Led) -> None:
        await led.student.publish(0)
        preflight = Preflight(recipe, led.workers, led.student, manifests, is_fresh=True)
        checks = [outcome async for outcome in preflight.run()]
        failed = [check for check in checks if check.status == "failed"]
        print_checks(checks, as_json=as_json)
        print_failures(failed[:-1])
        if failed:
            raise UserError(failed[-1].detail)

    return lead.with_workers(work, None)


Task = Callable[..., str | None]
"""Called with a ``Lead`` and the task's options; returns the line of a run that was asked to stop."""
TASKS: dict[str, Task] = {"train": train_task, "check": check, "eval": evaluate}


def run(descriptor: int) -> int:
    """Do what standard input says; the exit code of the process."""
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
        _give_up_output()
    link.close()
    return 0


def _give_up_output() -> None:
    """What standard output cannot take, as its reader left or its disk is full, is not tried again when Python ends."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
