"""Weight updates by a collective in whole runs, struck in every phase: killed, stopped, late and doubled peers,
strangers in the store, a firewall; on one network, on two, and on nodes of a Ray and of a Slurm cluster.

Invariant: whatever befalls a replica, the run goes on within its deadlines and the replica gets the weights of the
moment when it is back; whatever befalls a rank or the orchestrator, the run ends in one line, and goes on with
``--resume``. Every trained token's log-prob is that of the weights whose version it names, computed anew by
transformers; no sample is lost or doubled; no process and no shared memory is left. ``MOPD_WEIGHT_KILLS`` sets how many
cases are tried (``make kills-weights``: 30, and again with a student's adapters; else a few),
``MOPD_WEIGHT_KILLS_SEED`` which. Not exercised: CUDA.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest

from mopd.run.checkpointing import complete_steps
from tests.fixtures import slurm
from tests.fixtures.chance import seed_of
from tests.fixtures.networks import can_make_networks, two_networks
from tests.integration.under_fire import check_accounts
from tests.integration.weight_faults import (
    ADAPTERS,
    NODES,
    VLLM,
    WALL,
    Case,
    FarRun,
    RayRun,
    SlurmRun,
    StruckRun,
    Witness,
    draw,
    make_world,
    strike,
)
from tests.integration.world import World

pytestmark = [pytest.mark.slow, pytest.mark.multirank]
ELSEWHERE = {"far": FarRun, "ray": RayRun, "slurm": SlurmRun}
"""Runs whose replicas are in another network."""
NUM_CASES = int(os.environ.get("MOPD_WEIGHT_KILLS", "0"))
PARTS = os.environ.get("MOPD_WEIGHT_KILLS_PARTS", "one two far ray slurm vllm lora").split()
FEW = [Case(does="kill", phase="flight"), Case(does="flip", phase="bucket"), Case(does="term", phase="bucket")]
"""Of a run with one rank, in ``make test``: it starts once."""
ENDING_STEPS = 4
ENGINE = {
    "type": "vllm",
    "dtype": "float32",
    "kv_cache_memory_bytes": 32 * 2**20,
    "max_num_batched_tokens": 512,
    "max_num_seqs": 32,
    "enforce_eager": True,
}


@pytest.fixture(scope="module")
def small_world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("world"))


def play(run: StruckRun, cases: list[Case], chance: random.Random) -> None:
    """One after another; a run that has ended goes on."""
    witness = Witness(run)
    for number, case in enumerate(cases):
        if run.is_alive and max(run.deaths.values(), default=0) >= run.most_deaths - 1:
            strike(run, Case(does="term", phase="after"), 1000 + number, chance)
        if not run.is_alive:
            run.start(*run.flags)
        goal = run.num_steps + chance.randint(2, 4)
        run.wait_until(lambda goal=goal: run.num_steps >= goal, f"step {goal}")
        before = run.num_steps
        print(json.dumps(strike(run, case, number, chance)), flush=True)
        witness.look(before)
    if run.is_alive:
        strike(run, Case(does="term", phase="after"), 2000, chance)
    steps = complete_steps(run.path / "checkpoints")[-1]
    if cases[-1].does != "term":
        steps += ENDING_STEPS
        run.start("--resume", f"schedule.steps={steps}")
        assert run.end() == 0, run.stderr
    witness.look(0)
    witness.close()
    check_accounts(run, steps=steps)
    print(json.dumps({"tokens": witness.num_tokens, "worst": witness.worst}), flush=True)


def shared_out(cases: list[Case], chance: random.Random) -> dict[str, tuple[list[Case], dict[str, Any]]]:
    """The cases of each run, with its options: half of them go to one whose replicas are in another network."""
    plain = [case for case in cases if not case.rank]
    two_ranks = {
        "parallel": chance.choice(("tensor", "pipeline")),
        "schedule__max_staleness": 1,
        "rollout__on_new_weights": "finish",
    }
    shares: dict[str, tuple[list[Case], dict[str, Any]]] = {
        "one": (plain[0::4], {}),
        "two": (plain[1::4] + [case for case in cases if case.rank], two_ranks),
        "far": ([*plain[2::4], *plain[3::4], WALL], {"parallel": chance.choice((None, "tensor", "pipeline"))}),
    }
    if not can_make_networks():
        print("needs root, ip and iptables, to make networks: no replica is in another one", flush=True)
        shares["one"][0].extend(case for case in shares.pop("far")[0] if case != WALL)
    else:
        if importlib.util.find_spec("ray"):
            shares["ray"] = (list(NODES), {})
        if not slurm.why_not():
            shares["slurm"] = (list(NODES), {})
    shares["lora"] = (plain, {"student__lora": ADAPTERS, "student__optimizer": {"lr": 1e-2}})
    if importlib.util.find_spec("vllm"):
        one = {"num_replicas": 1, "patience": 4.0, "rollout__engine": {**ENGINE, "tensor_parallel_size": 2}}
        shares["vllm"] = (list(VLLM), one)
    return {name: share for name, share in shares.items() if share[0] and name in PARTS}


def test_struck_updates(small_world: World, tmp_path: Path) -> None:
    chance = random.Random(seed_of("MOPD_WEIGHT_KILLS_SEED", is_new=NUM_CASES > 0))
    shares = shared_out(draw(NUM_CASES, chance), chance) if NUM_CASES else {"one": (FEW, {})}
    for name, (cases, options) in shares.items():
        with contextlib.ExitStack() as stack:
            if name in ELSEWHERE:
                run: StruckRun = ELSEWHERE[name](
                    small_world, tmp_path / name, stack.enter_context(two_networks()), **options
                )
            else:
                run = StruckRun(small_world, tmp_path / name, **options)
            stack.callback(run.close)
            play(run, cases, chance)
        left = [path for path in run.shared if path.exists()]
        assert not [path for path in left if not path.name.startswith("vllm_dist_")], left  # which vLLM leaves on a CPU
