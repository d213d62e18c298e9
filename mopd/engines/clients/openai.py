"""Client of a stock vLLM server's OpenAI interface, for teachers that others serve.

This is the slow path: log-probs travel as JSON, one dict per position, prompt included, and the server turns every id
into text. ``mopd serve`` sends only the response's rows, as raw arrays. Shapes: R response tokens, K top-k.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from mopd.base.files.json_text import parse_json
from mopd.base.metrics import is_counted
from mopd.base.types import UserError
from mopd.engines.clients.http import HttpClient
from mopd.engines.clients.stock import check_stock, check_stock_scoring, to_scores
from mopd.engines.concurrency import all_or_none
from mopd.engines.interface import (
    EngineInfo,
    EngineRejected,
    Generation,
    ResponseCallback,
    Scores,
    ToDraw,
    ToScore,
)

MAX_BYTES_PER_ENTRY = 256
"""Limit of one log-prob's JSON: ``"151935":{"logprob":-12.345678901234567,"rank":151936,"decoded_token":"…"},``."""
MAX_VALUES_PER_ENTRY = 8
"""Limit of one log-prob's braces and commas; those inside its text do not count."""
PLAIN = {
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0,
    "frequency_penalty": 0,
}
"""Request fields that leave the model's distribution unchanged."""
ANSWER_HEAD_BYTES = 65536
"""Bytes that an answer may have beside its log-probs, and limit of answers without them."""

_log = logging.getLogger(__name__)


NO_IMAGES = "token prompts of the OpenAI interface hold no images: serve the model with `mopd serve`"


class OpenAIScorer:
    """Implements ``Scorer``, ``Generator`` (greedy only) and ``Described`` over ``/v1/completions``.

    Errors are those of ``RemoteEngine``: ``EngineUnavailable`` (refused, reset, deadline, 5xx, corrupt answer),
    ``EngineBusy`` (429), ``EngineRejected`` (other 4xx). It never retries, and belongs to the event loop of its first
    call. The server must have been started with ``--max-logprobs`` of at least the top-k.
    """

    def __init__(
        self,
        url: str,
        *,
        served_model_name: str | None,
        vocab_size: int,
        max_positions: int,
        token: str | None = None,
        timeout_s: float,
        name: str | None = None,
    ) -> None:
        """Configure the client without contacting the server.

        Args:
            url: ``http://host:port``, with or without ``/v1``.
            served_model_name: the model to ask for; ``None``: the only one that the server lists.
            vocab_size, max_positions: the model's, from its config: the server does not report them.
            timeout_s: limit of each call.

        Raises:
            UserError: the URL or the token cannot be used.
        """
        self.url = url.rstrip("/").removesuffix("/v1")
        self._http = HttpClient(self.url, token=token, timeout_s=timeout_s, name=name, content_type="application/json")
        self.name = self._http.name
        self.weight_version = -1
        self.vocab_size = vocab_size
        self.max_positions = max_positions
        self.bytes_sent = 0
        self.bytes_received = 0
        """Payload bytes of all scoring requests and answers so far."""
        self._model = served_model_name
        self._is_listed = False
        self._warned = False

    async def score(self, asked: ToScore) -> list[Scores]:
        """Score each sequence with one HTTP request. ``UserError`` for a temperature other than 1."""
        check_stock(asked, NO_IMAGES, name=self.name)
        check_stock_scoring(asked, vocab_size=self.vocab_size, name=self.name, server="an openai server")
        top_k = asked.top_k
        if not self._warned:
            self._warned = True
            _log.warning(
                "%s: scores through the OpenAI interface, as JSON with the whole prompt and a text per id: several "
                "times slower than a server started with `mopd serve`",
                self.name,
            )
        model = await self._served_model()

        async def score_one(sequence: Tensor, start: int) -> Scores:
            ids = sequence.tolist()
            if start == len(ids):
                return to_scores([], [], [], top_k)
            fields = {"model": model, "prompt": ids, "prompt_logprobs": top_k, "return_token_ids": True}
            body = json.dumps({**fields, "max_tokens": 1, "temperature": 0}).encode()
            longest = ANSWER_HEAD_BYTES + len(ids) * (16 + (top_k + 1) * MAX_BYTES_PER_ENTRY)
            try:
                answer = await self._http.call("POST", "/v1/completions", body, longest)
            except EngineRejected as error:
                if "logprobs" not in str(error):
                    raise
                raise EngineRejected(f"{error} (start the server with a larger --max-logprobs)") from error
            if is_counted():
                self.bytes_sent += len(body)
                self.bytes_received += len(answer)
            # in a thread: the event loop reads other answers meanwhile
            return await asyncio.to_thread(self._read, answer, ids, start, top_k)

        return await all_or_none(
            score_one(t, start) for t, start in zip(asked.tokens, asked.prompt_lengths, strict=True)
        )

    async def generate(self, asked: ToDraw, *, on_response: ResponseCallback | None = None) -> list[Generation]:
        """Draw greedy responses, one HTTP request each; ``ValueError`` for any other temperature, since the server's
        way of drawing is unknown."""
        check_stock(asked, NO_IMAGES, name=self.name)
        sampling = asked.sampling
        if sampling.temperature != 0:
            raise ValueError(f"{self.name}: temperature {sampling.temperature}: only 0")
        model = await self._served_model()
        # Named one by one, as the server's own defaults may come from the model's generation_config.json.
        fields = {"model": model, "max_tokens": sampling.max_new_tokens, "temperature": 0, "logprobs": 1, **PLAIN}
        # vLLM's server cuts the text alone: the tokens stay those that were drawn
        fields |= {"stop": [*sampling.stop], "include_stop_str_in_output": True} if sampling.stop else {}
        fields |= {"stop_token_ids": [*sampling.stop_token_ids]} if sampling.stop_token_ids else {}
        fields |= {"ignore_eos": True} if sampling.ignore_eos else {}

        async def generate_one(prompt: Sequence[int]) -> Generation:
            body = json.dumps({**fields, "prompt": [*prompt], "return_tokens_as_token_ids": True}).encode()
            longest = ANSWER_HEAD_BYTES + sampling.max_new_tokens * 4 * MAX_BYTES_PER_ENTRY
            return self._read_generation(await self._http.call("POST", "/v1/completions", body, longest))

        return await all_or_none(generate_one(prompt) for prompt in asked.prompts)

    async def info(self) -> EngineInfo:
        """Describe the served model. Without a manifest: the server's files cannot be hashed from here, so its scores
        are fingerprinted instead."""
        return EngineInfo(
            model=await self._served_model(),
            kind="openai",
            vocab_size=self.vocab_size,
            max_positions=self.max_positions,
            dtype="unknown",
            weight_version=-1,
        )

    async def health(self, *, timeout_s: float) -> None:
        """Return when ``/health`` answers 200 within ``timeout_s``; ``EngineUnavailable`` if not."""
        await self._http.call("GET", "/health", None, ANSWER_HEAD_BYTES, timeout_s=timeout_s)

    async def close(self) -> None:
        """Close the connections."""
        await self._http.close()

    async def _served_model(self) -> str:
        """Return the model to ask for, checked once against the server's list; ``UserError`` if it does not fit."""
        if self._model is not None and self._is_listed:
            return self._model
        listed = await self._http.call("GET", "/v1/models", None, ANSWER_HEAD_BYTES)
        try:
            names = [model["id"] for model in parse_json(listed)["data"]]
            if not all(isinstance(name, str) for name in names):
                raise TypeError("a name is no text")
        except (ValueError, KeyError, TypeError) as error:
            raise self._http.corrupt(f"/v1/models is not a list of models ({error})") from error
        shown = self._http.shown(", ".join(map(repr, names)) or "none")
        if self._model is None:
            if len(names) != 1:
                raise UserError(f"{self.name}: serves {shown}: name one as placement.served_model_name")
            self._model = names[0]
        elif self._model not in names:
            raise UserError(f"{self.name}: placement.served_model_name {self._model!r} is not served there: {shown}")
        self._is_listed = True
        return self._model

    def _read(self, body: bytes, tokens: list[int], start: int, top_k: int) -> Scores:
        """Return the response's rows. An entry holds the top-k and, if not among them, the sequence's own token."""
        try:
            answer = parse_json(body, max_values=10_000 + len(tokens) * (top_k + 2) * MAX_VALUES_PER_ENTRY)
            (choice,) = answer["choices"]
            entries, echoed = choice["prompt_logprobs"], choice.get("prompt_token_ids", tokens)
            model = answer.get("model", self._model)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise self._http.corrupt(f"no prompt_logprobs in it ({type(error).__name__}: {error})") from error
        if model != self._model:
            raise self._http.corrupt(f"it is of the model {model!r:.80}, not {self._model!r}")
        is_echo = echoed == tokens and all(type(token) is int for token in echoed)  # 1.0 and true equal 1
        if not is_echo or not isinstance(entries, list) or len(entries) != len(tokens):
            raise self._http.corrupt("it belongs to other tokens than those that were sent")
        ids, logprobs, own_logprobs = [], [], []
        for token, entry in zip(tokens[start:], entries[start:], strict=True):
            row = self._read_row(entry)
            if token not in row or len(row) not in (top_k, top_k + 1):
                problem = f"{len(row)} log-probs instead of {top_k}, or none of the token {token} itself"
                raise self._http.corrupt(problem)
            own_logprobs.append(row[token])
            if len(row) == top_k + 1:
                del row[token]
            ranked = sorted(row.items(), key=lambda item: -item[1])
            ids.append([key for key, _ in ranked])
            logprobs.append([value for _, value in ranked])
        return to_scores(ids, logprobs, own_logprobs, top_k)

    def _read_generation(self, body: bytes) -> Generation:
        try:
            (choice,) = parse_json(body)["choices"]
            tokens = [_id(token.removeprefix("token_id:")) for token in choice["logprobs"]["tokens"]]
            logprobs = [_logprob(value) for value in choice["logprobs"]["token_logprobs"]]
            reason = choice["finish_reason"]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise self._http.corrupt(f"no tokens with log-probs in it ({type(error).__name__}: {error})") from error
        return Generation(
            tokens=torch.tensor(tokens, dtype=torch.int64),
            logprobs=torch.tensor(logprobs, dtype=torch.float32),
            finish_reason=reason,
            token_versions=torch.full((len(tokens),), -1, dtype=torch.int32),
        )

    def _read_row(self, entry: Any) -> dict[int, float]:
        """Return token id -> log-prob of one position."""
        try:
            return {_id(key): _logprob(value["logprob"]) for key, value in entry.items()}
        except (AttributeError, ValueError, KeyError, TypeError) as error:
            raise self._http.corrupt(f"an entry of prompt_logprobs cannot be read ({error})") from error


def _id(text: str) -> int:
    """Parse a token id in canonical form only: ``07`` or `` 7`` beside ``7`` would merge two log-probs into one."""
    number = int(text)
    if str(number) != text or not 0 <= number < 2**31:
        raise ValueError(f"{text!r:.40} is no token id")
    return number


def _logprob(value: object) -> float:
    if type(value) not in (int, float):
        raise ValueError(f"{value!r:.40} is no number")
    return float(cast(float, value))
