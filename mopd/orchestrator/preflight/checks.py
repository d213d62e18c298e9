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
from dataclasses import asdict, dataclass
from typing import Any

from mopd.base.files.reading import MAX_TEXT_BYTES
from mopd.base.metrics import apart
from mopd.base.text import one_line
from mopd.base.types import Prompt, SampleMeta, UserError
from mopd.config.placements import ExternalConfig
from mopd.config.schema import Recipe
from mopd.conversion.hf.manifest import Manifest
from mopd.data.prompts import encode_prompts
from mopd.data.tokenizer import load_tokenizer
from mopd.engines.interface import EngineInfo
from mopd.engines.replicas.identity import Needs, fingerprint, fingerprint_difference, largest_difference, problems_of
from mopd.engines.replicas.interface import info_of
from mopd.launch.checks.inputs import Check
from mopd.orchestrator.preflight.parity import Parity
from mopd.orchestrator.preflight.rollout import AskedStudent, RolloutCheck
from mopd.orchestrator.preflight.scores import ScoresCheck
from mopd.orchestrator.preflight.vision import check_images, probe_rows, tokenizer_differences
from mopd.orchestrator.validation import ValidationResult, plain_examples, record_of
from mopd.orchestrator.workers import Workers
from mopd.placement.interface import ROLLOUT

logger = logging.getLogger(__name__)

NUM_PROBE_SAMPLES = 4
"""Per teacher: a wrong model, alignment or tokenizer shows in the first; more would only cost time."""
CONVERSATION = [
    {"role": role, "content": text} for role, text in (("user", "1 + 1"), ("assistant", "2"), ("user", "2 + 2"))
]
"""Rendered by two chat templates to see whether they are one."""
PROBE_IDS = 2**62
"""Sample ids of probes start here, far from the training stream's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Findings:
    """What the checks before the first step leave behind, as plain JSON."""

    failure: str | None
    """The first failed check's detail."""
    parity: dict[str, Any]
    """Teacher -> what was measured, of those that could be compared."""
    fingerprints: dict[str, Any]
    """``teachers.NAME`` -> fingerprint, of those whose files nobody can hash."""
    headroom: dict[str, Any] | None
    """Domain -> its teacher's reward and example answers (the best one's of an ensemble)."""
    validation: dict[str, Any] | None
    """The student's validation at step 0, a line of ``validation.jsonl``: a run need not validate twice."""


class Preflight:
    """Runs the checks in order, cheap ones first."""

    def __init__(
        self,
        recipe: Recipe,
        workers: Workers,
        student: AskedStudent,
        manifests: Mapping[str, Manifest],
        *,
        is_fresh: bool,
        fingerprints: Mapping[str, Any] | None = None,
    ) -> None:
        """``manifests`` has the key ``student`` and one ``teachers.NAME`` each.

        On resume (``is_fresh`` false) a teacher that no longer beats the student is a warning, and teachers without
        hashes must still have the stored ``fingerprints``.
        """
        self.recipe = recipe
        self.cfg = recipe.preflight
        self.workers = workers
        self.student = student
        self.manifests = manifests
        self.is_fresh = is_fresh
        self.headroom: dict[str, Any] | None = None
        self.validation: dict[str, Any] | None = None
        self.parity: dict[str, Parity] = {}
        """Teacher -> what was measured, of those that could be compared."""
        self.fingerprints: dict[str, Any] = {}
        """``teachers.NAME`` -> fingerprint, of those whose files nobody can hash."""
        self._stored = dict(fingerprints or {})
        self._infos: dict[str, list[EngineInfo]] = {}

    async def run(self) -> AsyncIterator[Check]:
        """Yield each outcome. A failure ends the checks with its stage, as later stages rely on earlier ones."""
        stages = (self._same_models, self._right_answers, self._better_teachers)
        for stage in stages:
            failed = False
            async for check in stage():
                failed = failed or check.status == "failed"
                yield check
            if failed:
                return

    async def _same_models(self) -> AsyncIterator[Check]:
        """Every group is the recipe's model, with the student's tokenizer and weights of its own; images are sound."""
        if self.workers.dataset.images is not None:
            yield await asyncio.to_thread(check_images, self.workers.inputs)
        yield await self._identity(ROLLOUT)
        for name in self.recipe.teachers:
            yield self._tokenizers(name)
            template = self._chat_template(name)
            if template is not None:
                yield template
            yield await self._identity(f"teachers.{name}")
            yield self._different_weights(name)

    async def _right_answers(self) -> AsyncIterator[Check]:
        """What the engines say of some probes is what their models say."""
        samples = await self._probe()
        try:
            rollout = RolloutCheck(self.recipe, self.workers, self.student)
            yield await rollout.judge(samples, self._infos[ROLLOUT][0])
            failed = await self.workers.teachers.score(samples)
            if failed:
                detail = f"teachers.{failed[0].teacher} did not score a probe: {failed[0].reason}: see its logs"
                yield Check(f"scores of {failed[0].teacher}", "failed", detail)
                return
            for name in self.recipe.teachers:
                yield await self._right_scores(name, samples)
        finally:
            await self._forget(samples)

    def _tokenizers(self, name: str) -> Check:
        teacher = self.recipe.teachers[name]
        title = f"tokenizer of {name}"
        differences = tokenizer_differences(self.workers.inputs, teacher.model, self.student.vocab_size)
        if not differences:
            return Check(title, "ok", "same ids mean the same tokens")
        return Check(
            title,
            "failed",
            f"teachers.{name}.model {teacher.model} and student.model {self.recipe.student.model} do not share "
            f"a tokenizer: {'; '.join(differences)}; choose a teacher with the student's tokenizer",
        )

    def _chat_template(self, name: str) -> Check | None:
        """A warning where teacher and student would each write a conversation otherwise: prompts are the student's."""
        teacher, data = self.recipe.teachers[name], self.recipe.data
        own = load_tokenizer(teacher.model)
        if data.chat_template is not None or None in (own.chat_template, self.workers.tokenizer.chat_template):
            return None
        title = f"chat template of {name}"
        prompt = f"teachers.{name}.model {teacher.model} and student.model {self.recipe.student.model}"
        try:
            read = [
                encode_prompts([CONVERSATION], data, tokenizer, [f"{prompt}: a probe conversation"])[0]
                for tokenizer in (own, self.workers.tokenizer)
            ]
        except UserError as error:  # of data that may hold no conversation at all
            return Check(title, "warning", str(error))
        if read[0] == read[1]:
            return None
        detail = (
            f"{prompt} have chat templates that write a probe conversation with other tokens ({len(read[0])} and "
            f"{len(read[1])}): the teacher is asked with the student's; set data.chat_template to the one that is meant"
        )
        return Check(title, "warning", detail)

    async def _identity(self, key: str) -> Check:
        """Every replica of a group is the model of the recipe, and large enough."""
        title = f"identity of {key.removeprefix('teachers.')}"
        is_rollout = key == ROLLOUT
        recipe, replicas = self.recipe, self.workers.routers[key].replicas
        infos = [await info_of(replica) for replica in replicas]
        self._infos[key] = infos
        manifest = self.manifests["student" if is_rollout else key]
        model = recipe.student.model if is_rollout else recipe.teachers[key.removeprefix("teachers.")].model
        needs = Needs.of(recipe, model=model, is_rollout=is_rollout)
        for replica, info in zip(replicas, infos, strict=True):
            problems = problems_of(info, manifest, needs, key=key, is_rollout=is_rollout)
            if problems:
                cure = f"start that server with {key}.model, or correct the recipe"
                detail = f"{'; '.join(problems)} (replica {replica.name}): {cure}"
                return Check(title, "failed", detail)
        if not is_rollout and infos[0].kind == "openai":
            return await self._fingerprint(key, title)
        count = f"{len(infos)} replicas" if len(infos) > 1 else "its replica"
        loaded = "loaded the recipe's folder" if infos[0].manifest is None else "has the hashes of the recipe's folder"
        return Check(title, "ok", f"{count} {loaded}")

    async def _fingerprint(self, key: str, title: str) -> Check:
        vocab_size = min(self.student.vocab_size, self._infos[key][0].vocab_size)
        temperature = self.recipe.loss.temperature
        prints = [
            await fingerprint(replica, vocab_size=vocab_size, temperature=temperature)
            for replica in self.workers.routers[key].replicas
        ]
        self.fingerprints[key] = prints[0]
        limit = self.cfg.logprob_limit(self._infos[key][0].dtype)
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
        if not self._is_same_model(name):
            return Check(title, "ok", "differ from the student's")
        if self.cfg.allow_same_weights:
            return Check(title, "ok", "the student's own (preflight.allow_same_weights)")
        return Check(
            title,
            "failed",
            f"teachers.{name}.model {self.recipe.teachers[name].model} has the same weights as student.model "
            f"{self.recipe.student.model}: name another model, or set preflight.allow_same_weights: true for "
            "self-distillation",
        )

    async def _right_scores(self, name: str, samples: Sequence[SampleMeta]) -> Check:
        """The scores in the data plane are the teacher's, see ``scores``."""
        title = f"scores of {name}"
        own = [sample for sample in samples if name in self.recipe.assignment.teachers_of(sample.domain)]
        if not own:
            return Check(title, "warning", "no row in the data asks this teacher")
        found = await ScoresCheck(self.recipe, self.workers).judge(name, own, self._infos[f"teachers.{name}"][0])
        if found.parity is not None:
            self.parity[name] = found.parity
        return Check(title, found.status, found.detail)

    async def _better_teachers(self) -> AsyncIterator[Check]:
        validator = self.workers.validator
        if validator is None:
            detail = "no validation section: no teacher's reward is compared, and no best checkpoint is kept"
            yield Check("rewards", "skipped", detail)
            return
        start = time.perf_counter()
        student = await validator.run(self.workers.generator)
        wall_s = time.perf_counter() - start
        best: dict[str, float] = {}
        examples: dict[str, list[dict[str, Any]]] = {}
        for name, teacher in self.recipe.teachers.items():
            domains = self.recipe.assignment.domains_of(name, validator.domains)
            if domains and isinstance(teacher.placement, ExternalConfig) and teacher.placement.protocol == "openai":
                detail = "unknown: a teacher behind an openai server only scores"
                yield Check(f"reward of {name}", "skipped", detail)
                continue
            if not domains:
                continue
            group = self.workers.teacher_groups[name]
            async with group.kept_awake():
                result = await validator.run(group.router, domains=domains)
            rewards = result.rewards
            for domain in domains:
                if domain not in best or rewards[domain] > best[domain]:
                    best[domain], examples[domain] = rewards[domain], result.examples[domain]
                yield self._better(name, domain, teacher=result, student=student)
        plain = plain_examples(examples, "headroom.json", MAX_TEXT_BYTES)
        self.headroom = {d: {"teacher": best[d], "examples": plain.get(d, [])} for d in best}
        self.validation = record_of(0, student, wall_s=wall_s)

    def _better(self, name: str, domain: str, *, teacher: ValidationResult, student: ValidationResult) -> Check:
        title = f"reward of {name} on {domain}"
        detail = f"teacher {teacher.rewards[domain]:.3f}, student {student.rewards[domain]:.3f}"
        if teacher.rewards[domain] > student.rewards[domain]:
            return Check(title, "ok", detail)
        if self.cfg.allow_same_weights and self._is_same_model(name):
            return Check(title, "skipped", f"{detail}; it is the student itself")
        assert self.workers.inputs.rewards is not None
        reward = self.workers.inputs.rewards.name(domain)
        text = why_not_better(name, domain, reward, teacher=teacher, student=student)
        is_error = self.is_fresh and self.cfg.require_better_teacher
        return Check(title, "failed" if is_error else "warning", text)

    def _is_same_model(self, name: str) -> bool:
        return self.manifests[f"teachers.{name}"].weights_sha256 == self.manifests["student"].weights_sha256

    async def _probe(self) -> list[SampleMeta]:
        """Student responses to the first prompts of every teacher's domains, put into the data plane."""
        dataset = self.workers.dataset
        rows = [
            place
            for name in self.recipe.teachers
            for place in probe_rows(dataset, self._domains_in_data(name), NUM_PROBE_SAMPLES)
        ]
        start = PROBE_IDS // self.recipe.rollout.samples_per_prompt
        prompts = [Prompt(sample_id=start + i, domain=domain, row=row) for i, (domain, row) in enumerate(rows)]
        return await self.workers.rollout.generate(prompts)

    def _domains_in_data(self, name: str) -> list[str]:
        """A teacher's domains that have rows, in the order in which it names them; a default teacher's others last."""
        rows_by_domain = self.workers.dataset.rows_by_domain
        named = [domain for domain in self.recipe.teachers[name].domains if domain in rows_by_domain]
        return named + [d for d in self.recipe.assignment.domains_of(name, [*rows_by_domain]) if d not in named]

    async def _forget(self, samples: Sequence[SampleMeta]) -> None:
        await self.workers.plane.discard([sample.sample_id for sample in samples])


async def check_before_training(
    recipe: Recipe,
    workers: Workers,
    student: AskedStudent,
    manifests: Mapping[str, Manifest],
    *,
    is_fresh: bool,
    fingerprints: Mapping[str, Any],
) -> Findings:
    """All checks up to the first failed one, and what they leave. Consumes no training randomness."""
    preflight = Preflight(recipe, workers, student, manifests, is_fresh=is_fresh, fingerprints=fingerprints)
    failure = None
    with apart():
        async for outcome in preflight.run():
            log = logger.warning if outcome.status == "warning" else logger.info
            if outcome.status != "failed":
                log("preflight %s: %s: %s", outcome.status, outcome.name, outcome.detail)
            if outcome.status == "failed":
                failure = outcome.detail
                break
    return Findings(
        failure=failure,
        parity={name: asdict(measured) for name, measured in preflight.parity.items()},
        fingerprints=preflight.fingerprints,
        headroom=preflight.headroom,
        validation=preflight.validation,
    )


MAX_RESPONSE, MAX_ANSWER = 200, 60
"""Characters of a response and of an answer in a message."""
MANY = 0.5
"""Share of responses from which on that they were cut is worth telling."""


def why_not_better(
    teacher_name: str, domain: str, reward_name: str, *, teacher: ValidationResult, student: ValidationResult
) -> str:
    """One line with the keys to change; ``reward_name`` is the reward's key and type."""
    if teacher.rewards[domain] == student.rewards[domain] == 0.0:
        return _never_matched(teacher_name, domain, reward_name, teacher, student)
    return (
        f"teachers.{teacher_name} does not beat the student on its own domain {domain!r}: teacher "
        f"{teacher.rewards[domain]:.3f}, student {student.rewards[domain]:.3f}; check teachers.{teacher_name}.model "
        f"and teachers.{teacher_name}.domains, or set preflight.require_better_teacher: false"
    )


def _never_matched(name: str, domain: str, reward: str, teacher: ValidationResult, student: ValidationResult) -> str:
    """Neither answered right once: probably nobody was understood."""
    share, num = teacher.extracted_share[domain], teacher.num_samples[domain]
    if share == student.extracted_share[domain] == 0.0:
        found = f"and extracted nothing from any of the {num} responses of either"
    else:
        found = f"though it extracted something from {share:.0%} of the teacher's {num} responses"
    cut = ""
    if teacher.truncated_share[domain] >= MANY:
        cut = (
            f"; {teacher.truncated_share[domain]:.0%} of the responses were cut: raise rollout.max_response_length, or "
        )
    return (
        f"{reward} never matched on domain {domain!r}: teachers.{name} and the student both have 0.000, {found}; here "
        f"is one response of the teacher: {_shown(teacher.examples[domain])}{cut or ': '}change the reward or "
        f"data.columns.ground_truth, or teachers.{name}.model and domains, or set "
        "preflight.require_better_teacher: false"
    )


def _shown(examples: list[dict[str, Any]]) -> str:
    """A response's end, where answers stand, what was extracted from it, and what was wanted."""
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
