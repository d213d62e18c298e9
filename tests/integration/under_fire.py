"""Asynchronous runs of the small world whose processes are killed, and what they must leave behind.

Who is who is read from ``/proc``; what was trained on from the journal of ``recorded``, which knows nothing of the
accounts that it is compared with.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from mopd.config.load import load_recipe
from mopd.data.prompts import load_prompts
from mopd.data.stream import PromptStream
from mopd.data.tokenizer import load_tokenizer
from tests.integration.recorded import JOURNAL
from tests.integration.world import REPOSITORY, World, environment, takes_signals

DEADLINE_S = 60.0
"""For a run to end after one of its processes has."""
START_S = 400.0
"""For a run to come to where it is wanted."""
LOCAL = {"type": "local", "num_threads": 1}
PER_STEP, PER_PROMPT, MAX_STALENESS = 8, 2, 2
ACTORS = {"ray::SimpleStorageUnit": "storage unit", "ray::TransferQueueController": "controller"}
"""Of TransferQueue, as they call themselves; and what our lines call them."""
TOY: dict[str, Any] = {
    "student__parallel": {"tensor_model_parallel_size": 1},
    "student__optimizer": {"lr": 1e-4},
    "student__max_tokens_per_micro_batch": 1024,
    "teacher_defaults": {"placement": LOCAL},
    "rollout": {
        "max_response_length": 48,
        "samples_per_prompt": PER_PROMPT,
        "placement": LOCAL,
        "on_new_weights": "continue",
    },
    "schedule": {
        "prompts_per_step": PER_STEP,
        "max_staleness": MAX_STALENESS,
        "sync_every_steps": 2,
        "wait_timeout_s": 120,
    },
    "validation": None,
    "checkpoint": {"every_steps": 3, "export_hf": False},
}
"""A small learning rate: responses stay long, so that something is always under way."""


def recipe_of(world: World, run_dir: Path, *, steps: int, **changes: Any) -> Path:
    """``TOY`` for so many steps, written beside ``run_dir``."""
    return world.write_recipe(run_dir, **{**TOY, "schedule__steps": steps, **changes})


class Run:
    """One run of ``recorded``: started, killed, started again."""

    program = "tests.integration.recorded"
    """What runs in the place of ``mopd``."""
    start_s, deadline_s = START_S, DEADLINE_S
    within: Sequence[str] = ()
    """Words before the command."""

    def __init__(self, recipe: Path, *, own_tmpdir: bool = True) -> None:
        """``own_tmpdir``: ``temporary`` is the run's alone. Its path is too long for Ray's sockets."""
        self.recipe, self.path = recipe, recipe.with_suffix("")
        self.journal = recipe.with_suffix(".journal")
        self.journal.mkdir(exist_ok=True)
        self.temporary = Path(tempfile.mkdtemp(prefix="m-"))  # pytest's own folders are too long for sockets
        self._tmpdir = {"TMPDIR": str(self.temporary)} if own_tmpdir else {}
        self._seen: dict[int, psutil.Process] = {}
        self.is_alive = False
        self._num_repairs = 0
        """Of servers, since the last start."""

    def start(self, *flags: str) -> None:
        """As a user does, and return at once."""
        self._errors = self.recipe.with_suffix(".stderr").open("w+", encoding="utf-8")
        with self.recipe.with_suffix(".stdout").open("w", encoding="utf-8") as output:
            self.process = subprocess.Popen(
                [*self.within, *self.command(*flags)],
                cwd=REPOSITORY,
                env={**environment(), JOURNAL: str(self.journal), **self._tmpdir},
                stdout=output,
                stderr=self._errors,
                text=True,
            )
        self.is_alive, self._num_repairs, self._seen = True, 0, {}

    def command(self, *flags: str) -> list[str]:
        """What ``start`` runs."""
        return [sys.executable, "-m", self.program, "train", str(self.recipe), *flags]

    @property
    def flags(self) -> list[str]:
        """With which the same run goes on, or starts again where it died before it had begun."""
        return ["--resume"] if (self.path / "recipe.yaml").is_file() else []

    @property
    def stderr(self) -> str:
        """Since the last start."""
        return self.recipe.with_suffix(".stderr").read_text(encoding="utf-8")

    def left_behind(self) -> list[str]:
        """What mopd has in TMPDIR."""
        return sorted(path.name for path in self.temporary.iterdir() if path.name.lstrip(".").startswith("mopd-"))

    @property
    def num_steps(self) -> int:
        """Lines of the metrics."""
        metrics = self.path / "metrics.jsonl"
        return metrics.read_bytes().count(b"\n") if metrics.exists() else 0

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """Fails when the run ends, or takes longer than ``START_S``, before the condition is true."""
        deadline = time.monotonic() + self.start_s
        while not condition():
            assert self.process.poll() is None, f"ended with {self.process.returncode} before {what}: {self.stderr}"
            assert time.monotonic() < deadline, f"not within {self.start_s:g} s: {what}\n{self.stderr}"
            time.sleep(0.005)

    def family(self) -> dict[str, psutil.Process]:
        """Living processes by role: ``launcher``, ``rank 0``, ``orchestrator``, ``rollout.0``, ``teachers.left.0``, ….
        Whatever else there is, is remembered for ``end``."""
        launcher = psutil.Process(self.process.pid)
        found = {"launcher": launcher}
        for process in [launcher, *launcher.children(recursive=True)]:
            self._seen[process.pid] = process
            role = role_of(process)
            if role is not None:
                found[role] = process
        return found

    def find(self, role: str) -> psutil.Process:
        """One of ``family``, as soon as it is there."""
        found: dict[str, psutil.Process] = {}

        def is_there() -> bool:
            found.update(self.family())
            return role in found

        self.wait_until(is_there, f"{role} is there")
        return found[role]

    def kill(self, role: str, number: signal.Signals = signal.SIGKILL) -> None:
        """``find`` it and send it the signal."""
        self.find(role).send_signal(number)

    def is_repaired(self) -> bool:
        """Wait until a server that died works again (true), or the run has ended."""
        deadline = time.monotonic() + self.deadline_s
        while self.process.poll() is None:
            if self.stderr.count(" works again, restart") > self._num_repairs:
                self._num_repairs += 1
                return True
            assert time.monotonic() < deadline, self.stderr
            time.sleep(0.05)
        return False

    def end(self) -> int:
        """Wait for the end; the exit code. Nothing of the run may be left."""
        code = self.process.wait(timeout=2 * DEADLINE_S)
        self.is_alive = False
        _, alive = psutil.wait_procs(list(self._seen.values()), timeout=20)
        assert not alive, f"left behind: {[p.cmdline() for p in alive]}"
        self._errors.close()
        return code

    def error(self) -> str:
        """The one line that says why it ended."""
        errors = [line for line in self.stderr.splitlines() if line.startswith("mopd: error:")]
        assert len(errors) == 1 and "Traceback" not in self.stderr, self.stderr
        assert self.stderr.endswith(errors[0] + "\n"), self.stderr
        return errors[0]


def role_of(process: psutil.Process) -> str | None:
    """What it is to the run, as its command line and its log say."""
    try:
        # looked at first: the launcher's guard, a leader too, has another command line by then
        is_of_launcher = takes_signals(process.ppid())
        words, is_leader = process.cmdline(), os.getsid(process.pid) == process.pid
        if words and words[0] in ACTORS:
            return ACTORS[words[0]]
        if words and words == psutil.Process(process.ppid()).cmdline() and "train" not in words:
            return None  # forked a moment ago, to become another program: not the orchestrator, or the server, itself
        # that of ``struck`` is known by the number of its end of the link
        if words[1:3] == ["-m", "mopd.orchestrator"] or (
            words[2:3] == ["tests.integration.struck"] and "train" not in words
        ):
            return "orchestrator"
        if "serve" in words and "-S" not in words:  # a server, not its reaper
            return Path(os.readlink(f"/proc/{process.pid}/fd/1")).stem
        if "train" in words and is_leader and is_of_launcher:
            return "rank 0"  # the only one
    except (psutil.Error, OSError):  # it has ended, or has not become what it is to be
        pass
    return None


def trained(run: Run) -> list[list[dict[str, Any]]]:
    """Samples of every step that counts, as the optimizer has seen them: a step that was done again, after a kill,
    makes what came from there on undone."""
    steps: list[list[dict[str, Any]]] = []
    journal = run.journal / "0.jsonl"  # ranks of one data-parallel rank say the same
    for entry in map(json.loads, journal.read_text(encoding="utf-8").splitlines()):
        assert entry["step"] <= len(steps) + 1, f"step {entry['step']} after {len(steps)}: steps are missing"
        del steps[entry["step"] - 1 :]
        steps.append(entry["samples"])
    return steps


def state_of(run: Run, step: int) -> dict[str, Any]:
    """What the checkpoint holds beside weights."""
    path = run.path / "checkpoints" / f"step_{step:08d}" / "state.json"
    state: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["extra"]
    return state


def expected_domains(recipe: Path, position: int) -> list[str]:
    """Domains of the stream's first prompts, from a stream that nobody has interrupted."""
    loaded = load_recipe(recipe).recipe
    rows = load_prompts(loaded.data.train, loaded.data, load_tokenizer(loaded.student.model)).rows_by_domain
    return [prompt.domain for prompt in PromptStream(rows, {}, loaded.seed).next(position)]


def check_accounts(run: Run, *, steps: int) -> None:
    """Every prompt of the stream is trained on exactly once, with all its samples, or open in the last checkpoint; each
    batch has the stream's mix; and the run's own accounts say so too."""
    done, state = trained(run), state_of(run, steps)
    assert len(done) == steps == run.num_steps
    ids = Counter(sample["sample_id"] for batch in done for sample in batch)
    twice = {i: count for i, count in ids.items() if count > 1}
    assert not twice, f"trained on more than once: {twice}"
    assert len(ids) == steps * PER_STEP * PER_PROMPT

    prompts = {i // PER_PROMPT for i in ids}
    assert len(prompts) == steps * PER_STEP, "a prompt's samples were torn apart"
    still_open = [entry["sample_id"] for entry in state["ledger"]["open"]]
    position = state["prompts"]["position"]
    assert sorted([*prompts, *still_open]) == list(range(position)), "prompts were lost, or are in two places"
    assert len(still_open) <= (MAX_STALENESS + 1) * PER_STEP

    domains = expected_domains(run.recipe, position)
    for batch in done:
        assert all(sample["domain"] == domains[sample["sample_id"] // PER_PROMPT] for sample in batch)
        left = sum(sample["domain"] == "left" for sample in batch) / PER_PROMPT
        assert abs(left - PER_STEP / 2) <= 1, "the mix of domains has drifted"
    ledger = state["ledger"]
    for domain in ("left", "right"):
        ends = {end: ledger[end].get(domain, 0) for end in ("trained", "refused", "replaced")}
        num_open = sum(entry["domain"] == domain for entry in ledger["open"])
        assert ends["trained"] == sum(s["domain"] == domain for batch in done for s in batch) / PER_PROMPT
        assert ledger["admitted"][domain] == sum(ends.values()) + num_open
        assert ends["replaced"] == 0
