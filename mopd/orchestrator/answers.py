"""The worker of the teachers' own answers: prompts in, samples out as from the rollout worker.

An answer is a function of its key: teacher, prompt, sampling and number among the prompt's answers. It is drawn once,
kept in a store, and found there in later epochs and by later runs.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch

from mopd.base.files.records import Records
from mopd.base.text import named_samples, one_line
from mopd.base.types import Prompt, SampleMeta, UserError
from mopd.config.groups import Assignment
from mopd.conversion.hf.manifest import ADAPTER_HASH, HASHES, Manifest
from mopd.data.prompts import PromptDataset
from mopd.data_plane.interface import Storage
from mopd.engines.concurrency import all_or_none
from mopd.engines.interface import Generation, SamplingParams, ToDraw
from mopd.engines.replicas.interface import SampleFailed
from mopd.orchestrator.rollout import put_samples
from mopd.orchestrator.teachers import TeacherGroup


class Asked(NamedTuple):
    """One answer that is wanted."""

    key: bytes
    teacher: str
    prompt: Prompt


@dataclass(frozen=True)
class AnswerWorker:
    """Draws ``samples_per_prompt`` answers per prompt from the teachers of its domain, each from one of them, by their
    weights."""

    teachers: Mapping[str, TeacherGroup]
    assignment: Assignment
    manifests: Mapping[str, Manifest]
    """Identity of each teacher, by ``teachers.NAME``."""
    plane: Storage
    dataset: PromptDataset
    _: KW_ONLY
    sampling: SamplingParams
    seed: int
    samples_per_prompt: int
    masked_tail: int = 0
    """As ``RolloutWorker.masked_tail``."""
    vocab_size: int
    """The student's: no answer may hold an id beyond it."""
    vision_ids: Collection[int] = ()
    """The student's ids that stand for vision. Engines of models that see images never draw them; one that reads text
    alone does not know them."""
    store: Records | None
    """Answers by key; ``None`` keeps none."""
    _counts: Counter[str] = field(default_factory=Counter)
    """Answers ``asked`` of the store and ``found`` there since the last ``take_numbers``."""

    async def generate(self, prompts: Sequence[Prompt], *, version: Callable[[], int] = int) -> list[SampleMeta]:
        """Put the fields of ``RolloutWorker.generate`` of one answer after the other, and return the samples.

        ``version`` returns the student's weights once the answers are there: their age counts from these. ``UserError``
        if no replica of a teacher gives an answer.
        """
        drawn, num, now = await self.draw(prompts), self.samples_per_prompt, version()
        sample_ids = [prompt.sample_id * num + number for prompt in prompts for number in range(num)]
        responses = [
            replace(own, token_versions=torch.full((len(own.tokens),), now, dtype=torch.int32)) for own in drawn
        ]
        each = [prompt for prompt in prompts for _ in range(num)]
        return await put_samples(self.plane, self.dataset, each, sample_ids, responses, masked_tail=self.masked_tail)

    async def draw(self, prompts: Sequence[Prompt]) -> list[Generation]:
        """Return ``samples_per_prompt`` answers to each prompt, one prompt after the other. Raises as ``generate``."""
        asked = [self._ask(prompt, number) for prompt in prompts for number in range(self.samples_per_prompt)]
        answers = {one.key: found for one in asked if (found := self._stored(one)) is not None}
        if self.store is not None:
            self._counts.update(asked=len(asked), found=sum(one.key in answers for one in asked))
        missing: defaultdict[str, dict[bytes, Asked]] = defaultdict(dict)
        for one in asked:
            if one.key not in answers:
                missing[one.teacher][one.key] = one
        for drawn in await all_or_none(self._draw(name, [*own.values()]) for name, own in missing.items()):
            answers |= drawn
        return [answers[one.key] for one in asked]

    def take_numbers(self) -> dict[str, float]:
        """Return the share of answers that the store had since the last call, if any was asked for."""
        asked, found = self._counts.pop("asked", 0), self._counts.pop("found", 0)
        return {"stored_answers_share": found / asked} if asked else {}

    def _ask(self, prompt: Prompt, number: int) -> Asked:
        row = self.dataset.row(prompt.row)
        sampling = self.sampling
        what: dict[str, object] = {
            "tokens": list(row.tokens),
            "images": [ref.digest.hex() for ref in row.images],
            "max_new_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            # greedy answers are the same whatever the seed
            "draw": [self.seed, number] if sampling.temperature else [],
        }
        stops = {"stop": sampling.stop, "stop_token_ids": sampling.stop_token_ids, "ignore_eos": sampling.ignore_eos}
        what |= {name: value for name, value in stops.items() if value}
        chance = int.from_bytes(_digest({**what, "draw": [self.seed, number]})[:8], "little") / 2**64
        shares = accumulate(self.assignment.weights_of(prompt.domain))
        names = self.assignment.teachers_of(prompt.domain)
        name = next((name for name, end in zip(names, shares, strict=True) if chance < end), names[-1])
        what |= {"tokens": list(row.tokens_of(name))}
        manifest = self.manifests[f"teachers.{name}"]
        what |= {each: getattr(manifest, each) for each in HASHES}
        what |= {ADAPTER_HASH: manifest.adapter_sha256} if manifest.adapter_sha256 else {}
        return Asked(_digest(what), name, prompt)

    async def _draw(self, name: str, asked: Sequence[Asked]) -> dict[bytes, Generation]:
        """Have one teacher answer, and store the answers."""
        group, rows = self.teachers[name], [one.prompt.row for one in asked]
        seeds = [int.from_bytes(one.key[:8], "little") >> 1 for one in asked]
        prompts = [self.dataset.row(row).tokens_of(name) for row in rows]
        try:
            async with group.kept_awake():
                images = self.dataset.images_of(rows) if group.sees_images else None
                drawn = await group.generate(ToDraw(prompts, self.sampling, seeds, images=images))
        except SampleFailed as error:
            failed = [asked[i].prompt for i in error.positions]
            named = named_samples([prompt.sample_id for prompt in failed], {prompt.domain for prompt in failed})
            raise error.ends(
                f"teachers.{name} gave no answer to prompts {named}: {one_line(error)}: see the replicas' logs"
            ) from error
        for one, answer in zip(asked, drawn, strict=True):
            self._check(name, answer.tokens)
            if self.store is not None:
                arrays = {"tokens": answer.tokens.numpy(), "logprobs": answer.logprobs.numpy()}
                self.store.append(one.key, {**arrays, "is_cut": np.array([answer.finish_reason == "length"])})
        return {one.key: answer for one, answer in zip(asked, drawn, strict=True)}

    def _stored(self, asked: Asked) -> Generation | None:
        arrays = None if self.store is None else self.store.get(asked.key)
        if arrays is None:
            return None
        tokens = torch.from_numpy(arrays["tokens"])
        self._check(asked.teacher, tokens)
        return Generation(
            tokens=tokens,
            logprobs=torch.from_numpy(arrays["logprobs"]),
            finish_reason="length" if arrays["is_cut"].all() else "stop",
            token_versions=torch.full((len(tokens),), -1, dtype=torch.int32),
        )

    def _check(self, name: str, tokens: torch.Tensor) -> None:
        if not len(tokens) or int(tokens.max()) >= self.vocab_size:
            what = f"token {int(tokens.max())}" if len(tokens) else "an empty response"
            raise UserError(
                f"teachers.{name} answered with {what}, which the student's vocabulary of {self.vocab_size} tokens "
                "lacks: choose a teacher with the student's vocabulary"
            )
        seen = next((token for token in tokens.tolist() if token in self.vision_ids), None)
        if seen is not None:
            raise UserError(
                f"teachers.{name} answered with token {seen}, which stands for an image in the student: choose a "
                "teacher that sees images, whose engine never draws it"
            )


def _digest(what: Mapping[str, object]) -> bytes:
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).digest()
