"""``/v1/completions`` as OpenAI and vLLM speak it, for looking at a teacher with any client: JSON, a dict per position.

mopd itself never uses it. Log-probs are at temperature 1. ``prompt_logprobs`` has vLLM's form; ``echo`` with
``logprobs`` has OpenAI's, and a token's text is ``token_id:N`` when the server has no tokenizer, or when
``return_tokens_as_token_ids`` asks for it.
"""

from __future__ import annotations

import secrets
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Protocol, cast

import torch
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError

from mopd.engines.interface import EngineInfo, Generation, SamplingParams, Scores
from mopd.files.json_text import parse_json
from mopd.serving.errors import bad_request, too_large
from mopd.serving.host import EngineHost
from mopd.serving.work import check_length, check_token, check_top_k
from mopd.wire.limits import MAX_TEMPERATURE, MIN_TEMPERATURE

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default."""
CHARACTERS_PER_TOKEN = 32
"""More than this, on average, is taken to be too long before it is cut into tokens: ordinary text has about 4, deeply
indented code 16."""
MAX_ENTRIES = 2**17
"""Log-probs in one answer: each is half a kilobyte of Python objects before it is JSON."""


def _prompt(value: Any) -> Any:
    """Checked by hand: pydantic's union keeps an error for every item of every kind that a long list is not."""
    if isinstance(value, str) or (isinstance(value, list) and (_all(value, int) or _all(value, str))):
        return value
    if isinstance(value, list) and all(isinstance(item, list) and _all(item, int) for item in value):
        return value
    raise ValueError("send a text, token ids, or a list of one of them")


def _all(items: list[Any], kind: type) -> bool:
    return all(type(item) is kind for item in items)


class Tokenizer(Protocol):
    """What of a transformers tokenizer is used."""

    def encode(self, text: str) -> list[int]:
        """Token ids, special tokens as the tokenizer adds them."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text, special tokens included."""
        ...


class CompletionRequest(BaseModel):
    """The keys that are answered; any other is refused by name."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = None
    prompt: Annotated[str | list[int] | list[str] | list[list[int]], PlainValidator(_prompt)]
    max_tokens: int = Field(DEFAULT_MAX_TOKENS, ge=0)
    temperature: float = Field(1.0, ge=0, allow_inf_nan=False)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = -1
    seed: int | None = None
    logprobs: int | None = Field(None, ge=0)
    prompt_logprobs: int | None = Field(None, ge=0)
    echo: bool = False
    return_tokens_as_token_ids: bool = False
    return_token_ids: bool = False
    n: int = Field(1, ge=1, le=1)
    stream: bool = False
    user: str | None = None


@dataclass(frozen=True, slots=True)
class _Completion:
    """What the engine gave for one prompt."""

    sequence: list[int]
    """Prompt and response."""
    drawn: Generation | None
    scores: Scores | None


@dataclass(slots=True)
class CompletionWork:
    """Implements ``Work`` for ``/v1/completions``: one request, checked against the engine."""

    request: CompletionRequest
    prompts: list[list[int]]
    info: EngineInfo
    tokenizer: Tokenizer | None
    media_type: str = "application/json"

    @property
    def num_tokens(self) -> int:
        """What it costs the queue: drawing and scoring each see every token."""
        return sum(map(len, self.prompts)) + len(self.prompts) * self.request.max_tokens

    @property
    def weight_version(self) -> int:
        """Whichever answered when the request came."""
        return self.info.weight_version

    def check(self, info: EngineInfo) -> None:
        """See ``Work.check``: what ``make_work`` could not know before."""
        if self._top_k is None:
            return
        check_top_k(self._top_k, info)
        if self.num_tokens * self._top_k > MAX_ENTRIES:
            raise too_large(
                f"{self.num_tokens} tokens with {self._top_k} log-probs each: at most {MAX_ENTRIES} together are "
                "answered as JSON; ask for fewer, or use /v1/score"
            )

    @property
    def _top_k(self) -> int | None:
        """Alternatives per position; None when no log-prob is asked for."""
        asked = [k for k in (self.request.logprobs, self.request.prompt_logprobs) if k is not None]
        return max(1, *asked) if asked else None

    async def run(self, host: EngineHost) -> list[_Completion]:
        """See ``Work.run``."""
        drawn: Sequence[Generation | None] = [None] * len(self.prompts)
        if self.request.max_tokens:
            seed = secrets.randbits(62) if self.request.seed is None else self.request.seed
            sampling = SamplingParams(
                max_new_tokens=self.request.max_tokens,
                temperature=self.request.temperature,
                top_p=self.request.top_p,
                top_k=min(self.request.top_k, self.info.vocab_size),
            )
            drawn = await host.generate(self.prompts, sampling, [seed + i for i in range(len(self.prompts))])
        sequences = [
            [*prompt, *([] if given is None else given.tokens.tolist())]
            for prompt, given in zip(self.prompts, drawn, strict=True)
        ]
        scores: Sequence[Scores | None] = [None] * len(self.prompts)
        if self._top_k is not None:
            tokens = [torch.tensor(sequence) for sequence in sequences]
            scores = await host.score(tokens, [1] * len(tokens), top_k=self._top_k, temperature=1.0)
        return [_Completion(*parts) for parts in zip(sequences, drawn, scores, strict=True)]

    def answer_bytes(self, answer: list[_Completion]) -> int:
        """See ``Work.answer_bytes``."""
        return sum(len(done.sequence) for done in answer) * 100 * (1 + (self._top_k or 0))

    def encode(self, answer: list[_Completion]) -> bytes:
        """See ``Work.encode``."""
        return bytes(JSONResponse(self._body(answer)).body)

    def _body(self, answer: list[_Completion]) -> dict[str, Any]:
        choices = [
            self._choice(index, prompt, done.sequence, done.drawn, done.scores)
            for index, (prompt, done) in enumerate(zip(self.prompts, answer, strict=True))
        ]
        num_prompt = sum(map(len, self.prompts))
        num_drawn = sum(len(done.sequence) for done in answer) - num_prompt
        return {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": self.info.model,
            "choices": choices,
            "usage": {
                "prompt_tokens": num_prompt,
                "completion_tokens": num_drawn,
                "total_tokens": num_prompt + num_drawn,
            },
        }

    def _choice(
        self, index: int, prompt: list[int], sequence: list[int], drawn: Generation | None, scores: Scores | None
    ) -> dict[str, Any]:
        start = 0 if self.request.echo else len(prompt)
        choice: dict[str, Any] = {
            "index": index,
            "text": self.tokenizer.decode(sequence[start:]) if self.tokenizer is not None else "",
            "token_ids": sequence[start:],
            "finish_reason": "length" if drawn is None else drawn.finish_reason,
            "logprobs": None,
        }
        if self.request.return_token_ids:
            choice["prompt_token_ids"] = prompt
        if scores is None:
            return choice
        if self.request.logprobs is not None:
            choice["logprobs"] = self._logprobs(sequence, start, scores)
        if self.request.prompt_logprobs is not None:
            choice["prompt_logprobs"] = [None] + [
                self._entries(sequence[place], scores, place - 1) for place in range(1, len(prompt))
            ]
        return choice

    def _entries(self, token: int, scores: Scores, row: int) -> dict[str, dict[str, Any]]:
        """vLLM's form: the most probable ids and the sequence's own, ``rank`` null where it is not among them."""
        count = self.request.prompt_logprobs or 0
        pairs = zip(scores.ids[row, :count].tolist(), scores.logprobs[row, :count].tolist(), strict=True)
        entries = {
            str(other): {"logprob": logprob, "rank": rank, "decoded_token": self._text(other)}
            for rank, (other, logprob) in enumerate(pairs, start=1)
        }
        if str(token) not in entries:
            own = scores.token_logprobs[row].item()
            best = scores.ids[row, 0].item() == token
            entries[str(token)] = {"logprob": own, "rank": 1 if best else None, "decoded_token": self._text(token)}
        return entries

    def _logprobs(self, sequence: list[int], start: int, scores: Scores) -> dict[str, list[Any]]:
        """OpenAI's form, from position ``start`` on; nothing is known of the first token of all."""
        count = self.request.logprobs or 0
        form: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        offset = 0
        for place, token in enumerate(sequence[start:], start=start):
            text = self._name(token)
            form["tokens"].append(text)
            form["text_offset"].append(offset)
            offset += len(text)
            row = place - 1
            form["token_logprobs"].append(scores.token_logprobs[row].item() if place else None)
            top = zip(scores.ids[row, :count].tolist(), scores.logprobs[row, :count].tolist(), strict=True)
            form["top_logprobs"].append({self._name(other): value for other, value in top} if place else None)
        return form

    def _text(self, token: int) -> str | None:
        return None if self.tokenizer is None else self.tokenizer.decode([token])

    def _name(self, token: int) -> str:
        text = None if self.request.return_tokens_as_token_ids else self._text(token)
        return f"token_id:{token}" if text is None else text


def read_work(body: bytearray, info: EngineInfo, tokenizer: Tokenizer | None) -> CompletionWork:
    """A request from its JSON, for a thread: texts become tokens here. ``Refusal`` 400 for what cannot be answered."""
    try:
        asked = CompletionRequest.model_validate(parse_json(body.decode()))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part)[:40] for part in first["loc"])
        raise bad_request(f"{place}: {first['msg']}") from error
    except ValueError as error:
        raise bad_request(f"not valid JSON: {error}") from error
    return make_work(asked, info, tokenizer)


def make_work(request: CompletionRequest, info: EngineInfo, tokenizer: Tokenizer | None) -> CompletionWork:
    """Token ids of the prompts; ``Refusal`` 400 for what this server cannot answer."""
    if request.stream:
        raise bad_request("stream is true: answers come whole; leave it out")
    if request.model not in (None, info.model):
        raise bad_request(f"model is {request.model!r:.80}: this server has {info.model!r}")
    if request.temperature and not MIN_TEMPERATURE <= request.temperature <= MAX_TEMPERATURE:
        raise bad_request(f"temperature is {request.temperature}: set 0, or {MIN_TEMPERATURE} to {MAX_TEMPERATURE:g}")
    if request.top_k != -1 and request.top_k < 1:
        raise bad_request(f"top_k is {request.top_k}: set -1 (all) or a positive number")
    if request.seed is not None and not 0 <= request.seed < 2**62:
        raise bad_request(f"seed is {request.seed}: set 0 or more, below 2**62")
    given = request.prompt
    is_one = not given or isinstance(given, str) or isinstance(given[0], int)
    several = cast(Sequence[str | list[int]], [given] if is_one else given)
    _check_amount([prompt for prompt in several if isinstance(prompt, str)], request.max_tokens, info)
    prompts: list[list[int]] = []
    for prompt in several:
        if isinstance(prompt, str):
            if tokenizer is None:
                raise bad_request("prompt is text and this server has no tokenizer: send token ids")
            prompt = tokenizer.encode(prompt)
        if not prompt:
            raise bad_request("a prompt is empty")
        if min(prompt) < 0:
            raise bad_request(f"prompt holds {min(prompt)}: token ids are not negative")
        check_length(len(prompt) + request.max_tokens, info)
        check_token(max(prompt), info)
        prompts.append(prompt)
    return CompletionWork(request, prompts, info, tokenizer)


def _check_amount(texts: Sequence[str], max_tokens: int, info: EngineInfo) -> None:
    """``Refusal`` 400 or 413 for texts that cannot fit: cutting megabytes into tokens takes seconds."""
    longest = max(map(len, texts), default=0)
    if longest > CHARACTERS_PER_TOKEN * info.max_positions:
        raise bad_request(f"a text of {longest} characters: {info.model} takes {info.max_positions} tokens")
    most = info.limits.max_tokens_per_request
    fewest = len(texts) * (1 + max_tokens)
    if most is not None and (fewest > most or sum(map(len, texts)) > CHARACTERS_PER_TOKEN * most):
        raise too_large(
            f"{len(texts)} texts of {sum(map(len, texts))} characters and {max_tokens} new tokens each: this server "
            f"takes {most} tokens at a time"
        )
