"""Checks that stop a run before its first step: is every teacher the right one, reached the right way?

Each check is one small class of mistake that otherwise trains silently: another tokenizer, a teacher that is the
student, a server with other weights, scores shifted by one, a student that differs from its sampler, two teachers
swapped. Scores take the way that they take in training: router, wire, engine. They consume no training randomness.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from mopd.base.files.reading import MAX_TEXT_BYTES
from mopd.base.metrics import apart
from mopd.base.text import one_line
from mopd.base.types import Prompt, SampleMeta, UserError
from mopd.config.schema import Recipe
from mopd.conversion.hf.manifest import Manifest
from mopd.data.prompts import encode_prompts
from mopd.data.tokenizer import load_tokenizer
from mopd.engines.interface import EngineInfo
from mopd.engines.replicas.identity import Needs, fingerprint, fingerprint_difference, largest_difference, problems_of
from mopd.engines.replicas.interface import info_of
from mopd.launch.checks.inputs import Check
from mopd.orchestrator.preflight.parity import Parity
from mopd.orchestrator.preflight.rollout import RolloutCheck
from mopd.orchestrator.preflight.scores import ScoresCheck
from mopd.orchestrator.preflight.vision import check_images, probe_rows, tokenizer_differences
from mopd.orchestrator.student import StudentGroup
from mopd.orchestrator.validation import ValidationResult, plain_examples, record_of
from mopd.orchestrator.workers import Workers
from mopd.placement.interface import ROLLOUT

logger = logging.getLogger(__name__)

NUM_PROBE_SAMPLES = 4
"""Probes of each teacher: a wrong model, alignment or tokenizer shows in the first; more would only cost time."""
CONVERSATION = [
    {"role": role, "content": text} for role, text in (("user", "1 + 1"), ("assistant", "2"), ("user", "2 + 2"))
]
"""Rendered by two chat templates to see whether they are one."""
PROBE_IDS = 2**62
"""Sample ids of probes start here, far from the training stream's."""


class Preflight:
    """Runs the checks in order, cheap ones first, and keeps what they measured, as plain JSON."""

    def __init__(
        self,
        recipe: Recipe,
        workers: Workers,
        student: StudentGroup,
        manifests: Mapping[str, Manifest],
        *,
        is_fresh: bool,
        fingerprints: Mapping[str, Any] | None = None,
        beside: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Set up. ``manifests`` has the key ``student`` and one ``teachers.NAME`` each; ``beside``: teacher -> plain
        folder that its scores are compared with.

        On resume (``is_fresh`` false) a teacher that no longer beats the student is a warning, and teachers without
        hashes must still have the stored ``fingerprints``.
        """
        self.recipe = recipe
        self.cfg = recipe.preflight
        self.workers = workers
        self.student = student
        self.manifests = manifests
        self.is_fresh = is_fresh
        self._beside = beside
        self.headroom: dict[str, Any] | None = None
        """Domain -> its teacher's reward, name, scores and example answers (the best one's of an ensemble)."""
        self.validation: dict[str, Any] | None = None
        """The student's validation at step 0, a line of ``validation.jsonl``: a run need not validate twice."""
        self.parity: dict[str, Parity] = {}
        """Teacher -> distance from its folder, where that could be compared."""
        self.fingerprints: dict[str, Any] = {}
        """``teachers.NAME`` -> fingerprint, of teachers whose files cannot be hashed."""
        self._stored = dict(fingerprints or {})
        self._infos: dict[str, list[EngineInfo]] = {}

    async def run(self) -> AsyncIterator[Check]:
        """Yield each outcome. A failure ends the checks with its stage, as later stages rely on earlier ones."""
        for stage in (self._same_models, self._right_answers, self._better_teachers):
            has_failed = False
            async for check in stage():
                has_failed = has_failed or check.status == "failed"
                yield check
            if has_failed:
                return

    async def find_failure(self) -> str | None:
        """Run the checks up to the first failed one, and return its detail; log the outcomes before it."""
        with apart():
            async for check in self.run():
                if check.status == "failed":
                    return check.detail
                log = logger.warning if check.status == "warning" else logger.info
                log("preflight %s: %s: %s", check.status, check.name, check.detail)
        return None

    async def _same_models(self) -> AsyncIterator[Check]:
        """Check that every group is the recipe's model, with the student's tokenizer and weights of its own, and that
        images are sound."""
        if self.workers.dataset.images is not None:
            yield await asyncio.to_thread(check_images, self.workers.inputs)
        if self.workers.rollout is not None:
            yield await self._identity(ROLLOUT)
        for name in self.recipe.teachers:
            yield self._tokenizers(name)
            template = self._chat_template(name)
            if template is not None:
                yield template
            yield await self._identity(f"teachers.{name}")
            yield self._different_weights(name)

    async def _right_answers(self) -> AsyncIterator[Check]:
        """Check that what the engines say of some probes is what their models say."""
        samples, rows = await self._probe()
        try:
            if self.workers.rollout is not None:
                rollout = RolloutCheck(self.recipe, self.workers, self.student)
                yield await rollout.judge(samples, self._infos[ROLLOUT][0])
            failed = await self.workers.teachers.score(samples, rows, keeps_all=True)
            if failed:
                detail = f"teachers.{failed[0].teacher} did not score a probe: {failed[0].reason}: see its logs"
                yield Check(f"scores of {failed[0].teacher}", "failed", detail)
                return
            for name in self.recipe.teachers:
                async for check in self._right_scores(name, samples, rows):
                    yield check
        finally:
            await self.workers.plane.discard([sample.sample_id for sample in samples])

    def _both(self, name: str) -> str:
        return f"teachers.{name}.model {self.recipe.teachers[name].model} and student.model {self.recipe.student.model}"

    def _tokenizers(self, name: str) -> Check:
        if name in self.workers.inputs.cross:
            return Check(f"tokenizer of {name}", "ok", "its own: responses are compared chunk by chunk")
        model = self.recipe.teachers[name].model
        differences = "; ".join(tokenizer_differences(self.workers.inputs, model, self.student.vocab_size))
        if not differences:
            return Check(f"tokenizer of {name}", "ok", "same ids mean the same tokens")
        cure = f"choose a teacher with the student's tokenizer, or set teachers.{name}.tokenizer: own"
        detail = f"{self._both(name)} do not share a tokenizer: {differences}; {cure}"
        return Check(f"tokenizer of {name}", "failed", detail)

    def _chat_template(self, name: str) -> Check | None:
        """Warn where the teacher's template would write a conversation with other tokens: prompts are the student's."""
        if name in self.workers.inputs.cross:
            return None
        data, both, student = self.recipe.data, self._both(name), self.workers.tokenizer
        own = load_tokenizer(self.recipe.teachers[name].model)
        if data.chat_template is not None or None in (own.chat_template, student.chat_template):
            return None
        place = [f"{both}: a probe conversation"]
        try:
            teachers, students = (encode_prompts([CONVERSATION], data, one, place)[0] for one in (own, student))
        except UserError as error:  # a template may refuse conversations, and the data may hold none
            return Check(f"chat template of {name}", "warning", str(error))
        if teachers == students:
            return None
        detail = (
            f"{both} have chat templates that write a probe conversation with other tokens ({len(teachers)} and "
            f"{len(students)}): the teacher is asked with the student's; set data.chat_template to the one that is "
            "meant"
        )
        return Check(f"chat template of {name}", "warning", detail)

    async def _identity(self, key: str) -> Check:
        """Check that every replica of a group is the model of the recipe, and takes long enough sequences."""
        name, is_rollout = key.removeprefix("teachers."), key == ROLLOUT
        title, replicas = f"identity of {name}", self.workers.routers[key].replicas
        infos = self._infos[key] = [await info_of(replica) for replica in replicas]
        manifest = self.manifests["student" if is_rollout else key]
        needs = Needs.of(self.recipe, None if is_rollout else name)
        for replica, info in zip(replicas, infos, strict=True):
            problems = "; ".join(problems_of(info, manifest, needs, key=key, is_rollout=is_rollout))
            if problems:
                cure = f"start that server with {key}.model, or correct the recipe"
                return Check(title, "failed", f"{problems} (replica {replica.name}): {cure}")
        if not is_rollout and self.recipe.teachers[name].stock:
            return await self._fingerprint(key, title)
        count = f"{len(infos)} replicas" if len(infos) > 1 else "its replica"
        loaded = "loaded the recipe's folder" if infos[0].manifest is None else "has the hashes of the recipe's folder"
        return Check(title, "ok", f"{count} {loaded}")

    async def _fingerprint(self, key: str, title: str) -> Check:
        """Check that the servers of a teacher without hashes score a fixed probe alike, and as at the run's start."""
        info, temperature = self._infos[key][0], self.recipe.loss.temperature
        vocab_size = min(self.student.vocab_size, info.vocab_size)
        prints = [
            await fingerprint(replica, vocab_size=vocab_size, temperature=temperature)
            for replica in self.workers.routers[key].replicas
        ]
        self.fingerprints[key] = prints[0]
        limit = self.cfg.logprob_limit(info.dtype)
        between = largest_difference(prints)
        if not between <= limit:
            detail = (
                f"{key}.placement.urls: the servers score a fixed probe differently (mean |log-prob difference| "
                f"{between:.2e}, limit {limit:g}): name servers of one model"
            )
            return Check(title, "failed", detail)
        if key not in self._stored:
            return Check(title, "ok", "no hashes to compare; its scores on a fixed probe are kept")
        since = fingerprint_difference(self._stored[key], prints[0])
        if not since <= limit:
            detail = (
                f"{key}.placement.urls: scores on the fixed probe are not those that the run began with (mean "
                f"|log-prob difference| {since:.2e}, limit {limit:g}): restore that model, or set another run_dir"
            )
            return Check(title, "failed", detail)
        return Check(title, "ok", f"same scores on the fixed probe as at the start ({since:.1e})")

    def _different_weights(self, name: str) -> Check:
        title = f"weights of {name}"
        refresh = self.recipe.teachers[name].refresh
        if refresh is not None:
            told = refresh if isinstance(refresh, str) else refresh.told
            return Check(title, "ok", f"the student's own (refresh: {told})")
        if not self._is_same_model(name):
            return Check(title, "ok", "differ from the student's")
        if self.cfg.allow_same_weights:
            return Check(title, "ok", "the student's own (preflight.allow_same_weights)")
        detail = (
            f"teachers.{name}.model {self.recipe.teachers[name].model} has the same weights as student.model "
            f"{self.recipe.student.model}: name another model, or write model: student (preflight.allow_same_weights "
            "permits it as it is)"
        )
        return Check(title, "failed", detail)

    async def _right_scores(
        self, name: str, samples: Sequence[SampleMeta], rows: Mapping[int, int]
    ) -> AsyncIterator[Check]:
        """Check that the scores in the data plane are the teacher's, and report how far the student is from it."""
        own = [sample for sample in samples if name in self.recipe.assignment.teachers_of(sample.domain)]
        if not own:
            yield Check(f"scores of {name}", "warning", "no row in the data asks this teacher")
            return
        workers, dtype = self.workers, self._infos[f"teachers.{name}"][0].dtype
        group, images = workers.teacher_groups[name], workers.dataset.images
        prompts = workers.teachers.prompts_of(name, own, rows)
        has_folders_weights = self.student.weight_version == 0 or name not in self.recipe.refreshed
        scores = ScoresCheck(
            self.recipe,
            group,
            workers.plane,
            images,
            dtype,
            prompts=prompts,
            cross=workers.inputs.cross.get(name),
            has_folders_weights=has_folders_weights,
        )
        check = await scores.judge(own, has_plain=name in self._beside)
        if scores.parity is not None:
            self.parity[name] = scores.parity
        yield check
        if check.status == "ok" and name in self._beside:
            yield await scores.precision(own, self._beside[name], is_drawn=workers.rollout is not None)
        if check.status == "ok" and name in workers.inputs.cross:
            yield await scores.chunks(own)
        elif check.status == "ok" and self.workers.rollout is not None:
            yield await scores.distance(own)
            support = await scores.coverage(own)
            if support is not None:
                yield support

    async def _better_teachers(self) -> AsyncIterator[Check]:
        """Check that every teacher beats the student on its own domains."""
        validator = self.workers.validator
        if validator is None:
            detail = "no validation section: no teacher's reward is compared, and no best checkpoint is kept"
            yield Check("rewards", "skipped", detail)
            return
        start = time.perf_counter()
        student = await validator.run(self.workers.generator)
        wall_s = time.perf_counter() - start
        best: dict[str, tuple[str, ValidationResult]] = {}
        for name, teacher in self.recipe.teachers.items():
            domains = self.recipe.assignment.domains_of(name, validator.domains)
            if not domains:
                continue
            if teacher.stock:
                detail = f"unknown: a teacher behind an {teacher.stock} server only scores"
                yield Check(f"reward of {name}", "skipped", detail)
                continue
            group = self.workers.teacher_groups[name]
            async with group.kept_awake():
                result = await validator.run(group, domains=domains, teacher=name)
            for domain in domains:
                if domain not in best or result.rewards[domain] > best[domain][1].rewards[domain]:
                    best[domain] = name, result
                yield self._better(name, domain, teacher=result, student=student)
        examples = {domain: result.examples[domain] for domain, (_, result) in best.items()}
        plain = plain_examples(examples, "headroom.json", MAX_TEXT_BYTES)
        self.headroom = {
            d: {"teacher": result.rewards[d], "name": name, "scores": result.scores[d], "examples": plain.get(d, [])}
            for d, (name, result) in best.items()
        }
        self.validation = record_of(0, student, wall_s=wall_s, watch=self.recipe.watched_domains)

    def _better(self, name: str, domain: str, *, teacher: ValidationResult, student: ValidationResult) -> Check:
        title = f"reward of {name} on {domain}"
        lead = teacher.rewards[domain] - student.rewards[domain]
        detail = f"teacher {teacher.rewards[domain]:.3f}, student {student.rewards[domain]:.3f} ({lead:+.3f})"
        detail += ", with the teacher's view of the prompts" if name in self.recipe.views else ""
        if teacher.rewards[domain] > student.rewards[domain]:
            return Check(title, "ok", detail)
        if self.cfg.allow_same_weights and self._is_same_model(name) and name not in self.recipe.views:
            return Check(title, "skipped", f"{detail}; it is the student itself")
        assert self.workers.inputs.rewards is not None
        reward = self.workers.inputs.rewards.name(domain)
        text = why_not_better(name, domain, reward, teacher=teacher, student=student)
        is_error = self.is_fresh and self.cfg.require_better_teacher
        return Check(title, "failed" if is_error else "warning", text)

    def _is_same_model(self, name: str) -> bool:
        own, student = self.manifests[f"teachers.{name}"], self.manifests["student"]
        return all(getattr(own, name) == getattr(student, name) for name in ("weights_sha256", "adapter_sha256"))

    async def _probe(self) -> tuple[list[SampleMeta], dict[int, int]]:
        """Draw the student's responses to the first prompts of every teacher's domains, into the data plane; the
        teachers' answers where there is no rollout. Return them, and the row of each one's prompt."""
        dataset, places = self.workers.dataset, []
        for name, teacher in self.recipe.teachers.items():
            # in the order in which the teacher names them; a default teacher's others last
            owned = self.recipe.assignment.domains_of(name, [*dataset.rows_by_domain])
            domains = [
                domain for domain in dict.fromkeys((*teacher.domains, *owned)) if domain in dataset.rows_by_domain
            ]
            places += probe_rows(dataset, domains, NUM_PROBE_SAMPLES)
        num = self.recipe.rollout.samples_per_prompt
        start = PROBE_IDS // num
        prompts = [Prompt(sample_id=start + i, domain=domain, row=row) for i, (domain, row) in enumerate(places)]
        rows = {prompt.sample_id * num + j: prompt.row for prompt in prompts for j in range(num)}
        if self.workers.rollout is not None:
            return await replace(self.workers.rollout, prefixes=None).generate(prompts), rows
        assert self.workers.answers is not None
        return await replace(self.workers.answers, store=None).generate(prompts), rows  # the checks write nothing


MAX_RESPONSE, MAX_ANSWER = 200, 60
"""Characters of a response and of an answer in a message."""
MANY = 0.5
"""Share of cut responses from which on the message says so."""


def why_not_better(
    teacher_name: str, domain: str, reward_name: str, *, teacher: ValidationResult, student: ValidationResult
) -> str:
    """Return one line with the keys to change; ``reward_name`` is the reward's key and type."""
    if teacher.rewards[domain] == student.rewards[domain] == 0.0:
        return _never_matched(teacher_name, domain, reward_name, teacher, student)
    return (
        f"teachers.{teacher_name} does not beat the student on its own domain {domain!r}: teacher "
        f"{teacher.rewards[domain]:.3f}, student {student.rewards[domain]:.3f}; check teachers.{teacher_name}.model, "
        f"its view and teachers.{teacher_name}.domains, or set preflight.require_better_teacher: false"
    )


def _never_matched(name: str, domain: str, reward: str, teacher: ValidationResult, student: ValidationResult) -> str:
    """Return the line where neither answered right once: probably the reward understood none of the responses."""
    share, num = teacher.extracted_share[domain], teacher.num_samples[domain]
    if share == student.extracted_share[domain] == 0.0:
        found = f"and extracted nothing from any of the {num} responses of either"
    else:
        found = f"though it extracted something from {share:.0%} of the teacher's {num} responses"
    cut = ""
    if teacher.truncated_share[domain] >= MANY:
        share_cut = f"{teacher.truncated_share[domain]:.0%}"
        cut = f"; {share_cut} of the responses were cut: raise rollout.max_response_length, or "
    return (
        f"{reward} never matched on domain {domain!r}: teachers.{name} and the student both have 0.000, {found}; here "
        f"is one response of the teacher: {_shown(teacher.examples[domain])}{cut or ': '}change the reward or "
        f"data.columns.ground_truth, or teachers.{name}.model and domains, or set "
        "preflight.require_better_teacher: false"
    )


def _shown(examples: list[dict[str, Any]]) -> str:
    """Return a response's end, where answers stand, what was extracted from it, and the ground truth."""
    example = next((one for one in examples if one["extracted"] is not None), examples[0])
    response, extracted = one_line(example["response"]), example["extracted"]
    if len(response) > MAX_RESPONSE:
        response = f"…{response[-MAX_RESPONSE:]}"
    answer = "nothing" if extracted is None else repr(_cut(one_line(extracted)))
    why = f" ({_cut(one_line(example['problem']))})" if example["problem"] else ""
    truth = _cut(one_line(str(example["ground_truth"])))
    return f"{response!r}, from which was extracted {answer}{why}, ground truth {truth!r}"


def _cut(text: str) -> str:
    return text if len(text) <= MAX_ANSWER else f"{text[: MAX_ANSWER - 1]}…"
