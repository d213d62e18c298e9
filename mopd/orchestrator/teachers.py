"""The teacher worker: reads sampled tokens, asks each domain's teachers, and writes their scores of every response
token.

Shapes: R response tokens of one sample, K = places of a row of ids (``support``), D = most teachers of any domain.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import Tensor

from mopd.base.metrics import is_counted
from mopd.base.text import named_samples, one_line
from mopd.base.types import HIDDEN_FIELD, TOKEN_FIELD, WIDE_FIELDS, Batch, FailedSample, SampleMeta, UserError
from mopd.config.groups import Assignment
from mopd.config.payloads import Asked, Combine
from mopd.data.cross_tokenizer import NO_ROW, NO_TOKEN, Aligned, CrossTokenizer
from mopd.data.image_refs import image_refs_from_tensor
from mopd.data.prompts import PromptDataset
from mopd.data_plane.interface import Storage
from mopd.engines.concurrency import all_or_none
from mopd.engines.interface import CorruptAnswer, Generation, ResponseCallback, Scores, ToDraw, ToScore
from mopd.engines.replicas.interface import NoReplica, SampleFailed
from mopd.engines.replicas.router import Router
from mopd.losses import combine
from mopd.losses.sampled import domain_baselines
from mopd.orchestrator.kept.scores import ScoreCache
from mopd.orchestrator.support import NO_ID, Coverage, coverage_metrics, given_ids, support_rows, widened
from mopd.orchestrator.traces import Traces

Answers = dict[int, Scores | FailedSample]
"""One teacher's answers by sample id."""
OwnPrompts = Mapping[int, Sequence[int]]
"""Sample id -> the prompt's tokens as one teacher reads them."""
NO_ROWS: Mapping[int, int] = MappingProxyType({})
KeptAwake = Callable[[], AbstractAsyncContextManager[object]]
"""Factory of the context in which a teacher is awake; a teacher with resources of its own always is."""


class TeacherGroup:
    """The replicas of one teacher."""

    def __init__(
        self,
        name: str,
        router: Router,
        *,
        vocab_size: int,
        hidden_size: int = 0,
        sees_images: bool = False,
        kept_awake: KeptAwake = nullcontext,
        adapter: str = "",
    ) -> None:
        """Set up the group. ``vocab_size`` is the teacher's own: no answer may name an id beyond it. ``hidden_size``:
        that of the states that it sends; 0 where it sends none. ``adapter``: what its requests name."""
        self.name = name
        self._adapter = adapter
        self.hidden_size = hidden_size
        self.sees_images = sees_images
        self.router = router
        self.router.vocab_size = vocab_size
        self.kept_awake = kept_awake

    async def score(self, asked: ToScore, *, stop_at_failure: bool = True) -> list[Scores | SampleFailed]:
        """Score as ``Router.score``, with the replicas awake and the teacher's adapter."""
        async with self.kept_awake():
            return await self.router.score(replace(asked, adapter=self._adapter), stop_at_failure=stop_at_failure)

    @property
    def weight_version(self) -> int:
        """Version of the weights that answer, as ``Generator`` has it."""
        return self.router.weight_version

    async def generate(self, asked: ToDraw, *, on_response: ResponseCallback | None = None) -> list[Generation]:
        """Draw as ``Router.generate`` with the teacher's adapter; the caller holds ``kept_awake``."""
        return await self.router.generate(replace(asked, adapter=self._adapter), on_response=on_response)


class TeacherWorker:
    """Adds ``TEACHER_FIELDS``, or ``HIDDEN_FIELD``, to samples that have ``tokens``."""

    def __init__(
        self,
        groups: Mapping[str, TeacherGroup],
        assignment: Assignment,
        plane: Storage,
        *,
        asked: Mapping[str, Asked],
        always_ids: Sequence[int] = (),
        temperature: float,
        dataset: PromptDataset | None = None,
        cross: Mapping[str, CrossTokenizer] = MappingProxyType({}),
        keep_going: bool = False,
    ) -> None:
        """Set up the worker. ``asked``: what each teacher is asked for; ``always_ids``: the ids of
        ``loss.always_ids``. ``dataset``: rows of the samples' prompts, with the images that samples name, and teachers'
        views. ``cross``: readers of teachers with another tokenizer, by name. ``keep_going``: samples that cannot be
        scored are returned (``on_failure: replace``) instead of ending the run."""
        self._groups, self._assignment, self._plane = dict(groups), assignment, plane
        self._asked, self._always_ids, self._temperature = dict(asked), tuple(always_ids), temperature
        self._width = max((own.width for own in asked.values()), default=0)
        self._dataset = dataset
        self._images = None if dataset is None else dataset.images
        self._viewers = frozenset(name for row in (dataset.rows if dataset is not None else ()) for name in row.views)
        self._keep_going = keep_going
        self.cross = dict(cross)
        """Readers of teachers with another tokenizer."""
        self._counts = {name: [0, 0, 0, 0] for name in cross}
        """``Aligned.counts`` of the samples since ``take_numbers``, added up."""
        self.cache: ScoreCache | None = None
        """What teachers have said before. Absent until they have shown that they are the right ones: the checks before
        a run ask the teachers themselves."""
        self.traces: Traces | None = None
        """What the samples' rollout and teachers say token by token. Absent before the run, as the cache, and where no
        rollout draws the samples."""
        self._rule, self._best = Rule(), dict[str, str]()
        self._told: dict[str, tuple[float, int]] = {}
        """Metric of the teachers of an ensemble -> its sum, and the number of tokens."""

    def join_by(self, rule: Rule, best: Mapping[str, str]) -> None:
        """From now on make one distribution of an ensemble's scores by ``rule``; of domains in ``best`` ask that
        teacher alone. Not before the checks, which look at each teacher."""
        self._rule, self._best = rule, dict(best)

    def teachers_of(self, domain: str) -> tuple[tuple[str, ...], tuple[float, ...]]:
        """Return the teachers that a domain's samples are scored by, and their weights, which add up to 1."""
        if domain in self._best:
            return (self._best[domain],), (1.0,)
        return self._assignment.teachers_of(domain), self._assignment.weights_of(domain)

    async def score(
        self, metas: Sequence[SampleMeta], rows: Mapping[int, int] = NO_ROWS, *, keeps_all: bool = False
    ) -> list[FailedSample]:
        """Score each sample with its domain's teachers, all teachers at the same time; return the samples that cannot
        be scored, which get no field. Several teachers make one ensemble (``merge``). ``rows``: sample id -> row of its
        prompt, of which a teacher's view is made. Rows of ids and states at tokens without a loss, as those that an
        environment gave, are neither stored nor sent to a rank, unless ``keeps_all``.

        Raises:
            UserError: a domain has no teacher; a sample cannot be scored and ``keep_going`` is false; or, a
                ``LostError``, a teacher has no replica left. Names samples, domain, teacher and last error.
        """
        asked: dict[str, list[SampleMeta]] = defaultdict(list)
        for meta in metas:
            for name in self.teachers_of(meta.domain)[0]:
                asked[name].append(meta)
        answers = await all_or_none(self._ask(self._groups[name], share, rows) for name, share in asked.items())
        by_teacher = dict(zip(asked, answers, strict=True))
        failed: dict[int, FailedSample] = {}
        fields: dict[int, dict[str, Tensor]] = {}
        for meta in metas:
            said: list[TeacherRows] = []
            names, weights = self.teachers_of(meta.domain)
            for name in names:
                answer = by_teacher[name][meta.sample_id]
                if isinstance(answer, FailedSample):
                    failed.setdefault(meta.sample_id, answer)
                else:
                    said.append(answer)
            if meta.sample_id not in failed:
                own = fields[meta.sample_id] = self._joined(meta.domain, names, said, weights)
                if self.cross and self._width:
                    own["chunk_advantage"] = chunk_advantage(said, weights)
        if self.traces is not None:
            await self.traces.note(metas, {sample_id: own[TOKEN_FIELD] for sample_id, own in fields.items()})
        if not keeps_all:
            await self._drop_rows(metas, fields)
        if fields:
            every = next(iter(fields.values()))
            await self._plane.update([*fields], {name: [own[name] for own in fields.values()] for name in every})
        return [*failed.values()]

    async def leave_out(self, metas: Sequence[SampleMeta]) -> None:
        """Write the fields of samples that no teacher scores: rows without ids, whose divergence is 0, and for their
        tokens what the rollout said."""
        ids = [meta.sample_id for meta in metas]
        said = (await self._plane.get(ids, ["rollout_logprobs"]))["rollout_logprobs"]
        fields: dict[str, list[Tensor]] = defaultdict(list)
        for token_logprobs in said:
            none = torch.empty(len(token_logprobs), 0)
            one = TeacherRows(*widened(none.int(), none, self._width), token_logprobs=token_logprobs)
            for name, value in self._joined("", (), [one], (1.0,)).items():
                fields[name].append(value)
        await self._plane.update(ids, fields)

    async def _drop_rows(self, metas: Sequence[SampleMeta], fields: dict[int, dict[str, Tensor]]) -> None:
        """Keep of ``WIDE_FIELDS`` the rows of loss tokens."""
        ids = [meta.sample_id for meta in metas if meta.num_loss_tokens < meta.response_length]
        ids = [sample_id for sample_id in ids if sample_id in fields]
        masks = (await self._plane.get(ids, ["loss_mask"]))["loss_mask"] if ids else []
        for sample_id, mask in zip(ids, masks, strict=True):
            own = fields[sample_id]
            own |= {name: own[name][mask] for name in WIDE_FIELDS if name in own}

    def take_numbers(self) -> dict[str, float]:
        """Return the numbers of the cache, of what was joined and of other tokenizers, since the last call."""
        values = {name: total / count for name, (total, count) in sorted(self._told.items())}
        self._told.clear()
        for source in (self.cache, self.traces):
            values |= {} if source is None else source.take_numbers()
        for name, (tokens, one_to_one, unscored, chunks) in self._counts.items():
            if tokens:
                values[f"one_to_one_share/{name}"] = one_to_one / tokens
                values[f"unscored_share/{name}"] = unscored / tokens
                values[f"chunk_tokens/{name}"] = (tokens - unscored) / max(chunks, 1)
            self._counts[name] = [0, 0, 0, 0]
        return values

    def _joined(
        self, domain: str, names: Sequence[str], said: Sequence[TeacherRows], weights: Sequence[float]
    ) -> dict[str, Tensor]:
        """Return the fields of one sample, made of what its teachers say of it, and count how they differ."""
        if self._rule.combine == "weighted_mean":
            return merge(said, weights, num_teachers=self._assignment.max_teachers)
        (only, *others), told = said, None
        if others:
            only, told = self._rule.join(said, weights)
        if told is not None and not told.is_floating_point():
            for i, name in enumerate(names):
                self._tell(f"teacher_chosen_share/{name}", told == i)
        elif told is not None:
            self._tell(f"teacher_disagreement/{domain}", told)
        ids, logprobs = widened(only.ids, only.logprobs, self._rule.width)
        return merge([replace(only, ids=ids, logprobs=logprobs)], (1.0,), num_teachers=1)

    def _tell(self, name: str, values: Tensor) -> None:
        total, count = self._told.get(name, (0.0, 0))
        self._told[name] = total + float(values.double().sum()), count + len(values)

    async def coverage(self, batch: Batch) -> dict[str, float]:
        """Return metrics of what the rows of a claimed batch hold of their teachers (``coverage_metrics``)."""
        if not self._width:
            return {}
        fields = await self._plane.get(batch.sample_ids, ["teacher_logprobs"])
        by_domain: dict[str, list[Coverage]] = defaultdict(list)
        for meta, logprobs in zip(batch.samples, fields["teacher_logprobs"], strict=True):
            if not (logprobs > -torch.inf).any():  # of no teacher
                continue
            names, _ = self.teachers_of(meta.domain)
            of_teachers = logprobs.unbind(1) if logprobs.dim() == 3 else (logprobs,)
            joined = Asked(own=logprobs.shape[-1]) if len(names) > len(of_teachers) else None  # in an order of its own
            for name, own in zip(names, of_teachers, strict=False):  # teachers that a domain lacks stand behind its own
                by_domain[meta.domain].append(Coverage.of(own, joined or self._asked[name]))
        return coverage_metrics(by_domain)

    async def compare(self, batch: Batch) -> None:
        """Write ``baseline`` [R] fp32 of a claimed batch's samples, for ``loss.baseline: domain``
        (``domain_baselines``). What the rollout said of its tokens stands for the student's log-probs, which nobody
        has yet: a baseline need not be exact, only blind to the token that it is subtracted at."""
        names = ("loss_mask", "teacher_token_logprobs", "rollout_logprobs")
        fields = await self._plane.get(batch.sample_ids, names)
        rows = zip(*(fields[name] for name in names), strict=True)
        sums = [float((teacher.double() - rollout)[mask].sum()) for mask, teacher, rollout in rows]
        counts = [sample.num_loss_tokens for sample in batch.samples]
        found = domain_baselines([sample.domain for sample in batch.samples], sums, counts)
        values = [torch.full((s.response_length,), one) for s, one in zip(batch.samples, found, strict=True)]
        await self._plane.update(batch.sample_ids, {"baseline": values})

    def prompts_of(self, name: str, metas: Sequence[SampleMeta], rows: Mapping[int, int]) -> OwnPrompts:
        """Return the prompts that a teacher reads in the place of the student's; none for one without a view."""
        if self._dataset is None or name not in self._viewers:
            return {}
        return {meta.sample_id: self._dataset.row(rows[meta.sample_id]).views[name].tokens for meta in metas}

    async def _ask(
        self, group: TeacherGroup, metas: Sequence[SampleMeta], rows: Mapping[int, int]
    ) -> dict[int, TeacherRows | FailedSample]:
        """Return what a teacher says of some samples, by their ids."""
        ids, images = [meta.sample_id for meta in metas], None
        store = self._images if group.sees_images else None
        asked = self._asked[group.name]
        cross = self.cross.get(group.name)
        names = ["tokens", *(["images"] if store is not None else []), *(["student_ids"] if asked.student else [])]
        names += ["rollout_logprobs"] if cross is not None else []
        fields = await self._plane.get(ids, names)
        if store is not None:
            images = [[store.prompt_image(ref) for ref in image_refs_from_tensor(own)] for own in fields["images"]]
        prompts = self.prompts_of(group.name, metas, rows)
        aligned: list[Aligned] | list[None] = [None] * len(metas)
        if cross is not None:
            aligned = await asyncio.to_thread(align, cross, metas, fields["tokens"])
            self._count(group.name, aligned)
        rows_of_all = zip(metas, fields["tokens"], aligned, strict=True)
        read = [with_prompt(prompts.get(meta.sample_id), meta, own, other) for meta, own, other in rows_of_all]
        students = fields.get("student_ids", [None] * len(metas))
        given = [
            given_ids(asked, own, self._always_ids, meta.response_length)
            for meta, own in zip(metas, students, strict=True)
        ]
        request = ToScore(
            [own for own, _ in read],
            [start for _, start in read],
            top_k=asked.own,
            temperature=self._temperature,
            images=images,
            given=[ids for ids in given if ids is not None] or None,  # all have some, or none has
            hidden_size=group.hidden_size,
        )
        answers = await self._kept_or_asked(group, metas, request)
        said: dict[int, TeacherRows | FailedSample] = {}
        for i, (meta, ids_RG) in enumerate(zip(metas, given, strict=True)):
            answer, other = answers[meta.sample_id], aligned[i]
            if isinstance(answer, Scores) and cross is not None and other is not None:
                drawn = fields["rollout_logprobs"][i]
                own = fields["tokens"][i][meta.prompt_length :]
                said[meta.sample_id] = in_students_tokens(answer, other, cross, own, drawn, width=self._width)
            elif isinstance(answer, Scores):
                support = support_rows(answer, ids_RG, self._width)
                said[meta.sample_id] = TeacherRows(*support, token_logprobs=answer.token_logprobs, hidden=answer.hidden)
            else:
                said[meta.sample_id] = answer
        return said

    def _count(self, name: str, aligned: Sequence[Aligned]) -> None:
        if not is_counted():
            return
        self._counts[name] = [sum(own) for own in zip(self._counts[name], *(a.counts() for a in aligned), strict=True)]

    async def _kept_or_asked(self, group: TeacherGroup, metas: Sequence[SampleMeta], asked: ToScore) -> Answers:
        """Return what the cache holds, and have the teacher score the rest."""
        if self.cache is None:
            return await self._answers(group, metas, asked)
        keys = self.cache.keys(group.name, asked)
        found = await self.cache.find(keys, asked)
        left = [i for i, own in enumerate(found) if own is None]
        fresh = await self._answers(group, [metas[i] for i in left], asked.at(left)) if left else {}
        kept = {keys[i]: own for i in left if isinstance(own := fresh[metas[i].sample_id], Scores)}
        await self.cache.keep(kept)
        return {meta.sample_id: own for meta, own in zip(metas, found, strict=True) if own is not None} | fresh

    async def _answers(self, group: TeacherGroup, metas: Sequence[SampleMeta], asked: ToScore) -> Answers:
        """Have a teacher score the samples."""
        try:
            scores = await group.score(asked, stop_at_failure=not self._keep_going)
        except SampleFailed as error:
            raise self._end(group, [metas[i] for i in error.positions], error) from error
        answers: Answers = {}
        for meta, given in zip(metas, scores, strict=True):
            if not isinstance(given, SampleFailed):
                answers[meta.sample_id] = given
            elif isinstance(given.last_error, NoReplica):  # replacements would meet the same end
                raise self._end(group, [meta], given) from given
            else:
                answers[meta.sample_id] = FailedSample(sample=meta, teacher=group.name, reason=one_line(given))
        return answers

    def _end(self, group: TeacherGroup, metas: Sequence[SampleMeta], error: SampleFailed) -> UserError:
        named = named_samples([meta.sample_id for meta in metas], {meta.domain for meta in metas})
        if isinstance(error.last_error, CorruptAnswer):
            cure = f"the scores are not this teacher's; check teachers.{group.name}.engine and placement"
        elif self._keep_going:
            cure = "see the replicas' logs"
        else:
            cure = "see the replicas' logs, or set on_failure: replace"
        return error.ends(f"teachers.{group.name} did not score samples {named}: {one_line(error)}: {cure}")


def with_prompt(
    prompt: Sequence[int] | None, meta: SampleMeta, tokens: Tensor, aligned: Aligned | None = None
) -> tuple[Tensor, int]:
    """Return what a teacher reads of a sample, and where the response begins there: its own ``prompt`` in the place of
    the student's, if it has one, and the student's response, token by token or as ``aligned`` for a teacher with
    another tokenizer. ``tokens`` [L] are the sample's."""
    if prompt is None:
        assert aligned is None, "a teacher with another tokenizer has a prompt in its own tokens"
        return tokens, meta.prompt_length
    response = tokens[meta.prompt_length :] if aligned is None else aligned.tokens
    return torch.cat([torch.tensor(prompt, dtype=tokens.dtype), response]), len(prompt)


def align(cross: CrossTokenizer, metas: Sequence[SampleMeta], tokens: Sequence[Tensor]) -> list[Aligned]:
    """Return the responses of some samples in a teacher's tokens. ``tokens`` [L] are each sample's."""
    return [cross.align(own[meta.prompt_length :].tolist()) for meta, own in zip(metas, tokens, strict=True)]


@dataclass(frozen=True, slots=True)
class TeacherRows:
    """What one teacher says of one response."""

    ids: Tensor
    """[R, K] int32 (``support_rows``)."""
    logprobs: Tensor
    """[R, K] fp32."""
    token_logprobs: Tensor
    """[R] fp32."""
    hidden: Tensor | None = None
    """[R, H] bf16, where it sends them."""
    advantage: Tensor | None = None
    """[R] fp32, of a teacher with another tokenizer: that of tokens without a row of ids; 0 elsewhere."""


def in_students_tokens(
    scores: Scores,
    aligned: Aligned,
    cross: CrossTokenizer,
    response: Tensor,
    rollout_logprobs: Tensor,
    *,
    width: int,
) -> TeacherRows:
    """Return what a teacher with another tokenizer says of its own N tokens as rows of the student's R.

    Tokens with a row of the teacher's (``Aligned.rows``) have it with the student's ids (``as_text``); other rows
    are empty, and have an advantage. ``rollout_logprobs`` [R] of the student's tokens ``response`` [R] divide a chunk's
    log-prob (``Aligned.spread``).
    """
    num_rows, asked = len(rollout_logprobs), scores.ids.shape[1]
    token_logprobs = aligned.spread(scores.token_logprobs, rollout_logprobs)
    ids = torch.full((num_rows, width), NO_ID, dtype=torch.int32)
    logprobs = torch.full((num_rows, width), -torch.inf)
    advantage = None
    if width:
        chosen_R = aligned.rows != NO_ROW
        rows = aligned.rows[chosen_R]
        own, logprobs[chosen_R, :asked] = cross.student_rows(scores.ids[rows], scores.logprobs[rows])
        ids[chosen_R, :asked] = own.masked_fill(own == NO_TOKEN, NO_ID).int()
        first = torch.where(ids == response[:, None], logprobs, -torch.inf).amax(1)
        advantage = aligned.advantage(scores.token_logprobs, rollout_logprobs, first)  # of chunks as the teacher cuts
        last = (rows - 1).clamp_min(0)
        after = aligned.tokens[last].masked_fill(rows == 0, NO_TOKEN)
        before = scores.ids[last], scores.logprobs[last], scores.token_logprobs[last]
        own, logprobs[chosen_R, :asked] = cross.as_text((own, logprobs[chosen_R, :asked]), after, before)
        ids[chosen_R, :asked] = own.masked_fill(own == NO_TOKEN, NO_ID).int()
    return TeacherRows(ids, logprobs, token_logprobs, advantage=advantage)


def chunk_advantage(said: Sequence[TeacherRows], weights: Sequence[float]) -> Tensor:
    """Return the advantage [R] fp32 of tokens in chunks of several, of a domain's teachers together; ``weights`` add up
    to 1, and a teacher with the student's tokenizer has no such chunk."""
    found = torch.zeros(len(said[0].token_logprobs), dtype=torch.float64)
    for own, weight in zip(said, weights, strict=True):
        found += 0.0 if own.advantage is None else weight * own.advantage.double()
    return found.float()


@dataclass(frozen=True, slots=True)
class Rule:
    """How the scores of an ensemble become those of one teacher, if they do."""

    combine: Combine = "weighted_mean"
    width: int = 0
    """Places of a row that all samples get."""

    def join(self, said: Sequence[TeacherRows], weights: Sequence[float]) -> tuple[TeacherRows, Tensor]:
        """Return the rows of one distribution, and what ``mopd.losses.combine`` tells of each [R]."""
        ids, logprobs = (torch.stack([getattr(own, name) for own in said]) for name in ("ids", "logprobs"))
        token_logprobs = torch.stack([own.token_logprobs for own in said])
        if self.combine == "per_token_lowest_entropy":
            joined = combine.lowest_entropy(ids, logprobs, token_logprobs)
        else:
            rule = combine.mean_logprob if self.combine == "mean_logprob" else combine.mean_probability
            joined = rule(ids, logprobs, token_logprobs, weights)
        return TeacherRows(joined.ids, joined.logprobs, joined.token_logprobs), joined.told


def merge(said: Sequence[TeacherRows], weights: Sequence[float], *, num_teachers: int) -> dict[str, Tensor]:
    """Return ``TEACHER_FIELDS`` (and ``HIDDEN_FIELD``) of one sample from its teachers' scores; ``weights`` add up
    to 1.

    ``teacher_ids`` int32 and ``teacher_logprobs`` fp32 are [R, D, K] for D = ``num_teachers`` (teachers beyond
    ``said`` repeat the first one; the loss gives them weight 0), or [R, K] for D = 1; there are none for K = 0.
    ``teacher_token_logprobs`` [R] fp32 is the weighted mean of the teachers' log-probs: the log of their weighted
    geometric mean (``docs/losses.md``).
    """
    if num_teachers == 1:
        (only,) = said
        rows, token_logprobs_R = {"teacher_ids": only.ids, "teacher_logprobs": only.logprobs}, only.token_logprobs
        states = {} if only.hidden is None else {HIDDEN_FIELD: only.hidden}
    else:
        states = {}  # no ensemble sends any
        padded = [*said, *[said[0]] * (num_teachers - len(said))]
        token_logprobs = torch.stack([own.token_logprobs for own in said])
        shares = torch.tensor(weights, dtype=torch.float64)
        rows = {
            "teacher_ids": torch.stack([own.ids for own in padded], dim=1),
            "teacher_logprobs": torch.stack([own.logprobs for own in padded], dim=1),
        }
        token_logprobs_R = (shares[:, None] * token_logprobs.double()).sum(0).float()
    return (rows if said[0].ids.shape[1] else {}) | states | {TOKEN_FIELD: token_logprobs_R}
