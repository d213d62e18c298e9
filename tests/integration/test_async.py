"""The asynchronous pipeline in whole runs: it trains, and no death of a process costs or doubles a sample.

Invariant: whichever process dies, and whenever, the run ends in one line within seconds and leaves no process behind
(or starts a server again and goes on), and with ``--resume`` each prompt of the stream is trained on exactly once.
``MOPD_KILLS`` sets how many random kills are tried (``make kills``: 20; else one, always the same), and has the other
tests take their long form; ``MOPD_KILLS_SEED`` sets which. Not exercised here: several machines, CUDA.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mopd.launch.failure import STOPPED_CODE
from mopd.run.checkpointing import complete_steps
from tests.fixtures.chance import seed_of
from tests.fixtures.environments import COUNTING
from tests.fixtures.tiny_models import CHARACTERS, make_tokenizer
from tests.integration.groups import is_alive
from tests.integration.under_fire import LOCAL, MAX_STALENESS, PER_PROMPT, TOY, Run, check_accounts, recipe_of, trained
from tests.integration.world import World, read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.multirank]
SHORT_FORM = 1
IS_LONG = "MOPD_KILLS" in os.environ
LONG = pytest.mark.skipif(not IS_LONG, reason="takes long: make kills")
VICTIMS = ("rank 0", "launcher", "orchestrator", "rollout.0", "teachers.left.0")
SERVERS = ("rollout.0", "teachers.left.0")
STEPS_BETWEEN = 6
"""At most; and what the last start adds."""
SHARE_AT_START, STARTING_S = 0.3, 5.0
"""Of all deaths: before the first step, or soon after it."""
SHARE_IN_TRANSFER = 0.4
"""Of the deaths of ranks, launchers and orchestrators."""
ENDLESS = 100_000
"""Steps, for a run that is to be killed: more go by while a server starts again than before."""
CALL = '<tool_call>{"name": "%s", "arguments": {"%s": "%s"}}</tool_call>'
CALLS = {
    "q": CALL % ("python", "code", "print(6 * 7)"),
    "=": CALL % ("calculator", "expression", "9 ** 9"),
    "?": CALL % ("calculator", "expression", "1 / 0"),
}
"""Characters that no prompt holds, and what their ids mean in the place of them."""


@pytest.fixture
def make_run() -> Iterator[Callable[..., Run]]:
    """Makes runs, of which none outlives its test."""
    made: list[Run] = []

    def make(recipe: Path, **options: bool) -> Run:
        made.append(Run(recipe, **options))
        return made[-1]

    yield make
    for run in made:
        if run.is_alive:
            run.process.kill()
            run.process.wait()
        shutil.rmtree(run.temporary)


@pytest.mark.parametrize("environment", [None, *(pytest.param(kind, marks=LONG) for kind in ("custom", "python_tool"))])
def test_random_kills_lose_nothing_and_repeat_nothing(
    world: World, tmp_path: Path, make_run: Callable[..., Run], environment: str | None
) -> None:
    """A run is killed again and again, in places and at moments by chance, then goes on to its end; also one whose
    responses have several turns in an environment."""
    changes = {} if environment is None else playing(environment, tmp_path)
    world = with_calls(world, tmp_path / "world") if environment == "python_tool" else world
    num_kills = int(os.environ.get("MOPD_KILLS", SHORT_FORM))
    chance = random.Random(seed_of("MOPD_KILLS_SEED", is_new=IS_LONG))
    victims = [chance.choice(VICTIMS) for _ in range(num_kills)]
    if num_kills >= len(VICTIMS):
        victims[: len(VICTIMS)] = VICTIMS  # each at least once
        chance.shuffle(victims)
    run = make_run(recipe_of(world, tmp_path / "run", steps=ENDLESS, **changes))
    for victim in victims:
        if not run.is_alive:
            run.start(*run.flags)
        may_start = IS_LONG and chance.random() < SHARE_AT_START
        if may_start:
            time.sleep(chance.uniform(0, STARTING_S))
        else:
            goal = run.num_steps + chance.randint(0, STEPS_BETWEEN)
            run.wait_until(lambda goal=goal: run.num_steps >= goal, f"step {goal}")
            time.sleep(chance.uniform(0, 0.2))
        if victim not in SERVERS and run.num_steps and chance.random() < SHARE_IN_TRANSFER:
            run.kill("rollout.0", signal.SIGSTOP)  # so that weights are on their way to it when their sender dies
            time.sleep(chance.uniform(0.5, 1.5))
        began = time.monotonic()
        run.kill(victim)
        told = after_death(run, victim)
        took = round(time.monotonic() - began, 1)
        print(json.dumps({"victim": victim, "step": run.num_steps, "s": took, "told": told}), flush=True)
    if not run.is_alive:
        run.start(*run.flags)
    check_stop(run)
    run.start("--resume=auto")
    before = run.num_steps
    run.wait_until(lambda: run.num_steps > before + 3, f"step {before + 4}")
    check_order(run)
    steps = complete_steps(run.path / "checkpoints")[-1] + STEPS_BETWEEN
    run.start("--resume", f"schedule.steps={steps}")
    assert run.end() == 0, run.stderr
    check_accounts(run, steps=steps)
    check_metrics(run, steps=steps)
    if environment == "python_tool":
        rows = read_metrics(run.path)
        for name in ("given_share", "tool_errors"):
            assert any(row.get(f"{name}/left", 0) > 0 for row in rows), f"no call was made: {name}"


@LONG
def test_the_process_of_the_tools_dies(world: World, tmp_path: Path, make_run: Callable[..., Run]) -> None:
    """The run ends in one line, and goes on."""
    world = with_calls(world, tmp_path / "world")
    run = make_run(recipe_of(world, tmp_path / "run", steps=ENDLESS, **playing("python_tool", tmp_path)))
    run.start()
    run.wait_until(lambda: run.num_steps > 3, "step 4")
    (tools,) = [one for one in run.find("orchestrator").children() if "python_tool" in one.cmdline()]
    tools.kill()
    assert run.end() == 2, run.stderr
    assert "(python_tool) ended its process (killed by signal 9)" in run.error()
    assert run.error().endswith("; go on with --resume")
    steps = complete_steps(run.path / "checkpoints")[-1] + STEPS_BETWEEN
    run.start("--resume", f"schedule.steps={steps}")
    assert run.end() == 0, run.stderr
    check_accounts(run, steps=steps)


def playing(kind: str, folder: Path) -> dict[str, Any]:
    """Keys of a recipe whose responses have up to 4 turns."""
    environment: dict[str, Any] = {"type": kind, "max_turns": 4}
    if kind == "custom":
        module = folder / "counting.py"
        module.write_text(COUNTING, encoding="utf-8")
        environment |= {"module": str(module), "class_name": "Counting"}
    return {
        "rollout": {**TOY["rollout"], "environment": environment, "max_response_length": 64},
        "preflight__require_better_teacher": False,
    }


def with_calls(world: World, folder: Path) -> World:
    """A world as that one, in which the student's random turns hold calls of tools."""
    shutil.copytree(world.folder, folder)
    copy = World(folder)
    for model in (copy.student, *copy.teachers.values()):
        make_tokenizer(model, characters=[CALLS.get(one, one) for one in CHARACTERS])
    return copy


@LONG
@pytest.mark.parametrize("victim", VICTIMS)
def test_a_new_run_dies_as_it_starts(world: World, tmp_path: Path, make_run: Callable[..., Run], victim: str) -> None:
    """It may not have begun: what is told then is right, too, and does."""
    chance = random.Random(f"{victim} {seed_of('MOPD_KILLS_SEED', is_new=IS_LONG)}")
    for number in range(3):
        run = make_run(recipe_of(world, tmp_path / f"run{number}", steps=ENDLESS))
        run.start()
        time.sleep(chance.uniform(0, STARTING_S))
        run.kill(victim)
        told = after_death(run, victim)
        print(json.dumps({"victim": victim, "step": run.num_steps, "told": told}), flush=True)
        if not run.is_alive:
            run.start(*run.flags)
        check_stop(run)


def after_death(run: Run, victim: str) -> str:
    """What the run said: it ended in one line, or has repaired itself."""
    if victim in SERVERS and run.is_repaired():
        return "repaired"
    code = run.end()
    if victim == "launcher":
        assert code == -signal.SIGKILL
        return "killed"
    # a rank crashed; the orchestrator is lost; a server that dies is lost only once it was there, and then repaired
    assert code == {"rank": 1, "orchestrator": 69}.get(victim.split()[0], 2), run.stderr
    assert victim.removeprefix("teachers.") in run.error()
    if victim not in SERVERS:  # of one that ends at its start, whoever asked it first tells
        assert "SIGKILL" in run.error()
        assert run.error().endswith("; go on with --resume" if run.flags else "; start again")
    return run.error()


def check_metrics(run: Run, *, steps: int) -> None:
    """One row a step, whose ages are within the bound, and whose responses are those that the optimizer saw."""
    for number, (row, samples) in enumerate(zip(read_metrics(run.path), trained(run), strict=True), start=1):
        assert row["step"] == number
        first: dict[int, int] = {}  # prompt -> the weights of the newest token of the response that was complete first
        for sample in samples:
            prompt = sample["sample_id"] // PER_PROMPT
            newest = sample["weight_version"] + sample["version_span"]
            first[prompt] = min(first.get(prompt, newest), newest)
        ages = [number - 1 - first[sample["sample_id"] // PER_PROMPT] for sample in samples]
        assert min(ages) >= 0 and max(ages) <= MAX_STALENESS
        assert row["staleness"] == max(number - 1 - sample["weight_version"] for sample in samples)
        for age in range(MAX_STALENESS + 1):
            assert row[f"staleness_share/{age}"] == pytest.approx(ages.count(age) / len(ages))
        assert row["response_versions/max"] == max(sample["num_versions"] for sample in samples)
        assert row["tokens"] == sum(sample["prompt_length"] + sample["response_length"] for sample in samples)


def check_stop(run: Run) -> None:
    """SIGTERM asks: the step ends, a checkpoint follows, and no process is left."""
    before = run.num_steps
    run.wait_until(lambda: run.num_steps > before + 1, f"step {before + 2}")
    run.kill("launcher", signal.SIGTERM)
    assert run.end() == STOPPED_CODE, run.stderr
    (line,) = [line for line in run.stderr.splitlines() if line.startswith("mopd: ")]
    assert line.startswith(f"mopd: stopped after step {run.num_steps} of ") and "SIGTERM" in line and "--resume" in line
    assert complete_steps(run.path / "checkpoints")[-1] == run.num_steps
    assert "Traceback" not in run.stderr


def check_order(run: Run) -> None:
    """Ctrl-C ends servers first, then who asks them, then the rest; nothing is left, also of killed lives."""
    family = run.family()
    run.kill("launcher", signal.SIGINT)
    order: list[str] = []
    while len(order) < len(family):
        dead = [role for role, one in family.items() if role not in order and not is_alive(one.pid)]
        order += reversed(dead)  # who ended first between two looks nobody knows: rank 0 ends 1 ms after that
        time.sleep(0.002)
    assert run.end() == 128 + signal.SIGINT, run.stderr
    assert run.stderr.endswith("mopd: ended by SIGINT; go on with --resume\n") and "Traceback" not in run.stderr
    assert order[-3:] == ["orchestrator", "rank 0", "launcher"]
    assert run.left_behind() == []


@LONG
@pytest.mark.ray
def test_actors_of_transfer_queue_die(world: World, tmp_path: Path, make_run: Callable[..., Run]) -> None:
    """One line, nothing of Ray is left; finished samples are read back from a checkpoint, unless its files changed.
    They have the student's ids too, also those of responses that went on under new weights."""
    pytest.importorskip("transfer_queue")
    changes = {"data_plane": {"type": "transfer_queue"}, "teacher_defaults": {"placement": LOCAL, "payload": "union"}}
    recipe = recipe_of(world, tmp_path / "run", steps=ENDLESS, **changes)
    run = make_run(recipe, own_tmpdir=False)
    actors = ["storage unit", "controller"]
    random.Random(seed_of("MOPD_KILLS_SEED", is_new=IS_LONG)).shuffle(actors)
    for actor in actors if IS_LONG else actors[:1]:
        before = run.num_steps
        run.start(*run.flags)
        run.wait_until(lambda before=before: run.num_steps > before + 3, f"step {before + 4}")
        run.kill(actor)
        assert run.end() == 69, run.stderr
        assert f"TransferQueue's {actor}" in run.error() and "--resume" in run.error()

    if not IS_LONG:
        return
    steps = complete_steps(run.path / "checkpoints")[-1]
    (saved, *_) = sorted((run.path / "checkpoints" / f"step_{steps:08d}.samples").glob("**/*.pkl"))
    intact = saved.read_bytes()
    saved.write_bytes(intact[:-1] + bytes([intact[-1] ^ 1]))
    run.start("--resume")
    assert run.end() == 2, run.stderr
    assert saved.name in run.error() and "SHA-256" in run.error()
    saved.write_bytes(intact)
    run.start("--resume", f"schedule.steps={steps + 3}")
    assert run.end() == 0, run.stderr
    check_accounts(run, steps=steps + 3)


HANGING_REWARD = """
import time
calls = 0
def reward(prompt, response, ground_truth, extra_info, domain):
    global calls
    calls += 1
    if calls > 40:
        time.sleep(3600)
    return float(len(response) % 2)
"""


def test_a_reward_that_hangs(world: World, tmp_path: Path, make_run: Callable[..., Run]) -> None:
    """In the middle of a run, whose loss needs rewards: one line at its deadline, and without the hang it goes on."""
    code = tmp_path / "reward.py"
    code.write_text(HANGING_REWARD, encoding="utf-8")
    recipe = recipe_of(
        world,
        tmp_path / "run",
        steps=ENDLESS,
        loss={"type": "policy_gradient", "task_reward_weight": 1.0, "top_k": 8, "correction": {"type": "icepop"}},
        rewards={"default": {"type": "custom", "path": str(code), "function": "reward", "timeout_s": 3}},
        checkpoint__every_steps=1,
    )
    run = make_run(recipe)
    run.start()
    assert run.end() == 2, run.stderr
    assert "timeout_s 3" in run.error() and str(code) in run.error()

    if not IS_LONG:
        return
    steps = run.num_steps + 2
    code.write_text(HANGING_REWARD.replace("calls > 40", "False"), encoding="utf-8")
    run.start("--resume", f"schedule.steps={steps}")
    assert run.end() == 0, run.stderr
    check_accounts(run, steps=steps)
