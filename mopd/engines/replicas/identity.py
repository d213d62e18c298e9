"""Identity of the model that a replica serves: its hashes if the server reports them, else its scores on a probe."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from mopd.base.types import UserError
from mopd.config.schedule import PreflightConfig
from mopd.config.schema import Recipe
from mopd.conversion.hf.manifest import HASHES, Manifest
from mopd.data.image_processing import read_image_processing, sees_images
from mopd.engines.checks import check_scores
from mopd.engines.interface import EngineError, EngineInfo, ToScore
from mopd.engines.replicas.interface import Replica

PROBE_TOKENS = 48
"""Tokens of the fixed probe; a stored fingerprint holds one score fewer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Needs:
    """A run's requirements on every replica of a group."""

    length: int
    """Tokens of the longest sequence."""
    num_ids: int
    """Largest number of ids per position: of a teacher those that it is asked for, of the rollout those that it
    tells."""
    temperature: float = 1.0
    """Temperature of scores."""
    preflight: PreflightConfig = PreflightConfig()
    """Limits of how far two replicas of one model may differ."""
    image_processing: str | None = None
    """``ImageProcessing.fingerprint`` of the student, if student and model see images."""

    @classmethod
    def of_all(cls, recipe: Recipe, teachers: Sequence[str]) -> Needs:
        """Return the requirements on replicas that answer for several teachers."""
        each = [cls.of(recipe, name) for name in teachers]
        return replace(each[0], length=max(own.length for own in each), num_ids=max(own.num_ids for own in each))

    @classmethod
    def of(cls, recipe: Recipe, teacher: str | None) -> Needs:
        """Return the requirements on replicas of a teacher, or, for ``None``, of the rollout."""
        student, processing, asked = recipe.student.model, None, recipe.asked
        model = student if teacher is None else recipe.teachers[teacher].model
        if sees_images(student) and sees_images(model):
            processing = read_image_processing(student, recipe.data.max_pixels).fingerprint
        return cls(
            length=recipe.longest_sequence(teacher),
            num_ids=max(own.student for own in asked.values()) if teacher is None else asked[teacher].width,
            temperature=recipe.loss.temperature,
            preflight=recipe.preflight,
            image_processing=processing,
        )


def problems_of(info: EngineInfo, manifest: Manifest, needs: Needs, *, key: str, is_rollout: bool) -> list[str]:
    """Return why this replica cannot serve the group ``key``. A rollout's weights, which arrive later, do not count."""
    found = []
    if info.manifest is not None:
        names = ("config_sha256",) if is_rollout else HASHES
        for name in names:
            ours, theirs = getattr(manifest, name), info.manifest[name]
            if ours != theirs:
                found.append(f"{name} is {theirs[:12]}… there ({info.model}) and {ours[:12]}… in {manifest.path}")
        found += [] if is_rollout else _adapter_problems(info, manifest, key)
    if needs.length > info.max_positions:
        found.append(
            f"it takes {info.max_positions} tokens, data.max_prompt_length + rollout.max_response_length is "
            f"{needs.length} (with a view: its own max_prompt_length; with tokenizer: own, twice the response)"
        )
    if needs.num_ids > info.most_logprobs:
        found.append(
            f"it gives at most {info.most_logprobs} log-probs per position, loss.top_k and always_ids ask for "
            f"{needs.num_ids}: lower loss.top_k"
        )
    if needs.image_processing is not None and needs.image_processing != info.image_processing:
        other = "makes other pixels of an image than the student" if info.image_processing else "sees no images"
        found.append(
            f"it {other}: the image processors of {info.model} and student.model need the same settings, its server "
            "this recipe's data.max_pixels"
        )
    return [f"{key}: {problem}" for problem in found]


def _adapter_problems(info: EngineInfo, manifest: Manifest, key: str) -> list[str]:
    """Return why a server is not that of the teacher ``key`` with its adapter, if it has one."""
    name, ours = key.removeprefix("teachers."), manifest.adapter_sha256
    if not ours:
        return []
    theirs = info.adapters.get(name)
    if theirs is None:
        there = ", ".join(sorted(info.adapters)) or "none"
        return [f"it has no adapter {name!r} ({info.model} has {there})"]
    return [] if theirs == ours else [f"adapter_sha256 is {theirs[:12]}… there and {ours[:12]}… in the recipe's folder"]


def fingerprint_tokens(vocab_size: int) -> list[int]:
    """Return the fixed probe: ids below ``vocab_size``, the same on every machine."""
    digests = (hashlib.sha256(f"mopd probe {i}".encode()).digest() for i in range(PROBE_TOKENS))
    return [int.from_bytes(digest[:8], "little") % vocab_size for digest in digests]


async def fingerprint(
    replica: Replica, *, vocab_size: int, temperature: float, sees_images: bool = False
) -> dict[str, Any]:
    """Return a teacher replica's log-probs of the probe's tokens, as plain JSON.

    For a model that ``sees_images`` the probe uses the lower half of the vocabulary: ids that stand for images, of
    which the probe has none, are among the last. ``UserError`` if the replica does not score it, or not plausibly.
    """
    tokens = fingerprint_tokens(vocab_size // 2 if sees_images else vocab_size)
    asked = ToScore([torch.tensor(tokens)], [1], top_k=1, temperature=temperature)
    scorer: Any = replica.engine
    try:
        scores = await scorer.score(asked)
    except EngineError as error:
        raise UserError(f"{replica.name} did not score the fixed probe: {error}: see its log") from error
    try:  # the scores did not pass a router, which would check them
        check_scores(scores, asked, vocab_size=None)
    except ValueError as error:
        raise UserError(f"{replica.name} cannot have scored the fixed probe: {error}: see its log") from error
    return {"vocab_size": vocab_size, "token_logprobs": scores[0].token_logprobs.tolist()}


def fingerprint_difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    """Return the mean |log-prob difference|; infinite for probes over different vocabularies."""
    if one["vocab_size"] != other["vocab_size"]:
        return float("inf")
    left, right = (torch.tensor(print_["token_logprobs"], dtype=torch.float64) for print_ in (one, other))
    return (left - right).abs().mean().item()


def largest_difference(prints: Sequence[Mapping[str, Any]]) -> float:
    """Return the largest difference between the first fingerprint and any other; 0 for one alone."""
    return max((fingerprint_difference(prints[0], other) for other in prints[1:]), default=0.0)
