"""Samples and scores of a run, kept and trained on again: replayed they give the same numbers to the last bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from mopd.base.files.records import Records
from tests.integration.world import World, mopd, read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.multirank]
STEPS = 4
NEW = ("scores_found_share", "scores_cache_bytes", "stored_share")


@pytest.fixture(scope="module")
def run_dir(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kept") / "run"
    recipe = world.write_recipe(
        folder,
        schedule__steps=STEPS,
        validation__every_steps=STEPS,
        checkpoint={"every_steps": 2, "export_hf": False},
        metrics__keep_samples=True,
        data__scores_cache=str(folder.parent / "scores"),
    )
    done = mopd("train", recipe)
    assert done.returncode == 0, done.stderr
    return folder


def trained(folder: Path) -> list[dict[str, float]]:
    """What the student's steps gave; what the groups of engines counted is left out, as nobody asked them."""
    return [
        {
            name: value
            for name, value in line.items()
            if name not in NEW and name.split("/")[0] not in ("teachers", "rollout")
        }
        for line in read_metrics(folder)
    ]


def test_a_replay_is_the_run_again(run_dir: Path) -> None:
    kept = Records(run_dir.parent / "scores")
    assert len(kept) == 8 * STEPS, "those of the steps alone: the checks before them ask the teachers themselves"
    done = mopd("replay", run_dir)
    assert done.returncode == 0, done.stderr
    again = run_dir.with_name("run-replay-topk_forward_kl")
    assert trained(again) == trained(run_dir)
    assert [(line["scores_found_share"], line["stored_share"]) for line in read_metrics(again)] == [(1.0, 1.0)] * STEPS
    assert all(line["teachers/samples/left"] == 0 for line in read_metrics(again))
    other = mopd("replay", run_dir, "loss.type=topk_reverse_kl", "--steps", "3")
    assert other.returncode == 0, other.stderr
    reverse = read_metrics(run_dir.with_name("run-replay-topk_reverse_kl"))
    first, base = reverse[0], read_metrics(run_dir)[0]
    assert len(reverse) == 3 and first["loss"] != base["loss"] and first["scores_found_share"] == 1.0
    same = [name for name in base if name.startswith(("kl_k1/", "num_tokens/", "response_length/", "teacher_mass/"))]
    assert {name: first[name] for name in same} == {name: base[name] for name in same}, "the same tokens and weights"
    compared = mopd("compare", run_dir, again, "--json")
    assert compared.returncode == 0 and "run-replay-topk_forward_kl" in compared.stdout


@pytest.mark.long
def test_stored_and_fresh_samples_are_mixed_and_a_resumed_run_goes_on_alike(run_dir: Path, world: World) -> None:
    folder = run_dir.with_name("mixed")
    recipe = world.write_recipe(
        folder,
        schedule={"steps": STEPS, "prompts_per_step": 8, "wait_timeout_s": 120, "on_policy_fraction": 0.75},
        validation__every_steps=STEPS,
        checkpoint={"every_steps": 2, "export_hf": False},
        data__scored=[str(run_dir / "samples")],
        data__scores_cache=str(run_dir.parent / "scores"),
    )
    done = mopd("train", recipe)
    assert done.returncode == 0, done.stderr
    lines = read_metrics(folder)
    assert [line["stored_share"] for line in lines] == [0.25] * STEPS
    assert all(0.25 <= line["scores_found_share"] < 1 for line in lines[1:])
    again = mopd("train", recipe, "--resume", "--from", "step_2")
    assert again.returncode == 0, again.stderr
    assert trained(folder) == [{k: line[k] for k in now} for now, line in zip(trained(folder), lines, strict=True)]
    assert len(read_metrics(folder)) == STEPS


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--steps", "9"], f"does not hold the samples of step {STEPS + 1} of 9: set --steps {STEPS}"),
        (["loss.type=policy_gradient"], "data.scored names samples of other weights, but loss.type 'policy_gradient'"),
    ],
)
def test_what_cannot_be_replayed_is_one_line(run_dir: Path, arguments: list[str], line: str) -> None:
    done = mopd("replay", run_dir, *arguments)
    assert done.returncode == 2 and line in done.stderr.splitlines()[-1], done.stderr


def test_a_run_that_kept_nothing_cannot_be_replayed(run_dir: Path) -> None:
    bare = run_dir.with_name("bare")
    bare.mkdir()
    (bare / "recipe.yaml").write_text((run_dir / "recipe.yaml").read_text())
    done = mopd("replay", bare)
    lines = done.stderr.splitlines()
    assert done.returncode == 2 and len(lines) == 1 and "train a run with metrics.keep_samples: true" in lines[0]
