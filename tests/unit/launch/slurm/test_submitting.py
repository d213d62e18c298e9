"""A job is handed to Slurm and watched to its end. Slurm's two commands are scripts here that say what they would."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from mopd.base.types import UserError
from mopd.config.load import load_recipe
from mopd.launch.slurm import submitting
from mopd.launch.slurm.submitting import PreparedJob, prepare_job, submit_job, wait_for

RECIPE = """\
run_dir: run
student: {model: models/student}
teachers: {math: {model: models/math, domains: [math]}}
data: {train: [train.jsonl]}
schedule: {steps: 3, prompts_per_step: 4}
slurm: {gpus_per_node: 8}
"""
SBATCH = """\
#!/bin/sh
[ "$1" = --test-only ] && exit 0
cat answer
cat complaint >&2
exit $(cat code)
"""
SCONTROL = """\
#!/bin/sh
state=$(head -n 1 states)
[ "$(wc -l < states)" -gt 1 ] && sed -i 1d states
echo "JobId=$5 JobState=$state Restarts=0 ExitCode=$(cat code):0"
"""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PreparedJob:
    """A job whose folder is the current one's; sbatch takes it as number 41."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    for name, text in {"answer": "41;cluster\n", "complaint": "", "code": "0", "states": "PENDING\n"}.items():
        (tmp_path / name).write_text(text)
    for name, text in {"sbatch": SBATCH, "scontrol": SCONTROL}.items():
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setattr(submitting, "POLL_S", 0.0)
    return prepare_job(load_recipe("recipe.yaml"))


def test_a_job_is_kept_with_its_script_and_number(job: PreparedJob) -> None:
    assert submit_job(job) == "41"
    script = job.folder / submitting.SCRIPT
    assert script.read_text() == job.text and script.stat().st_mode & 0o111 == 0o111
    assert json.loads((job.folder / "job.json").read_text()) == {"id": "41"}
    with pytest.raises(UserError, match=r"job 41 PENDING is this run's: stop it"):
        submit_job(job)


@pytest.mark.parametrize(
    ("answer", "complaint", "code", "why"),
    [
        ("", "sbatch: error: Invalid account\n", "1", "Invalid account"),
        ("", "", "3", "exit code 3 and no message"),
        ("queued\n", "sbatch: strange\n", "0", "strange"),
        ("42\n", "sbatch: error: lost it\n", "1", "lost it"),
    ],
)
def test_what_sbatch_refuses_leaves_nothing(job: PreparedJob, answer: str, complaint: str, code: str, why: str) -> None:
    for name, text in {"answer": answer, "complaint": complaint, "code": code}.items():
        Path(name).write_text(text)
    with pytest.raises(UserError, match=rf"slurm: sbatch refused the job: {why}$"):
        submit_job(job)
    assert not Path("run").exists()


@pytest.mark.parametrize("first", [[], ["PENDING", "RUNNING"]])
def test_a_job_that_is_queued_again_is_waited_for(
    job: PreparedJob, capsys: pytest.CaptureFixture[str], first: list[str]
) -> None:
    """It passes through a state that looks like its end, be it the first that is seen."""
    states = [*first, "NODE_FAIL", "PENDING", "RUNNING", "COMPLETED"]
    Path("states").write_text("\n".join([*states, "COMPLETED", ""]))
    assert wait_for(job, "41") == 0
    assert [line.split()[2] for line in capsys.readouterr().out.splitlines()] == states
