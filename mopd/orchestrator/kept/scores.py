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

import torch
from torch import Tensor

from mopd.base.files.reading import shown_path
from mopd.base.files.records import Records
from mopd.base.types import UserError
from mopd.config.schema import Recipe
from mopd.conversion.hf.manifest import Manifest
from mopd.data_plane.interface import as_stored
from mopd.engines.checks import check_scores
from mopd.engines.interface import Scores, ToScore
from mopd.engines.replicas.interface import info_of
from mopd.engines.replicas.router import Router
from mopd.run.manifests import engine_extras

logger = logging.getLogger(__name__)
FIELDS = ("ids", "logprobs", "token_logprobs", "given_logprobs", "hidden")
"""Fields of a record; the last ones where ids were given, or hidden states asked for (their bits, as int16)."""


class ScoreCache:
    """Scores of a recipe's teachers in one folder, which several runs may share at a time."""

    def __init__(self, records: Records, identities: Mapping[str, str]) -> None:
        """``identities``: what decides the scores of each teacher, but for what it is asked."""
        self._records, self._identities = records, dict(identities)
        self._num_asked = self._num_found = 0
        self._is_full = False

    def keys(self, teacher: str, asked: ToScore) -> list[bytes]:
        """Return the keys of a teacher's scores of some samples."""
        about = f"{self._identities[teacher]}\0{asked.top_k}\0{asked.temperature!r}\0"
        about += f"hidden {asked.hidden_size}\0" if asked.hidden_size else ""
        given = [None] * len(asked) if asked.given is None else asked.given
        keys = []
        for own, start, pictures, ids in zip(asked.tokens, asked.prompt_lengths, asked.seen, given, strict=True):
            shown = json.dumps([[picture.digest.hex(), *picture.grid] for picture in pictures])
            content = own.to(torch.int64).contiguous().numpy().tobytes()
            if ids is not None:
                content += b"\0given\0%d\0" % ids.shape[1] + ids.contiguous().numpy().tobytes()
            keys.append(hashlib.sha256(f"{about}{start}\0{shown}\0".encode() + content).digest())
        return keys

    async def find(self, keys: Sequence[bytes], asked: ToScore) -> list[Scores | None]:
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

    def _read(self, key: bytes, asked: ToScore) -> Scores | None:
        """Return what is kept under a key of the question about one sample."""
        arrays = self._records.get(key)
        if arrays is None:
            return None
        try:
            fields = {name: torch.from_numpy(array) for name, array in arrays.items()}
            fields |= {"hidden": fields["hidden"].view(torch.bfloat16)} if "hidden" in fields else {}
            scores = Scores(**fields)
            check_scores([scores], asked, vocab_size=None)
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
    return ScoreCache(records, identities)
