"""Teachers' scores kept on disk: what a teacher has said of some tokens, it need not be asked a second time.

A record's key is a hash of all that decides the scores: the teacher's hashes (config, weights, tokenizer, adapter),
engine, dtype and arguments of its engine that may change scores; the tokens, where the response begins, the images;
top k, the ids that it was given, and temperature. Scores of another teacher, or of tokens of another tokenizer, are
therefore never found.
Shapes: R response tokens of one sample, K = top-k.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mopd.base.files.reading import shown_path
from mopd.base.files.records import Records
from mopd.base.types import UserError
from mopd.config.schema import Recipe
from mopd.conversion.hf.manifest import Manifest
from mopd.data_plane.interface import as_stored
from mopd.engines.checks import check_scores
from mopd.engines.interface import Images, Scores
from mopd.engines.replicas.interface import info_of
from mopd.engines.replicas.router import Router
from mopd.run.manifests import engine_extras

logger = logging.getLogger(__name__)
FIELDS = ("ids", "logprobs", "token_logprobs", "given_logprobs", "hidden")
"""Fields of a record; the last ones where ids were given, or hidden states asked for (their bits, as int16)."""


@dataclass(frozen=True)
class Questions:
    """What a teacher is asked of some samples."""

    tokens: Sequence[Tensor]
    """What the teacher reads: its own view of the prompt, where it has one, and the response."""
    starts: Sequence[int]
    """Where each response begins in it."""
    images: Images
    given: Sequence[Tensor | None]
    """Ids of each sample's rows, [R, G] int32; either all have some or none has."""
    top_k: int
    hidden_size: int = 0
    """Size of the hidden states that are asked for; 0: none are."""

    @property
    def given_ids(self) -> list[Tensor] | None:
        """The ids as an engine takes them."""
        return [ids for ids in self.given if ids is not None] or None

    def at(self, places: Sequence[int]) -> Questions:
        """Return the questions about some of the samples."""
        images = None if self.images is None else [self.images[i] for i in places]
        tokens, starts = [self.tokens[i] for i in places], [self.starts[i] for i in places]
        given = [self.given[i] for i in places]
        return Questions(tokens, starts, images, given, self.top_k, self.hidden_size)


class ScoreCache:
    """Scores of a recipe's teachers in one folder, which several runs may share at a time."""

    def __init__(self, records: Records, identities: Mapping[str, str], *, temperature: float) -> None:
        """``identities``: what decides the scores of each teacher, but for the questions and the temperature."""
        self._records, self._identities, self._temperature = records, dict(identities), temperature
        self._num_asked = self._num_found = 0
        self._is_full = False

    def keys(self, teacher: str, asked: Questions) -> list[bytes]:
        """Return the keys of a teacher's scores of some samples."""
        seen = [()] * len(asked.tokens) if asked.images is None else asked.images
        about = f"{self._identities[teacher]}\0{asked.top_k}\0{self._temperature!r}\0"
        about += f"hidden {asked.hidden_size}\0" if asked.hidden_size else ""
        keys = []
        for own, start, pictures, ids in zip(asked.tokens, asked.starts, seen, asked.given, strict=True):
            shown = json.dumps([[picture.digest.hex(), *picture.grid] for picture in pictures])
            content = own.to(torch.int64).contiguous().numpy().tobytes()
            if ids is not None:
                content += b"\0given\0%d\0" % ids.shape[1] + ids.contiguous().numpy().tobytes()
            keys.append(hashlib.sha256(f"{about}{start}\0{shown}\0".encode() + content).digest())
        return keys

    async def find(self, keys: Sequence[bytes], asked: Questions) -> list[Scores | None]:
        """Return what is kept of each sample, ``None`` where that is nothing. ``UserError`` for a damaged record."""
        found = await asyncio.to_thread(lambda: [self._read(key, asked.at([i])) for i, key in enumerate(keys)])
        self._num_asked += len(found)
        self._num_found += sum(scores is not None for scores in found)
        return found

    async def keep(self, scores: Mapping[bytes, Scores]) -> None:
        """Keep a teacher's answers, as far as there is room. ``UserError`` where the system refuses to write."""

        def write(key: bytes, own: Scores) -> bool:
            names = [name for name in FIELDS if getattr(own, name) is not None]
            tensors = [_without_bf16(own) for own in as_stored([getattr(own, name) for name in names])]
            return self._records.append(key, {name: t.numpy() for name, t in zip(names, tensors, strict=True)})

        kept = await asyncio.to_thread(lambda: [write(key, own) for key, own in scores.items()])
        if not all(kept) and not self._is_full:
            self._is_full = True
            logger.warning(
                "data.scores_cache: %s is as large as data.scores_cache_max_gib allows: further scores are not kept",
                shown_path(self._records.folder),
            )

    def take_numbers(self) -> dict[str, float]:
        """Return the share of samples since the last call whose scores were found, and the folder's size."""
        values = {"scores_cache_bytes": float(self._records.num_bytes)}
        if self._num_asked:
            values["scores_found_share"] = self._num_found / self._num_asked
        self._num_asked = self._num_found = 0
        return values

    def _read(self, key: bytes, asked: Questions) -> Scores | None:
        """Return what is kept under a key of the question about one sample."""
        arrays = self._records.get(key)
        if arrays is None:
            return None
        try:
            fields = {name: torch.from_numpy(array) for name, array in arrays.items()}
            fields |= {"hidden": fields["hidden"].view(torch.bfloat16)} if "hidden" in fields else {}
            scores, options = Scores(**fields), {"top_k": asked.top_k, "hidden_size": asked.hidden_size}
            check_scores([scores], asked.tokens, asked.starts, vocab_size=None, given=asked.given_ids, **options)
        except (TypeError, ValueError) as error:
            raise UserError(
                f"data.scores_cache: a record of {shown_path(self._records.folder)} holds no scores ({error}): "
                "name another folder"
            ) from error
        return scores


def _without_bf16(tensor: Tensor) -> Tensor:
    """Return bf16 numbers, which numpy does not know, as the integers of their bits."""
    return tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor


async def open_score_cache(
    recipe: Recipe, routers: Mapping[str, Router], manifests: Mapping[str, Manifest]
) -> ScoreCache | None:
    """Open the folder of ``data.scores_cache``; ``None`` without one. ``routers`` and ``manifests`` are those of each
    ``teachers.NAME``.

    Raises:
        UserError: the folder holds something else, or it cannot be told whose a teacher's scores are.
    """
    if recipe.data.scores_cache is None:
        return None
    extras, identities = engine_extras(recipe), {}
    for name in recipe.teachers:
        key = f"teachers.{name}"
        if not manifests[key].weights_sha256:
            raise UserError(
                f"data.scores_cache is set, but {key}.model {manifests[key].path!r} holds no weights, so that nothing "
                "tells whose scores are kept: copy them there, or remove scores_cache"
            )
        info = await info_of(routers[key].replicas[0])
        identities[name] = json.dumps(
            [*manifests[key].identity, info.kind, info.dtype, extras.get(key)], sort_keys=True
        )
    max_bytes = round(recipe.data.scores_cache_max_gib * 2**30)
    records = await asyncio.to_thread(
        Records, recipe.data.scores_cache, {"content": "teacher scores"}, max_bytes=max_bytes
    )
    return ScoreCache(records, identities, temperature=recipe.loss.temperature)
