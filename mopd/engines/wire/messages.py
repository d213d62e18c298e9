"""Requests and answers of the engine server, and their bytes: a small msgpack map with raw little-endian arrays.

A message is a frozen dataclass with a class attribute ``kind``; fields made by ``array_field`` are one-dimensional
numpy arrays, all others scalars. On the wire::

    {"kind": "score", "version": 12, "head": <msgpack map of the scalars>,
     "arrays": {"tokens": <4 bytes per id>, ...}, "crc": CRC-32 of head and arrays in order}

Sequences lie end to end in flat arrays, with their lengths beside them.

A score request for two sequences, of 5 and 4 tokens with 3 and 2 prompt tokens, at K = 8::

    tokens [9] int32 = 1 5 9 7 7 | 1 4 4 6        lengths [2] = 5 4        prompt_lengths [2] = 3 2        images [0]

and its answer (2 + 2 response rows; nothing for the prompt)::

    lengths [2] = 2 2    ids [4 * 8] int32    logprobs [4 * 8]    token_logprobs [4]      8 K + 4 bytes per row

(of a request with G given ids, or for hidden states of size H, also given_logprobs [4 * G] and hidden [4 * H]).

Shapes: N sequences, T tokens of all sequences, R rows (response tokens) of all sequences, K top-k.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import math
import typing
import zlib
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cache, reduce
from typing import Any, ClassVar, TypeVar

import msgpack
import numpy as np

from mopd.base.files.json_text import parse_json
from mopd.base.text import shortened, visible
from mopd.base.types import RouteShape
from mopd.config.values import MAX_STOP_IDS, MAX_STOP_TEXTS, check_stop, require_at_least
from mopd.engines.wire.image_table import from_table

VERSION = 12
"""Version of the wire format; the two ends must agree."""
LARGE_BYTES = 2**18
"""Bodies above this are coded in a thread, so that the event loop serves others meanwhile."""
FRAME_HEAD_BYTES = 4
MIB = 2**20

CONTENT_TYPE = "application/msgpack"
"""Content type of every message body; errors are small JSON objects."""
DEADLINE_HEADER = "x-mopd-deadline-s"
"""Request header: seconds from arrival after which the client no longer waits for the answer."""
MAX_HEAD_BYTES = MIB
"""Largest packed scalars of one message, in bytes."""
MAX_CHUNK_BYTES = 64 * MIB
"""Largest body with a part of the weights, in bytes, everything included."""
MAX_EXPERTS = 2**15
"""Most experts of a layer whose numbers routes hold."""
MAX_SAMPLES = 65536
"""Most sequences in one request."""
MIN_TEMPERATURE = 1e-4
"""Smallest positive temperature: logits divided by much less are infinite, and their log-probs are NaN."""
MAX_TEMPERATURE = 1e6
"""Largest temperature: every distribution is uniform long before, and fp32 ends at 3e38."""

Array = np.ndarray[Any, Any]


class WireError(ValueError):
    """Bytes that are not the message they should be."""


@dataclasses.dataclass(frozen=True)
class Message:
    """Base of all messages that ``encode`` and ``decode`` handle."""

    kind: ClassVar[str]

    def check(self) -> None:
        """Raise ``WireError`` if the fields do not fit one another."""


MessageT = TypeVar("MessageT", bound=Message)


def array_field(dtype: str) -> Any:
    """Declare a field that holds a one-dimensional array; ``dtype`` is numpy's name of a little-endian dtype."""
    return dataclasses.field(metadata={"dtype": dtype})


def encode(message: Message) -> bytes:
    """Return the message as a body."""
    scalars, dtypes = _fields(typing.cast(Any, type(message)))
    head = msgpack.packb({name: getattr(message, name) for name in scalars}, unicode_errors="backslashreplace")
    arrays = {name: _buffer(getattr(message, name), dtype, name) for name, dtype in dtypes.items()}
    crc = _crc(head, arrays.values())
    outer = {"kind": type(message).kind, "version": VERSION, "head": head, "arrays": arrays, "crc": crc}
    return typing.cast(bytes, msgpack.packb(outer))


def decode(body: bytes | bytearray | memoryview, cls: type[MessageT], *others: type[MessageT]) -> MessageT:
    """Return the message in a body, which may be of any of these kinds. Arrays are fresh, writable and of the machine's
    byte order.

    Raises:
        WireError: not msgpack, another kind or version, a missing or unknown field, a wrong type, a wrong checksum, or
            fields that do not fit one another.
    """
    outer = _unpack(body)
    _require_keys(outer, {"kind", "version", "head", "arrays", "crc"}, "message")
    cls = next((other for other in others if other.kind == outer["kind"]), cls)
    if outer["kind"] != cls.kind or type(outer["version"]) is not int or outer["version"] != VERSION:
        raise WireError(
            f"expected kind {cls.kind!r} version {VERSION}, got {_shown(outer['kind'])} version "
            f"{_shown(outer['version'])}"
        )
    head, arrays = outer["head"], outer["arrays"]
    if not isinstance(head, bytes) or len(head) > MAX_HEAD_BYTES:
        raise WireError(f"head is not a buffer of at most {MAX_HEAD_BYTES} bytes")
    scalars, dtypes = _fields(typing.cast(Any, cls))
    _require_keys(arrays, dtypes.keys(), "arrays")
    for name in dtypes:
        if not isinstance(arrays[name], bytes):
            raise WireError(f"array {name!r} is not a buffer")
    # the checksum comes before the head is unpacked: damaged bytes are reported as such
    if type(outer["crc"]) is not int or _crc(head, (arrays[name] for name in dtypes)) != outer["crc"]:
        raise WireError("checksum does not match: the bytes changed on their way")
    given = _unpack(head)
    _require_keys(given, scalars.keys(), "head")
    values = {name: _scalar(given[name], annotation, name) for name, annotation in scalars.items()}
    message = cls(**values, **{name: _array(arrays[name], dtype, name) for name, dtype in dtypes.items()})
    message.check()
    return message


async def encode_aside(message: Message) -> bytes:
    """Encode a message; a large one in a thread."""
    num_bytes = sum(value.nbytes for value in vars(message).values() if isinstance(value, np.ndarray))
    return await asyncio.to_thread(encode, message) if num_bytes > LARGE_BYTES else encode(message)


async def decode_aside(body: bytes | bytearray, cls: type[MessageT]) -> MessageT:
    """Decode a body; a large one in a thread."""
    return await asyncio.to_thread(decode, body, cls) if len(body) > LARGE_BYTES else decode(body, cls)


def frame(body: bytes) -> bytes:
    """Return a message as part of a stream: its length in 4 little-endian bytes, then the message."""
    return len(body).to_bytes(FRAME_HEAD_BYTES, "little") + body


class FrameReader:
    """Cuts a stream of frames into messages."""

    def __init__(self, *, max_bytes: int) -> None:
        """Start an empty stream. ``max_bytes`` bounds one message, and with it the bytes kept here."""
        self._max_bytes = max_bytes
        self._rest = bytearray()

    def feed(self, part: bytes) -> list[bytes]:
        """Return the messages that are complete with ``part``; ``WireError`` for one longer than ``max_bytes``."""
        self._rest += part
        found: list[bytes] = []
        while len(self._rest) >= FRAME_HEAD_BYTES:
            size = int.from_bytes(self._rest[:FRAME_HEAD_BYTES], "little")
            if size > self._max_bytes:
                raise WireError(f"a message of {size} bytes in a stream: at most {self._max_bytes} can be right")
            if len(self._rest) < FRAME_HEAD_BYTES + size:
                break
            found.append(bytes(self._rest[FRAME_HEAD_BYTES : FRAME_HEAD_BYTES + size]))
            del self._rest[: FRAME_HEAD_BYTES + size]
        return found


@cache
def _fields(cls: type[Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return, by name, the annotations of the scalars and the dtypes of the arrays."""
    hints = typing.get_type_hints(cls)
    dtypes = {field.name: field.metadata["dtype"] for field in dataclasses.fields(cls) if field.metadata}
    return {field.name: hints[field.name] for field in dataclasses.fields(cls) if not field.metadata}, dtypes


def _crc(head: bytes, buffers: Iterable[bytes | memoryview]) -> int:
    return reduce(lambda crc, buffer: zlib.crc32(buffer, crc), buffers, zlib.crc32(head))


def _buffer(array: Array, dtype: str, name: str) -> memoryview:
    cast = np.ascontiguousarray(array, dtype=dtype)
    if cast.ndim != 1:
        raise ValueError(f"array {name!r} has {cast.ndim} dimensions, expected 1")
    return cast.view(np.uint8).data  # msgpack packs bytes, not elements


def _array(data: bytes, dtype: str, name: str) -> Array:
    wire = np.dtype(dtype)
    if len(data) % wire.itemsize:
        raise WireError(f"array {name!r} has {len(data)} bytes, not a multiple of {wire.itemsize}")
    return np.frombuffer(data, dtype=wire).astype(wire.newbyteorder("="), copy=True)


def _unpack(data: bytes | bytearray | memoryview) -> Any:
    try:
        return msgpack.unpackb(data, raw=False, strict_map_key=True, max_ext_len=0)
    except RecursionError as error:
        raise WireError("not msgpack: nested too deeply") from error
    except (ValueError, msgpack.exceptions.UnpackException) as error:
        # a truncated body, an unknown type byte, extra bytes, text that is not UTF-8 or a map key that is no text
        raise WireError(f"not msgpack: {_shown(str(error) or type(error).__name__)}") from error


def _require_keys(value: Any, keys: AbstractSet[str], what: str) -> None:
    if not isinstance(value, dict):
        raise WireError(f"{what} is not a map")
    if value.keys() != keys:
        odd = sorted(visible(str(key))[:40] for key in value.keys() ^ keys)
        raise WireError(f"{what} misses or does not know {', '.join(odd[:4])}")


def _scalar(value: Any, annotation: Any, name: str) -> Any:
    if annotation is float:
        if type(value) in (int, float) and math.isfinite(value):
            return float(value)
    # `is`: True would pass for the whole number 1
    elif type(value) is annotation:
        return value
    raise WireError(f"{name} is {_shown(value)}: wrong type, or not finite")


def _shown(value: Any) -> str:
    return shortened(repr(value), 60)


@dataclass(frozen=True, kw_only=True)
class ScoreRequest(Message):
    """Request to score the response part of each sequence."""

    kind: ClassVar[str] = "score"
    tokens: Array = array_field("<i4")
    """[T] int32."""
    lengths: Array = array_field("<i4")
    """[N] int32, tokens of each sequence."""
    prompt_lengths: Array = array_field("<i4")
    """[N] int32, at least 1 each."""
    images: Array = array_field("<i4")
    """[8 * M] int32, a table of the images (``mopd.engines.wire.image_table``)."""
    given_ids: Array = array_field("<i4")
    """[R * G] int32, ids at which each row is scored."""
    num_given: int
    """G."""
    hidden_size: int
    """H, the size of the hidden states that are asked for; 0: none are."""
    top_k: int
    temperature: float
    adapter: str = ""
    """Name of the adapter that answers; empty: none."""
    weight_version: int
    """Version that must answer; -1 is the checkpoint."""

    def check(self) -> None:
        """Raise ``WireError`` unless the arrays fit one another and the scalars are in range."""
        _check_sequences(self.tokens, self.lengths, "lengths")
        _check_images(self.images, len(self.lengths))
        if self.prompt_lengths.shape != self.lengths.shape:
            raise WireError(f"{len(self.lengths)} lengths but {len(self.prompt_lengths)} prompt_lengths")
        if ((self.prompt_lengths < 1) | (self.prompt_lengths > self.lengths)).any():
            raise WireError("prompt_lengths must lie between 1 and the sequence's length")
        if self.top_k < 0:
            raise WireError(f"top_k is {self.top_k}: set 0 or more")
        if self.hidden_size < 0:
            raise WireError(f"hidden_size is {self.hidden_size}: set 0 or more")
        if self.num_given < 0 or self.given_ids.shape != (self.num_rows * self.num_given,):
            raise WireError(f"{len(self.given_ids)} given ids for {self.num_rows} rows of {self.num_given}")
        if len(self.given_ids) and self.given_ids.min() < 0:
            raise WireError("a given id is negative")
        if not MIN_TEMPERATURE <= self.temperature <= MAX_TEMPERATURE:
            raise WireError(
                f"temperature is {self.temperature}: scoring needs {MIN_TEMPERATURE} to {MAX_TEMPERATURE:g}"
            )

    @property
    def checksum(self) -> bytes:
        """16 bytes over the token ids, their split into sequences, the images, the given ids and the adapter; the
        answer repeats them."""
        return _checksum(
            self.tokens, self.lengths, self.prompt_lengths, self.images, self.given_ids, adapter=self.adapter
        )

    @property
    def num_rows(self) -> int:
        """R, the number of rows of the answer."""
        return len(self.tokens) - int(self.prompt_lengths.sum(dtype=np.int64))


@dataclass(frozen=True, kw_only=True)
class ScoreAnswer(Message):
    """A model's distributions over every response token; most probable id first in each row."""

    kind: ClassVar[str] = "scores"
    request_checksum: bytes
    weight_version: int
    top_k: int
    num_given: int
    """G of the request."""
    hidden_size: int
    """H of the request."""
    lengths: Array = array_field("<i4")
    """[N] int32, rows of each sequence."""
    ids: Array = array_field("<i4")
    """[R * K] int32."""
    logprobs: Array = array_field("<f4")
    """[R * K] fp32."""
    token_logprobs: Array = array_field("<f4")
    """[R] fp32."""
    given_logprobs: Array = array_field("<f4")
    """[R * G] fp32, of the given ids, which do not come back."""
    hidden: Array = array_field("<u2")
    """[R * H], the bits of bf16 numbers."""

    def check(self) -> None:
        """Raise ``WireError`` unless every row has ``top_k``, ``num_given`` and ``hidden_size`` entries."""
        _check_sequences(self.token_logprobs, self.lengths, "lengths", at_least=0)
        entries = len(self.token_logprobs) * self.top_k
        if self.num_given < 0 or self.given_logprobs.shape != (len(self.token_logprobs) * self.num_given,):
            raise WireError(
                f"{len(self.token_logprobs)} rows of {self.num_given} given ids but {len(self.given_logprobs)} logprobs"
            )
        if self.hidden_size < 0 or self.hidden.shape != (len(self.token_logprobs) * self.hidden_size,):
            raise WireError(
                f"{len(self.token_logprobs)} rows of hidden size {self.hidden_size} but {len(self.hidden)} numbers"
            )
        if self.top_k < 0 or self.ids.shape != (entries,) or self.logprobs.shape != (entries,):
            raise WireError(
                f"{len(self.token_logprobs)} rows x top_k {self.top_k} but {len(self.ids)} ids and "
                f"{len(self.logprobs)} logprobs"
            )


PLAIN_SAMPLING = (
    "max_new_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "repetition_penalty", "ignore_eos",
    "num_begun", "num_top_ids",
)  # fmt: skip
"""Fields of ``mopd.engines.interface.SamplingParams`` that a ``GenerateRequest`` carries as they are."""


@dataclass(frozen=True, kw_only=True)
class GenerateRequest(Message):
    """Request to draw one response per prompt."""

    kind: ClassVar[str] = "generate"
    tokens: Array = array_field("<i4")
    """[T] int32, prompts end to end."""
    lengths: Array = array_field("<i4")
    """[N] int32."""
    seeds: Array = array_field("<i8")
    """[N] int64, not negative."""
    images: Array = array_field("<i4")
    """[8 * M] int32, as in ``ScoreRequest``."""
    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    repetition_penalty: float
    stop: str
    """Stop texts, a JSON list."""
    stop_token_ids: Array = array_field("<i4")
    """[S] int32, stop ids beside the checkpoint's own."""
    ignore_eos: bool
    num_begun: int
    num_top_ids: int
    """Most probable ids that are told with each token."""
    route_layers: int = 0
    """Layers whose routes are told with each response; 0: none are."""
    route_choices: int = 0
    route_experts: int = 0
    adapter: str = ""
    """As in ``ScoreRequest``."""
    weight_version: int
    """Oldest version that may answer."""

    def check(self) -> None:
        """Raise ``WireError`` unless the arrays fit one another and the scalars are in range."""
        _check_sequences(self.tokens, self.lengths, "lengths")
        _check_images(self.images, len(self.lengths))
        if self.seeds.shape != self.lengths.shape or (self.seeds < 0).any():
            raise WireError(f"{len(self.lengths)} prompts need as many seeds, none negative; got {len(self.seeds)}")
        if self.max_new_tokens < 1:
            raise WireError(f"max_new_tokens is {self.max_new_tokens}: set 1 or more")
        if self.temperature != 0 and not MIN_TEMPERATURE <= self.temperature <= MAX_TEMPERATURE:
            raise WireError(f"temperature is {self.temperature}: set 0, or {MIN_TEMPERATURE} to {MAX_TEMPERATURE:g}")
        if not 0 < self.top_p <= 1:
            raise WireError(f"top_p is {self.top_p}: set a number in (0, 1]")
        if self.top_k != -1 and self.top_k < 1:
            raise WireError(f"top_k is {self.top_k}: set -1 (all) or a positive number")
        if self.num_top_ids < 0:
            raise WireError(f"num_top_ids is {self.num_top_ids}: set 0 or more")
        shape = self.route_layers, self.route_choices, self.route_experts
        if shape != (0, 0, 0) and not (min(shape) > 0 and self.route_choices <= self.route_experts <= MAX_EXPERTS):
            raise WireError(f"routes of {shape} layers, choices and experts: name all or none, up to {MAX_EXPERTS}")
        if not 0 <= self.num_begun < self.lengths.min():
            raise WireError(f"num_begun is {self.num_begun}: set 0 or more, below the shortest prompt's length")
        if len(self.stop_token_ids) > MAX_STOP_IDS or (self.stop_token_ids < 0).any():
            raise WireError(f"{len(self.stop_token_ids)} stop_token_ids: send at most {MAX_STOP_IDS}, none negative")
        try:
            require_at_least("min_p", self.min_p, 0, 1)
            require_at_least("presence_penalty", self.presence_penalty, -2, 2)
            require_at_least("repetition_penalty", self.repetition_penalty, 0.01, 100)
            check_stop(self.stop_texts)
        except ValueError as error:
            raise WireError(str(error)) from error

    @property
    def routes(self) -> RouteShape | None:
        """Shape of the routes that are asked for."""
        if not self.route_layers:
            return None
        return RouteShape(num_layers=self.route_layers, num_choices=self.route_choices, num_experts=self.route_experts)

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """The texts of ``stop``; ``ValueError`` if it is no list of texts."""
        try:
            texts = parse_json(self.stop, max_values=MAX_STOP_TEXTS + 1)
        except ValueError as error:
            raise ValueError(f"stop is no JSON ({error})") from error
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise ValueError("stop is no JSON list of texts")
        return tuple(texts)

    @property
    def checksum(self) -> bytes:
        """16 bytes over prompts, seeds, images and the adapter; the answer repeats them."""
        return _checksum(self.tokens, self.lengths, self.seeds, self.images, adapter=self.adapter)


@dataclass(frozen=True, kw_only=True)
class GenerateAnswer(Message):
    """One sampled response, with its stop token if there is one. The answer to a request is a stream of them, in the
    order in which they end, each in a ``frame``."""

    kind: ClassVar[str] = "response"
    request_checksum: bytes
    index: int
    """Place of its prompt in the request."""
    finish_reason: str
    """``stop``, ``length`` or ``handed_back`` (``mopd.engines.interface.Generation``)."""
    tokens: Array = array_field("<i4")
    """[R] int32."""
    logprobs: Array = array_field("<f4")
    """[R] fp32."""
    token_versions: Array = array_field("<i4")
    """[R] int32, version of the weights that drew each token, never decreasing."""
    top_ids: Array = array_field("<i4")
    """[R * ``num_top_ids``] int32, most probable ids at each place."""
    routes: Array = array_field("<u1")
    """Bytes of ``Generation.routes``."""


@dataclass(frozen=True, kw_only=True)
class GenerateFailure(Message):
    """Last frame of an answer whose remaining responses cannot be drawn. A failure before the first response has an
    HTTP status of its own instead."""

    kind: ClassVar[str] = "failure"
    request_checksum: bytes
    status: int
    """HTTP status that the failure would have had, from 400 to 599."""
    message: str

    def check(self) -> None:
        """Raise ``WireError`` for a status that is no error's."""
        if not 400 <= self.status < 600:
            raise WireError(f"status is {self.status}")


def split_points(lengths: Array) -> Array:
    """Return where flat arrays are cut (``numpy.split``'s second argument)."""
    return np.cumsum(lengths, dtype=np.int64)[:-1]


def _check_sequences(flat: Array, lengths: Array, name: str, at_least: int = 1) -> None:
    """Raise ``WireError`` unless ``flat`` is exactly the sequences that ``lengths`` announces, without negative ids."""
    if not 1 <= len(lengths) <= MAX_SAMPLES:
        raise WireError(f"{len(lengths)} sequences: send 1 to {MAX_SAMPLES}")
    if (lengths < at_least).any():
        raise WireError(f"{name} holds a value below {at_least}")
    total = int(lengths.sum(dtype=np.int64))
    if total != len(flat):
        raise WireError(f"{name} add up to {total} but {len(flat)} values came")
    if flat.dtype.kind == "i" and len(flat) and flat.min() < 0:
        raise WireError("a token id is negative")


def _check_images(table: Array, num_sequences: int) -> None:
    try:
        from_table(table, num_sequences)
    except ValueError as error:
        raise WireError(str(error)) from error


def _checksum(*arrays: Array, adapter: str) -> bytes:
    digest = hashlib.blake2b(adapter.encode(errors="surrogatepass"), digest_size=16)
    for array in arrays:
        little = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
        digest.update(len(little).to_bytes(8, "little"))
        digest.update(little.view(np.uint8).data)
    return digest.digest()
