"""Validation rewards of a Hugging Face folder, or of a checkpoint of a run, with the recipe's rollout group."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

from rich.table import Table
from torch import Tensor

from mopd.base.text import json_lines
from mopd.base.types import UserError
from mopd.config.groups import TorchEngineConfig
from mopd.config.placements import InProcessConfig
from mopd.config.schema import Recipe
from mopd.conversion.hf.reader import HfReader
from mopd.data_plane.local import LocalDataPlane
from mopd.engines.replicas.interface import SampleFailed
from mopd.engines.replicas.router import Router
from mopd.engines.torch.engine import TorchEngine
from mopd.engines.torch.loading import read_config
from mopd.launch.failure import rank_0_host
from mopd.orchestrator.leading import Orchestrator, engine_device, join
from mopd.orchestrator.ranks import Ranks
from mopd.orchestrator.student import StudentGroup
from mopd.orchestrator.validation import ValidationResult, Validator
from mopd.orchestrator.weights.sync import GroupWeightSync
from mopd.orchestrator.workers import Inputs, build_routers, build_validator, read_inputs
from mopd.placement.gpus import without_sharing
from mopd.placement.groups import Groups
from mopd.placement.interface import ROLLOUT
from mopd.report.intervals import mean_interval, show_interval
from mopd.report.terminal import Terminal


def evaluate(orchestrator: Orchestrator, *, model: str | None, checkpoint: str | None, as_json: bool) -> str | None:
    """Validate a ``checkpoint`` of a run or the Hugging Face folder ``model`` (both ``None``: ``student.model``), and
    print the result.

    A checkpoint needs all ranks to be read; for a Hugging Face folder this process works alone. Which of the two it is
    does not depend on what a rank finds on its disk: the ranks of one node would wait for those of another.

    Raises:
        UserError: a file cannot be used.
    """
    recipe = orchestrator.loaded.recipe
    inputs = read_inputs(recipe)
    validator = build_validator(recipe, inputs)
    assert validator is not None, "the command line refuses a recipe without validation"
    folder = Path(checkpoint or model or recipe.student.model)

    async def work(ranks: Ranks) -> ValidationResult:
        async with orchestrator.reporting():
            if checkpoint is not None:
                return await _evaluate_checkpoint(recipe, inputs, validator, folder, ranks)
            return await _evaluate_folder(recipe, validator, folder)

    result = orchestrator.run(work)
    print_result(result, title=str(folder), as_json=as_json)
    return None


async def _evaluate_folder(recipe: Recipe, validator: Validator, folder: Path) -> ValidationResult:
    """Validate with the recipe's rollout group as it would sample from that folder."""
    rollout = recipe.rollout
    if isinstance(rollout.engine, TorchEngineConfig) and isinstance(rollout.placement, InProcessConfig):
        # transformers renames what older checkpoints call otherwise; the other engines take the student's names only.
        engine = TorchEngine.from_pretrained(folder, rollout.engine, engine_device(), max_pixels=recipe.data.max_pixels)
        return await validator.run(engine)

    async def work(router: Router) -> ValidationResult:
        await GroupWeightSync(router).publish(_read_weights(folder), 0)
        return await validator.run(router)

    student = dataclasses.replace(recipe.student, model=str(folder))
    return await _with_rollout(dataclasses.replace(recipe, student=student), work)


async def _evaluate_checkpoint(
    recipe: Recipe, inputs: Inputs, validator: Validator, folder: Path, ranks: Ranks
) -> ValidationResult:
    """Have all ranks read their shards and stream the whole student to the rollout group."""
    plane = LocalDataPlane()  # an evaluation moves no samples
    plane.serve(host=rank_0_host())
    try:
        facts = await join(ranks, list(inputs.train.domain_counts), plane)

        async def work(router: Router) -> ValidationResult:
            student = StudentGroup(recipe, ranks, facts, GroupWeightSync(router))
            step = (await student.load(folder)).get("step")
            if type(step) is not int or step < 0:
                raise UserError(f"--checkpoint: {str(folder)!r} has no step in its state: name a step folder of a run")
            await student.publish(step)
            return await validator.run(router)

        return await _with_rollout(recipe, work)
    finally:
        await plane.close()


async def _with_rollout(
    recipe: Recipe, work: Callable[[Router], Coroutine[Any, Any, ValidationResult]]
) -> ValidationResult:
    """Do ``work`` with the recipe's rollout group, which has no weights yet. Nothing trains beside it, so it shares no
    GPU."""
    async with Groups(without_sharing(recipe), log_dir=None, device=engine_device(), only=(ROLLOUT,)) as groups:
        try:
            return await work(build_routers(groups)[ROLLOUT])
        except SampleFailed as error:
            raise UserError(str(error)) from error


def _read_weights(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield all tensors of a Hugging Face folder; a tied output matrix that is stored all the same is left out."""
    reader = HfReader(folder)
    is_tied = bool(read_config(folder).get_text_config().tie_word_embeddings)
    for name in sorted(reader.names):
        if not (is_tied and name == "lm_head.weight"):
            yield name, reader.read(name)


def print_result(result: ValidationResult, *, title: str, as_json: bool) -> None:
    """Print rewards by domain, as a table or as JSON."""
    intervals = {domain: mean_interval(result.scores.get(domain, [])) for domain in result.rewards}
    if as_json:
        told = {"rewards": result.rewards, "intervals": intervals, "num_samples": result.num_samples}
        print(json_lines(told | ({"pass_at_k": result.pass_at_k} if result.pass_at_k else {})))
        return
    best_of = ("pass@k",) if result.pass_at_k else ()
    table = Table("domain", "reward", "95 %", *best_of, "samples", "truncated", title=title)
    for domain, reward in result.rewards.items():
        share = result.truncated_share[domain]
        best = (f"{result.pass_at_k[domain]:.3f}",) if result.pass_at_k else ()
        interval = show_interval(intervals[domain], "{:.3f}")
        table.add_row(domain, f"{reward:.3f}", interval, *best, str(result.num_samples[domain]), f"{share:.0%}")
    Terminal().print(table)
