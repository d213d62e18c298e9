"""Planned bytes beside those that the real client counts on its way to a real server, and the data plane's tensors."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mopd.config.groups import TorchEngineConfig
from mopd.config.load import load_recipe
from mopd.config.payloads import Asked
from mopd.engines.clients.remote import RemoteEngine
from mopd.engines.interface import SamplingParams, ToDraw, ToScore
from mopd.engines.torch.engine import TorchEngine
from mopd.orchestrator.teachers import TeacherRows, merge
from mopd.planning.traffic import draw_bytes, score_bytes
from mopd.planning.workload import Workload, sample_bytes
from tests.fixtures.recipe import RECIPE
from tests.fixtures.servers import running_server
from tests.fixtures.tiny_models import make_hf_model, make_tokenizer
from tests.fixtures.updates import load

PROMPTS, RESPONSES = (5, 9, 16, 30), (40, 12, 25, 3)
TOP_K = 16


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> TorchEngine:
    folder = tmp_path_factory.mktemp("model")
    make_tokenizer(folder)
    return TorchEngine.from_pretrained(make_hf_model(folder), TorchEngineConfig(dtype="float32"))


def workload(*, responses: tuple[int, ...] = RESPONSES) -> Workload:
    num = len(PROMPTS)
    return Workload(
        samples=num, prompt_tokens=sum(PROMPTS) / num, response_tokens=sum(responses) / num, source="", max_teachers=1,
        longest_response=max(responses), max_tokens=100, teacher_shares={"math": 1.0}, image_tokens=0.0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("per_request", "asked", "hidden_size"),
    [
        (1, Asked(own=TOP_K), 0),
        (4, Asked(own=TOP_K), 0),
        (4, Asked(student=TOP_K), 0),
        (4, Asked(own=TOP_K, student=TOP_K, always=2), 0),
        (4, Asked(), 0),
        (4, Asked(), 64),
    ],
)
def test_scores_weigh_what_is_planned(engine: TorchEngine, per_request: int, asked: Asked, hidden_size: int) -> None:
    tokens = [torch.ones(a + b, dtype=torch.int64) for a, b in zip(PROMPTS, RESPONSES, strict=True)]
    ids = torch.arange(asked.given, dtype=torch.int32)
    given = [ids.expand(length, -1).contiguous() for length in RESPONSES] if asked.given else None

    async def work(url: str) -> int:
        client = RemoteEngine(url, timeout_s=30)
        for low in range(0, len(tokens), per_request):
            part = slice(low, low + per_request)
            options = {"top_k": asked.own, "temperature": 1.0, "hidden_size": hidden_size}
            own = None if given is None else given[part]
            await client.score(ToScore(tokens[part], PROMPTS[part], given=own, **options))
        await client.close()
        return client.bytes_sent + client.bytes_received

    with running_server(engine) as server:
        payload_bytes = asyncio.run(work(server.url))
    options = {"samples_per_request": per_request, "hidden_size": hidden_size}
    planned = score_bytes(len(tokens), workload(), asked, **options)
    assert planned == pytest.approx(payload_bytes, rel=0.05)


@pytest.mark.parametrize("num_top_ids", [0, TOP_K])
def test_responses_weigh_what_is_planned(engine: TorchEngine, num_top_ids: int) -> None:
    prompts = [[3] * length for length in PROMPTS]

    async def work(url: str) -> tuple[int, tuple[int, ...]]:
        client = RemoteEngine(url, timeout_s=30)
        await load(client, [(name, slot.clone()) for name, slot in engine.weight_slots.items()], 0)
        before = client.bytes_sent + client.bytes_received
        sampling = SamplingParams(max_new_tokens=60, num_top_ids=num_top_ids)
        drawn = await client.generate(ToDraw(prompts, sampling, [1, 2, 3, 4]))
        await client.close()
        return client.bytes_sent + client.bytes_received - before, tuple(len(one.tokens) for one in drawn)

    with running_server(engine, "rollout") as server:
        payload_bytes, lengths = asyncio.run(work(server.url))
    work, num = workload(responses=lengths), len(prompts)
    planned = draw_bytes(num, work, samples_per_request=num, num_top_ids=num_top_ids)
    assert planned == pytest.approx(payload_bytes, rel=0.05)


@pytest.mark.parametrize("sends_hidden", [False, True])
def test_a_sample_weighs_what_its_tensors_do(engine: TorchEngine, tmp_path: Path, sends_hidden: bool) -> None:
    """The fields that the rollout and the teacher worker write."""
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    keys = [f"loss.top_k={TOP_K}"]
    asked, work = {"top_k": TOP_K, "hidden_size": 0}, workload()
    if sends_hidden:
        keys = ["loss={type: full_jsd}", "teacher_defaults.payload=hidden"]
        asked, work = {"top_k": 0, "hidden_size": 64}, replace(work, hidden_sizes={"math": 64})
    recipe = load_recipe(path, keys).recipe
    tokens = [torch.ones(a + b, dtype=torch.int64) for a, b in zip(PROMPTS, RESPONSES, strict=True)]
    scores = asyncio.run(engine.score(ToScore(tokens, PROMPTS, temperature=1.0, **asked)))
    total = 0
    for own, score, length in zip(tokens, scores, RESPONSES, strict=True):
        said = TeacherRows(score.ids, score.logprobs, token_logprobs=score.token_logprobs, hidden=score.hidden)
        fields = merge([said], (1.0,), num_teachers=1)
        fields |= {"tokens": own, "loss_mask": torch.ones(length, dtype=torch.bool)}
        fields |= {"rollout_logprobs": torch.ones(length), "token_versions": torch.ones(length, dtype=torch.int32)}
        total += sum(value.nbytes for value in fields.values())
    assert not recipe.needs_task_advantage
    assert len(tokens) * sample_bytes(recipe, work) == pytest.approx(total, rel=1e-3)
