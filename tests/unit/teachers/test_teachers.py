"""Teachers: the right teacher for each domain, shared work between replicas, and no bad score in the data plane."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mopd.config.schema import TorchEngine as TorchEngineConfig
from mopd.data_plane.local import LocalDataPlane
from mopd.engines.interface import Scores
from mopd.engines.torch_engine import TorchEngine
from mopd.teachers.group import TeacherGroup
from mopd.teachers.routing import Routing
from mopd.teachers.worker import TeacherWorker
from mopd.types import TEACHER_FIELDS, SampleMeta, UserError
from tests.fixtures.tiny_models import FP32_FORWARD_ATOL, VOCAB_SIZE, make_hf_model

ROUTING = Routing({"math": "mathematician", "algebra": "mathematician", "code": "coder"})


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TorchEngine]:
    root = tmp_path_factory.mktemp("teachers")
    folders = {name: make_hf_model(root / name, seed=i) for i, name in enumerate(("mathematician", "coder", "spare"))}
    return {name: TorchEngine.from_pretrained(folder, TorchEngineConfig()) for name, folder in folders.items()}


class Counting:
    """A scorer that notes the lengths it was asked for and answers through a real engine, or with altered scores."""

    def __init__(self, engine: TorchEngine, **changes: object) -> None:
        self.engine, self.changes = engine, changes
        self.requests: list[list[int]] = []

    async def score(
        self, tokens: Sequence[Tensor], prompt_lengths: Sequence[int], *, top_k: int, temperature: float
    ) -> list[Scores]:
        self.requests.append([len(t) for t in tokens])
        await asyncio.sleep(0.01)
        scores = await self.engine.score(tokens, prompt_lengths, top_k=top_k, temperature=temperature)
        return [
            *scores[:-1],
            replace(scores[-1], **{k: change(getattr(scores[-1], k)) for k, change in self.changes.items()}),
        ]


def samples(*domains: str) -> tuple[list[SampleMeta], list[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    metas, tokens = [], []
    for i, domain in enumerate(domains):
        prompt_length, response_length = 2 + i, 3 + i % 2
        tokens.append(torch.randint(3, VOCAB_SIZE, (prompt_length + response_length,), generator=generator))
        metas.append(
            SampleMeta(
                sample_id=70 + i,
                domain=domain,
                weight_version=0,
                prompt_length=prompt_length,
                response_length=response_length,
                num_loss_tokens=response_length,
            )
        )
    return metas, tokens


def run_worker(groups: dict[str, TeacherGroup], *domains: str, top_k: int = 5) -> dict[str, list[Tensor]]:
    metas, tokens = samples(*domains)

    async def run() -> dict[str, list[Tensor]]:
        plane = LocalDataPlane()
        await plane.put(metas, {"tokens": tokens})
        await TeacherWorker(groups, ROUTING, plane, top_k=top_k, temperature=0.8).score(metas)
        batch = await plane.claim(len(metas), TEACHER_FIELDS, timeout_s=0)
        return await plane.get(batch.sample_ids, TEACHER_FIELDS)

    return asyncio.run(run())


def test_each_sample_is_scored_by_its_domains_teacher(engines: dict[str, TorchEngine]) -> None:
    groups = {name: TeacherGroup(name, [engines[name]], vocab_size=VOCAB_SIZE) for name in ("mathematician", "coder")}
    domains = ("code", "math", "algebra", "code", "math")
    fields = run_worker(groups, *domains)
    metas, tokens = samples(*domains)
    for i, meta in enumerate(metas):
        engine = engines[ROUTING.teacher_of(meta.domain)]
        (expected,) = asyncio.run(engine.score([tokens[i]], [meta.prompt_length], top_k=5, temperature=0.8))
        assert torch.equal(fields["teacher_ids"][i], expected.ids)
        torch.testing.assert_close(fields["teacher_logprobs"][i], expected.logprobs, rtol=0, atol=FP32_FORWARD_ATOL)
        torch.testing.assert_close(
            fields["teacher_token_logprobs"][i], expected.token_logprobs, rtol=0, atol=FP32_FORWARD_ATOL
        )
        assert fields["teacher_ids"][i].shape == (meta.response_length, 5)


def test_unknown_domain_is_named_before_anything_is_scored(engines: dict[str, TorchEngine]) -> None:
    scorer = Counting(engines["coder"])
    with pytest.raises(
        UserError, match=r"'law' \(known: 'algebra', 'code', 'math'\): add it to teachers.<name>.domains"
    ):
        run_worker({"coder": TeacherGroup("coder", [scorer], vocab_size=VOCAB_SIZE)}, "code", "law")
    assert scorer.requests == []


def test_replicas_share_tokens_and_keep_the_order(engines: dict[str, TorchEngine]) -> None:
    replicas = [Counting(engines["coder"]), Counting(engines["coder"])]
    group = TeacherGroup("coder", replicas, vocab_size=VOCAB_SIZE)
    metas, tokens = samples(*["code"] * 9)
    starts = [meta.prompt_length for meta in metas]
    shared = asyncio.run(group.score(tokens, starts, top_k=4, temperature=1.0))
    alone = asyncio.run(engines["coder"].score(tokens, starts, top_k=4, temperature=1.0))
    for a, b in zip(shared, alone, strict=True):
        torch.testing.assert_close(a.logprobs, b.logprobs, rtol=0, atol=FP32_FORWARD_ATOL)
    loads = [sum(map(sum, replica.requests)) for replica in replicas]
    assert sum(loads) == sum(map(len, tokens)) and abs(loads[0] - loads[1]) <= max(map(len, tokens))


def test_a_busy_replica_gets_less(engines: dict[str, TorchEngine]) -> None:
    replicas = [Counting(engines["coder"]), Counting(engines["coder"])]
    group = TeacherGroup("coder", replicas, vocab_size=VOCAB_SIZE)

    async def run() -> None:
        long = asyncio.create_task(group.score([torch.full((60,), 4)], [1], top_k=1, temperature=1.0))
        await asyncio.sleep(0)
        await group.score([torch.full((9,), 4)] * 3, [1] * 3, top_k=1, temperature=1.0)
        await long
        await group.score([torch.full((9,), 4)], [1], top_k=1, temperature=1.0)  # all idle again: the first one

    asyncio.run(run())
    assert [replica.requests for replica in replicas] == [[[60], [9]], [[9, 9, 9]]]


def test_groups_need_replicas_of_their_own(engines: dict[str, TorchEngine]) -> None:
    with pytest.raises(ValueError, match=r"teachers.coder has no replica"):
        TeacherGroup("coder", [], vocab_size=1)
    with pytest.raises(ValueError, match=r"teachers.coder: two replicas are one engine"):
        TeacherGroup("coder", [engines["coder"]] * 2, vocab_size=1)


BAD_SCORES = {
    "ids is .* expected torch.int32": {"ids": lambda t: t.long()},
    r"logprobs is torch.float32 \[2, 5\], expected torch.float32 \[3, 5\]": {"logprobs": lambda t: t[1:]},
    r"token_logprobs is torch.float32 \[4\], expected torch.float32 \[3\]": {
        "token_logprobs": lambda t: torch.cat([t, t[:1]])
    },
    "a log-prob is not finite": {"logprobs": lambda t: t.masked_fill(t == t.min(), float("-inf"))},
    "an id is outside the vocabulary of": {"ids": lambda t: t + VOCAB_SIZE},
}


@pytest.mark.parametrize("message", BAD_SCORES)
def test_bad_scores_name_teacher_and_sample(engines: dict[str, TorchEngine], message: str) -> None:
    scorer = Counting(engines["coder"], **BAD_SCORES[message])
    groups = {"coder": TeacherGroup("coder", [scorer], vocab_size=VOCAB_SIZE)}
    with pytest.raises(RuntimeError, match=f"teacher 'coder' on sample 72: {message}"):
        run_worker(groups, "code", "code", "code")


def test_a_failing_replica_fails_the_group(engines: dict[str, TorchEngine], tmp_path: Path) -> None:
    broken = TorchEngine.empty(make_hf_model(tmp_path), TorchEngineConfig())
    group = TeacherGroup("coder", [engines["coder"], broken], vocab_size=VOCAB_SIZE)
    with pytest.raises(RuntimeError, match="no weights"):
        asyncio.run(group.score([torch.tensor([4, 5])] * 2, [1, 1], top_k=1, temperature=1.0))
