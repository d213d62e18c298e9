"""Is what a teacher says, through router, wire and engine, what its model says? One look per teacher, before step 1.

The better proof is a transformers forward of the teacher's own folder (``parity``). Where it does not fit into memory,
or the folder holds no weights, the teacher is held against its own greedy continuations (``alignment``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torch import Tensor

from mopd.base.hardware import free_memory_bytes
from mopd.base.text import one_line
from mopd.base.types import PromptImage, SampleMeta
from mopd.config.machine.auto import compares_with_transformers
from mopd.config.schema import Recipe
from mopd.conversion.models.families import FAMILIES
from mopd.data.image_refs import refs_from_tensor
from mopd.data.images import ImageStore
from mopd.engines.interface import EngineInfo
from mopd.engines.replicas.interface import SampleFailed
from mopd.engines.torch.loading import read_config
from mopd.engines.vision import read_sight
from mopd.launch.preparing import weights_bytes
from mopd.orchestrator.preflight.alignment import AlignmentCheck, Text
from mopd.orchestrator.preflight.parity import Parity, Probe, Reference
from mopd.orchestrator.workers import Workers
from mopd.run.manifests import has_own_weights

CURE = "the scores are not this teacher's; check teachers.{name}.engine and placement, or widen {keys}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Judgement:
    """Of one teacher's scores."""

    status: Literal["ok", "failed"]
    detail: str
    parity: Parity | None = None
    """Against its folder, where that was compared and is right."""


class ScoresCheck:
    """Looks at probe samples that are in the data plane, scored."""

    def __init__(self, recipe: Recipe, workers: Workers) -> None:
        self._recipe, self._workers = recipe, workers

    async def judge(self, name: str, samples: Sequence[SampleMeta], info: EngineInfo) -> Judgement:
        """``samples`` are those of the teacher's domains, at least one."""
        teacher = self._recipe.teachers[name]
        compared, why = compares_with_transformers(
            self._recipe.preflight.compare_with_transformers,
            weights_bytes=weights_bytes(Path(teacher.model)) if has_own_weights(teacher) else None,
            free_memory_bytes=free_memory_bytes(),
        )
        if compared:
            return await self._against_folder(name, samples, info.dtype)
        return await self._against_itself(name, samples, info.dtype, why)

    async def _against_folder(self, name: str, samples: Sequence[SampleMeta], dtype: str) -> Judgement:
        cfg, folder = self._recipe.preflight, self._recipe.teachers[name].model
        probes = await self._probes_of(name, samples)
        parity = await asyncio.to_thread(_compare, folder, dtype, probes, self._recipe)
        kl_limit, limit = cfg.self_kl_limit(dtype), cfg.logprob_limit(dtype)
        detail = (
            f"mean KL to a transformers forward {parity.kl:.2e} nats over {parity.num_positions} tokens (limit "
            f"{kl_limit:g}), |log-prob difference| mean {parity.mean_difference:.2e} (limit {limit:g}), max "
            f"{parity.max_difference:.2e}"
        )
        if abs(parity.kl) <= kl_limit and parity.mean_difference <= limit:
            return Judgement(status="ok", detail=detail, parity=parity)
        keys = "preflight.max_self_kl and max_logprob_difference for a low-precision engine"
        return Judgement(status="failed", detail=f"{detail}: {CURE.format(name=name, keys=keys)}")

    async def _against_itself(self, name: str, samples: Sequence[SampleMeta], dtype: str, why: str) -> Judgement:
        recipe = self._recipe
        folder = Path(recipe.teachers[name].model)
        names = ("tokens", "images") if self._store(name) is not None else ("tokens",)
        fields = await self._workers.plane.get([sample.sample_id for sample in samples], names)
        texts = [
            Text(tuple(fields["tokens"][i].tolist()), sample.prompt_length, self._images(name, fields, i))
            for i, sample in enumerate(samples)
        ]
        check = AlignmentCheck(
            self._workers.teacher_groups[name],
            top_k=recipe.loss.top_k,
            longest=recipe.data.max_prompt_length + recipe.rollout.max_response_length,
            limit=recipe.preflight.logprob_limit(dtype),
            dtype=dtype,
            sight=None if self._store(name) is None else read_sight(folder, recipe.data.max_pixels),
        )
        config = read_config(folder)
        try:
            found = await check.run(texts, has_rotary_positions=config.model_type in FAMILIES)
        except SampleFailed as error:
            detail = f"teachers.{name} did not continue a probe: {one_line(error)}: see its logs"
            return Judgement(status="failed", detail=detail)
        if found.problem:
            cure = CURE.format(name=name, keys="preflight.max_logprob_difference for a low-precision engine")
            return Judgement(status="failed", detail=f"teachers.{name}: its scores: {found.problem}: {cure}")
        detail = (
            f"equal what its own greedy continuations report ({found.difference:.1e} over {found.num_tokens} tokens), "
            f"every other reading is off by {found.nearest:.1e} or more; not compared with transformers: {why}"
        )
        return Judgement(status="ok", detail=detail)

    async def _probes_of(self, name: str, samples: Sequence[SampleMeta]) -> list[Probe]:
        names = ["tokens", "teacher_ids", "teacher_logprobs", "teacher_token_logprobs"]
        if self._store(name) is not None:
            names.append("images")
        fields = await self._workers.plane.get([sample.sample_id for sample in samples], names)
        probes = []
        for i, sample in enumerate(samples):
            ids, logprobs = fields["teacher_ids"][i], fields["teacher_logprobs"][i]
            teachers = self._recipe.assignment.teachers_of(sample.domain)
            if self._recipe.assignment.max_teachers > 1:
                place = teachers.index(name)
                ids, logprobs = ids[:, place], logprobs[:, place]
            probes.append(
                Probe(
                    tokens=fields["tokens"][i],
                    prompt_length=sample.prompt_length,
                    ids=ids,
                    logprobs=logprobs,
                    token_logprobs=fields["teacher_token_logprobs"][i] if len(teachers) == 1 else None,
                    images=self._images(name, fields, i),
                )
            )
        return probes

    def _store(self, name: str) -> ImageStore | None:
        return self._workers.dataset.images if self._workers.teacher_groups[name].sees_images else None

    def _images(self, name: str, fields: Mapping[str, Sequence[Tensor]], i: int) -> tuple[PromptImage, ...]:
        """Those of sample ``i``, as far as the teacher ``name`` sees them."""
        store = self._store(name)
        return () if store is None else tuple(map(store.prompt_image, refs_from_tensor(fields["images"][i])))


def _compare(folder: str, dtype: str, probes: Sequence[Probe], recipe: Recipe) -> Parity:
    return Reference(folder, dtype, recipe.data.max_pixels).compare(probes, temperature=recipe.loss.temperature)
