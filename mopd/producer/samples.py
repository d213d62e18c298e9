"""What the controller asks of those that make samples in another process: both ends of each call. Ids and lengths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mopd.controller import Plane, Rewards, Rollout, Teachers
from mopd.producer.channel import Channel, Handler
from mopd.producer.messages import (
    pack_failed,
    pack_prompts,
    pack_samples,
    read_failed,
    read_prompts,
    read_samples,
)
from mopd.types import Batch, FailedSample, Prompt, SampleMeta


class FarWorkers:
    """The asking end: rollout, teachers, rewards and the controller's side of the data plane, in one."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    async def generate(self, prompts: Sequence[Prompt]) -> list[SampleMeta]:
        """See ``Rollout.generate``."""
        return read_samples(await self._channel.call("generate", pack_prompts(prompts)))

    async def score(self, samples: Sequence[SampleMeta]) -> list[FailedSample]:
        """See ``Teachers.score``."""
        failed = await self._channel.call("score", pack_samples(samples))
        return read_failed(failed, samples) if failed else []

    async def judge(self, prompts: Sequence[Prompt], samples: Sequence[SampleMeta]) -> None:
        """See ``Rewards.judge``."""
        await self._channel.call("judge", pack_prompts(prompts), pack_samples(samples))

    async def claim(self, sample_ids: Sequence[int], fields: Sequence[str]) -> Batch:
        """See ``Plane.claim``."""
        return Batch(samples=tuple(read_samples(await self._channel.call("claim", list(sample_ids), list(fields)))))

    async def release(self, batch: Batch) -> None:
        """See ``Plane.release``."""
        await self._channel.call("release", pack_samples(batch.samples))

    async def discard(self, sample_ids: Sequence[int]) -> None:
        """See ``Plane.discard``."""
        await self._channel.call("discard", list(sample_ids))


class SampleAnswers:
    """The answering end, with the workers of its process."""

    def __init__(self, rollout: Rollout, teachers: Teachers, rewards: Rewards | None, plane: Plane) -> None:
        self._rollout, self._teachers, self._rewards, self._plane = rollout, teachers, rewards, plane

    @property
    def handlers(self) -> dict[str, Handler]:
        """For a ``Channel``."""
        return {
            "generate": self._generate,
            "score": self._score,
            "judge": self._judge,
            "claim": self._claim,
            "release": self._release,
            "discard": self._discard,
        }

    async def _generate(self, prompts: list[Any]) -> list[Any]:
        return pack_samples(await self._rollout.generate(read_prompts(prompts)))

    async def _score(self, samples: list[Any]) -> list[Any]:
        return pack_failed(await self._teachers.score(read_samples(samples)))

    async def _judge(self, prompts: list[Any], samples: list[Any]) -> None:
        assert self._rewards is not None, "nobody asks where the loss needs no rewards"
        await self._rewards.judge(read_prompts(prompts), read_samples(samples))

    async def _claim(self, sample_ids: list[int], fields: list[str]) -> list[Any]:
        return pack_samples((await self._plane.claim(sample_ids, fields)).samples)

    async def _release(self, samples: list[Any]) -> None:
        await self._plane.release(Batch(samples=tuple(read_samples(samples))))

    async def _discard(self, sample_ids: list[int]) -> None:
        await self._plane.discard(sample_ids)
