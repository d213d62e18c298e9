"""Which checkpoint a run goes on from, and damage of its files told before anything starts."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from mopd.base.metrics import JsonlWriter, read_jsonl
from mopd.base.types import UserError
from mopd.config.load import Loaded, load_recipe
from mopd.report.run_files import Best, best_of
from mopd.run import checkpointing, resuming
from mopd.run.folder import RunDir
from tests.fixtures.recipe import RECIPE


@pytest.fixture
def loaded(tmp_path: Path) -> Loaded:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    return load_recipe(path, ["schedule.steps=10"])


def make_run(tmp_path: Path, *steps: int) -> RunDir:
    """A run folder with complete checkpoints, whose files hold their step."""
    run = RunDir(tmp_path / "run")
    for step in steps:
        run.checkpoint(step).mkdir(parents=True)
        (run.checkpoint(step) / "manifest.json").write_text(str(step))
    return run


def names(run: RunDir) -> list[str]:
    return sorted(path.name for path in run.checkpoints.iterdir())


def test_other_names_are_no_checkpoints(tmp_path: Path, loaded: Loaded) -> None:
    run = make_run(tmp_path, 2, 4)
    for name in ("step_00000002.bak", "step_00000009.aside", "step_9", "step_000000009", "step_", "step_-0000009",
                 "step_0000000x", "step_٠٠٠٠٠٠٠٩", "old_step_00000009", f"step_{'9' * 200}"):  # fmt: skip
        (run.checkpoints / name).mkdir()
        (run.checkpoints / name / "manifest.json").write_text("{}")
    (run.checkpoints / "step_00000007").mkdir()  # without its manifest
    (run.checkpoints / "step_00000008").write_text("a file")
    assert checkpointing.complete_steps(run.checkpoints) == [2, 4]
    assert resuming.choose(run, loaded.recipe, wanted=None) == run.checkpoint(4)


def test_a_live_run_leaves_other_names_alone(tmp_path: Path, loaded: Loaded) -> None:
    run = make_run(tmp_path)
    (run.checkpoints / "step_00000002.bak").mkdir(parents=True)
    (run.checkpoints / "step_00000002.bak" / "manifest.json").write_text("{}")

    cfg = load_recipe(loaded.path, ["checkpoint={every_steps: 1, keep_last: 1, async_save: false}"]).recipe.checkpoint
    writer = checkpointing.Checkpointer(run=run, cfg=cfg, student=Student(), samples=Student(), last_step=9)
    for step in (1, 2, 3):
        asyncio.run(writer.save_if_due(step, {}, best_step=None))
    assert names(run) == ["step_00000002.bak", "step_00000003", "step_00000003.samples"]


class Student:
    """Ranks that write as fast as the test lets them."""

    def __init__(self) -> None:
        self.folder: Path | None = None
        self.is_busy = False

    async def is_saving(self) -> bool:
        return self.is_busy

    async def save(self, folder: Path, state: object, *, is_async: bool) -> None:
        assert self.folder is None, "two at a time"
        folder.mkdir(parents=True)
        self.folder, self.is_busy = folder, is_async

    async def finish_save(self) -> None:
        assert self.folder is not None
        (self.folder / "manifest.json").write_text("{}")
        self.folder, self.is_busy = None, False

    async def save_samples(self, folder: Path) -> str:
        folder.mkdir(parents=True)
        return "hash"


def test_an_old_checkpoint_stays_until_the_next_is_whole(tmp_path: Path, loaded: Loaded) -> None:
    """One that is being written counts for nothing: neither as complete, nor in the place of one that is removed."""
    run = make_run(tmp_path)
    cfg = load_recipe(loaded.path, ["checkpoint={every_steps: 2, keep_last: 1, async_save: true}"]).recipe.checkpoint
    student = Student()
    writer = checkpointing.Checkpointer(run=run, cfg=cfg, student=student, samples=student, last_step=9)

    async def work() -> None:
        await writer.save_if_due(2, {}, best_step=2)
        await writer.save_if_due(3, {}, best_step=2)
        assert checkpointing.complete_steps(run.checkpoints) == []
        assert "timing/checkpoint_s" not in writer.take_numbers()
        student.is_busy = False  # the thread is done
        await writer.save_if_due(3, {}, best_step=2)
        assert checkpointing.complete_steps(run.checkpoints) == [2]
        assert writer.take_numbers().keys() == {"timing/checkpoint_s", "timing/checkpoint_wait_s"}
        await writer.save_if_due(4, {}, best_step=4)  # better, and not whole yet
        assert checkpointing.complete_steps(run.checkpoints) == [2]
        await writer.save_if_due(6, {}, best_step=6)  # waits for the one before
        assert checkpointing.complete_steps(run.checkpoints) == [4]
        await writer.save(6, {}, best_step=6)  # on a request to stop
        await writer.finish()
        assert checkpointing.complete_steps(run.checkpoints) == [6]
        await writer.save_if_due(9, {}, best_step=6)  # the last one
        assert checkpointing.complete_steps(run.checkpoints) == [6, 9]
        assert not student.is_busy

    asyncio.run(work())


def test_nothing_to_go_on_from(tmp_path: Path, loaded: Loaded) -> None:
    run = make_run(tmp_path)
    assert resuming.choose(run, loaded.recipe, wanted=None) is None
    with pytest.raises(UserError, match=r"--from step_4: no complete checkpoint in .*checkpoints: there is none"):
        resuming.choose(run, loaded.recipe, wanted="step_4")


@pytest.mark.parametrize("wanted", ["step_00000004", "step_4", "4"])
def test_an_older_one_is_taken_by_name(tmp_path: Path, loaded: Loaded, wanted: str) -> None:
    run = make_run(tmp_path, 2, 4, 6)
    assert resuming.choose(run, loaded.recipe, wanted=wanted) == run.checkpoint(4)


@pytest.mark.parametrize("wanted", ["step_5", "latest", "", "-4", "step_", "../step_4", "٤", "9" * 5000, "step_4.bak"])
def test_what_is_no_complete_checkpoint_is_refused(tmp_path: Path, loaded: Loaded, wanted: str) -> None:
    run = make_run(tmp_path, *range(1, 21))
    (run.checkpoint(5) / "manifest.json").unlink()
    with pytest.raises(UserError, match=r"complete are step_00000020, .* and 9 earlier ones") as caught:
        resuming.choose(run, loaded.recipe, wanted=wanted)
    assert len(str(caught.value)) < 1000


def test_fewer_steps_than_done(tmp_path: Path, loaded: Loaded) -> None:
    run = make_run(tmp_path, 4, 8, 12)
    with pytest.raises(UserError, match=r"schedule.steps is 10, .* has done 12: raise .* --from step_00000008"):
        resuming.choose(run, loaded.recipe, wanted=None)
    with pytest.raises(UserError, match=r"--from step_12: schedule.steps is 10"):
        resuming.choose(run, loaded.recipe, wanted="step_12")
    assert resuming.choose(run, loaded.recipe, wanted="step_8") == run.checkpoint(8)
    exact = load_recipe(loaded.path, ["schedule.steps=12"]).recipe
    assert resuming.choose(run, exact, wanted=None) == run.checkpoint(12)


def test_later_checkpoints_are_set_aside_and_kept(tmp_path: Path) -> None:
    run = make_run(tmp_path, 2, 4, 6)
    (run.checkpoints / "step_00000006.aside").mkdir()
    resuming.set_aside(run, after_step=2)
    expected = ["step_00000002", "step_00000004.aside", "step_00000006.aside", "step_00000006.aside-2"]
    assert names(run) == expected
    assert (run.checkpoints / "step_00000006.aside-2" / "manifest.json").read_text() == "6"
    assert checkpointing.complete_steps(run.checkpoints) == [2]


def test_the_best_step_is_one_whose_checkpoint_is_there() -> None:
    lines = [{"step": step, "rewards": {"math": reward}} for step, reward in ((0, 1.0), (3, 0.9), (6, 0.5), (9, 0.7))]
    assert best_of(lines) == Best(step=3, reward=0.9)
    assert best_of(lines, kept=[6, 9]) == Best(step=9, reward=0.7)
    assert best_of(lines, kept=[]) is None


def test_a_damaged_checkpoint_names_the_older_ones(tmp_path: Path) -> None:
    run = make_run(tmp_path, 2, 4, 6)
    hint = resuming.older_ones(run, run.checkpoint(6))
    assert "--from step_00000004" in hint and "step_00000004, step_00000002" in hint
    assert resuming.older_ones(run, run.checkpoint(2)) == ""


@pytest.mark.parametrize(
    "state", [{}, {"step": "4", "prompts": {}}, {"step": True, "prompts": {}}, {"step": 4}, {"step": 3, "prompts": {}}]
)
def test_a_state_that_is_not_the_folders(tmp_path: Path, state: dict[str, object]) -> None:
    run = make_run(tmp_path, 4)
    assert resuming.progress_of(run.checkpoint(4), {"step": 4, "prompts": {}}, weight_version=4) == resuming.Progress(
        step=4, prompts={}, ledger=None, samples=None
    )
    with pytest.raises(UserError, match="step_00000004: its state says step"):
        resuming.progress_of(run.checkpoint(4), state, weight_version=4)
    with pytest.raises(UserError, match="step_00000004: its state says step"):
        resuming.progress_of(run.checkpoint(4), {"step": 4, "prompts": {}}, weight_version=3)


FILES = ("recipe.yaml", "manifest.json", "metrics.jsonl", "validation.jsonl", "parity.json", "headroom.json",
         "machine.json", "report.json", "report.html", ".lock", "wandb_id")  # fmt: skip
FOLDERS = ("checkpoints", "tensorboard", "logs", "hf")
PLACES: dict[str, Callable[[Path], object]] = {
    "folder": lambda path: path.mkdir(),
    "pipe": lambda path: os.mkfifo(path),
    "loop": lambda path: path.symlink_to(path.name),
    "nowhere": lambda path: path.symlink_to("absent"),
    "file": lambda path: path.write_text(""),
}


@pytest.mark.parametrize("kind", PLACES)
@pytest.mark.parametrize("name", FILES + FOLDERS)
def test_something_else_in_the_place_of_a_file_or_folder(tmp_path: Path, name: str, kind: str) -> None:
    run = RunDir(tmp_path)
    PLACES[kind](tmp_path / name)
    if kind == ("file" if name in FILES else "folder"):
        resuming.check_layout(run)
        return
    with pytest.raises(UserError, match=f"{name}: not a"):
        resuming.check_layout(run)


@pytest.mark.parametrize("kind", PLACES)
def test_something_else_in_the_place_of_a_checkpoint(tmp_path: Path, kind: str) -> None:
    run = make_run(tmp_path, 2)
    PLACES[kind](run.checkpoints / "step_00000004.bak")
    resuming.check_layout(run)
    PLACES[kind](run.checkpoints / "step_00000004")
    if kind == "folder":
        resuming.check_layout(run)
        return
    with pytest.raises(UserError, match="step_00000004: not a folder"):
        resuming.check_layout(run)


MODEL = {"path": "m", "config_sha256": "0", "weights_sha256": "1", "tokenizer_sha256": "2"}
PARITY = {"math": {"kl": 0.0, "mean_difference": 0.0, "max_difference": 0.0, "num_positions": 8}}
GOOD: dict[str, bytes] = {
    "manifest.json": json.dumps({"student": MODEL, "teachers.math": MODEL}).encode(),
    "wandb_id": b"0123abc\n",
    "parity.json": json.dumps(PARITY).encode(),
    "headroom.json": b'{"math": {"teacher": 1.0}}',
    "metrics.jsonl": b'{"step": 1, "loss": 0.5, "grad_norm": null}\n{"step": 2, "loss": 0.4}\n',
    "validation.jsonl": b'{"step": 0, "rewards": {"math": 0.5}, "wall_s": 1.0, "examples": {"math": '
    b'[{"prompt": "a", "response": "b", "ground_truth": null, "reward": 1}]}}\n',
}
OWN: dict[str, dict[str, bytes]] = {
    "manifest.json": {
        "a hash missing": json.dumps({"student": {"path": "m"}}).encode(),
        "a hash too many": json.dumps({"student": MODEL | {"more": "a"}}).encode(),
        "a hash of numbers": json.dumps({"student": MODEL | {"config_sha256": 1}}).encode(),
        "fingerprints of text": json.dumps({"student": MODEL, "fingerprints": {"teachers.math": "a"}}).encode(),
        "short fingerprints": json.dumps(
            {"student": MODEL, "fingerprints": {"teachers.math": {"vocab_size": 9, "token_logprobs": [0.5]}}}
        ).encode(),
        "no bytes": b"",
    },
    "wandb_id": {"no bytes": b"", "another way": b"../../etc", "two lines": b"a\nb", "long": b"a" * 1000},
    "parity.json": {"no kl": b'{"math": {}}', "true": b'{"math": {"kl": true}}', "no bytes": b""},
    "headroom.json": {
        "no teacher": b'{"math": {}}',
        "large": b'{"math": {"teacher": 1e300}}',
        "no bytes": b"",
        "examples": b'{"math": {"teacher": 1, "examples": [1]}}',
    },
    "metrics.jsonl": {
        "a negative step": b'{"step": -1}\n',
        "a step beyond": b'{"step": 9007199254740993}\n',
        "true": b'{"step": true}\n',
        "half a step": b'{"step": 1.5}\n',
        "steps backwards": b'{"step": 2}\n{"step": 1}\n',
        "a step twice": b'{"step": 2}\n{"step": 2}\n',
        "text": b'{"step": 1, "loss": "low"}\n',
        "lists": b'{"step": 1, "loss": [1]}\n',
        "large": b'{"step": 1, "loss": 1e300}\n',
        "two objects": b'{"step": 1}{"step": 2}\n',
        "many metrics": json.dumps({"step": 1} | {f"m{i}": 1 for i in range(10_001)}).encode() + b"\n",
    },
    "validation.jsonl": {
        "no rewards": b'{"step": 1}\n',
        "empty rewards": b'{"step": 1, "rewards": {}}\n',
        "rewards of text": b'{"step": 1, "rewards": {"math": "1"}}\n',
        "a list of rewards": b'{"step": 1, "rewards": [1]}\n',
        "examples in a list": b'{"step": 1, "rewards": {"a": 1}, "examples": [1]}\n',
        "examples of text": b'{"step": 1, "rewards": {"a": 1}, "examples": {"a": ["b"]}}\n',
        "an example without a response": b'{"step": 1, "rewards": {"a": 1}, "examples": {"a": [{"prompt": "b"}]}}\n',
        "time as text": b'{"step": 1, "rewards": {"a": 1}, "wall_s": "long"}\n',
    },
}
CASES = [(name, case, content) for name, cases in OWN.items() for case, content in cases.items()]


@pytest.mark.parametrize(("name", "case", "content"), CASES, ids=[f"{name}: {case}" for name, case, _ in CASES])
def test_damaged_files_are_named(tmp_path: Path, name: str, case: str, content: bytes) -> None:
    """Damage of the text itself is tried by ``tests/fuzz/test_run_files.py``."""
    for each, good in GOOD.items():
        (tmp_path / each).write_bytes(good)
    run = RunDir(tmp_path)
    resuming.check_files(run)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=name) as caught:
        resuming.check_files(run)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 1000
    assert "restore the file" in message or "remove" in message


@pytest.mark.parametrize("content", [b"", b'{"step": 1}\n{"step": 2, "lo'])
def test_a_line_that_is_being_written_is_no_damage(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(content)
    steps = [record["step"] for record in read_jsonl(path)]
    JsonlWriter(path).close()
    assert [record["step"] for record in read_jsonl(path)] == steps == [1][: content.count(b"\n")]


def test_three_starts_without_a_checkpoint_are_enough(tmp_path: Path) -> None:
    """A new checkpoint begins the count anew; the refusal says how the last one ended."""
    run = make_run(tmp_path)
    for number in range(3):
        resuming.count_start(run)
        resuming.note_end(run, f"rank 1 failed, time {number}")
    with pytest.raises(UserError, match=r"3 starts in a row, and no new checkpoint at all; .*: rank 1 failed, time 2"):
        resuming.count_start(run)
    make_run(tmp_path, 7)
    for _ in range(3):
        resuming.count_start(run)  # of which nothing more is heard
    with pytest.raises(UserError, match="no new checkpoint since step_00000007; the last one: killed, or its machine"):
        resuming.count_start(run)
    resuming.note_end(run, "")
    resuming.count_start(run)


def test_what_a_person_ends_is_no_failed_start(tmp_path: Path) -> None:
    """Ctrl-C takes back its own start, not those that failed before."""
    run = make_run(tmp_path)
    for _ in range(5):
        resuming.count_start(run)
        resuming.note_end(run, "ended by SIGINT; start again", is_users=True)
        assert not run.attempts.exists()
    for number in range(3):
        resuming.count_start(run)
        resuming.note_end(run, f"rank 1 failed, time {number}")
        if number < 2:
            resuming.count_start(run)
            resuming.note_end(run, "ended by SIGINT; start again", is_users=True)
    with pytest.raises(UserError, match=r"3 starts in a row, .*: rank 1 failed, time 2"):
        resuming.count_start(run)


@pytest.mark.parametrize("text", ["[]", "{", '{"starts": "3", "checkpoint": null}', '{"starts": 1, "checkpoint": 4}'])
def test_a_count_of_starts_that_is_none(tmp_path: Path, text: str) -> None:
    run = make_run(tmp_path, 1)
    run.attempts.write_text(text)
    with pytest.raises(UserError, match=r"attempts\.json: .*: remove the file"):
        resuming.count_start(run)
