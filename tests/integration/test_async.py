"""The asynchronous pipeline in whole runs: it trains, and no death of a process costs or doubles a sample.

Invariant: whichever process dies, and whenever, the run ends in one line within seconds and leaves no process behind
(or starts a server again and goes on), and with ``--resume`` each prompt of the stream is trained on exactly once.
``MOPD_KILLS`` sets how many random kills are tried (``make kills``: 20), ``MOPD_KILLS_SEED`` which. Not exercised here:
several machines, CUDA.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path

import pytest

from mopd.run.checkpointing import complete_steps
from tests.integration.groups import is_alive
from tests.integration.under_fire import MAX_STALENESS, Run, check_accounts, recipe_of, trained
from tests.integration.world import World, read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.multirank]
SHORT_FORM = 3
VICTIMS = ("rank 0", "launcher", "producer", "rollout.0", "teachers.left.0")
SERVERS = ("rollout.0", "teachers.left.0")
STEPS_BETWEEN = 6
"""At most; and what the last start adds."""
ENDLESS = 100_000
"""Steps, for a run that is to be killed: more go by while a server starts again than before."""


def test_random_kills_lose_nothing_and_repeat_nothing(world: World, tmp_path: Path) -> None:
    """A run is killed again and again, in places and at moments by chance, then goes on to its end."""
    num_kills = int(os.environ.get("MOPD_KILLS", SHORT_FORM))
    seed = int(os.environ.get("MOPD_KILLS_SEED", random.randrange(2**31)))
    print(f"MOPD_KILLS_SEED={seed}")
    chance = random.Random(seed)
    victims = [chance.choice(VICTIMS) for _ in range(num_kills)]
    if num_kills >= len(VICTIMS):
        victims[: len(VICTIMS)] = VICTIMS  # each at least once
        chance.shuffle(victims)
    run = Run(recipe_of(world, tmp_path / "run", steps=ENDLESS))
    for victim in [*victims, "launcher"]:
        if not run.is_alive:
            run.start(*(["--resume"] if run.num_steps else []))
        goal = run.num_steps + chance.randint(0, STEPS_BETWEEN)
        run.wait_until(lambda goal=goal: run.num_steps >= goal, f"step {goal}")
        time.sleep(chance.uniform(0, 0.2))
        began = time.monotonic()
        run.kill(victim)
        told = after_death(run, victim)
        took = round(time.monotonic() - began, 1)
        print(json.dumps({"victim": victim, "step": run.num_steps, "s": took, "told": told}), flush=True)
    steps = (complete_steps(run.path / "checkpoints") or [0])[-1] + STEPS_BETWEEN
    run.start("--resume", f"schedule.steps={steps}")
    assert run.end() == 0, run.stderr
    check_accounts(run, steps=steps)
    check_metrics(run, steps=steps)


def after_death(run: Run, victim: str) -> str:
    """What the run said: it ended in one line, or has repaired itself."""
    if victim in SERVERS and "preflight" in run.stderr:
        said = f"{victim.removeprefix('teachers.')} works again"
        run.wait_until(lambda: run.stderr.count(said) > run.num_repairs, f"{victim} is repaired")
        run.num_repairs += 1
        return said
    code = run.end()
    if victim == "launcher":
        assert code == -signal.SIGKILL
        return "killed"
    assert code == (1 if victim.startswith("rank") else 2), run.stderr
    assert victim.removeprefix("teachers.") in run.error() and "SIGKILL" in run.error() and "--resume" in run.error()
    return run.error()


def check_metrics(run: Run, *, steps: int) -> None:
    """One row a step, whose ages are within the bound, and whose responses are those that the optimizer saw."""
    for number, (row, samples) in enumerate(zip(read_metrics(run.path), trained(run), strict=True), start=1):
        assert row["step"] == number
        versions = [number - 1 - sample["weight_version"] for sample in samples]
        assert min(versions) >= 0 and max(versions) <= MAX_STALENESS
        assert row["staleness"] == pytest.approx(sum(versions) / len(versions))
        for age in range(MAX_STALENESS + 1):
            assert row[f"staleness_share/{age}"] == pytest.approx(versions.count(age) / len(versions))
        assert row["response_versions/max"] == max(sample["num_versions"] for sample in samples)
        assert row["tokens"] == sum(sample["prompt_length"] + sample["response_length"] for sample in samples)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_a_signal_ends_a_run_in_order(world: World, tmp_path: Path, number: signal.Signals) -> None:
    """Servers first, then who asks them, then the rest; nothing is left, in TMPDIR either."""
    run = Run(recipe_of(world, tmp_path / "run", steps=ENDLESS))
    run.start()
    run.wait_until(lambda: run.num_steps >= 4, "step 4")
    family = run.family()
    run.kill("launcher", number)

    order: list[str] = []
    while len(order) < len(family):
        order += [role for role, one in family.items() if role not in order and not is_alive(one.pid)]
        time.sleep(0.002)

    assert run.end() == 128 + number, run.stderr
    assert run.stderr.endswith(f"mopd: ended by {number.name}; go on with --resume\n") and "Traceback" not in run.stderr
    assert order[-3:] == ["producer", "rank 0", "launcher"]
    assert not list(run.temporary.iterdir())
