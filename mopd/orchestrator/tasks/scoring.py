"""``mopd score``: teachers' scores of stored responses, without a student, for runs that will read them.

The teachers are started as a run starts them, and held against their folders before anything is kept. What the cache
holds already is not asked again, so a command that was cut off goes on where it was.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from mopd.base.files.reading import shown_path
from mopd.base.files.records import Records
from mopd.base.files.writing import writing
from mopd.base.types import LOSS_FIELDS, Prompt, SampleMeta, UserError
from mopd.config.data import ColumnsConfig, DataFileConfig
from mopd.config.payloads import always_ids_of, token_ids
from mopd.config.schema import Recipe
from mopd.conversion.hf.manifest import Manifest
from mopd.conversion.models.reading import read_dims
from mopd.data.prompts import PromptRow, load_prompts
from mopd.data.tokenizer import compare_tokenizers, load_tokenizer
from mopd.data_plane.local import LocalDataPlane
from mopd.engines.replicas.identity import Needs, problems_of
from mopd.engines.replicas.interface import info_of
from mopd.orchestrator.kept.samples import (
    OF_TEXTS,
    StoredSamples,
    StoredWorker,
    about_samples,
    open_stored,
    write_samples,
)
from mopd.orchestrator.kept.scores import open_score_cache
from mopd.orchestrator.leading import engine_device
from mopd.orchestrator.preflight.checks import NUM_PROBE_SAMPLES
from mopd.orchestrator.preflight.scores import ScoresCheck
from mopd.orchestrator.teachers import TeacherGroup, TeacherWorker
from mopd.orchestrator.workers import build_routers, teacher_group, with_guests
from mopd.placement.groups import Groups
from mopd.report.terminal import Terminal
from mopd.run.manifests import make_manifests

PROMPTS_TOGETHER = 256
"""Prompts whose samples are in memory at a time, and texts of one record."""
TEXT_COLUMNS = ColumnsConfig(prompt="prompt", ground_truth="response", domain="domain")


def score(recipe: Recipe, *, texts: Sequence[str]) -> dict[str, Any]:
    """Score the samples of ``data.scored``, made of ``texts`` if there are any, and return what was done.

    Raises:
        UserError: the recipe names no folder to read or to write, samples or teachers are not what it says.
    """
    if recipe.data.scores_cache is None:
        raise UserError("mopd score writes into data.scores_cache, which is absent: name a folder there")
    manifests = make_manifests(recipe)
    if texts:
        write_texts(recipe, manifests["student"], texts)
    stored = open_stored(recipe, manifests["student"])
    if stored is None:
        raise UserError("mopd score reads data.scored, which is empty: name folders of samples there")
    return asyncio.run(_score(recipe, stored, manifests))


def write_texts(recipe: Recipe, student: Manifest, files: Sequence[str]) -> None:
    """Make samples of the rows of some files, with columns ``prompt``, ``response`` and ``domain``, in a random order.

    A response ends with the tokenizer's stop token, or is cut off at ``rollout.max_response_length``.

    Raises:
        UserError: a file cannot be used, or the folder of ``data.scored`` is not one empty one.
    """
    tokenizer, folders = load_tokenizer(recipe.student.model), recipe.data.scored
    if len(folders) != 1 or recipe.rollout.samples_per_prompt != 1:
        raise UserError(
            f"--texts makes one folder of samples with one response to each prompt, but data.scored names "
            f"{len(folders)} folders and rollout.samples_per_prompt is {recipe.rollout.samples_per_prompt}: name one, "
            "and set 1"
        )
    folder = Path(folders[0])
    if folder.is_dir() and any(folder.iterdir()):
        raise UserError(f"--texts: {shown_path(folder)} (data.scored) is not empty: leave --texts out, or name another")
    entries = tuple(DataFileConfig(path=file, columns=TEXT_COLUMNS) for file in files)
    dataset = load_prompts(entries, replace(recipe.data, train=entries), tokenizer)
    order = np.random.default_rng(abs(recipe.seed)).permutation(len(dataset))
    samples = [_sample_of(dataset.row(int(row)), tokenizer, recipe.rollout.max_response_length) for row in order]
    partial = folder.with_name(f".{folder.name}.partial")
    with writing(folder):
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    records = Records(partial, about_samples(recipe, student, sampling=OF_TEXTS))
    for number, start in enumerate(range(0, len(samples), PROMPTS_TOGETHER), start=1):
        part = samples[start : start + PROMPTS_TOGETHER]
        masks = [torch.ones(meta.response_length, dtype=torch.bool) for meta, _ in part]
        fields = {"tokens": [torch.tensor(tokens) for _, tokens in part], "loss_mask": masks}
        write_samples(records, number, [meta for meta, _ in part], fields)
    with writing(folder):
        partial.replace(folder)  # whole or absent, wherever this is cut off


def _sample_of(row: PromptRow, tokenizer: Any, longest: int) -> tuple[SampleMeta, list[int]]:
    if not isinstance(row.ground_truth, str) or not row.ground_truth:
        raise UserError(f"{row.place}: column 'response' holds no text: write one there, or remove the row")
    whole = [*tokenizer(row.ground_truth, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    response = whole[:longest]
    meta = SampleMeta(
        sample_id=0,
        domain=row.domain,
        weight_version=0,
        prompt_length=len(row.tokens),
        response_length=len(response),
        num_loss_tokens=len(response),
        truncated=len(whole) > longest,
    )
    return meta, [*row.tokens, *response]


async def _score(recipe: Recipe, stored: StoredSamples, manifests: dict[str, Manifest]) -> dict[str, Any]:
    keys = [f"teachers.{name}" for name in recipe.teachers]
    prompts = [Prompt(sample_id=i, domain=domain, row=i) for i, domain in enumerate(stored.domains)]
    for domain in dict.fromkeys(stored.domains):
        recipe.assignment.teachers_of(domain)
    _require_one_tokenizer(recipe)
    async with Groups(recipe, log_dir=None, device=engine_device(), only=keys) as groups:
        routers = build_routers(groups)
        groups.watch(routers, {})
        plane = LocalDataPlane()
        teachers = {name: await teacher_group(name, routers, groups) for name in recipe.teachers}
        always_ids = token_ids(
            always_ids_of(recipe.loss), load_tokenizer(recipe.student.model).get_vocab(), "loss.always_ids"
        )
        options: dict[str, Any] = {"asked": recipe.asked, "temperature": recipe.loss.temperature}
        worker = TeacherWorker(teachers, recipe.assignment, plane, always_ids=always_ids, **options)
        load = StoredWorker(stored, plane, LOSS_FIELDS)
        for name, group in teachers.items():
            dtype = await _require_right_model(recipe, group, manifests[f"teachers.{name}"])
            own = [p for p in prompts if name in recipe.assignment.teachers_of(p.domain)][:NUM_PROBE_SAMPLES]
            if own:
                metas = await load.load(own, 0)
                await worker.score(metas, keeps_all=True)
                check = await ScoresCheck(recipe, group, plane, None, dtype).judge(metas)
                await plane.discard([meta.sample_id for meta in metas])
                if check.status == "failed":
                    raise UserError(check.detail)
        worker.cache = cache = await open_score_cache(recipe, with_guests(routers, groups), manifests)
        assert cache is not None, "score() has looked"
        begin_s, num_tokens = time.perf_counter(), 0
        console = Terminal(stderr=True)
        columns = (TextColumn("scored"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
            task = bar.add_task("", total=len(prompts))
            for start in range(0, len(prompts), PROMPTS_TOGETHER):
                part = prompts[start : start + PROMPTS_TOGETHER]
                metas = await load.load(part, 0)
                await worker.score(metas)
                await plane.discard([meta.sample_id for meta in metas])
                num_tokens += sum(meta.response_length for meta in metas)
                bar.update(task, advance=len(part))
    wall_s = time.perf_counter() - begin_s
    counts = {"prompts": len(prompts), "response_tokens": num_tokens, "wall_s": wall_s}
    return {**counts, "scores_cache": recipe.data.scores_cache, **cache.take_numbers()}


def _require_one_tokenizer(recipe: Recipe) -> None:
    """Raise ``UserError`` for a teacher to whom the student's ids mean other tokens."""
    model = recipe.student.model
    own, vocab_size = load_tokenizer(model), read_dims(Path(model)).vocab_size
    for name, teacher in recipe.teachers.items():
        if teacher.tokenizer == "own":
            raise UserError(f"teachers.{name}.tokenizer is own, and kept scores are of the student's tokens: remove it")
        differences = compare_tokenizers(own, load_tokenizer(teacher.model), vocab_size)
        if differences:
            raise UserError(
                f"teachers.{name}.model {teacher.model} and student.model {model} do not share a tokenizer: "
                f"{'; '.join(differences)}; choose a teacher with the student's tokenizer"
            )


async def _require_right_model(recipe: Recipe, group: TeacherGroup, manifest: Manifest) -> str:
    """Return the dtype of a teacher's engine. Raise ``UserError`` unless each replica is the recipe's model."""
    key = f"teachers.{group.name}"
    needs = Needs.of(recipe, group.name)
    for replica in group.router.replicas:
        info = await info_of(replica)
        problems = "; ".join(problems_of(info, manifest, needs, key=key, is_rollout=False))
        if problems:
            raise UserError(f"{problems} (replica {replica.name}): start that server with {key}.model")
    return info.dtype
