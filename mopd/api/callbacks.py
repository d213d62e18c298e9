"""Process of one callback of a recipe: ``python -m mopd.api.callbacks < LINES``, started by ``run/callbacks.py``.

::

    run ── {"run": folder, "key": …, "module": …, "options": {…}, "timeout_s": …, "on_error": …} ──> callback
        <── {"ready": true}  or  {"error": text} ──
    run ── {"after": step} ──> callback        it follows the run's files from then on
    run ── end of its standard input ──>       it delivers what is there, and ends

What the callback prints goes to the run's log.
"""

from __future__ import annotations

import json
import os
import select
import sys
import threading
from collections.abc import Mapping
from typing import Any

from mopd.api import WATCH_S, Callback, Events, Run
from mopd.base.plugins import described, load_plugin
from mopd.base.types import UserError
from mopd.run.stopping import request_stop


class Guarded(Callback):
    """Calls another callback within a deadline. Its first error is its last call, and is told in one line."""

    def __init__(self, own: Callback, task: Mapping[str, Any]) -> None:
        self._own, self._task = own, task
        self._called = f"{task['key']}: {task['module']!r}"
        self._has_failed = False

    def on_step(self, run: Run, record: Mapping[str, Any]) -> None:
        self._call("on_step", record["step"], run, record)

    def on_validation(self, run: Run, record: Mapping[str, Any]) -> None:
        self._call("on_validation", record["step"], run, record)

    def on_checkpoint(self, run: Run, step: int) -> None:
        self._call("on_checkpoint", step, run, step)

    def _call(self, name: str, step: int, run: Run, what: Any) -> None:
        if self._has_failed:
            return
        timer = threading.Timer(self._task["timeout_s"], self._end_late, (run, f"{name} of step {step}"))
        timer.daemon = True
        timer.start()
        try:
            getattr(self._own, name)(run, what)
        except Exception as error:  # whatever the callback raises is told, and decides what on_error says
            problem = described(error, self._task["module"].rpartition(":")[0])
            self._fail(run, f"failed in {name} of step {step}: {problem}")
        finally:
            timer.cancel()

    def _end_late(self, run: Run, where: str) -> None:
        self._fail(run, f"took longer than timeout_s {self._task['timeout_s']:g} in {where}")
        os._exit(0)

    def _fail(self, run: Run, problem: str) -> None:
        self._has_failed = True
        is_stop = self._task["on_error"] == "stop"
        then = "the run stops after its step" if is_stop else "the run goes on without it"
        print(f"mopd: {self._called} {problem}: {then} (on_error: {self._task['on_error']})", file=sys.stderr)
        sys.stderr.flush()
        if is_stop:
            request_stop(run.path, f"{self._task['key']}, which {problem},")


def main() -> None:
    """Follow a run until standard input ends."""
    answers, sys.stdout = sys.stdout, sys.stderr
    task = json.loads(sys.stdin.readline())
    try:
        own = load_plugin(task["key"], task["module"], "callback")(**task["options"])
        if not isinstance(own, Callback):
            raise UserError(f"{task['key']}: {task['module']!r} makes a {type(own).__name__}, no mopd.Callback")
    except UserError as error:
        answers.write(json.dumps({"error": str(error)}) + "\n")
        return
    except Exception as error:
        problem = described(error, task["module"].rpartition(":")[0])
        answers.write(json.dumps({"error": f"{task['key']}: {task['module']!r} cannot be made: {problem}"}) + "\n")
        return
    answers.write('{"ready": true}\n')
    answers.close()
    line = sys.stdin.readline()
    if not line:  # the run ended before its first step
        return
    run, after = Run(task["run"]), json.loads(line)["after"]
    events = Events(run, [Guarded(own, task)], after_step=after, is_cut=True)
    while not select.select([sys.stdin], [], [], WATCH_S)[0]:
        events.deliver()
    events.deliver()


if __name__ == "__main__":
    main()
