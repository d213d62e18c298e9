"""Runs on a small disk that fills up at random moments: ``python -m tests.integration.disk_full WORLD DISK NUM SEED``.

``WORLD`` is a folder of ``world.build_world``, ``DISK`` an empty one on which a tmpfs may be mounted. Each of the
``NUM`` moments is one run that is cut off by a full disk, and goes on once there is space. Every run is one rank, a
child of this process. Prints one JSON object a moment; an assertion ends the process.
"""

from __future__ import annotations

import errno
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import yaml

from tests.fixtures import warm
from tests.fixtures.ports import free_port
from tests.integration.world import World, read_metrics, read_validation

DISK_BYTES = 64 * 2**20
PAGE = 4096
DEADLINE_S = 120.0
STEPS = 4


@dataclass(frozen=True)
class Moment:
    """When the disk fills, and what is left on it then."""

    phase: str
    free_bytes: int
    has_come: Callable[[Path], bool]


@dataclass(frozen=True)
class Ended:
    """What a run left for its user."""

    code: int
    stderr: str


def moments(random_: random.Random, checkpoint_bytes: int, hf_bytes: int) -> list[Moment]:
    """One of each kind, in random order."""
    step = random_.randint(1, STEPS - 1)
    saved = random_.randint(1, STEPS // 2) * 2
    kinds = [
        Moment("start", random_.randrange(0, 8 * PAGE), lambda run: True),
        Moment(f"step {step}", random_.randrange(0, 3 * PAGE), lambda run: num_steps(run) >= step),
        Moment(
            f"checkpoint {saved}",
            random_.randrange(0, checkpoint_bytes),
            lambda run: (run / "checkpoints" / f"step_{saved:08d}").exists(),
        ),
        Moment("export", random_.randrange(0, hf_bytes), lambda run: any(run.glob(".hf.*"))),
        Moment("report", hf_bytes + random_.randrange(0, 6 * PAGE), lambda run: any(run.glob(".hf.*"))),
    ]
    random_.shuffle(kinds)
    return kinds


def size_of(folder: Path) -> int:
    """Bytes of all files below."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def num_steps(run: Path) -> int:
    """Lines of the metrics."""
    metrics = run / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def train(recipe: Path, log: Path, *flags: str, meanwhile: Callable[[], None] = lambda: None) -> Ended:
    """``mopd train`` as the one rank; ``meanwhile`` is called all the time."""
    variables = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    variables |= {"TORCHELASTIC_RUN_ID": "one", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, "-m", "mopd", "train", str(recipe), *flags]
    give_up_at = time.monotonic() + DEADLINE_S
    with log.open("wb") as file:
        child = subprocess.Popen(command, stdout=file, stderr=file, env=os.environ | variables)
    while child.poll() is None:
        assert time.monotonic() < give_up_at, f"no end: {log.read_text()}"
        meanwhile()
        time.sleep(0.0005)
    return Ended(child.returncode, log.read_text())


def fill(disk: Path, free_bytes: int) -> None:
    """Leave so much, in whole pages; the run writes meanwhile."""
    with (disk / "filler").open("wb") as file:
        while True:
            status = os.statvfs(disk)
            taken = status.f_bavail * status.f_frsize - free_bytes
            try:
                if taken > 0:
                    os.posix_fallocate(file.fileno(), 0, taken)
                return
            except OSError as error:
                assert error.errno == errno.ENOSPC, error


def check_refusal(ended: Ended, disk: Path) -> str:
    """The one line."""
    errors = [line for line in ended.stderr.splitlines() if line.startswith("mopd: error:")]
    assert ended.code == 2, ended
    assert len(errors) == 1 and ended.stderr.endswith(errors[0] + "\n"), ended.stderr
    assert "Traceback" not in ended.stderr, ended.stderr
    assert "No space left on device" in errors[0] and str(disk) in errors[0], errors[0]
    return errors[0]


def check_same(run: Path, expected: Path) -> None:
    """Weights, metrics and validations, bit for bit."""
    assert read_metrics(run) == read_metrics(expected)
    assert read_validation(run) == read_validation(expected)
    for path in expected.joinpath("hf").iterdir():
        assert (run / "hf" / path.name).read_bytes() == path.read_bytes(), path.name
    assert (run / "report.html").is_file() and (run / "report.json").is_file()
    unfinished = list(run.glob(".*"))
    assert not unfinished, unfinished


def attempt(world: World, disk: Path, moment: Moment, expected: Path) -> str | None:
    """Fill the disk at the moment, free it, go on. The line, or ``None`` when the run had written all it wanted."""
    run, log = disk / "run", disk.with_suffix(".log")
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", disk], check=True)
    try:
        recipe = disk.with_suffix(".yaml")
        recipe.write_text(yaml.safe_dump(world.recipe(run, **OVERRIDES)), encoding="utf-8")
        filler = disk / "filler"

        def watch() -> None:
            if not filler.exists() and moment.has_come(run):
                fill(disk, moment.free_bytes)

        watch()
        ended = train(recipe, log, meanwhile=watch)
        if ended.code == 0:
            return None
        line = check_refusal(ended, disk)
        filler.unlink()
        flags = ["--resume"] if line.endswith("; go on with --resume") else []
        assert flags or line.endswith("; start again"), line
        again = train(recipe, log, *flags)
        assert again.code == 0, again.stderr
        check_same(run, expected)
        return line
    finally:
        subprocess.run(["umount", disk], check=True)


OVERRIDES = {
    "student__parallel": {"tensor_model_parallel_size": 1},
    "schedule__steps": STEPS,
    "validation__every_steps": 2,
    "metrics__tensorboard": True,
}


def run_all(world: World, disk: Path, num_moments: int, seed: int) -> None:
    """The uninterrupted run, then ``num_moments`` that are not."""
    expected = disk.with_name("expected")
    log = disk.with_suffix(".log")
    ended = train(world.write_recipe(expected, **OVERRIDES), log)
    assert ended.code == 0, ended.stderr
    sizes = [size_of(expected / name) for name in (f"checkpoints/step_{STEPS:08d}", "hf")]
    random_ = random.Random(seed)
    waiting: list[Moment] = []
    done = 0
    while done < num_moments:
        waiting = waiting or moments(random_, *sizes)
        moment = waiting.pop()
        line = attempt(world, disk, moment, expected)
        if line is not None:
            done += 1
            print(json.dumps({"phase": moment.phase, "free_bytes": moment.free_bytes, "line": line}), flush=True)


if __name__ == "__main__":
    warm.install()
    run_all(World(Path(sys.argv[1])), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
