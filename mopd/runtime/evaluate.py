"""``mopd eval``: validation rewards of a Hugging Face folder or of a checkpoint of a run."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from mopd.config.load import Loaded
from mopd.config.schema import Recipe
from mopd.data_plane.local import LocalDataPlane
from mopd.engines.torch_engine import TorchEngine
from mopd.rollout.validation import ValidationResult
from mopd.runtime.failure import rank_and_world_size
from mopd.runtime.ranks import CommandChannel, StudentGroup, serve
from mopd.runtime.validation import Validator
from mopd.runtime.workers import Inputs, build_validator, read_inputs
from mopd.student import parallel
from mopd.student.worker import StudentWorker
from mopd.weight_sync.in_process import InProcessWeightSync


def evaluate(loaded: Loaded, *, model: Path | None, as_json: bool) -> None:
    """Validate ``model`` (checkpoint or Hugging Face folder; ``None``: ``student.model``) and print the rewards.

    A checkpoint needs all ranks to be read; for a Hugging Face folder rank 0 works alone.

    Raises:
        UserError: a file cannot be used.
    """
    recipe = loaded.recipe
    is_checkpoint = model is not None and not (model / "config.json").is_file()
    is_leader = rank_and_world_size()[0] == 0
    inputs = read_inputs(recipe) if is_leader else None
    if not is_checkpoint:
        if inputs is not None:
            folder = recipe.student.model if model is None else str(model)
            engine = TorchEngine.from_pretrained(
                folder, recipe.rollout.engine, torch.device("cuda" if torch.cuda.is_available() else "cpu")
            )
            _print(asyncio.run(_validator(loaded, inputs).run(engine)), title=folder, as_json=as_json)
        return
    assert model is not None
    generator = _read_checkpoint(recipe, model, is_leader=is_leader)
    if generator is not None and inputs is not None:
        _print(asyncio.run(_validator(loaded, inputs).run(generator)), title=str(model), as_json=as_json)


def _read_checkpoint(recipe: Recipe, folder: Path, *, is_leader: bool) -> TorchEngine | None:
    """All ranks read their shards; the leader gets an engine with the whole student, the others ``None``."""
    timeout_s = recipe.schedule.wait_timeout_s
    with parallel.joined(recipe.student.parallel, timeout_s=timeout_s, seed=recipe.seed) as layout:
        worker = StudentWorker(recipe, LocalDataPlane(layout.control_group), sorted(recipe.teacher_by_domain))
        channel = CommandChannel(layout.control_group)
        if not is_leader:
            serve(worker, channel)
            return None
        generator = TorchEngine.empty(recipe.student.model, recipe.rollout.engine, layout.device)
        student = StudentGroup(worker, channel, InProcessWeightSync([generator]))
        step = int(student.load(folder)["step"])
        asyncio.run(student.publish(step))
        student.stop()
        return generator


def _validator(loaded: Loaded, inputs: Inputs) -> Validator:
    validator = build_validator(loaded.recipe, inputs, None)
    assert validator is not None, "the command line refuses a recipe without validation"
    return validator


def _print(result: ValidationResult, *, title: str, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"rewards": result.rewards, "num_samples": result.num_samples}, indent=2, ensure_ascii=False))
        return
    table = Table("domain", "reward", "samples", "truncated", title=title)
    for domain, reward in result.rewards.items():
        share = result.truncated_share[domain]
        table.add_row(domain, f"{reward:.3f}", str(result.num_samples[domain]), f"{share:.0%}")
    Console().print(table)
