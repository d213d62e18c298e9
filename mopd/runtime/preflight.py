"""Checks that stop a run before its first step: is every teacher the right one, reached the right way?

Each check is one small class of mistake that otherwise trains silently: another tokenizer, a teacher that is the
student, scores shifted by one, a student that differs from its sampler, two teachers swapped. They consume no training
randomness.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mopd.config.schema import Recipe
from mopd.conversion.manifest import Manifest
from mopd.data.tokenizer import compare_tokenizers, load_tokenizer
from mopd.losses.api import parallel_topk_distill
from mopd.rollout.validation import ValidationResult
from mopd.runtime.workers import Workers
from mopd.types import ROLLOUT_FIELDS, Prompt, SampleMeta

PROBE_IDS = 2**62
"""Sample ids of probes start here, far from the training stream's."""
MAX_PROBE_POSITIONS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """Outcome of one check."""

    name: str
    status: Literal["ok", "failed", "warning", "skipped"]
    detail: str
    """What was measured; for a failure also the key to change."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rewards:
    """Validation at step 0, from the last check; kept so that a run need not validate twice."""

    student: ValidationResult
    student_wall_s: float
    """Time that the student's validation took, in seconds."""
    teachers: Mapping[str, float]
    """Domain -> reward of its own teacher."""


class Preflight:
    """Runs the checks in order, cheap ones first."""

    def __init__(self, recipe: Recipe, workers: Workers, manifests: Mapping[str, Manifest], *, is_fresh: bool) -> None:
        """``manifests`` has the key ``student`` and one ``teachers.NAME`` each.

        On resume (``is_fresh`` false) a teacher that no longer beats the student is a warning.
        """
        self.recipe = recipe
        self.cfg = recipe.preflight
        self.workers = workers
        self.manifests = manifests
        self.is_fresh = is_fresh
        self.rewards: Rewards | None = None

    async def run(self) -> AsyncIterator[Check]:
        """Yield each outcome. Later checks rely on earlier ones: stop at the first failure."""
        for name in self.recipe.teachers:
            yield self._tokenizers(name)
            yield self._different_weights(name)
        samples = await self._probe()
        try:
            yield await self._student_equals_engine(samples)
            for name in self.recipe.teachers:
                yield await self._teacher_equals_itself(name, samples)
        finally:
            await self._forget(samples)
        if self.recipe.validation is not None:
            async for check in self._better_teachers():
                yield check

    def _tokenizers(self, name: str) -> Check:
        teacher = self.recipe.teachers[name]
        title = f"tokenizer of {name}"
        differences = compare_tokenizers(
            self.workers.tokenizer, load_tokenizer(teacher.model), self.workers.student_vocab_size
        )
        if not differences:
            return Check(name=title, status="ok", detail="same ids mean the same tokens")
        return Check(
            name=title,
            status="failed",
            detail=f"teachers.{name}.model {teacher.model} and student.model {self.recipe.student.model} do not share "
            f"a tokenizer: {'; '.join(differences)}; choose a teacher with the student's tokenizer",
        )

    def _different_weights(self, name: str) -> Check:
        title = f"weights of {name}"
        if not self._is_same_model(name):
            return Check(name=title, status="ok", detail="differ from the student's")
        if self.cfg.allow_same_weights:
            return Check(name=title, status="ok", detail="the student's own (preflight.allow_same_weights)")
        return Check(
            name=title,
            status="failed",
            detail=f"teachers.{name}.model {self.recipe.teachers[name].model} has the same weights as student.model "
            f"{self.recipe.student.model}: name another model, or set preflight.allow_same_weights: true for "
            "self-distillation",
        )

    async def _student_equals_engine(self, samples: Sequence[SampleMeta]) -> Check:
        title = "student and rollout engine"
        ids = [sample.sample_id for sample in samples]
        student_logprobs = await self.workers.student.logprobs(ids, temperature=self.recipe.rollout.temperature)
        rollout_logprobs = (await self.workers.plane.get(ids, ("rollout_logprobs",)))["rollout_logprobs"]
        difference = (torch.cat(student_logprobs) - torch.cat(rollout_logprobs)).abs().mean().item()
        limit = self.cfg.max_logprob_difference
        detail = f"mean |log-prob difference| {difference:.2e} at equal weights (limit {limit:g})"
        if difference <= limit:
            return Check(name=title, status="ok", detail=detail)
        return Check(
            name=title,
            status="failed",
            detail=f"{detail}: match rollout.engine.dtype and student.dtype, or widen preflight.max_logprob_difference",
        )

    async def _teacher_equals_itself(self, name: str, samples: Sequence[SampleMeta]) -> Check:
        """KL between the scores that went through routing, batching and the data plane, and the teacher's distribution
        after each probe prefix alone, computed without padding, cache or batch."""
        title = f"scores of {name}"
        own = [sample for sample in samples if self.recipe.teacher_by_domain[sample.domain] == name]
        if not own:
            return Check(name=title, status="warning", detail="no row in the data asks this teacher")
        await self.workers.teachers.score(own)
        ids = [sample.sample_id for sample in own]
        fields = await self.workers.plane.get(ids, ("tokens", "teacher_ids", "teacher_logprobs"))
        kls = [
            self._kl_to_prefix(name, sample, tokens, teacher_ids, teacher_logprobs)
            for sample, tokens, teacher_ids, teacher_logprobs in zip(
                own, fields["tokens"], fields["teacher_ids"], fields["teacher_logprobs"], strict=True
            )
        ]
        kl = torch.cat(kls).mean().item()
        num_tokens = sum(k.numel() for k in kls)
        detail = f"mean KL to itself {kl:.2e} nats over {num_tokens} tokens (limit {self.cfg.max_self_kl:g})"
        if abs(kl) <= self.cfg.max_self_kl:
            return Check(name=title, status="ok", detail=detail)
        return Check(
            name=title,
            status="failed",
            detail=f"{detail}: the scores are not this teacher's; check teachers.{name}.engine, or widen "
            "preflight.max_self_kl for a low-precision engine",
        )

    def _kl_to_prefix(
        self, name: str, sample: SampleMeta, tokens: Tensor, ids_RK: Tensor, logprobs_RK: Tensor
    ) -> Tensor:
        """[P] KL at up to ``MAX_PROBE_POSITIONS`` response positions, the first and the last among them."""
        last = sample.response_length - 1
        positions = sorted({round(i * last / (MAX_PROBE_POSITIONS - 1)) for i in range(MAX_PROBE_POSITIONS)})
        logits_PV = torch.stack(
            [self.workers.prefix_logits(name, tokens[: sample.prompt_length + position]) for position in positions]
        )
        kl_P, _ = parallel_topk_distill(
            logits_PV,
            ids_RK[positions].long(),
            logprobs_RK[positions],
            loss="forward_kl",
            tail="bucket",
            temperature=self.recipe.loss.temperature,
        )
        return kl_P

    async def _better_teachers(self) -> AsyncIterator[Check]:
        validator = self.workers.validator
        assert validator is not None
        start = time.perf_counter()
        student = await validator.run(self.workers.generator)
        wall_s = time.perf_counter() - start
        teachers: dict[str, float] = {}
        for name, teacher in self.recipe.teachers.items():
            domains = tuple(domain for domain in teacher.domains if domain in validator.domains)
            if domains:
                teachers |= (await validator.run(self.workers.teacher_generator(name), domains=domains)).rewards
            for domain in domains:
                yield self._better(name, domain, teacher=teachers[domain], student=student.rewards[domain])
        self.rewards = Rewards(student=student, student_wall_s=wall_s, teachers=teachers)

    def _better(self, name: str, domain: str, *, teacher: float, student: float) -> Check:
        title = f"reward of {name} on {domain}"
        detail = f"teacher {teacher:.3f}, student {student:.3f}"
        if teacher > student:
            return Check(name=title, status="ok", detail=detail)
        if self.cfg.allow_same_weights and self._is_same_model(name):
            return Check(name=title, status="skipped", detail=f"{detail}; it is the student itself")
        text = (
            f"teachers.{name} does not beat the student on its own domain {domain!r}: {detail}; check "
            f"teachers.{name}.model and teachers.{name}.domains, or set preflight.require_better_teacher: false"
        )
        is_error = self.is_fresh and self.cfg.require_better_teacher
        return Check(name=title, status="failed" if is_error else "warning", detail=text)

    def _is_same_model(self, name: str) -> bool:
        return self.manifests[f"teachers.{name}"].weights_sha256 == self.manifests["student"].weights_sha256

    async def _probe(self) -> list[SampleMeta]:
        """Student responses to the first prompts of every teacher's domains, put into the data plane."""
        dataset = self.workers.dataset
        rows = [
            (domain, row)
            for teacher in self.recipe.teachers.values()
            for domain, row in itertools.islice(
                ((d, r) for d in teacher.domains if d in dataset.rows_by_domain for r in dataset.rows_by_domain[d]),
                self.cfg.num_probe_samples,
            )
        ]
        start = PROBE_IDS // self.recipe.rollout.samples_per_prompt
        prompts = [
            Prompt(sample_id=start + i, domain=domain, tokens=dataset.row(row).tokens, row=row)
            for i, (domain, row) in enumerate(rows)
        ]
        return await self.workers.rollout.generate(prompts)

    async def _forget(self, samples: Sequence[SampleMeta]) -> None:
        timeout_s = self.recipe.schedule.wait_timeout_s
        batch = await self.workers.plane.claim(len(samples), ROLLOUT_FIELDS, timeout_s=timeout_s)
        await self.workers.plane.release(batch)
