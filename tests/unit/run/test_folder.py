"""One writer per run folder, no folder reused by accident, and a resumed run that is the same run."""

from __future__ import annotations

import dataclasses
import errno
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from mopd.base.files.writing import WriteRefusedError
from mopd.base.types import CutOffError, UserError
from mopd.cli.main import main
from mopd.config.load import Loaded, load_recipe
from mopd.run.folder import RunDir, check_same_run
from mopd.run.stopping import is_users_stop
from tests.fixtures.recipe import RECIPE

ROOT = Path(__file__).parents[3]
Load = Callable[..., Loaded]


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """Load the small recipe, with overrides, in an empty current directory."""
    monkeypatch.chdir(tmp_path)
    Path("recipe.yaml").write_text(RECIPE)
    return lambda *overrides: load_recipe("recipe.yaml", overrides)


def begin(loaded: Loaded) -> Path:
    """A run that has begun and ended."""
    with RunDir(loaded.recipe.run_dir) as run:
        run.open(loaded, resume=False)
        run.write_recipe(loaded)
    return run.path


def test_fresh_run_takes_an_absent_or_empty_folder(load: Load) -> None:
    loaded = load()
    Path("runs/one").mkdir(parents=True)
    Path("runs/one/.lock").touch()  # left by a process that was killed
    path = begin(loaded)
    assert {entry.name for entry in path.iterdir()} == {"recipe.yaml"}
    assert load_recipe(path / "recipe.yaml").recipe == loaded.recipe


def test_run_that_wrote_nothing_leaves_nothing(load: Load) -> None:
    loaded = load()
    with RunDir(loaded.recipe.run_dir) as run:
        run.open(loaded, resume=False)
        assert (run.path / ".lock").is_file()
    assert not run.path.exists()


def test_a_used_folder_needs_resume(load: Load) -> None:
    loaded = load()
    path = begin(loaded)
    before = sorted(path.iterdir())
    for refuse in (RunDir.check, RunDir.open):
        with pytest.raises(UserError, match=r"^recipe.yaml:1: run_dir: 'runs/one' is not empty: add --resume"):
            refuse(RunDir(path), loaded, resume=False)
    assert sorted(path.iterdir()) == before
    RunDir(path).check(loaded, resume=True)


def test_what_others_left_for_the_run_is_no_run(load: Load) -> None:
    """Servers that wait for it, its job, a request to stop it, its starts."""
    loaded = load()
    path = Path(loaded.recipe.run_dir)
    for name in ("replicas", "job", "logs"):
        (path / name).mkdir(parents=True)
    for name in ("stop", "attempts.json"):
        (path / name).touch()
    RunDir(path).check(loaded, resume=False)
    with RunDir(path) as run:
        run.open(loaded, resume=False)
    assert {entry.name for entry in path.iterdir()} == {"replicas", "job", "logs", "stop", "attempts.json"}
    (path / "else").touch()
    with pytest.raises(UserError, match="is not empty"):
        RunDir(path).check(loaded, resume=False)


def test_resume_needs_a_run(load: Load) -> None:
    loaded = load()
    for refuse in (RunDir.check, RunDir.open):
        with pytest.raises(UserError, match="holds no run to resume"):
            refuse(RunDir("runs/one"), loaded, resume=True)
    assert not Path("runs").exists()


def test_second_writer_is_refused_by_process_id(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first writer is another process; killing it frees the folder at once."""
    monkeypatch.setattr("mopd.run.folder.LOCK_WAIT_S", 0.1)
    code = (
        "import sys, time; from mopd.config.load import load_recipe; from mopd.run.folder import RunDir\n"
        "loaded = load_recipe('recipe.yaml'); run = RunDir('runs/one'); run.open(loaded, resume=False)\n"
        "run.write_recipe(loaded); print('taken', flush=True); time.sleep(60)"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"taken\n"
        for refuse in (RunDir.check, RunDir.open):
            with pytest.raises(UserError, match=rf"is in use by process {writer.pid}"):
                refuse(RunDir("runs/one"), load(), resume=True)
        writer.send_signal(signal.SIGKILL)
    with RunDir("runs/one") as run:
        run.open(load(), resume=True)


def test_resume_may_change_where_and_how_long_it_runs(load: Load) -> None:
    path = begin(load())
    moved = path.rename("elsewhere")
    given = load(
        "run_dir=elsewhere",
        "student.parallel.data_parallel_size=2",
        "student.packing=false",
        "student.max_tokens_per_micro_batch=99",
        "schedule.steps=9",
        "schedule.wait_timeout_s=1",
        "checkpoint.keep_last=9",
        "metrics.wandb={project: p}",
        "rollout.engine={type: torch, max_tokens_per_batch: 9}",
        "teachers.math.engine={type: torch, max_tokens_per_batch: 9}",
        "teachers.math.replicas=2",
    )
    RunDir(moved).check(given, resume=True)


@pytest.mark.parametrize(
    ("overrides", "listed"),
    [
        (["seed=1"], "seed (0 -> 1)"),
        (["schedule.prompts_per_step=8"], "schedule.prompts_per_step (4 -> 8)"),
        (["student.optimizer.lr=1"], "student.optimizer.lr (1e-06 -> 1.0)"),
        (["teachers.math.model=other"], 'teachers.math.model ("models/math" -> "other")'),
        (["teachers.code={model: m, domains: [code]}"], 'teachers.code.model (absent -> "m")'),
        (["rewards.default=null", "validation=null"], 'rewards.default.type ("exact_match" -> absent)'),
        (["loss.top_k=3", "rollout.top_p=0.5"], "rollout.top_p (1.0 -> 0.5), loss.top_k (64 -> 3)"),
        (['teachers."a.engine.b"={model: m, domains: [code]}'], 'teachers."a.engine.b".model (absent -> "m")'),
        ([f"data.train=[{'x' * 500}]"], 'data.train (["train.jsonl"] -> ["xxx'),
    ],
)
def test_resume_may_not_change_what_is_learned(load: Load, overrides: list[str], listed: str) -> None:
    path = begin(load())
    with pytest.raises(UserError) as caught:
        check_same_run(load_recipe(path / "recipe.yaml"), load(*overrides))
    assert listed in str(caught.value)
    assert "schedule.steps" not in str(caught.value) and len(str(caught.value)) < 1000
    with pytest.raises(UserError, match="differs from the run to resume"), RunDir(path) as run:
        run.open(load(*overrides), resume=True)
    begin_again = RunDir(path)
    begin_again.open(load(), resume=True)  # the refused one gave the lock back
    begin_again.close()


def test_folder_of_a_killed_writer_is_discarded_unless_it_holds_something(load: Load) -> None:
    loaded = load()
    killed = RunDir("runs/one")
    killed.open(loaded, resume=False)
    RunDir("runs/one").discard_if_unused()
    assert not Path("runs/one").exists()
    begin(loaded)
    RunDir("runs/one").discard_if_unused()
    assert Path("runs/one/recipe.yaml").is_file()


def test_a_request_to_stop_while_the_folder_is_tried_is_kept(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    lock, run = RunDir._lock_folder, RunDir("runs/one")

    def locked(trial: RunDir) -> None:
        lock(trial)
        trial.stop.touch()

    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(RunDir, "_lock_folder", locked)
        run.check(load(), resume=False)
    assert list(run.path.iterdir()) == [run.stop]
    with run:
        run.open(load(), resume=False)
    assert run.stop.exists()  # the folder was there: whoever ends the run looks at the request first
    run.discard_if_unused()
    assert not run.path.exists()


def test_logs_that_ranks_began_after_the_end_are_discarded_while_empty(load: Load) -> None:
    run = RunDir(load().recipe.run_dir)
    run.logs_here.mkdir(parents=True)
    (run.logs_here / "rank_1.log").touch()
    (run.logs_here / ".start").write_text("of rank 0")
    (run.logs_here / "rank_2.log").write_text("a word")
    run.discard_if_unused()
    assert [path.name for path in run.logs_here.iterdir()] == ["rank_2.log"]
    (run.logs_here / "rank_2.log").write_text("")
    run.discard_if_unused()
    assert not run.path.exists()
    run.logs_here.mkdir(parents=True)
    (run.logs_here / "rank_1.log").touch()
    run.recipe.touch()  # a run has begun: what it left is for its user to see
    run.discard_if_unused()
    assert (run.logs_here / "rank_1.log").is_file()


@pytest.fixture
def places(load: Load) -> Load:
    """Things where a run folder cannot be."""
    Path("file").touch()
    Path("dangling").symlink_to("nowhere")
    Path("circle").symlink_to("other")
    Path("other").symlink_to("circle")
    return load


def in_the_launcher(loaded: Loaded) -> None:
    """What ``mopd train`` asks before it starts ranks."""
    RunDir(loaded.recipe.run_dir).check(loaded, resume=False)


def in_rank_0(loaded: Loaded) -> None:
    """The folder may have changed since."""
    with RunDir(loaded.recipe.run_dir) as run:
        run.open(loaded, resume=False)


@pytest.mark.parametrize("where", [in_the_launcher, in_rank_0])
@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("file", "'file' is a file"),
        ("file/below", "file', above 'file/below', is a file"),
        ("dangling", "'dangling' is a symbolic link that leads to no folder"),
        ("circle", "is a symbolic link that leads to no folder"),
        ("x" * 256, "too long: a name may have 255 bytes"),
        ("/".join(["y" * 200] * 20), "the whole path 3935: set a shorter run_dir"),
        ("a\0b", "not a possible name"),
        ("a\ud800b", "not a possible name"),
        ("/proc/run", "/proc"),
        ("/dev/null", "'/dev/null' is a file"),
        ("/dev/null/run", "above '/dev/null/run', is a file"),
    ],
)
def test_no_folder_can_be_here(places: Load, path: str, problem: str, where: Callable[[Loaded], None]) -> None:
    before = sorted(Path().iterdir())
    loaded = places()
    loaded = dataclasses.replace(loaded, recipe=dataclasses.replace(loaded.recipe, run_dir=path))
    with pytest.raises(UserError, match=re.escape(problem)) as caught:
        where(loaded)
    assert "run_dir" in str(caught.value) or where is in_rank_0
    str(caught.value).encode()
    assert sorted(Path().iterdir()) == before


def as_nobody(action: Callable[[], object]) -> str:
    """What ``action`` raises for a user who owns nothing."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        told = b"nothing"
        try:
            os.setresuid(65534, 65534, 65534)
            action()
        except BaseException as error:
            told = f"{type(error).__name__}: {error}".encode()
        os.write(writing, told)
        os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with os.fdopen(reading, "rb") as pipe:
        return pipe.read().decode()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become nobody")
@pytest.mark.parametrize(
    ("mode", "inner", "problem"),
    [
        (0o755, "run", "cannot be written: Permission denied; make it writable or name another place"),
        (0o755, "", "cannot be written: Permission denied"),
        (0o700, "run", "cannot be looked into (Permission denied)"),
        (0o700, "", "cannot be looked into (Permission denied)"),
        (0o777, "run", "nothing"),
    ],
)
def test_folders_of_others(load: Load, mode: int, inner: str, problem: str) -> None:
    with tempfile.TemporaryDirectory() as name:  # all the way to it may be searched, unlike pytest's folders
        os.chmod(name, 0o755)
        folder = Path(name) / "theirs"
        folder.mkdir()
        folder.chmod(mode)
        loaded = load(f"run_dir={folder / inner}")
        told = as_nobody(lambda: RunDir(loaded.recipe.run_dir).check(loaded, resume=False))
        assert problem in told
        assert told == "nothing" or str(folder) in told


@pytest.mark.parametrize("left", [[], [".lock"], ["logs"], [".recipe.yaml.12.partial"], [".lock", ".x.1.partial"]])
def test_a_start_that_failed_may_be_started_again(load: Load, left: list[str]) -> None:
    Path("runs/one").mkdir(parents=True)
    for name in left:
        Path("runs/one", name).touch()
    RunDir("runs/one").check(load(), resume=False)
    assert {entry.name for entry in begin(load()).iterdir()} == {"recipe.yaml", *({"logs"} & set(left))}


def test_folders_above_go_with_a_run_that_wrote_nothing(load: Load) -> None:
    Path("runs").mkdir()
    with RunDir("runs/a/b/c") as run:
        run.open(load(), resume=False)
    assert list(Path("runs").iterdir()) == []


@pytest.mark.parametrize(("begun", "how"), [(False, "start again"), (True, "go on with --resume")])
@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "cache"),
        RuntimeError("No space left on device (os error 28)"),
        WriteRefusedError("cache: cannot be written: No space left on device"),
    ],
)
def test_a_refused_write_says_how_the_run_goes_on(load: Load, begun: bool, how: str, error: Exception) -> None:
    if begun:
        begin(load())
    with pytest.raises(CutOffError, match=f"No space left on device.*; {how}$"), RunDir("runs/one").telling():
        raise error


@pytest.mark.parametrize("error", [UserError("x"), ValueError("x"), KeyboardInterrupt(), FileNotFoundError(2, "x")])
def test_other_errors_pass(load: Load, error: BaseException) -> None:
    with pytest.raises(type(error)) as caught, RunDir("runs/one").telling():
        raise error
    assert caught.value is error


def test_a_stop_knows_a_run_by_its_lock_not_by_the_file(load: Load, capsys: pytest.CaptureFixture[str]) -> None:
    """A killed process leaves the file. A request with ``--by`` is not a user's."""
    loaded = load()
    path = begin(loaded)
    (path / ".lock").write_text("4242\n")
    assert main(["stop", str(path)]) == 0
    assert "no run is in there now, and the next one forgets the request" in capsys.readouterr().out
    assert is_users_stop(path)
    with RunDir(path) as run:
        run.open(loaded, resume=True)
        assert main(["stop", str(path), "--by", "job 7"]) == 0
        assert "it ends after its step and a checkpoint" in capsys.readouterr().out
    assert not is_users_stop(path)


KILLED_EXPORT = """
import os, signal, sys, torch
from pathlib import Path
from mopd.conversion.hf.writer import write_folder
def stream():
    yield "weight", torch.zeros(2)
    os.kill(os.getpid(), signal.SIGKILL)
write_folder(Path(sys.argv[1]), stream(), source=Path(sys.argv[2]))
"""


def test_an_export_that_was_killed_goes_at_the_next_start(load: Load, tmp_path: Path) -> None:
    loaded = load()
    path = begin(loaded)
    (tmp_path / "config.json").write_text("{}")
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    killed = subprocess.run([sys.executable, "-c", KILLED_EXPORT, path / "hf", tmp_path], env=environment)
    assert killed.returncode == -signal.SIGKILL
    assert len(list(path.glob(".hf.*"))) == 1
    with RunDir(path) as run:
        run.open(loaded, resume=True)
    assert {entry.name for entry in path.iterdir()} == {"recipe.yaml"}
