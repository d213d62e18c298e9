"""Validation rewards of a Hugging Face folder, or of a checkpoint of a run, with the recipe's rollout group."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mopd.config.data import LocalPlaneConfig
from mopd.config.groups import TorchEngineConfig
from mopd.config.load import Loaded
from mopd.config.placements import InProcessConfig, LocalConfig
from mopd.config.schema import Recipe
from mopd.conversion.hf.reader import HfReader
from mopd.engines.torch.engine import TorchEngine
from mopd.engines.torch.loading import read_config
from mopd.launch.failure import rank_and_world_size
from mopd.launch.ranks import StudentGroup, serve
from mopd.placement.groups import Groups
from mopd.placement.interface import ROLLOUT
from mopd.placement.weights import GroupWeightSync
from mopd.replicas.interface import SampleFailed
from mopd.replicas.router import Router
from mopd.run.leading import Opened, joined, opened_plane
from mopd.run.validation import ValidationResult, Validator
from mopd.run.workers import Inputs, build_routers, build_validator, read_inputs
from mopd.types import UserError


def evaluate(loaded: Loaded, model: Path | None, checkpoint: Path | None = None) -> ValidationResult | None:
    """Validate a ``checkpoint`` of a run or the Hugging Face folder ``model`` (both ``None``: ``student.model``); the
    result on rank 0.

    A checkpoint needs all ranks to be read; for a Hugging Face folder rank 0 works alone. Which of the two it is does
    not depend on what a rank finds on its disk: the ranks of one node would wait for those of another.

    Raises:
        UserError: a file cannot be used.
    """
    inputs = read_inputs(loaded.recipe) if rank_and_world_size()[0] == 0 else None
    if checkpoint is not None:
        return _evaluate_checkpoint(loaded, inputs, checkpoint)
    if inputs is None:
        return None
    folder = loaded.recipe.student.model if model is None else str(model)
    return asyncio.run(_evaluate_folder(loaded, inputs, folder))


async def _evaluate_folder(loaded: Loaded, inputs: Inputs, folder: str) -> ValidationResult:
    """With the recipe's rollout group as it would sample from that folder."""
    recipe, validator = loaded.recipe, _validator(loaded, inputs)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rollout = recipe.rollout
    if isinstance(rollout.engine, TorchEngineConfig) and isinstance(rollout.placement, InProcessConfig):
        # transformers renames what older checkpoints call otherwise; the other engines take the student's names only.
        engine = TorchEngine.from_pretrained(folder, rollout.engine, device, max_pixels=recipe.data.max_pixels)
        return await validator.run(engine)

    async def work(router: Router) -> ValidationResult:
        await GroupWeightSync(router).publish(_read_weights(Path(folder)), 0)
        return await validator.run(router)

    student = dataclasses.replace(recipe.student, model=folder)
    return await _with_rollout(dataclasses.replace(recipe, student=student), device, work)


def _evaluate_checkpoint(loaded: Loaded, inputs: Inputs | None, folder: Path) -> ValidationResult | None:
    """All ranks read their shards and stream the whole student to the leader's rollout group."""
    recipe = loaded.recipe
    if inputs is None:
        with joined(recipe, None) as (worker, channel):
            serve(worker, channel)
        return None
    validator = _validator(loaded, inputs)
    # An evaluation moves no samples: its data plane stays this process's.
    local = dataclasses.replace(recipe, data_plane=LocalPlaneConfig())
    with opened_plane(local) as (plane, reader):
        opened = Opened(list(inputs.train.domain_counts), plane.address, reader)
        with joined(recipe, opened) as (worker, channel):

            async def work(router: Router) -> ValidationResult:
                student = StudentGroup(worker, channel, GroupWeightSync(router))
                step = (await student.load(folder)).get("step")
                if type(step) is not int or step < 0:
                    raise UserError(
                        f"--checkpoint: {str(folder)!r} has no step in its state: name a step folder of a run"
                    )
                await student.publish(step)
                return await validator.run(router)

            return asyncio.run(_with_rollout(recipe, worker.layout.device, work))


async def _with_rollout(
    recipe: Recipe, device: torch.device, work: Callable[[Router], Coroutine[Any, Any, ValidationResult]]
) -> ValidationResult:
    """``work`` with the recipe's rollout group, which has no weights yet. Nothing trains beside it, so that it shares
    no GPU."""
    if isinstance(recipe.rollout.placement, LocalConfig):
        alone = dataclasses.replace(recipe.rollout.placement, share_gpus_with=None)
        recipe = dataclasses.replace(recipe, rollout=dataclasses.replace(recipe.rollout, placement=alone))
    async with Groups(recipe, log_dir=None, device=device, only=(ROLLOUT,)) as groups:
        try:
            return await work(build_routers(groups)[ROLLOUT])
        except SampleFailed as error:
            raise UserError(str(error)) from error


def _read_weights(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """All tensors of a Hugging Face folder; a tied output matrix that is stored all the same is left out."""
    reader = HfReader(folder)
    is_tied = bool(read_config(folder).get_text_config().tie_word_embeddings)
    for name in sorted(reader.names):
        if not (is_tied and name == "lm_head.weight"):
            yield name, reader.read(name)


def _validator(loaded: Loaded, inputs: Inputs) -> Validator:
    validator = build_validator(loaded.recipe, inputs)
    assert validator is not None, "the command line refuses a recipe without validation"
    return validator
