"""HTTP application around one engine. One process serves one replica; nothing is shared between servers.

::

    head (limit, deadline) ─ web page? ─ token? ─ length? ─ body (limit, deadline) ─ decode ─
         431  408            400 403     401      411        413  408  429           400

    ─ room in the queue? ─ version? ─ engine ─ answer, or a stream of responses (``streaming``)
         429 413 503         409     500 504

A request whose client goes away is cancelled: it leaves the queue, or is aborted if the engine can do so.
"""

from __future__ import annotations

import dataclasses
import hmac
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from fastapi import Depends, FastAPI, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.middleware.trustedhost import TrustedHostMiddleware

from mopd.base.text import one_line
from mopd.base.types import UserError
from mopd.engines.interface import (
    EngineInfo,
    EngineRejected,
    EngineUnavailable,
    Generation,
    ResponseCallback,
    SamplingParams,
    ToDraw,
    ToScore,
    WeightsLost,
)
from mopd.engines.wire.images import MAX_BODY_BYTES as MAX_IMAGES_BODY_BYTES
from mopd.engines.wire.images import ImageFiles, ImagesKept
from mopd.engines.wire.messages import (
    CONTENT_TYPE,
    MAX_CHUNK_BYTES,
    PLAIN_SAMPLING,
    VERSION,
    GenerateRequest,
    MessageT,
    ScoreAnswer,
    ScoreRequest,
    WireError,
    decode_aside,
    encode,
    encode_aside,
    split_points,
)
from mopd.engines.wire.weights import WeightFinish, WeightJoin, WeightPart, WeightReceived, WeightStart
from mopd.serving.admission import Admission, ServerLimits
from mopd.serving.bodies import ARRIVING_BYTES, BodyReader, SlicedResponse, read_deadline, with_deadline
from mopd.serving.errors import Refusal, bad_request, stale_weights
from mopd.serving.host import EngineHost, HostedEngine
from mopd.serving.images import ImageCache
from mopd.serving.metrics import Handler, ServerMetrics
from mopd.serving.request_checks import LOOPBACK_NAMES, RequestChecks
from mopd.serving.streaming import StreamedResponse, frames_of
from mopd.serving.updates import MAX_JOIN_BYTES, SMALL_BYTES, WeightUpdates

logger = logging.getLogger(__name__)
ResultT = TypeVar("ResultT")


@dataclass(frozen=True, kw_only=True)
class Served:
    """Configuration of a server: its engine, its limits and its access."""

    role: Literal["teacher", "rollout"]
    """``teacher``: the weights are fixed; ``rollout``: there are none until the first update."""
    name: str
    """The group's name in the recipe."""
    host: EngineHost
    limits: ServerLimits
    manifest: dict[str, str] | None = None
    """Hashes of the folder that the engine loaded."""
    adapters: Mapping[str, str] = field(default_factory=dict)
    """SHA-256 of each adapter beside it, by name."""
    token: str | None = None
    """Access token required on every path but ``/health``; without one, web pages are kept out."""
    names: Sequence[str] = LOOPBACK_NAMES
    """Names by which clients may call a server without a token."""
    on_dead: Callable[[], None] = lambda: None
    """Called once when the engine is dead for good."""


class EngineServer:
    """Handlers and state of one application. Not thread-safe: use from one event loop."""

    def __init__(self, served: Served) -> None:
        self.served = served
        self.admission = Admission(served.limits)
        self.updates = WeightUpdates(served.host, self.admission, fixed=served.role == "teacher")
        self.metrics = ServerMetrics(self.admission, self.updates)
        limits = served.limits
        self._bodies = BodyReader(limits, max_arriving_bytes=max(ARRIVING_BYTES, limits.max_body_bytes))
        self._chunks = BodyReader(limits, max_arriving_bytes=MAX_CHUNK_BYTES)
        self._image_bodies = BodyReader(limits, max_arriving_bytes=2 * MAX_IMAGES_BODY_BYTES)
        self.images = ImageCache(served.host.engine.sight, served.name)
        self._info: EngineInfo | None = None
        self._sleeping: Literal["no", "cache", "all"] = "no"
        """Part of the engine that sleeps: nothing, its cache, or cache and weights."""

    async def start(self) -> None:
        """Start the engine's host and read its description. Call before the first request."""
        await self.served.host.start()
        self._info = await self.served.host.engine.info()
        if self._info.limits.max_sequences is not None:  # as many again may wait: the engine never does
            self.admission.max_queued_sequences = 2 * self._info.limits.max_sequences

    async def close(self) -> None:
        """End updates and the engine's host. Call after the last request."""
        self.drain()
        await self.updates.close()
        await self.served.host.close()

    def drain(self) -> None:
        """Admit nothing new, nor what has not arrived completely; running requests may end."""
        if self.admission.closed_kind is None:
            self.admission.close("draining", "the server is about to end")
        for bodies in (self._bodies, self._chunks, self._image_bodies):
            bodies.close(Refusal(503, "draining", "the server is about to end"))

    @property
    def info(self) -> EngineInfo:
        """The engine's description, completed by the server's limits, version and hashes."""
        assert self._info is not None
        limits = self.served.limits
        is_within = self._info.most_logprobs <= limits.max_logprobs
        return dataclasses.replace(
            self._info,
            weight_version=self.updates.weight_version,
            max_logprobs=self._info.max_logprobs if is_within else limits.max_logprobs,
            manifest=self.served.manifest,
            adapters={**self._info.adapters, **self.served.adapters},
            limits=dataclasses.replace(
                self._info.limits,
                max_tokens_per_request=limits.max_tokens_per_request,
                max_queued_tokens=limits.max_queued_tokens,
                max_body_bytes=limits.max_body_bytes,
            ),
        )

    async def health(self) -> Response:
        """Answer 200 while the server takes requests (a rollout server without weights does: it waits for them)."""
        if self.admission.closed_kind is None:
            await self._engine_call(self.served.host.engine.check_health())
        kind = self.admission.closed_kind
        return JSONResponse({"status": kind or "ok"}, status_code=200 if kind is None else 503)

    async def show_info(self) -> Response:
        """Answer with the description of server and engine."""
        served = self.served
        info = dataclasses.asdict(self.info)
        return JSONResponse({"wire_version": VERSION, "role": served.role, "name": served.name, "engine": info})

    async def show_metrics(self) -> Response:
        """Answer with the metrics in Prometheus' text format."""
        return Response(self.metrics.render(), media_type=CONTENT_TYPE_LATEST)

    async def score(self, request: Request) -> Response:
        """Answer with scores of response tokens."""
        deadline = read_deadline(request, self.served.limits.request_timeout_s)
        message = await self._read(request, ScoreRequest, self.served.limits.max_body_bytes, self._bodies)
        check_score(message, self.info)
        sequences = list(torch.from_numpy(message.tokens.astype(np.int64)).split(message.lengths.tolist()))
        images = self.images.of(message.images, sequences)
        lengths = message.lengths - message.prompt_lengths
        rows = torch.from_numpy(message.given_ids).view(message.num_rows, message.num_given)
        asked = ToScore(
            sequences,
            message.prompt_lengths.tolist(),
            top_k=message.top_k,
            temperature=message.temperature,
            images=images,
            given=rows.split(lengths.tolist()) if message.num_given else None,
            hidden_size=message.hidden_size,
            adapter=message.adapter,
        )

        async def call() -> ScoreAnswer:
            scores = await self.served.host.work.score(asked)
            at_given = [own.given_logprobs.reshape(-1) for own in scores if own.given_logprobs is not None]
            states = [torch.zeros(0, dtype=torch.bfloat16)]
            states += [own.hidden.reshape(-1) for own in scores if own.hidden is not None]
            self.updates.require(message.weight_version)  # the weights may have changed during the call
            self.metrics.scored_tokens.inc(message.num_rows)
            return ScoreAnswer(
                request_checksum=message.checksum,
                weight_version=message.weight_version,
                top_k=message.top_k,
                num_given=message.num_given,
                hidden_size=message.hidden_size,
                lengths=lengths,
                ids=torch.cat([given.ids.reshape(-1) for given in scores]).numpy(),
                logprobs=torch.cat([given.logprobs.reshape(-1) for given in scores]).numpy(),
                token_logprobs=torch.cat([given.token_logprobs for given in scores]).numpy(),
                given_logprobs=torch.cat(at_given or [torch.zeros(0)]).numpy(),
                hidden=torch.cat(states).view(torch.int16).numpy().view(np.uint16),  # numpy has no bfloat16
            )

        reservation = self.admission.admit(len(message.tokens))
        try:
            self.updates.require(message.weight_version)
            with self.admission.running():
                answer = await with_deadline(request, deadline, self._engine_call(call()))
            content = await encode_aside(answer)
            self.metrics.sent_bytes.inc(len(content))
            # room in the queue is held until the answer has left
            return SlicedResponse(content, CONTENT_TYPE, on_end=reservation.release)
        except BaseException:
            reservation.release()
            raise

    async def generate(self, request: Request) -> Response:
        """Answer with drawn responses; each leaves when it is complete."""
        deadline = read_deadline(request, self.served.limits.request_timeout_s)
        message = await self._read(request, GenerateRequest, self.served.limits.max_body_bytes, self._bodies)
        info = self.info
        check_generate(message, info)
        plain: dict[str, Any] = {name: getattr(message, name) for name in PLAIN_SAMPLING}
        plain["top_k"] = min(message.top_k, info.vocab_size)
        stop_token_ids = tuple(message.stop_token_ids.tolist())
        sampling = SamplingParams(
            **plain, stop=message.stop_texts, stop_token_ids=stop_token_ids, routes=message.routes
        )
        prompts = [prompt.tolist() for prompt in np.split(message.tokens, split_points(message.lengths))]
        images = self.images.of(message.images, prompts)
        asked = ToDraw(prompts, sampling, message.seeds.tolist(), images=images, adapter=message.adapter)

        async def draw(on_response: ResponseCallback) -> list[Generation]:
            with self.admission.running():
                return await self._engine_call(self.served.host.work.generate(asked, on_response=on_response))

        reservation = self.admission.admit(len(message.tokens), num_sequences=len(prompts))
        try:
            self.updates.require_at_least(message.weight_version)
            frames = frames_of(
                message, draw, request=request, deadline=deadline, reservation=reservation, metrics=self.metrics
            )
            first = await anext(frames)  # a failure before the first frame still gets a status of its own
        except BaseException:
            reservation.release()
            raise
        return StreamedResponse(first, frames, message.checksum, self.metrics)

    async def keep_images(self, request: Request) -> Response:
        """Keep image files for requests that name them."""
        self.images.require_vision()
        files = (await self._read(request, ImageFiles, MAX_IMAGES_BODY_BYTES, self._image_bodies)).files
        await self.images.add(files)
        return Response(encode(ImagesKept(num_files=len(files))), media_type=CONTENT_TYPE)

    async def sleep(self, engine: HostedEngine) -> str:
        """Release the engine's memory until ``wake``; running requests end first. Succeeds if it is asleep already."""
        if self.updates.is_running:
            raise stale_weights("a weight update is on its way")
        # admission is closed before the wait for running requests: none may come in meanwhile
        if self._sleeping == "no":
            self.admission.pause(Refusal(503, "asleep", "the engine is asleep: wake it first"))
        try:
            if self._sleeping != "all":
                await self.admission.wait_idle(self.served.limits.request_timeout_s)
                await self._engine_call(engine.sleep())
                self._sleeping, self.admission.takes_weights = "all", False
                self.updates.forget()
        finally:
            if self._sleeping == "no":
                self.admission.resume()
        return "asleep"

    async def wake_weights(self, engine: HostedEngine) -> str:
        """Allocate the weights' memory alone, for an update; ``wake`` must follow. Succeeds if it is awake already."""
        if self._sleeping == "all":
            await self._engine_call(engine.wake_up(weights_only=True))
            self._sleeping, self.admission.takes_weights = "cache", True
        return "awake" if self._sleeping == "no" else "asleep"

    async def wake(self, engine: HostedEngine) -> str:
        """Undo ``sleep``. Succeeds if it is awake already."""
        if self._sleeping != "no":
            await self._engine_call(engine.wake_up())
            self._sleeping = "no"
            self.admission.resume()
        return "awake"

    @property
    def handlers(self) -> dict[str, Handler]:
        """Handlers of POST requests by path."""
        updates = self.updates
        return {
            "/v1/score": self.score,
            "/v1/generate": self.generate,
            "/v1/images": self.keep_images,
            "/v1/sleep": self._of_sleep(self.sleep),
            "/v1/wake": self._of_sleep(self.wake),
            "/v1/wake/weights": self._of_sleep(self.wake_weights),
            "/v1/weights/join": self._of_weights(WeightJoin, updates.join, MAX_JOIN_BYTES, updates.require_not_fixed),
            "/v1/weights/part": self._of_weights(WeightPart, updates.add, MAX_CHUNK_BYTES, updates.require_receiving),
            "/v1/weights/start": self._of_weights(WeightStart, updates.start),
            "/v1/weights/finish": self._of_weights(WeightFinish, updates.finish),
        }

    def _of_sleep(self, change: Callable[[HostedEngine], Awaitable[str]]) -> Handler:
        """Return the handler of a request to sleep or wake up."""

        async def handle(request: Request) -> Response:
            async with self._bodies.read(request, SMALL_BYTES):
                pass
            engine = self.served.host.engine
            if not engine.can_sleep:
                raise bad_request("this engine cannot sleep")
            return JSONResponse({"status": await change(engine)})

        return handle

    def _of_weights(
        self,
        cls: type[MessageT],
        step: Callable[[MessageT], Awaitable[WeightReceived | None]],
        max_bytes: int = SMALL_BYTES,
        require: Callable[[], None] = lambda: None,
    ) -> Handler:
        """Return the handler of a message of weight updates. ``require`` refuses before a large body is read."""
        bodies = self._bodies if max_bytes == SMALL_BYTES else self._chunks

        async def handle(request: Request) -> Response:
            require()
            message = await self._read(request, cls, max_bytes, bodies)
            answer = await self._engine_call(step(message))
            return Response(encode(answer or self.updates.version), media_type=CONTENT_TYPE)

        return handle

    async def _read(self, request: Request, cls: type[MessageT], max_bytes: int, bodies: BodyReader) -> MessageT:
        async with bodies.read(request, max_bytes) as body:
            self.metrics.received_bytes.inc(len(body))
            try:
                return await decode_aside(body, cls)
            except WireError as error:
                raise bad_request(str(error)) from error

    async def _engine_call(self, call: Awaitable[ResultT]) -> ResultT:
        """Await the engine; turn its errors into refusals. A dead engine ends the server: its supervisor starts
        another."""
        try:
            return await call
        except (ValueError, UserError, EngineRejected) as error:
            raise bad_request(one_line(error)) from error
        except WeightsLost as error:  # an update took them while the request waited for its turn
            raise stale_weights(one_line(error)) from error
        except EngineUnavailable as error:
            message = one_line(error)
            logger.error("the engine is dead: %s", message)
            if self.admission.closed_kind != "dead":
                self.admission.close("dead", f"the engine is dead: {message}")
                self.served.on_dead()
            raise Refusal(503, "dead", f"the engine is dead: {message}") from error


def create_app(server: EngineServer) -> FastAPI:
    """Build the application; its lifespan starts and closes the engine's host."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await server.start()
        yield
        await server.close()

    app = FastAPI(title="mopd engine server", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    with_token = [Depends(_token_check(server.served.token))]
    app.add_api_route("/health", server.health, methods=["GET"], response_model=None)
    for path, getter in (("/info", server.show_info), ("/metrics", server.show_metrics)):
        app.add_api_route(path, getter, methods=["GET"], response_model=None, dependencies=with_token)
    for path, handler in server.handlers.items():
        counted = server.metrics.counted(path, handler)
        app.add_api_route(path, counted, methods=["POST"], response_model=None, dependencies=with_token)

    async def refuse(_: Request, error: Exception) -> Response:
        assert isinstance(error, Refusal)
        return error.response()

    app.add_exception_handler(Refusal, refuse)
    is_open = server.served.token is None
    if is_open:  # a page whose own name was pointed at this machine (DNS rebinding) has no `Origin` that would show it
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=list(server.served.names))
    app.add_middleware(RequestChecks, is_open=is_open)
    return app


def _token_check(token: str | None) -> Callable[[Request], Awaitable[None]]:
    async def check(request: Request) -> None:
        given = request.headers.get("authorization", "")  # compared in constant time
        if token is not None and not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
            raise Refusal(401, "unauthorized", "send the server's token: Authorization: Bearer TOKEN")

    return check


def check_score(request: ScoreRequest, info: EngineInfo) -> None:
    """Raise ``Refusal`` 400 for what this engine cannot do: a bad request must not spoil the call that it shares."""
    highest = max(int(ids.max(initial=0)) for ids in (request.tokens, request.given_ids))
    _check_sequences(highest, int(request.lengths.max()), request.adapter, info)
    if request.top_k + request.num_given > info.most_logprobs:
        more = f" and {request.num_given} ids are given" if request.num_given else ""
        raise bad_request(f"top_k is {request.top_k}{more}: {info.model} gives at most {info.most_logprobs}")


def check_generate(request: GenerateRequest, info: EngineInfo) -> None:
    """Raise ``Refusal`` 400 as ``check_score``."""
    largest = max(int(request.tokens.max()), int(request.stop_token_ids.max(initial=0)))
    _check_sequences(largest, int(request.lengths.max()) + request.max_new_tokens, request.adapter, info)
    if request.num_top_ids > info.most_logprobs:
        raise bad_request(f"num_top_ids is {request.num_top_ids}: {info.model} tells at most {info.most_logprobs}")


def _check_sequences(largest: int, longest: int, adapter: str, info: EngineInfo) -> None:
    if largest >= info.vocab_size:
        raise bad_request(f"token {largest} is outside the vocabulary of {info.vocab_size} of {info.model}")
    if longest > info.max_positions:
        raise bad_request(f"a sequence of {longest} tokens: {info.model} takes {info.max_positions}")
    if adapter and adapter not in info.adapters:
        raise bad_request(
            f"adapter {adapter!r} is not there: {info.model} has {', '.join(sorted(info.adapters)) or 'none'}"
        )
