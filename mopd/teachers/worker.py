"""The teacher worker: reads sampled tokens, asks each domain's teacher, writes its view of every response token."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch

from mopd.data_plane.interface import DataPlane
from mopd.engines.interface import Scores
from mopd.teachers.group import TeacherGroup
from mopd.teachers.routing import Routing
from mopd.types import SampleMeta


class TeacherWorker:
    """Adds ``TEACHER_FIELDS`` to samples that have ``tokens``."""

    def __init__(
        self,
        groups: Mapping[str, TeacherGroup],
        routing: Routing,
        plane: DataPlane,
        *,
        top_k: int,
        temperature: float,
    ) -> None:
        self._groups, self._routing, self._plane = dict(groups), routing, plane
        self._top_k, self._temperature = top_k, temperature

    async def score(self, metas: Sequence[SampleMeta]) -> None:
        """Score each sample with its domain's teacher, teachers side by side.

        ``UserError`` for a domain without a teacher; ``RuntimeError`` with teacher and sample id for scores of
        the wrong shape or type, ids outside the teacher's vocabulary, or log-probs that are not finite.
        """
        samples: dict[str, list[SampleMeta]] = defaultdict(list)
        for meta in metas:
            samples[self._routing.teacher_of(meta.domain)].append(meta)
        await asyncio.gather(*(self._score_group(self._groups[name], share) for name, share in samples.items()))

    async def _score_group(self, group: TeacherGroup, metas: Sequence[SampleMeta]) -> None:
        sample_ids = [meta.sample_id for meta in metas]
        tokens = (await self._plane.get(sample_ids, ["tokens"]))["tokens"]
        scores = await group.score(
            tokens, [meta.prompt_length for meta in metas], top_k=self._top_k, temperature=self._temperature
        )
        for meta, given in zip(metas, scores, strict=True):
            self._check(group, meta, given)
        await self._plane.update(
            sample_ids,
            {
                "teacher_ids": [given.ids for given in scores],
                "teacher_logprobs": [given.logprobs for given in scores],
                "teacher_token_logprobs": [given.token_logprobs for given in scores],
            },
        )

    def _check(self, group: TeacherGroup, meta: SampleMeta, scores: Scores) -> None:
        where = f"teacher {group.name!r} on sample {meta.sample_id}"
        rows = (meta.response_length, self._top_k)
        expected = (
            ("ids", rows, torch.int32),
            ("logprobs", rows, torch.float32),
            ("token_logprobs", rows[:1], torch.float32),
        )
        for name, shape, dtype in expected:
            value = getattr(scores, name)
            if tuple(value.shape) != shape or value.dtype != dtype:
                raise RuntimeError(
                    f"{where}: {name} is {value.dtype} {list(value.shape)}, expected {dtype} {list(shape)}"
                )
        if not (scores.logprobs.isfinite().all() and scores.token_logprobs.isfinite().all()):
            raise RuntimeError(f"{where}: a log-prob is not finite")
        if not bool(((scores.ids >= 0) & (scores.ids < group.vocab_size)).all()):
            raise RuntimeError(f"{where}: an id is outside the vocabulary of {group.vocab_size}")
