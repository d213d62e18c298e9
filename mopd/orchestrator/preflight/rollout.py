"""Check that every replica of the rollout says what the student says, with the weights that a run sends first.

An engine that kept a weight of its own, or put one into the wrong place, would draw from another model than the one
that learns, and nothing later would say so. Engines begin without the student's weights: what did not arrive shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from mopd.base.types import Prompt, SampleMeta, UserError
from mopd.config.schema import Recipe
from mopd.engines.checks import check_generations
from mopd.engines.concurrency import all_or_none
from mopd.engines.interface import (
    CorruptAnswer,
    EngineError,
    EngineInfo,
    Generation,
    Generator,
    ResponseCallback,
    ToDraw,
)
from mopd.engines.replicas.interface import Replica
from mopd.launch.checks.inputs import Check
from mopd.orchestrator.preflight.vision import probe_rows
from mopd.orchestrator.student import StudentGroup
from mopd.orchestrator.workers import Workers
from mopd.placement.interface import ROLLOUT

MAX_TOKENS = 64
"""Tokens of the response that each of several replicas draws alone: a wrong weight shows in every one."""
FIRST_ID = 2**62 + 2**61
"""Sample ids of these, far from the training stream's and from the other probes'."""


class CheckedReplica:
    """A replica's engine as a ``Generator``, where no router looks at its answers."""

    def __init__(self, replica: Replica, vocab_size: int) -> None:
        self.name, self._engine, self._vocab_size = replica.name, cast(Generator, replica.engine), vocab_size
        self.weight_version = self._engine.weight_version

    async def generate(self, asked: ToDraw, *, on_response: ResponseCallback | None = None) -> list[Generation]:
        """Draw responses; raise ``CorruptAnswer`` for responses that cannot have been drawn."""
        drawn = await self._engine.generate(asked, on_response=on_response)
        try:
            check_generations(drawn, asked, vocab_size=self._vocab_size)
        except ValueError as error:
            raise CorruptAnswer(f"{self.name}: corrupt answer: {error}") from error
        return drawn


class RolloutCheck:
    """Compares log-probs at equal weights."""

    def __init__(self, recipe: Recipe, workers: Workers, student: StudentGroup) -> None:
        self._recipe, self._workers, self._student = recipe, workers, student

    async def judge(self, samples: Sequence[SampleMeta], info: EngineInfo) -> Check:
        """Compare ``samples``, which were drawn through the router by any replicas; of several each draws one more.

        Raises:
            UserError: a replica does not draw it.
        """
        title, replicas = "student and rollout engine", self._workers.routers[ROLLOUT].replicas
        limit = self._recipe.preflight.logprob_limit(self._recipe.student.dtype, info.dtype)
        found = {"": torch.cat(await self._apart(samples)).mean().item()}
        if len(replicas) > 1:
            found |= await self._each(replicas)
        detail = f"mean |log-prob difference| {found['']:.2e} at equal weights (limit {limit:g})"
        for name, difference in found.items():
            if difference <= limit:
                continue
            whose = f"replica {name}: mean |log-prob difference| {difference:.2e} at equal weights (limit {limit:g})"
            return Check(title, "failed", f"{whose if name else detail}: {self._cure()}")
        if len(found) > 1:
            detail += f", of one of {len(replicas)} replicas at most {max(found.values()):.2e}"
        return Check(title, "ok", detail)

    def _cure(self) -> str:
        """What may hold replicas apart that have the student's weights.

        A rounded rollout has the same limit as another one: what rounding costs depends on the model, and on a random
        one fp8 is farther off than a projection that is 10 % too large (docs/teachers.md#low-precision), which a limit
        wide enough for it would let pass. The user who rounds says how much it may cost.
        """
        quantised = self._recipe.rollout.quantised
        if quantised:
            return (
                f"rollout.engine.extra.quantization is {quantised!r}, which rounds the student's weights: set "
                "preflight.max_logprob_difference to what that may cost, or remove it"
            )
        return "match rollout.engine.dtype and student.dtype, or widen preflight.max_logprob_difference"

    async def _each(self, replicas: Sequence[Replica]) -> dict[str, float]:
        """Return the mean difference of a response that each replica draws to the same prompt, by its name."""
        workers, rollout, weights = self._workers, self._workers.rollout, self._workers.weights
        assert rollout is not None and weights is not None, "there are replicas"
        sampling = rollout.sampling
        alone = replace(
            rollout,
            sampling=replace(sampling, max_new_tokens=min(MAX_TOKENS, sampling.max_new_tokens)),
            samples_per_prompt=1,
        )
        ((domain, row),) = probe_rows(workers.dataset, list(workers.dataset.rows_by_domain), 1)

        async def draw(number: int, replica: Replica) -> SampleMeta:
            prompt = Prompt(sample_id=FIRST_ID + number, domain=domain, row=row)
            try:
                checked = CheckedReplica(replica, self._student.vocab_size)
                (sample,) = await replace(alone, generator=checked).generate([prompt])
            except EngineError as error:
                raise UserError(f"{replica.name} did not draw a probe: {error}: see its log") from error
            return sample

        async with weights.kept_awake():
            samples = await all_or_none(draw(number, replica) for number, replica in enumerate(replicas))
        try:
            apart = await self._apart(samples)
        finally:
            await workers.plane.discard([sample.sample_id for sample in samples])
        return {replica.name: rows.mean().item() for replica, rows in zip(replicas, apart, strict=True)}

    async def _apart(self, samples: Sequence[SampleMeta]) -> list[Tensor]:
        """Return the absolute differences between student and rollout, fp32, at each sample's drawn tokens."""
        ids = [sample.sample_id for sample in samples]
        student = await self._student.logprobs(samples, temperature=self._recipe.rollout.temperature)
        fields = await self._workers.plane.get(ids, ("rollout_logprobs", "loss_mask"))
        both = zip(student, fields["rollout_logprobs"], fields["loss_mask"], strict=True)
        return [(own - drawn)[mask].abs() for own, drawn, mask in both]
