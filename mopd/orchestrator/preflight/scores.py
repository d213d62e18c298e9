"""Comparison of a teacher's scores, got by way of router, wire and engine, with what its model says, before step 1.

The better proof is a transformers forward of the teacher's own folder (``parity``). Where it does not fit into memory,
or the folder holds no weights, the teacher is held against its own greedy continuations (``alignment``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from mopd.base.hardware import free_memory_bytes
from mopd.base.text import one_line
from mopd.base.types import HIDDEN_FIELD, TEACHER_FIELDS, TOKEN_FIELD, PromptImage, SampleMeta
from mopd.config.machine.auto import compares_with_transformers
from mopd.config.payloads import Asked
from mopd.config.schema import Recipe
from mopd.conversion.hf.head import OutputHead
from mopd.conversion.models.known import FAMILIES
from mopd.data.cross_tokenizer import CrossTokenizer
from mopd.data.image_refs import image_refs_from_tensor
from mopd.data.images import ImageStore
from mopd.data_plane.interface import Storage
from mopd.engines.interface import ToScore
from mopd.engines.replicas.interface import SampleFailed
from mopd.engines.torch.loading import read_config
from mopd.engines.vision import read_vision
from mopd.launch.checks.inputs import Check
from mopd.launch.preparing import weights_bytes
from mopd.orchestrator.preflight.alignment import AlignmentCheck, Text
from mopd.orchestrator.preflight.parity import Parity, Probe, Reference, head_difference
from mopd.orchestrator.preflight.precision import Cost, cost_of
from mopd.orchestrator.support import Coverage, low_quantile
from mopd.orchestrator.teachers import OwnPrompts, TeacherGroup, align, with_prompt
from mopd.run.manifests import has_own_weights

MOST_UNSCORED = 0.1
"""Share of the student's tokens that no chunk has, above which a warning says so."""
LEAST_MASS = 0.9
"""Mean mass of a teacher on its support below which a warning says so."""
CURE = "the scores are not this teacher's; check teachers.{name}.engine and placement, or widen {keys}"
Outcome = tuple[bool, str]
"""Whether the scores are right, and what was measured."""


class ScoresCheck:
    """Judges one teacher by probe samples that are in the data plane, scored."""

    def __init__(
        self,
        recipe: Recipe,
        group: TeacherGroup,
        plane: Storage,
        images: ImageStore | None,
        dtype: str,
        *,
        prompts: OwnPrompts = MappingProxyType({}),
        cross: CrossTokenizer | None = None,
        has_folders_weights: bool = True,
    ) -> None:
        """``images``: store of the images that samples name; ``dtype``: that of the teacher's engine; ``prompts``: what
        it reads in the place of the student's; ``cross``: the reader of one with another tokenizer;
        ``has_folders_weights``: its weights are those of its folder."""
        self._recipe, self._group, self._plane, self._name, self._dtype = recipe, group, plane, group.name, dtype
        self._has_folders_weights = has_folders_weights
        self._images, self._prompts, self._cross = images if group.sees_images else None, prompts, cross
        self.parity: Parity | None = None
        """Distance from the teacher's folder, where that was compared and is right."""

    async def judge(self, samples: Sequence[SampleMeta], *, has_plain: bool = False) -> Check:
        """Judge the scores of ``samples`` of the teacher's domains, at least one. ``has_plain``: another folder than
        the teacher's is what they are compared with (``precision``)."""
        teacher = self._recipe.teachers[self._name]
        is_compared, why = compares_with_transformers(
            self._recipe.preflight.compare_with_transformers,
            weights_bytes=weights_bytes(Path(teacher.model)) if has_own_weights(teacher) else None,
            free_memory_bytes=free_memory_bytes(),
        )
        if not self._has_folders_weights:
            is_compared, why = False, "its weights are the student's of this step"
        if has_plain:
            is_compared, why = False, "the plain folder is, below"
        judging = self._against_folder(samples) if is_compared else self._against_itself(samples, why)
        is_right, detail = await judging
        if is_right and self._recipe.asked[self._name].hidden:
            is_right, found = await self._through_head(samples)
            detail = f"{detail}; {found}" if is_right else found
        return Check(f"scores of {self._name}", "ok" if is_right else "failed", detail)

    async def distance(self, samples: Sequence[SampleMeta]) -> Check:
        """Report how far the student is from the teacher, on ``samples`` of its own.

        The mean of log p(y) - log q(y) over the student's tokens y estimates KL(student || teacher); a token outside of
        the teacher's top k is one that a top-k loss sees in its tail alone.
        """
        probes = await self._probes_of(samples)
        fields = await self._fields_of(samples, "rollout_logprobs", "loss_mask")
        drawn, masks = fields["rollout_logprobs"], fields["loss_mask"]
        responses = [probe.tokens[probe.prompt_length :] for probe in probes]
        rows = zip(probes, responses, masks, strict=True)
        num_tokens, asked = sum(int(mask.sum()) for mask in masks), self._recipe.asked[self._name]
        told = [f"{num_tokens} tokens of the student"]
        if asked.width:
            outside = torch.cat([_is_outside(probe, own)[mask] for probe, own, mask in rows]).double().mean().item()
            told = [f"{outside:.1%} of {num_tokens} tokens of the student are outside {_support(asked)}"]
        both = [
            (row.double() - teacher)[mask]
            for probe, row, mask in zip(probes, drawn, masks, strict=True)
            if (teacher := probe.token_logprobs) is not None
        ]
        if both:
            kl = torch.cat(both).mean().item()
            told = [f"KL(student || teacher) about {kl:.3f} nats a token", *told]
        return Check(f"distance of {self._name}", "ok", "; ".join(told))

    async def precision(self, samples: Sequence[SampleMeta], folder: str, *, is_drawn: bool) -> Check:
        """Report what the engine's precision costs beside the plain ``folder``; ``is_drawn``: on ``samples`` that the
        student has drawn."""
        recipe, name, drawn = self._recipe, self._name, None
        names = ("rollout_logprobs", "loss_mask") if is_drawn and self._cross is None else ()
        fields = await self._fields_of(samples, "tokens", *names)
        probes = await self._own_probes(self._read(samples, fields["tokens"]), fields)
        if names:
            drawn = list(zip(*(fields[key] for key in names), strict=True))

        def compare() -> Cost:
            adapter = recipe.teachers[name].adapter
            reference = Reference(folder, self._dtype, recipe.data.max_pixels, adapter=adapter)
            return cost_of(reference, probes, drawn, recipe.loss.temperature)

        cost = await asyncio.to_thread(compare)
        return cost.check(f"precision of {name}", folder, recipe.preflight.self_kl_limit(self._dtype))

    async def chunks(self, samples: Sequence[SampleMeta]) -> Check:
        """Report how the student's own ``samples`` look in the tokens of a teacher with another tokenizer, and how far
        the student is from it, chunk by chunk."""
        assert self._cross is not None, "only a teacher with another tokenizer is asked about"
        fields = await self._fields_of(samples, "tokens", TOKEN_FIELD, "rollout_logprobs")
        aligned = align(self._cross, samples, fields["tokens"])
        tokens, one_to_one, unscored, count = map(sum, zip(*(own.counts() for own in aligned), strict=True))
        theirs = sum(len(own.tokens) for own in aligned)
        rows = zip(fields["rollout_logprobs"], fields[TOKEN_FIELD], strict=True)
        kl = sum(float((drawn.double() - teacher).sum()) for drawn, teacher in rows) / tokens
        detail = (
            f"{one_to_one / tokens:.1%} of {tokens} tokens of the student are one token of the teacher; the mean chunk "
            f"has {(tokens - unscored) / max(count, 1):.2f} tokens of the student and {theirs / max(count, 1):.2f} of "
            f"the teacher; {unscored / tokens:.1%} are in none; log-ratio about {kl:.3f} nats a token"
        )
        if unscored > MOST_UNSCORED * tokens:
            detail += ": the student learns nothing of those; see docs/teachers.md, another tokenizer"
            return Check(f"chunks of {self._name}", "warning", detail)
        return Check(f"chunks of {self._name}", "ok", detail)

    async def coverage(self, samples: Sequence[SampleMeta]) -> Check | None:
        """Report how much of the teacher the ids hold at which its log-probs travel, on the student's own ``samples``,
        and warn where that is little; ``None`` where the payload has no ids."""
        asked, payload = self._recipe.asked[self._name], self._recipe.teachers[self._name].payload
        if not asked.width:
            return None
        rows = [probe.logprobs for probe in await self._probes_of(samples) if probe.logprobs is not None]
        found = Coverage.of(torch.cat(rows), asked)
        mean, low = found.mass_R.double().mean().item(), low_quantile(found.mass_R)
        detail = f"{_support(asked)} holds {mean:.4f} of the teacher's mass (mean), {low:.4f} (lowest hundredth)"
        if asked.always:
            outside, added = found.outside_R.double().mean().item(), found.decision_mass_R.double().mean().item()
            detail += (
                f"; at {outside:.1%} of the positions a token of loss.always_ids is in no other list, with {added:.1e} "
                "of the mass"
            )
        if mean >= LEAST_MASS:
            return Check(f"support of {self._name}", "ok", detail)
        cure = "payload: union" if payload == "student_topk" else "loss.tail: sampled with payload: union"
        detail += f": the loss sees little of the teacher; raise loss.top_k, or set {cure}"
        return Check(f"support of {self._name}", "warning", detail)

    async def _through_head(self, samples: Sequence[SampleMeta]) -> Outcome:
        """Hold the hidden states and the output matrix that the trainer ranks read against the engine's log-probs."""
        folder, probes = self._recipe.teachers[self._name].model, await self._probes_of(samples)

        def compare() -> tuple[float, float]:
            return head_difference(OutputHead(Path(folder)), probes, temperature=self._recipe.loss.temperature)

        # the states travel in bfloat16, whatever the engine computes in
        difference, rounding = await asyncio.to_thread(compare)
        limit = self._recipe.preflight.logprob_limit("bfloat16") + rounding
        detail = f"its hidden states through the output matrix of its folder differ by {difference:.2e} (mean, limit "
        if difference <= limit:
            return True, f"{detail}{limit:.3g})"
        return False, (
            f"teachers.{self._name}: {detail}{limit:.3g}) from its log-probs: {folder} has another output matrix than "
            "the engine, or that sends other states; start it with this folder, set payload: topk and a top-k loss, or "
            "widen preflight.max_logprob_difference"
        )

    async def _against_folder(self, samples: Sequence[SampleMeta]) -> Outcome:
        recipe, cfg, probes = self._recipe, self._recipe.preflight, await self._probes_of(samples)

        def compare() -> Parity:
            teacher, pixels = recipe.teachers[self._name], recipe.data.max_pixels
            reference = Reference(teacher.model, self._dtype, pixels, adapter=teacher.adapter)
            return reference.compare(probes, temperature=recipe.loss.temperature)

        parity = await asyncio.to_thread(compare)
        has_hidden = recipe.asked[self._name].hidden
        # A teacher that is the student got its weights from the trainer, in the trainer's dtype.
        dtypes = [self._dtype, *([recipe.student.dtype] if self._name in recipe.refreshed else ())]
        kl_limit = cfg.self_kl_limit(*dtypes, *(["bfloat16"] if has_hidden else ()))  # the dtype in which states travel
        limit = cfg.logprob_limit(*dtypes)
        detail = (
            f"mean KL to a transformers forward {parity.kl:.2e} nats over {parity.num_positions} tokens (limit "
            f"{kl_limit:g}), |log-prob difference| mean {parity.mean_difference:.2e} (limit {limit:g}), max "
            f"{parity.max_difference:.2e}"
        )
        if abs(parity.kl) <= kl_limit and parity.mean_difference <= limit:
            has_kl = self._recipe.support_width or has_hidden  # without rows there is none
            self.parity = parity if has_kl else None
            return True, detail
        quantised = recipe.teachers[self._name].quantised
        of_what = f"engine.extra.quantization {quantised!r}" if quantised else "a low-precision engine"
        keys = f"preflight.max_self_kl and max_logprob_difference for {of_what}"
        return False, f"{detail}: {CURE.format(name=self._name, keys=keys)}"

    async def _against_itself(self, samples: Sequence[SampleMeta], why: str) -> Outcome:
        recipe, name, folder = self._recipe, self._name, Path(self._recipe.teachers[self._name].model)
        fields = await self._fields_of(samples, "tokens")
        read = self._read(samples, fields["tokens"])
        texts = [Text(tuple(own.tolist()), start, self._images_of(fields, i)) for i, (own, start) in enumerate(read)]
        check = AlignmentCheck(
            self._group,
            top_k=max(1, recipe.asked[name].own),
            longest=recipe.longest_sequence(name),
            limit=recipe.preflight.logprob_limit(self._dtype),
            dtype=self._dtype,
            sight=None if self._images is None else read_vision(folder, recipe.data.max_pixels),
        )
        try:
            found = await check.run(texts, has_rotary_positions=read_config(folder).model_type in FAMILIES)
        except SampleFailed as error:
            return False, f"teachers.{name} did not continue a probe: {one_line(error)}: see its logs"
        if found.problem:
            cure = CURE.format(name=name, keys="preflight.max_logprob_difference for a low-precision engine")
            return False, f"teachers.{name}: its scores: {found.problem}: {cure}"
        return True, (
            f"equal what its own greedy continuations report ({found.difference:.1e} over {found.num_tokens} tokens), "
            f"every other reading is off by {found.nearest:.1e} or more; not compared with transformers: {why}"
        )

    async def _probes_of(self, samples: Sequence[SampleMeta]) -> list[Probe]:
        has_rows, more = self._recipe.support_width > 0, (HIDDEN_FIELD,) * self._recipe.sends_hidden
        fields = await self._fields_of(samples, "tokens", *(TEACHER_FIELDS if has_rows else (TOKEN_FIELD,)), *more)
        assignment, probes = self._recipe.assignment, []
        read = self._read(samples, fields["tokens"])
        if self._cross is not None:
            return await self._own_probes(read, fields)
        for i, sample in enumerate(samples):
            ids, logprobs = (fields[name][i] if has_rows else None for name in TEACHER_FIELDS[:2])
            teachers = assignment.teachers_of(sample.domain)
            if ids is not None and logprobs is not None and assignment.max_teachers > 1:
                place = teachers.index(self._name)
                ids, logprobs = ids[:, place], logprobs[:, place]
            probes.append(
                Probe(
                    tokens=read[i][0],
                    prompt_length=read[i][1],
                    ids=ids,
                    logprobs=logprobs,
                    token_logprobs=fields["teacher_token_logprobs"][i] if len(teachers) == 1 else None,
                    images=self._images_of(fields, i),
                    hidden=fields[HIDDEN_FIELD][i] if more else None,
                )
            )
        return probes

    async def _own_probes(
        self, read: Sequence[tuple[Tensor, int]], fields: Mapping[str, Sequence[Tensor]]
    ) -> list[Probe]:
        """Ask the teacher once more for scores of its own tokens at its own most probable ids, where the data plane has
        others: with another tokenizer, what the student's are to learn."""
        tokens, starts = [own for own, _ in read], [start for _, start in read]
        top_k, temperature = max(1, self._recipe.asked[self._name].own), self._recipe.loss.temperature
        seen = [self._images_of(fields, i) for i in range(len(read))]
        images = None if self._images is None else seen
        probes = []
        answers = await self._group.score(ToScore(tokens, starts, top_k=top_k, temperature=temperature, images=images))
        for own, start, scores, shown in zip(tokens, starts, answers, seen, strict=True):
            if isinstance(scores, SampleFailed):
                raise scores
            probes.append(
                Probe(
                    tokens=own,
                    prompt_length=start,
                    ids=scores.ids,
                    logprobs=scores.logprobs,
                    token_logprobs=scores.token_logprobs,
                    images=shown,
                )
            )
        return probes

    def _read(self, samples: Sequence[SampleMeta], tokens: Sequence[Tensor]) -> list[tuple[Tensor, int]]:
        """Return what the teacher reads of each sample, and where the response begins there (``with_prompt``)."""
        aligned = [None] * len(samples) if self._cross is None else align(self._cross, samples, tokens)
        rows = zip(samples, tokens, aligned, strict=True)
        return [with_prompt(self._prompts.get(sample.sample_id), sample, own, other) for sample, own, other in rows]

    async def _fields_of(self, samples: Sequence[SampleMeta], *names: str) -> dict[str, list[Tensor]]:
        """Read fields of the samples, and their images where the teacher sees them."""
        wanted = names if self._images is None else (*names, "images")
        return await self._plane.get([sample.sample_id for sample in samples], wanted)

    def _images_of(self, fields: Mapping[str, Sequence[Tensor]], i: int) -> tuple[PromptImage, ...]:
        """Return the images of sample ``i``, as far as the teacher sees them."""
        store = self._images
        return () if store is None else tuple(map(store.prompt_image, image_refs_from_tensor(fields["images"][i])))


def _is_outside(probe: Probe, own_R: Tensor) -> Tensor:
    """Return whether each of the response's tokens [R] is none of its row's ids."""
    assert probe.ids is not None, "only rows of ids are asked about"
    return (probe.ids != own_R[:, None]).all(-1)


def _support(asked: Asked) -> str:
    """Return what a row of ids is made of, in words."""
    owners = [f"{owner} top {num}" for owner, num in (("its", asked.own), ("the student's", asked.student)) if num]
    always = [f"{asked.always} of loss.always_ids"] if asked.always else []
    return " and ".join(owners + always)
