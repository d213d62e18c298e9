"""What rank 0 and the producer process tell each other of prompts and samples: short rows, some 60 bytes each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Any

from mopd.types import FailedSample, Prompt, SampleMeta


def pack_prompts(prompts: Sequence[Prompt]) -> list[tuple[Any, ...]]:
    """One row each."""
    return [_prompt_row(prompt) for prompt in prompts]


def read_prompts(rows: Sequence[Sequence[Any]]) -> list[Prompt]:
    """Inverse of ``pack_prompts``."""
    return [Prompt(**dict(zip(_PROMPT, row, strict=True))) for row in rows]


def pack_samples(samples: Sequence[SampleMeta]) -> list[tuple[Any, ...]]:
    """One row each."""
    return [_sample_row(sample) for sample in samples]


def read_samples(rows: Sequence[Sequence[Any]]) -> list[SampleMeta]:
    """Inverse of ``pack_samples``."""
    return [SampleMeta(**dict(zip(_SAMPLE, row, strict=True))) for row in rows]


def pack_failed(failed: Sequence[FailedSample]) -> list[tuple[int, str, str]]:
    """One row each."""
    return [(failure.sample.sample_id, failure.teacher, failure.reason) for failure in failed]


def read_failed(rows: Sequence[Sequence[Any]], samples: Sequence[SampleMeta]) -> list[FailedSample]:
    """Inverse of ``pack_failed``; ``samples`` are those that were asked about."""
    by_id = {sample.sample_id: sample for sample in samples}
    return [FailedSample(sample=by_id[i], teacher=teacher, reason=reason) for i, teacher, reason in rows]


_PROMPT = tuple(field.name for field in fields(Prompt))
_SAMPLE = tuple(field.name for field in fields(SampleMeta))
_prompt_row, _sample_row = attrgetter(*_PROMPT), attrgetter(*_SAMPLE)  # ``astuple`` copies deeply: ten times as long
