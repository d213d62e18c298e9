"""Router replay in bf16: what the torch engine drew, scored by a student with the engine's routes and without."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mopd.base.types import ROUTES_FIELD, RouteShape, SampleMeta, UserError
from mopd.config.data import DataConfig
from mopd.config.groups import TeacherConfig, TorchEngineConfig
from mopd.config.load import load_recipe
from mopd.config.rollout import RolloutConfig
from mopd.config.schedule import ScheduleConfig
from mopd.config.schema import Recipe
from mopd.config.student import StudentConfig
from mopd.conversion.models.dims import check_routes
from mopd.conversion.models.reading import read_dims
from mopd.data_plane.local import LocalDataPlane
from mopd.engines.checks import check_generations
from mopd.engines.clients.remote import RemoteEngine
from mopd.engines.interface import Generation, SamplingParams, ToDraw
from mopd.engines.torch.engine import TorchEngine
from mopd.orchestrator.trajectories import join_parts
from mopd.student.parallel import Layout
from mopd.student.worker import StudentWorker
from tests.fixtures.recipe import RECIPE
from tests.fixtures.servers import running_server
from tests.fixtures.tiny_models import make_hf_model

PROMPTS = [[3 + (i * 7 + j) % 40 for j in range(1 + i % 5)] for i in range(16)]
LENGTH = 48


@pytest.fixture(autouse=True)
def uncompiled() -> Iterator[None]:
    """Megatron has small functions compiled, which takes seconds each."""
    with torch._dynamo.config.patch(disable=True):
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    keys = {"num_experts": 32, "num_experts_per_tok": 4, "num_layers": 4, "scale": 0.1}
    return str(make_hf_model(tmp_path_factory.mktemp("replay") / "model", "qwen3_moe", **keys))


@pytest.fixture(scope="module")
def drawn(model: str) -> list[Generation]:
    engine = TorchEngine.from_pretrained(model, TorchEngineConfig(dtype="bfloat16"))
    sampling = SamplingParams(max_new_tokens=LENGTH, routes=shape_of(model))
    asked = ToDraw(PROMPTS, sampling, list(range(len(PROMPTS))))
    responses = asyncio.run(engine.generate(asked))
    check_generations(responses, asked, vocab_size=engine.vocab_size)
    return responses


def student_says(model: str, drawn: list[Generation], *, replay_routes: bool) -> list[Tensor]:
    plane = LocalDataPlane()
    recipe = Recipe(
        run_dir="unused",
        student=StudentConfig(model=model, dtype="bfloat16"),
        teachers={"all": TeacherConfig(model="unused", domains=("math",))},
        data=DataConfig(train=("unused",), max_prompt_length=16),
        rollout=RolloutConfig(max_response_length=LENGTH, replay_routes=replay_routes),
        schedule=ScheduleConfig(steps=1, prompts_per_step=len(PROMPTS)),
    )
    worker = StudentWorker(recipe, plane.reader(), ("math",))
    metas = [
        SampleMeta(
            sample_id=i, domain="math", weight_version=0, prompt_length=len(prompt), response_length=len(own.tokens),
            num_loss_tokens=len(own.tokens),
        )
        for i, (prompt, own) in enumerate(zip(PROMPTS, drawn, strict=True))
    ]  # fmt: skip
    fields = {
        "tokens": [torch.cat([torch.tensor(prompt), own.tokens]) for prompt, own in zip(PROMPTS, drawn, strict=True)],
        ROUTES_FIELD: [own.routes for own in drawn if own.routes is not None],
    }
    asyncio.run(plane.put(metas, fields))
    return worker.logprobs(metas)


def test_replay_closes_most_of_the_gap(layout: Layout, model: str, drawn: list[Generation]) -> None:
    said = torch.cat([own.logprobs for own in drawn])
    free, replayed = (
        (torch.cat(student_says(model, drawn, replay_routes=on)) - said).abs().double() for on in (False, True)
    )
    assert 2 * replayed.square().mean().sqrt() < free.square().mean().sqrt()
    assert 4 * replayed.max() < free.max()


@torch.no_grad()
def test_the_engine_tells_the_routes_of_every_token(model: str) -> None:
    """In fp32, of prompts of unequal lengths and rows that end before others: those of one pass over the whole."""
    engine = TorchEngine.from_pretrained(model, TorchEngineConfig(dtype="float32"))
    sampling = SamplingParams(max_new_tokens=24, routes=shape_of(model), stop_token_ids=tuple(range(10, 14)))
    drawn = asyncio.run(engine.generate(ToDraw(PROMPTS, sampling, list(range(len(PROMPTS))))))
    assert len({len(own.tokens) for own in drawn}) > 3
    seen: list[Tensor] = []
    for layer in engine.model.get_decoder().layers:
        layer.mlp.gate.register_forward_hook(lambda gate, inputs, output: seen.append(output[2]))
    for prompt, own in zip(PROMPTS, drawn, strict=True):
        seen.clear()
        engine.model(torch.tensor([prompt + own.tokens.tolist()]), use_cache=False)
        expected = torch.stack(seen, dim=1)[:-1]
        assert own.routes is not None and own.routes.dtype == torch.uint8
        assert torch.equal(own.routes.long().sort(-1).values, expected.sort(-1).values)
        assert own.routes.nbytes == shape_of(model).token_bytes * (len(prompt) + len(own.tokens) - 1)


def test_routes_travel_from_a_server(model: str) -> None:
    config = TorchEngineConfig(dtype="float32")
    local, sampling = (
        TorchEngine.from_pretrained(model, config),
        SamplingParams(max_new_tokens=8, routes=shape_of(model)),
    )

    async def ask(url: str) -> list[Generation]:
        remote = RemoteEngine(url, timeout_s=30.0)
        try:
            return await remote.generate(ToDraw(PROMPTS, sampling, list(range(len(PROMPTS)))))
        finally:
            await remote.close()

    with running_server(local, "teacher") as running:
        theirs = asyncio.run(ask(running.url))
    ours = asyncio.run(local.generate(ToDraw(PROMPTS, sampling, list(range(len(PROMPTS))))))
    for own, other in zip(ours, theirs, strict=True):
        assert own.routes is not None and other.routes is not None and torch.equal(own.routes, other.routes)
    with pytest.raises(UserError, match="has 4 layers with experts, and routes of 5 are asked for"):
        wrong = replace(sampling, routes=replace(shape_of(model), num_layers=5))
        asyncio.run(local.generate(ToDraw(PROMPTS, wrong, list(range(len(PROMPTS))))))


def test_parts_of_a_response_keep_the_ways_that_they_went() -> None:
    """A part that was handed back at once, one that went on, and one behind what an environment said."""

    def part(length: int, num_routed: int, value: int) -> Generation:
        zeros = torch.zeros(length)
        routes = torch.full((num_routed, 1, 1), value, dtype=torch.uint8)
        return Generation(
            tokens=zeros.long(), logprobs=zeros, finish_reason="stop", token_versions=zeros.int(), routes=routes
        )

    parts = [part(0, 0, 1), part(2, 4, 2), replace(part(3, 0, 0), routes=None), part(2, 9, 3)]
    joined = join_parts(parts, "stop")
    assert joined.routes is not None and joined.routes.flatten().tolist() == [2] * 4 + [3] * 5


def shape_of(model: str) -> RouteShape:
    moe = read_dims(Path(model)).moe
    assert moe is not None
    return moe.route_shape


@pytest.mark.parametrize(
    ("key", "line"),
    [
        ("rollout.engine.type=sglang", "rollout.engine.type is sglang, which is not asked for routes"),
        ("student.packing=false", "student.packing is false"),
        ("objective=sft_on_teacher", "objective or schedule.warm_up trains on the teachers' own answers"),
    ],
)
def test_what_has_no_routes_is_refused_by_name(tmp_path: Path, key: str, line: str) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(RECIPE)
    with pytest.raises(UserError, match=f"rollout.replay_routes is true, but {line}: change one of them"):
        load_recipe(file, ["rollout.replay_routes=true", key])


def test_a_model_without_experts_is_refused(tmp_path: Path) -> None:
    dims = read_dims(make_hf_model(tmp_path, "qwen3"))
    with pytest.raises(UserError, match=r"rollout.replay_routes is true, and model_type qwen3 has no experts"):
        check_routes(dims, replay_routes=True)
