"""The calls of Slurm: submit a run's job, ask for its state. Each has a deadline."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mopd.base.files.json_text import read_json_object
from mopd.base.files.reading import shown_path
from mopd.base.text import one_line
from mopd.base.types import UserError

CALL_TIMEOUT_S = 30.0
"""Deadline of one command of Slurm; a controller that is busy takes seconds."""
ENDED = (
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED",
    "TIMEOUT",
)  # fmt: skip
"""States that a job does not leave by itself."""
IMPOSSIBLE = "Requested node configuration is not available"
"""Slurm's words for more nodes, GPUs or CPUs than a partition has at any time."""
CURE = "remove the file; squeue --me lists your jobs"


@dataclass(frozen=True, kw_only=True, slots=True)
class JobState:
    """The state of a job, or of all tasks of an array, from ``scontrol show job``."""

    id: str
    states: tuple[str, ...]
    """State of each task, as Slurm spells it."""
    reason: str
    """Why it waits; empty where it does not."""
    exit_code: int
    """The largest one; 128 + n for signal n."""
    restarts: int

    @property
    def has_ended(self) -> bool:
        """Whether no task runs or waits."""
        return all(state in ENDED for state in self.states)

    def __str__(self) -> str:
        states = ", ".join(f"{self.states.count(state)} {state}" for state in dict.fromkeys(self.states))
        shown = self.states[0] if len(self.states) == 1 else states
        why = f" ({self.reason})" if self.reason else ""
        again = f", start {self.restarts + 1}" if self.restarts else ""
        return f"job {self.id} {shown}{why}{again}"


def submit(script: Path, *, where: str) -> str:
    """Submit the script by sbatch and return the job's id.

    Raises:
        UserError: sbatch is not here, refuses the job, or does not answer; ``where`` heads the line.
    """
    path = os.path.abspath(script)  # no option, whatever its folder is called
    tried = _call(["sbatch", "--test-only", path])
    if IMPOSSIBLE in tried.stderr:  # sbatch would let it wait for ever
        raise UserError(f"{where}: sbatch refused the job: {one_line(tried.stderr)}")
    done = _call(["sbatch", "--parsable", path])
    found = re.fullmatch(r"(\d{1,18})(;\S+)?\s*", done.stdout)
    if done.returncode != 0 or found is None:
        lines = [line.removeprefix("sbatch: ").removeprefix("error: ") for line in done.stderr.strip().splitlines()]
        why = one_line("; ".join(lines)) if lines else f"exit code {done.returncode} and no message"
        raise UserError(f"{where}: sbatch refused the job: {why}")
    return found[1]


def gpus_of(partition: str | None) -> str:
    """Return what Slurm says of the GPUs of a partition's nodes, such as ``gpu:h100:8``; empty where it has none.

    Args:
        partition: names with commas; ``None`` is the cluster's default.
    """
    said = _call(["sinfo", "--noheader", "--format=%P %G", *([] if partition is None else ["--partition", partition])])
    for line in said.stdout.splitlines():
        name, _, resources = line.strip().partition(" ")
        found = re.search(r"\bgpu(:[\w.-]+)?:\d+", resources)
        if found is not None and (partition is not None or name.endswith("*")):
            return found[0]
    return ""


def state_of(job_id: str) -> JobState | None:
    """Ask for the job's state; ``None`` for one that Slurm has forgotten, minutes after its end.

    Raises:
        UserError: Slurm is not here or does not answer.
    """
    done = _call(["scontrol", "--oneliner", "show", "job", job_id])
    if done.returncode != 0 and "Invalid job id" in done.stderr:
        return None
    if done.returncode != 0:
        raise UserError(f"scontrol show job {job_id}: {one_line(done.stderr) or f'exit code {done.returncode}'}")
    tasks = [dict(re.findall(r"(\w+)=(\S*)", line)) for line in done.stdout.splitlines() if "JobState=" in line]
    codes = [[int(part) for part in task.get("ExitCode", "0:0").split(":")] for task in tasks]
    reasons = [
        task["Reason"] for task in tasks if task["JobState"] == "PENDING" and task.get("Reason", "None") != "None"
    ]
    return JobState(
        id=job_id,
        states=tuple(task["JobState"] for task in tasks),
        reason=reasons[0] if reasons else "",
        exit_code=max((128 + signal if signal else code for code, signal in codes), default=0),
        restarts=max((int(task.get("Restarts", "0")) for task in tasks), default=0),
    )


def kept_id(file: Path) -> str | None:
    """Read the id of a run's job from ``job.json``; ``None`` without the file.

    Raises:
        UserError: the file holds no id.
    """
    if not file.is_file():
        return None
    job_id = read_json_object(file, cure=CURE, max_bytes=4096).get("id")
    if not isinstance(job_id, str) or not re.fullmatch(r"\d{1,18}", job_id):
        raise UserError(f"{shown_path(file)}: holds no id of a job: {CURE}")
    return job_id


def job_of(file: Path) -> str | None:
    """Describe the state of a run's job in words, also where Slurm does not answer; ``None`` without a job.

    Raises:
        UserError: the file is damaged.
    """
    job_id = kept_id(file)
    if job_id is None:
        return None
    try:
        state = state_of(job_id)
    except UserError as error:  # the run's own folder has more to tell
        return f"job {job_id}: {error}"
    return f"job {job_id} has ended, and Slurm has forgotten it" if state is None else str(state)


def _call(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    if shutil.which(command[0]) is None:
        raise UserError(
            f"{command[0]} is not on this machine: call mopd where Slurm's commands are; mopd slurm RECIPE --dry-run "
            "prints the script anywhere"
        )
    try:
        return subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=CALL_TIMEOUT_S, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        raise UserError(
            f"{command[0]} did not answer within {CALL_TIMEOUT_S:g} s: ask again later (sinfo says how the cluster is)"
        ) from None
