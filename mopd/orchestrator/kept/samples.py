"""Samples on disk: what a run has trained on, or what was made of texts, to train on again.

Two records for each step of a run (for each part of the texts): ``meta/STEP`` holds domains and lengths, ``rows/STEP``
the tokens end to end, and what else there is for each response token. Scores are not among them: the teachers give
those, or ``data.scores_cache``. Shapes: N samples of a step, L tokens of one, R response tokens of one.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mopd.base.files.json_text import parse_json
from mopd.base.files.reading import shown_path
from mopd.base.files.records import Records
from mopd.base.types import Batch, Prompt, SampleMeta, UserError
from mopd.config.losses import REWARDED, FullLossConfig, TopKLossConfig
from mopd.config.schema import Recipe
from mopd.conversion.hf.manifest import Manifest
from mopd.data.image_processing import check_image_keys, sees_images
from mopd.data_plane.interface import Storage
from mopd.orchestrator.rollout import repeated_share

OF_TEXTS = "texts"
"""What stands for the sampling of responses that nobody has drawn here: they have no ``rollout_logprobs``."""
CONTENT = "samples"
META = re.compile(rb"meta/\d{12}")
DTYPES = {
    "tokens": torch.int64, "loss_mask": torch.bool, "rollout_logprobs": torch.float32, "task_advantage": torch.float32
}  # fmt: skip
CURES = {
    "tokenizer_sha256": "their ids mean other tokens; name samples of this student's tokenizer",
    "samples_per_prompt": "set rollout.samples_per_prompt as the run had it",
    "sampling": "a loss of the sampled token needs the log-probs that its tokens were drawn with; set rollout's "
    "temperature, cuts and penalties as the run had them, or a divergence without task_reward_weight",
    "task_advantage": "set loss.task_advantage as the run had it, or task_reward_weight: 0",
}
"""What is compared between stored samples and the recipe -> the cure of a difference."""


def about_samples(recipe: Recipe, student: Manifest, *, sampling: str | None = None) -> dict[str, str]:
    """Return what a reader must know of samples that this recipe makes."""
    check_image_keys(sees=sees_images(recipe.student.model), is_stored=True)
    rollout, loss = recipe.rollout, recipe.loss
    drawn = f"temperature {rollout.temperature}, {rollout.biased or 'top_p 1.0, top_k -1'}"
    has_advantage = sampling is None and recipe.needs_task_advantage
    return {
        "content": CONTENT,
        "tokenizer_sha256": student.tokenizer_sha256,
        "samples_per_prompt": str(rollout.samples_per_prompt),
        "sampling": drawn if sampling is None else sampling,
        "task_advantage": loss.task_advantage if has_advantage and isinstance(loss, REWARDED) else "none",
    }


def write_samples(
    records: Records, number: int, metas: Sequence[SampleMeta], fields: Mapping[str, Sequence[Tensor]]
) -> None:
    """Write the samples of one step; those of a former life of the run, which did the step before, are read no more.

    Raises:
        UserError: the system refuses (a full disk).
    """
    lengths = [[meta.length, meta.prompt_length, meta.truncated] for meta in metas]
    domains = json.dumps([meta.domain for meta in metas]).encode()
    rows: dict[str, np.ndarray] = {
        name: torch.cat([*own]).cpu().to(DTYPES[name]).numpy() for name, own in fields.items()
    }
    rows["tokens"] = rows["tokens"].astype(np.int32)
    records.append(b"rows/%012d" % number, rows)
    shape: dict[str, np.ndarray] = {"lengths": np.array(lengths, np.int32), "domains": np.frombuffer(domains, np.uint8)}
    records.append(b"meta/%012d" % number, shape)


class SampleKeeper:
    """Writes every sample that is trained on into the run folder (``metrics.keep_samples``)."""

    def __init__(self, folder: Path, recipe: Recipe, student: Manifest, plane: Storage) -> None:
        """Raises ``UserError`` if the folder holds samples of another kind."""
        self._records, self._plane = Records(folder, about_samples(recipe, student)), plane
        self._fields = [name for name in DTYPES if name in recipe.loss_fields(1)]

    async def keep(self, step: int, batch: Batch) -> None:
        """Write a batch that is in the data plane. ``UserError`` where the system refuses."""
        fields = await self._plane.get(batch.sample_ids, self._fields)
        await asyncio.to_thread(write_samples, self._records, step, batch.samples, fields)


Sample = tuple[SampleMeta, dict[str, Tensor]]
"""A stored sample, with an id and a version that mean nothing, and its fields."""


class StoredSamples:
    """Samples of the folders of ``data.scored``, in the order in which they were trained on, folder after folder."""

    def __init__(self, folders: Sequence[str | Path], *, samples_per_prompt: int) -> None:
        """Read where every sample lies.

        Raises:
            UserError: a folder has none, or what it holds is damaged, or no samples.
        """
        self.abouts: dict[str, dict[str, str]] = {}
        """What each folder says of its samples, by its name for a message."""
        self.domains: list[str] = []
        """Domain of each prompt."""
        self.num_steps = 0
        self._per_prompt = samples_per_prompt
        self._places: list[tuple[Records, int, int]] = []
        """Each prompt's folder, its step, and the place of its first sample there."""
        self._newest: tuple[Records, int, list[Sample]] | None = None
        """The step that was read last, of which the next prompt mostly is."""
        for folder in folders:
            records = Records(folder)
            numbers = steps_of(records)
            if records.about.get("content") != CONTENT or not numbers:
                raise UserError(
                    f"data.scored: {shown_path(folder)} holds no samples: name the folder samples of a run with "
                    "metrics.keep_samples, or what mopd score has made of texts"
                )
            self.abouts[f"data.scored: {shown_path(folder)}"] = records.about
            self.num_steps += len(numbers)
            for number in numbers:
                domains, _ = _read_meta(records, number)
                if len(domains) % samples_per_prompt:
                    raise _damaged(records, number)
                self._places += [(records, number, i) for i in range(0, len(domains), samples_per_prompt)]
                self.domains += domains[::samples_per_prompt]

    def read(self, prompt: int) -> list[Sample]:
        """Return the samples of one prompt.

        Their fields are ``tokens`` [L] int64, ``loss_mask`` [R] bool, and [R] fp32 ``rollout_logprobs``, NaN where
        nobody has drawn the response here, and ``task_advantage`` if it is kept. ``UserError`` for a damaged record.
        """
        records, number, index = self._places[prompt]
        if self._newest is None or self._newest[:2] != (records, number):
            self._newest = (records, number, _read_step(records, number))
        return self._newest[2][index : index + self._per_prompt]


def steps_of(records: Records) -> list[int]:
    """Return the steps whose samples a folder holds, ascending."""
    keys = records.keys()
    return [int(key[5:]) for key in keys if META.fullmatch(key)]


def _read_meta(records: Records, number: int) -> tuple[list[str], list[list[int]]]:
    """Return domain, and length, prompt's length and whether it was cut off, of each sample of a step."""
    arrays = records.get(b"meta/%012d" % number) or {}
    try:
        domains = parse_json(arrays["domains"].tobytes())
        lengths = arrays["lengths"].tolist()
        is_sound = len(domains) == len(lengths) and all(isinstance(domain, str) for domain in domains)
        is_sound = is_sound and all(0 < start <= length for length, start, _ in lengths)
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(records, number) from error
    if not is_sound:
        raise _damaged(records, number)
    return domains, lengths


def _read_step(records: Records, number: int) -> list[Sample]:
    domains, lengths = _read_meta(records, number)
    rows = {name: torch.from_numpy(array) for name, array in (records.get(b"rows/%012d" % number) or {}).items()}
    responses = [length - start for length, start, _ in lengths]
    rows.setdefault("rollout_logprobs", torch.full((sum(responses),), math.nan))
    try:
        fields = {
            name: own.to(DTYPES[name]).split([length for length, *_ in lengths] if name == "tokens" else responses)
            for name, own in rows.items()
        }
        parts = [dict(zip(fields, own, strict=True)) for own in zip(*fields.values(), strict=True)]
        return [(_meta(domain, sizes, own), own) for domain, sizes, own in zip(domains, lengths, parts, strict=True)]
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise _damaged(records, number) from error


def _meta(domain: str, sizes: Sequence[int], fields: Mapping[str, Tensor]) -> SampleMeta:
    length, prompt_length, truncated = sizes
    return SampleMeta(
        sample_id=0,
        domain=domain,
        weight_version=0,
        prompt_length=prompt_length,
        response_length=length - prompt_length,
        num_loss_tokens=int(fields["loss_mask"].sum()),
        truncated=bool(truncated),
        repeated_share=repeated_share(fields["tokens"][prompt_length:]),
    )


def _damaged(records: Records, number: int) -> UserError:
    return UserError(f"{shown_path(records.folder)}: the samples of step {number} are not what mopd writes: remove it")


def open_stored(recipe: Recipe, student: Manifest) -> StoredSamples | None:
    """Open the folders of ``data.scored``; ``None`` without any.

    Raises:
        UserError: a folder holds no samples, or samples that this recipe cannot train on.
    """
    if not (recipe.data.scored or recipe.metrics.keep_samples):
        return None
    own = about_samples(recipe, student)  # refuses what cannot be kept before any engine is started
    if not recipe.data.scored:
        return None
    compared = ["tokenizer_sha256", "samples_per_prompt"]
    is_dense = isinstance(recipe.loss, (TopKLossConfig, FullLossConfig)) and not recipe.needs_task_advantage
    compared += [] if is_dense else ["sampling"]
    compared += ["task_advantage"] if recipe.needs_task_advantage else []
    stored = StoredSamples(recipe.data.scored, samples_per_prompt=recipe.rollout.samples_per_prompt)
    for shown, about in stored.abouts.items():
        for name in compared:
            there, here = about.get(name), own[name]
            if there != here:
                raise UserError(
                    f"{shown}: {name} of its samples is {there!r:.80}, and {here!r:.80} here: {CURES[name]}"
                )
    return stored


class StoredWorker:
    """Puts stored samples where the rollout would put those that it draws."""

    def __init__(self, stored: StoredSamples, plane: Storage, fields: Sequence[str]) -> None:
        """``fields``: those that the loss needs."""
        self._stored, self._plane = stored, plane
        self._fields = [name for name in DTYPES if name in fields]

    async def load(self, prompts: Sequence[Prompt], weight_version: int) -> list[SampleMeta]:
        """Put the samples of some prompts into the data plane, prompt after prompt, and return them.

        Their ages count from ``weight_version``: they wait no longer than others, and what their tokens are off-policy
        is the matter of ``loss.correction``.
        """
        found = await asyncio.to_thread(lambda: [self._stored.read(prompt.row) for prompt in prompts])
        metas, samples = [], [own for samples in found for _, own in samples]
        for prompt, own in zip(prompts, found, strict=True):
            first = prompt.sample_id * len(own)
            metas += [
                replace(meta, sample_id=first + j, weight_version=weight_version) for j, (meta, _) in enumerate(own)
            ]
        await self._plane.put(metas, {name: [own[name] for own in samples] for name in self._fields})
        return metas
