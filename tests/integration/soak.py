"""Run the asynchronous toy for a long time, and say what grows and what is left: ``python -m tests.integration.soak``.

Prints one line a process (``make soak``): its resident memory after the warm-up, and its growth in MiB a minute, a
least squares line through samples taken every few seconds. Ends with exit code 1 when a process grows by ``LIMIT`` or
more, or anything is left in ``/dev/shm``, in the run's own ``TMPDIR``, or as a process.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil

from tests.integration.under_fire import recipe_of, role_of
from tests.integration.world import REPOSITORY, World, build_world, environment

LIMIT = 1.0
"""MiB a minute."""
EVERY_S = 5.0
WARM_UP = 0.25
"""Share of the time that is not counted: arenas and caches fill."""
END_S = 60.0
MARK = "SOAK_OF"
"""Environment variable that all processes of the run inherit, also those that leave its family."""


def processes_of(mark: str) -> Iterator[psutil.Process]:
    """Living processes of the run, whoever their parent is."""
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                yield process
        except psutil.Error:
            continue


def name_of(process: psutil.Process) -> str | None:
    """Its role, or (Ray's actors and servers, reapers) the start of its command line."""
    role = role_of(process)
    if role is not None:
        return role
    try:
        words = process.cmdline()
    except psutil.Error:
        return None
    if not words or "train" in words:
        return "launcher" if words else None
    if words[0].startswith("ray::"):
        return words[0]
    return next((Path(word).name for word in words if word.endswith(".py")), Path(words[0]).name)


def watch(
    mark: str, until: float, run: subprocess.Popen[bytes], log: Path
) -> dict[tuple[str, int], list[tuple[float, float]]]:
    """Process -> (minute, MiB of its own resident memory)."""
    found = defaultdict(list)
    began = time.monotonic()
    while time.monotonic() < until:
        assert run.poll() is None, f"ended with exit code {run.returncode}: {log.read_text(encoding='utf-8')[-4000:]}"
        for process in processes_of(mark):
            try:
                name, mib = name_of(process), process.memory_info().rss / 2**20
            except psutil.Error:
                continue
            if name is not None:
                found[name, process.pid].append(((time.monotonic() - began) / 60, mib))
        time.sleep(EVERY_S)
    return found


def growth(samples: list[tuple[float, float]]) -> float:
    """MiB a minute."""
    minutes, mib = np.array(samples).T
    return float(np.polyfit(minutes, mib, 1)[0])


def soak(world: World, folder: Path, minutes: float, plane: str) -> int:
    """Run, measure, end; the exit code."""
    recipe = recipe_of(world, folder / "run", steps=10**6, data_plane={"type": plane}, checkpoint__every_steps=200)
    temporary = folder / "tmp"
    temporary.mkdir()
    shared_before = set(os.listdir("/dev/shm"))
    mark = str(os.getpid())
    variables = {**environment(), MARK: mark, "TMPDIR": str(temporary)}
    log = folder / "log"
    with log.open("wb") as output:
        command = [sys.executable, "-m", "mopd", "train", str(recipe)]
        run = subprocess.Popen(command, cwd=REPOSITORY, env=variables, stdout=output, stderr=output)
    found = watch(mark, time.monotonic() + 60 * minutes, run, log)
    run.send_signal(signal.SIGTERM)
    code = run.wait(END_S)
    give_up_at = time.monotonic() + END_S
    while (left := [p.cmdline() for p in processes_of(mark)]) and time.monotonic() < give_up_at:
        time.sleep(0.1)
    steps = (folder / "run" / "metrics.jsonl").read_bytes().count(b"\n")
    print(f"{minutes:g} minutes, {steps} steps, data_plane {plane}; ended by SIGTERM with exit code {code}")
    worst = 0.0
    for (name, _), samples in sorted(found.items()):
        counted = [(at, mib) for at, mib in samples if at >= WARM_UP * minutes]
        if len(counted) < 3 or samples[-1][0] < minutes - 1:  # ended on its own, long before
            continue
        worst = max(worst, growth(counted))
        print(f"{name[:50]:50} {counted[0][1]:8.1f} -> {counted[-1][1]:8.1f} MiB {growth(counted):+7.3f} MiB/min")
    left_behind = {
        "processes": left,
        "/dev/shm": sorted(set(os.listdir("/dev/shm")) - shared_before),
        "TMPDIR": sorted(set(os.listdir(temporary)) - {"ray"}),  # the logs of Ray's sessions, which it keeps
    }
    print(f"left behind: {json.dumps(left_behind)}")
    return int(worst >= LIMIT or any(left_behind.values()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--plane", default="transfer_queue")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-") as made:
        sys.exit(soak(build_world(Path(made, "world")), Path(made), given.minutes, given.plane))
