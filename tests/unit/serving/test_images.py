"""Images on their way through router, wire and server: seen as the engine itself sees them, each file sent once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from torch import Tensor

from mopd.base.types import PromptImage
from mopd.config.groups import RoutingConfig, TorchEngineConfig
from mopd.engines.clients.remote import RemoteEngine
from mopd.engines.interface import EngineRejected, EngineUnavailable, SamplingParams, ToDraw, ToScore
from mopd.engines.replicas.interface import Replica, SampleFailed
from mopd.engines.replicas.router import Router
from mopd.engines.torch.engine import TorchEngine
from mopd.engines.wire.images import ImageFiles
from mopd.engines.wire.messages import CONTENT_TYPE, encode
from tests.fixtures.seen import Transformers, placeholders, prompt_image, prompts_with_images
from tests.fixtures.servers import RunningServer, running_server
from tests.fixtures.tiny_models import FP32_FORWARD_ATOL
from tests.fixtures.vision import image_bytes, make_vision_model
from tests.unit.serving.test_updates import run

CONFIG = TorchEngineConfig(dtype="float32")
SAMPLING = SamplingParams(max_new_tokens=6)


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_model(tmp_path_factory.mktemp("seeing"))


@pytest.fixture
def running(seeing: Path) -> Iterator[RunningServer]:
    """A teacher that sees images, and has none yet."""
    with running_server(TorchEngine.from_pretrained(seeing, CONFIG)) as running:
        yield running


def asked(folder: Path) -> tuple[list[Tensor], list[int], list[list[PromptImage]]]:
    prompts, images = prompts_with_images(folder)
    return [torch.tensor([*prompt, 7, 8, 9]) for prompt in prompts], [len(prompt) for prompt in prompts], images


def test_scores_are_those_of_transformers(running: RunningServer, seeing: Path) -> None:
    tokens, starts, images = asked(seeing)

    async def score(engine: RemoteEngine) -> Any:
        router = Router("math", [Replica(name="math.0", engine=engine)], RoutingConfig(), kind="teacher")
        return await router.score(ToScore(tokens, starts, top_k=8, temperature=1.0, images=images))

    reference = Transformers(seeing)
    for i, given in enumerate(run(running, score)):
        expected = reference.logprobs(tokens[i].tolist(), starts[i], images[i])
        torch.testing.assert_close(given.logprobs, expected.topk(8).values, rtol=0, atol=FP32_FORWARD_ATOL)
        own = expected.gather(1, tokens[i][starts[i] :, None]).squeeze(1)
        torch.testing.assert_close(given.token_logprobs, own, rtol=0, atol=FP32_FORWARD_ATOL)


def test_a_file_travels_once(running: RunningServer, seeing: Path) -> None:
    """However many ask about it at a time or later; its bytes are the file's and at most 5 % more."""
    content = image_bytes(112, 112)
    loads: list[int] = []

    def load() -> bytes:
        loads.append(len(content))
        return content

    image = replace(prompt_image(seeing, content), load=load)
    prompt = [1, 10, *placeholders(image), 12]

    async def work(engine: RemoteEngine) -> list[int]:
        scored = [torch.tensor([*prompt, 7, 8])]
        text = [torch.ones_like(scored[0])]
        plain, _ = await sent(engine, engine.score(ToScore(text, [len(prompt)], top_k=1, temperature=1.0)))
        together = [
            engine.score(ToScore(scored, [len(prompt)], top_k=1, temperature=1.0, images=[[image]])) for _ in range(3)
        ]
        first, _ = await sent(engine, asyncio.gather(*together))
        again, drawn = await sent(engine, engine.generate(ToDraw([prompt] * 2, SAMPLING, [1, 2], images=[[image]] * 2)))
        assert len(drawn) == 2
        return [first - 3 * plain, again]

    first, again = run(running, work)
    assert loads == [len(content)]
    assert len(content) < first <= 1.05 * len(content) + 3 * 40  # beside the file its name, in each request
    assert again < 1000
    assert running.server.images.num_bytes == len(content)


async def sent(engine: RemoteEngine, work: Awaitable[Any]) -> tuple[int, Any]:
    before = engine.bytes_sent
    result = await work
    return engine.bytes_sent - before, result


def test_a_server_that_has_lost_an_image_is_sent_it_again(running: RunningServer, seeing: Path) -> None:
    """It was started anew, or had no room; one that never has room is given up."""
    tokens, starts, images = asked(seeing)
    kept = running.server.images

    async def work(engine: RemoteEngine) -> None:
        first = await engine.score(ToScore(tokens, starts, top_k=4, temperature=1.0, images=images))
        kept._files.clear()
        again = await engine.score(ToScore(tokens, starts, top_k=4, temperature=1.0, images=images))
        assert all(torch.equal(one.logprobs, other.logprobs) for one, other in zip(first, again, strict=True))
        kept._files.clear()
        kept.num_bytes, kept._max_bytes = 0, len(images[0][0].load()) + 1
        await engine.score(ToScore(tokens[:1], starts[:1], top_k=4, temperature=1.0, images=images[:1]))
        assert len(kept._files) == 1 and kept.num_bytes < kept._max_bytes
        with pytest.raises(EngineUnavailable, match=r"math\.0: misses images that it was sent 4 times: it has no room"):
            await engine.score(ToScore(tokens, starts, top_k=4, temperature=1.0, images=images))

    run(running, work, name="math.0")


def test_a_waiter_goes_and_the_file_still_comes(running: RunningServer, seeing: Path) -> None:
    image = prompt_image(seeing, image_bytes(84, 84))
    tokens = torch.tensor([1, *placeholders(image), 5, 6])

    async def work(engine: RemoteEngine) -> Any:
        def score() -> Any:
            return engine.score(ToScore([tokens], [len(tokens) - 2], top_k=2, temperature=1.0, images=[[image]]))

        first, second = asyncio.ensure_future(score()), asyncio.ensure_future(score())
        await asyncio.sleep(0)
        first.cancel()
        return await second

    assert len(run(running, work)) == 1


def test_images_that_cannot_be_answered_about(running: RunningServer, teacher: RunningServer, seeing: Path) -> None:
    """Each is refused in one line, and spoils neither its neighbours nor the server."""
    good = prompt_image(seeing, image_bytes(56, 84))
    tokens = torch.tensor([1, *placeholders(good), 5, 6])
    start = len(tokens) - 2
    half = image_bytes(84, 112, 3, kind="JPEG")
    broken = replace(prompt_image(seeing, half), load=lambda: half[: len(half) // 2], digest=good.digest[::-1])
    narrow = replace(good, grid=(1, good.grid[2], good.grid[1]))
    wide = torch.tensor([1, *placeholders(narrow), 5, 6])

    def fails(server: RunningServer, match: str, sequence: Tensor, images: Any, error: Any = EngineRejected) -> None:
        with pytest.raises(error, match=match):
            run(server, lambda e: e.score(ToScore([sequence], [start], top_k=2, temperature=1.0, images=images)))

    fails(running, r"HTTP 400: image \w{32}: the image is damaged", tokens, [[broken]])
    fails(running, r"HTTP 400: image \w{32} has the grid \[1, 4, 6\] here, \[1, 6, 4\] for who asks", wide, [[narrow]])
    fails(running, "HTTP 400: sequence 0: 6 image tokens for 0 images", tokens, None)
    fails(running, "HTTP 400: sequence 0: 6 image tokens for 2 images", tokens, [[good, good]])
    fails(teacher, "HTTP 400: math: the model sees no images", torch.ones_like(tokens), [[good]])
    (scores,) = run(running, lambda e: e.score(ToScore([tokens], [start], top_k=2, temperature=1.0, images=[[good]])))
    assert len(scores.ids) == 2

    async def routed(engine: RemoteEngine) -> Any:
        router = Router("math", [Replica(name="math.0", engine=engine)], RoutingConfig(), kind="teacher")
        both, images = [tokens, wide], [[good], [narrow]]
        return await router.score(
            ToScore(both, [start, start], top_k=2, temperature=1.0, images=images), stop_at_failure=False
        )

    one, other = run(running, routed)
    assert torch.equal(one.logprobs, scores.logprobs) and isinstance(other, SampleFailed)


def test_what_is_sent_as_an_image(running: RunningServer, teacher: RunningServer) -> None:
    def post(server: RunningServer, body: bytes) -> httpx.Response:
        return httpx.post(f"{server.url}/v1/images", content=body, headers={"content-type": CONTENT_TYPE})

    file = image_bytes()
    assert post(running, encode(ImageFiles.of([file, file]))).status_code == 200
    for body, problem in (
        (encode(ImageFiles.of([file, b"no image"])), "no image"),
        (encode(ImageFiles.of([image_bytes(kind="GIF")])), "no image of the formats PNG"),
        (b"\xc1", "not msgpack"),
    ):
        refused = post(running, body)
        assert refused.status_code == 400 and problem in refused.json()["error"]["message"]
    assert post(teacher, encode(ImageFiles.of([file]))).status_code == 400
    assert post(running, b"\x00" * (18 * 2**20)).status_code == 413
    assert running.server.images.num_bytes == len(file)
