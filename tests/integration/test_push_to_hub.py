"""A run whose exported folders go to a Hub of the tests' own, which takes none of them in the run's first life."""

from __future__ import annotations

import json
from pathlib import Path

from tests.fixtures.hub import LoopbackHub, hub_environment, loopback_hub
from tests.integration.world import World, start_mopd

TOKEN = "hf_a_token_of_the_tests"
REPOSITORY = "models/me/student"


def train(hub: LoopbackHub, world: World, run_dir: Path, *options: str, steps: int) -> str:
    """Run to the end of ``steps``; what was printed."""
    recipe = world.write_recipe(
        run_dir,
        schedule__steps=steps,
        student__optimizer={"lr": 2.0e-3},
        checkpoint__export_hf_every_steps=2,
        checkpoint__push_to_hub={"repo": "me/student"},
    )
    variables = hub_environment(hub, run_dir.parent / "home") | {"HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1"}
    process = start_mopd("train", recipe, *options, **variables)
    printed = "".join(process.communicate(timeout=120))
    assert process.returncode == 0, printed
    return printed


def test_what_the_hub_did_not_take_goes_there_in_the_runs_next_life(world: World, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with loopback_hub() as hub:
        hub.num_refused = 1000
        printed = train(hub, world, run_dir, steps=2)
        assert "folders are not on the Hub: hf upload me/student FOLDER" in printed
        assert hub.repositories[REPOSITORY].private and not hub.repositories[REPOSITORY].messages
        hub.num_refused = 0
        printed = train(hub, world, run_dir, "--resume", steps=4)
        assert "not on the Hub" not in printed
    repository = hub.repositories[REPOSITORY]
    assert list(repository.messages.values()) == ["step 2", "step 4", "the result"]
    assert hub.tokens == {f"Bearer {TOKEN}"}
    steps = sorted((run_dir / "hf_steps").iterdir())
    commits = json.loads((run_dir / "pushed.json").read_text())
    for folder in (*steps, run_dir / "hf"):
        uploaded = repository.commits[commits[folder.name]]
        files = {path.name: path.read_bytes() for path in folder.iterdir()}
        assert files.items() <= uploaded.items() and "model.safetensors" in files
    written = [path for path in run_dir.rglob("*") if path.is_file()]
    assert not [path for path in written if TOKEN.encode() in path.read_bytes()]


def test_a_name_that_is_taken_ends_the_run_before_its_first_step(world: World, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    recipe = world.write_recipe(run_dir, checkpoint__push_to_hub={"repo": "me/student"})
    with loopback_hub() as hub:
        hub.add(REPOSITORY, {"config.json": b"{}"})
        variables = hub_environment(hub, tmp_path / "home") | {"HF_TOKEN": TOKEN}
        process = start_mopd("train", recipe, **variables)
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 2
    assert "me/student is there and public" in errors.splitlines()[-1]
    assert not run_dir.exists()
