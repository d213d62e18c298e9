"""Client of an SGLang server's own interface, ``/generate``: of one that mopd starts, and of stock servers.

Log-probs travel as JSON, ``[log-prob, id, text]`` each. Shapes: R response tokens, K top-k.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mopd.base.files.json_text import parse_json
from mopd.base.metrics import is_counted
from mopd.base.types import UserError
from mopd.engines.checks import check_ids, check_length, check_sampling
from mopd.engines.clients.http import MAX_SMALL_BYTES, HttpClient
from mopd.engines.clients.stock import check_stock, check_stock_scoring, to_scores
from mopd.engines.concurrency import all_or_none
from mopd.engines.interface import (
    EngineInfo,
    EngineUnavailable,
    Generation,
    ResponseCallback,
    SamplingParams,
    Scores,
    ToDraw,
    ToScore,
)
from mopd.engines.stop_texts import StopTexts
from mopd.engines.torch.loading import read_config, read_stop_ids

ENTRY_BYTES, ENTRY_VALUES = 64, 8
"""Limits of one log-prob's JSON, ``[-12.345678901234567,151935,null],``, and of its values, brackets and commas."""
HEAD_BYTES, HEAD_VALUES = 2**16, 10_000
"""Limits of what an answer may have beside its log-probs."""
SPAN_BYTES = 128
"""Limit of ``{"version":"123456","start":1234,"end":5678},``: a response has one for each version of the weights."""
LENGTH_KEY = "max_position_embeddings"
NO_IMAGES = "SGLang is asked about tokens alone: serve the model with vllm or torch"


class SglangClient:
    """Implements ``Scorer``, ``Generator`` and ``Described``. It never retries, and belongs to the event loop of its
    first call.

    Errors are those of ``RemoteEngine``: ``EngineUnavailable`` (refused, reset, deadline, 5xx, corrupt answer),
    ``EngineBusy`` (429), ``EngineRejected`` (other 4xx).
    """

    def __init__(
        self, url: str, folder: Path, *, token: str | None = None, timeout_s: float, name: str | None = None
    ) -> None:
        """Configure the client without contacting the server.

        Args:
            url: ``http://host:port``.
            folder: the model's config and tokenizer, of which the server tells nothing.
            timeout_s: limit of each call.

        Raises:
            UserError: the URL, the token or the folder's config cannot be used.
        """
        config = read_config(folder)
        self.url = url.rstrip("/")
        self._http = HttpClient(self.url, token=token, timeout_s=timeout_s, name=name, content_type="application/json")
        self.name = self._http.name
        self.vocab_size = int(config.get_text_config().vocab_size)
        self.max_positions = int(config.get_text_config().max_position_embeddings)
        self.stop_ids = read_stop_ids(folder, config)
        self.weight_version = -1
        self.bytes_sent = 0
        self.bytes_received = 0
        """Payload bytes of all requests and answers so far."""
        self._folder = folder

    async def score(self, asked: ToScore) -> list[Scores]:
        """Score each sequence with one HTTP request. ``UserError`` for a temperature other than 1."""
        check_stock(asked, NO_IMAGES, name=self.name)
        check_stock_scoring(asked, vocab_size=self.vocab_size, name=self.name, server="SGLang")
        tokens, top_k = asked.tokens, asked.top_k
        check_ids(asked, self.vocab_size, name=self.name)
        check_length(asked, self.max_positions, LENGTH_KEY, name=self.name)

        async def score_one(sequence: Tensor, start: int) -> Scores:
            ids = sequence.tolist()
            if start == len(ids):
                return to_scores([], [], [], top_k)
            count = (len(ids) - start + 1) * (top_k + 1)
            answer = await self._ask(score_request(ids, start, top_k), count, num_tokens=1)
            try:  # in a thread: the event loop reads other answers meanwhile
                limits = {"vocab_size": self.vocab_size, "max_values": count}
                return await asyncio.to_thread(read_scores, answer, ids, start, top_k, **limits)
            except ValueError as error:
                raise self._http.corrupt(error) from error

        return await all_or_none(score_one(t, start) for t, start in zip(tokens, asked.prompt_lengths, strict=True))

    async def generate(self, asked: ToDraw, *, on_response: ResponseCallback | None = None) -> list[Generation]:
        """Draw one response per prompt, with one HTTP request each. SGLang heeds seeds only with
        ``enable_deterministic_inference``. A request whose caller has gone is aborted by SGLang.

        Raises:
            UserError: a prompt and its response do not fit, or there is a penalty: SGLang reports log-probs after it.
        """
        check_stock(asked, NO_IMAGES, name=self.name)
        prompts, sampling = asked.prompts, asked.sampling
        if sampling.has_penalty:
            raise UserError(
                f"presence_penalty {sampling.presence_penalty}, repetition_penalty {sampling.repetition_penalty}: "
                "SGLang reports log-probs after penalties: remove them, or set engine: {type: torch}"
            )
        check_sampling(asked, self.stop_ids, name=self.name)
        check_ids(asked, self.vocab_size, name=self.name)
        check_length(asked, self.max_positions, LENGTH_KEY, name=self.name)
        texts = await asyncio.to_thread(StopTexts, self._folder, sampling.stop) if sampling.stop else None
        ends = sampling.ends(self.stop_ids)

        async def generate_one(i: int, prompt: Sequence[int], seed: int) -> Generation:
            count = sampling.max_new_tokens * (2 + sampling.num_top_ids)
            answer = await self._ask(
                draw_request(prompt, sampling, ends, seed), count, num_tokens=sampling.max_new_tokens
            )
            begun = prompt[len(prompt) - sampling.num_begun :]
            try:
                generation = await asyncio.to_thread(
                    read_generation, answer, ends, sampling, texts, begun, max_values=count
                )
            except ValueError as error:
                raise self._http.corrupt(error) from error
            if on_response is not None:
                on_response(i, generation)
            return generation

        return await all_or_none(
            generate_one(i, *item) for i, item in enumerate(zip(prompts, asked.seeds, strict=True))
        )

    async def info(self) -> EngineInfo:
        """Describe the served model. Without a manifest: a stock server's files cannot be hashed from here, so its
        scores are fingerprinted instead."""
        said = await self.control("GET", "/model_info")
        if not isinstance(said.get("model_path"), str):
            raise self._http.corrupt("/model_info names no model_path")
        return EngineInfo(
            model=said["model_path"],
            kind="sglang",
            vocab_size=self.vocab_size,
            max_positions=self.max_positions,
            dtype="unknown",
            weight_version=-1,
        )

    async def health(self, *, timeout_s: float) -> None:
        """Return when the server has drawn a token within ``timeout_s``; ``EngineUnavailable`` if not."""
        await self._http.call("GET", "/health", None, MAX_SMALL_BYTES, timeout_s=timeout_s)

    async def control(self, method: str, path: str, **fields: Any) -> dict[str, Any]:
        """Call a route of SGLang beside ``/generate`` and return its answer, an object; empty for an empty body."""
        content = None if method == "GET" else json.dumps(fields).encode()
        body = await self._http.call(method, path, content, MAX_SMALL_BYTES)
        try:
            said = parse_json(body, any_number=True) if body else {}
        except ValueError as error:
            raise self._http.corrupt(f"{path}: {error}") from error
        return said if isinstance(said, dict) else {}

    async def close(self) -> None:
        """Close the connections."""
        await self._http.close()

    async def _ask(self, request: dict[str, Any], num_entries: int, *, num_tokens: int) -> bytes:
        body = json.dumps(request).encode()
        longest = HEAD_BYTES + num_entries * ENTRY_BYTES + num_tokens * (ENTRY_BYTES + SPAN_BYTES)
        answer = await self._http.call("POST", "/generate", body, longest)
        if is_counted():
            self.bytes_sent += len(body)
            self.bytes_received += len(answer)
        return answer


def score_request(ids: Sequence[int], start: int, top_k: int) -> dict[str, Any]:
    """Return the request for the log-probs of ``ids[start:]``. SGLang leaves out those of the first place that it is
    asked for, so that it is asked from one place earlier."""
    return {
        "input_ids": list(ids),
        "sampling_params": {"max_new_tokens": 0, "temperature": 0},
        "return_logprob": True,
        "logprob_start_len": start - 1,
        "top_logprobs_num": top_k,
    }


def draw_request(prompt: Sequence[int], sampling: SamplingParams, ends: Sequence[int], seed: int) -> dict[str, Any]:
    """Return the request for a response that one of ``ends`` ends. With ``ignore_eos`` SGLang heeds no id at all:
    ``read_generation`` cuts the response then, as it does after a stop text."""
    cuts = sampling if sampling.temperature else SamplingParams(max_new_tokens=1)  # no cut matters to greedy
    params = {  # named one by one, as a server may have defaults of its own
        "max_new_tokens": sampling.max_new_tokens,
        "min_new_tokens": 0,
        "temperature": sampling.temperature,
        "top_p": cuts.top_p,
        "top_k": cuts.top_k,
        "min_p": cuts.min_p,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "n": 1,
        "stop_token_ids": list(ends),
        "ignore_eos": sampling.ignore_eos,
        "sampling_seed": seed,
    }
    return {
        "input_ids": list(prompt),
        "sampling_params": params,
        "return_logprob": True,
        "top_logprobs_num": sampling.num_top_ids,
    }


def read_scores(
    body: bytes, tokens: Sequence[int], start: int, top_k: int, *, vocab_size: int, max_values: int
) -> Scores:
    """Return the rows of ``tokens[start:]`` from an answer to ``score_request``; ``ValueError`` for another answer."""
    meta = _meta(body, max_values)
    own = _entries(meta, "input_token_logprobs", len(tokens) - start + 1, first_is_empty=True)
    # SGLang (0.5.23) writes 0 for the vocabulary's last id, beside that id's log-prob
    asked = [0 if token == vocab_size - 1 else token for token in tokens[start:]]
    if [token for _, token in own[1:]] != asked or meta.get("prompt_tokens") != len(tokens):
        raise ValueError("it scores other tokens than those that were sent")
    ranked: list[list[tuple[float, int]]] = [[] for _ in own]
    if top_k:
        ranked = _rows(meta, "input_top_logprobs", len(own), top_k, first_is_empty=True)
    return to_scores(
        [[token for _, token in row] for row in ranked[1:]],
        [[value for value, _ in row] for row in ranked[1:]],
        [value for value, _ in own[1:]],
        top_k,
    )


def read_generation(
    body: bytes,
    ends: Sequence[int],
    sampling: SamplingParams,
    texts: StopTexts | None = None,
    begun: Sequence[int] = (),
    *,
    max_values: int,
) -> Generation:
    """Return the response in an answer to ``draw_request``, up to the first of ``ends`` or the first token that
    completes one of ``texts``; ``ValueError`` if it is none. ``begun`` are the response's tokens at the end of the
    prompt.

    ``EngineUnavailable``: SGLang gave the request up.
    """
    meta = _meta(body, max_values)
    finish = meta.get("finish_reason")
    reason = finish.get("type") if isinstance(finish, dict) else None
    if isinstance(finish, dict) and reason == "abort":
        raise EngineUnavailable(f"SGLang gave a request up: {finish.get('message')!r:.200}")
    if reason not in ("stop", "length"):
        raise ValueError(f"a response ended with {reason!r:.40}")
    drawn = _entries(meta, "output_token_logprobs", None, first_is_empty=False)
    tokens = [token for _, token in drawn]
    if tokens != meta["output_ids"]:
        raise ValueError("its log-probs are those of other tokens than were drawn")
    top_ids = None
    if sampling.num_top_ids:
        rows = _rows(meta, "output_top_logprobs", len(tokens), sampling.num_top_ids, first_is_empty=False)
        top_ids = torch.tensor([[token for _, token in row] for row in rows], dtype=torch.int32)
    versions = _versions(meta.get("weight_versions"), len(tokens))
    end = next((i + 1 for i, token in enumerate(tokens) if token in ends), None)
    if texts is not None:
        completed = texts.first_end([*begun, *tokens], after=len(begun))
        end = min(filter(None, (end, None if completed is None else completed - len(begun))), default=None)
    return Generation(
        tokens=torch.tensor(tokens[:end], dtype=torch.int64),
        logprobs=torch.tensor([value for value, _ in drawn[:end]], dtype=torch.float32),
        top_ids=None if top_ids is None else top_ids.view(-1, sampling.num_top_ids)[:end].contiguous(),
        finish_reason="length" if end is None and reason == "length" else "stop",
        token_versions=versions[:end],
    )


def _meta(body: bytes, max_values: int) -> dict[str, Any]:
    """Return ``meta_info`` of an answer, and in it ``output_ids``."""
    answer = parse_json(body, max_values=HEAD_VALUES + max_values * ENTRY_VALUES)
    if not isinstance(answer, dict) or not isinstance(answer.get("meta_info"), dict):
        raise ValueError("no object with meta_info")
    return {**answer["meta_info"], "output_ids": answer.get("output_ids")}


def _entries(
    meta: dict[str, Any], key: str, count: int | None, *, first_is_empty: bool = True
) -> list[tuple[float, int]]:
    """Return the ``(log-prob, id)`` of a list; of the first place SGLang may tell no log-prob."""
    listed = meta.get(key)
    if not isinstance(listed, list) or (count is not None and len(listed) != count):
        raise ValueError(f"{key} is no list of {count} log-probs")
    return [_entry(entry, may_lack=first_is_empty and i == 0) for i, entry in enumerate(listed)]


def _rows(
    meta: dict[str, Any], key: str, count: int, width: int, *, first_is_empty: bool
) -> list[list[tuple[float, int]]]:
    """Return ``count`` rows of ``width`` entries, the most probable first."""
    listed = meta.get(key)
    if not isinstance(listed, list) or len(listed) != count:
        raise ValueError(f"{key} has not {count} rows")
    rows: list[list[tuple[float, int]]] = []
    for i, row in enumerate(listed):
        if first_is_empty and i == 0 and row is None:
            rows.append([])
        elif isinstance(row, list) and len(row) == width:
            rows.append([_entry(entry) for entry in row])
        else:
            raise ValueError(f"row {i} of {key} has not {width} log-probs")
    return rows


def _entry(entry: object, *, may_lack: bool = False) -> tuple[float, int]:
    if not isinstance(entry, list) or len(entry) != 3 or type(entry[1]) is not int or not 0 <= entry[1] < 2**31:
        raise ValueError(f"{entry!r:.80} is no log-prob, id and text")
    if entry[0] is None and may_lack:
        return 0.0, entry[1]
    if type(entry[0]) not in (int, float):
        raise ValueError(f"{entry[0]!r:.40} is no log-prob")
    return float(entry[0]), entry[1]


def _versions(spans: object, num_tokens: int) -> Tensor:
    """Return [R] int32 versions from SGLang's spans; ``ValueError`` unless they cover all tokens in order. A label that
    is no number, as ``default``, is of weights that no student sent: -1."""
    versions: list[int] = []
    for span in spans if isinstance(spans, list) else ():
        if not isinstance(span, dict) or span.get("start") != len(versions) or type(span.get("end")) is not int:
            break
        label = str(span.get("version"))
        number = int(label) if label.isascii() and label.isdecimal() and len(label) < 10 else -1
        versions += [number] * min(span["end"] - span["start"], num_tokens)
    if len(versions) != num_tokens:
        raise ValueError(f"it does not tell which weights drew its {num_tokens} tokens: {spans!r:.200}")
    return torch.tensor(versions, dtype=torch.int32)
