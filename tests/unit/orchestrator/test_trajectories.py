"""Responses of several turns with a real engine, a real environment process and a real chat template.

Every log-prob that was drawn is held against one teacher-forced transformers pass over the whole trajectory. Not
exercised: a server between engine and worker (``tests/integration``), bf16.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from mopd.base.metrics import apart
from mopd.base.types import Prompt, SampleMeta, UserError
from mopd.config.data import DataConfig
from mopd.config.environment import CustomEnvironmentConfig
from mopd.config.groups import Assignment, TeacherConfig, TorchEngineConfig
from mopd.config.payloads import Asked
from mopd.config.rewards import EnvironmentRewardConfig, ExactMatchConfig
from mopd.data.prompts import PromptDataset, PromptRow
from mopd.data.turns import TurnFrame
from mopd.data_plane.local import LocalDataPlane
from mopd.engines.interface import SamplingParams, ToDraw, ToScore
from mopd.engines.torch.engine import TorchEngine
from mopd.environments.process import Environments
from mopd.orchestrator.rewards import RewardWorker
from mopd.orchestrator.rollout import RolloutWorker
from mopd.orchestrator.teachers import TeacherWorker
from mopd.orchestrator.trajectories import Player
from mopd.rewards.domains import build_rewards
from tests.fixtures.environments import COUNTING, OPENING
from tests.fixtures.tiny_models import EOS_ID, make_hf_model, make_tokenizer
from tests.unit.orchestrator.groups import teacher_of

TOLERANCE = 1e-4
SAMPLING = SamplingParams(max_new_tokens=150, num_top_ids=4)
FIELDS = ("tokens", "loss_mask", "rollout_logprobs", "token_versions", "environment_reward")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return turning_model(tmp_path_factory.mktemp("model"))


def turning_model(folder: Path) -> Path:
    """A model whose turns end after a few tokens, and differ."""
    make_hf_model(folder, seed=5, scale=0.1)
    make_tokenizer(folder)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor([[*tokenizer(f"{text}\nassistant:")["input_ids"], *tokenizer(said)["input_ids"], EOS_ID]
                        for text in ("user:1+1", "tool:ab3") for said in ("abc", "cab")])  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(25):
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture
def engine(folder: Path) -> TorchEngine:
    """An engine with weights of version 3."""
    engine = TorchEngine.empty(folder, TorchEngineConfig(dtype="float32"))
    source = TorchEngine.from_pretrained(folder, TorchEngineConfig(dtype="float32"))
    asyncio.run(engine.load_weights(source.model.named_parameters(), 3))
    return engine


def dataset_of(tokenizer: PreTrainedTokenizerBase, count: int = 12) -> PromptDataset:
    texts = [f"user:{i}+{i}\nassistant:" for i in range(count)]
    more = {"domain": "sums", "ground_truth": "abc", "extra_info": None, "place": "file: row"}
    return PromptDataset([PromptRow(text=t, tokens=tuple(tokenizer(t)["input_ids"]), **more) for t in texts])


def player_of(tokenizer: PreTrainedTokenizerBase, folder: Path, source: str, name: str, **options: Any) -> Player:
    path = folder / f"{name}.py"
    path.write_text(source)
    cfg = CustomEnvironmentConfig(type="custom", module=str(path), class_name=name, **options)
    frame = TurnFrame(tokenizer, DataConfig(train=("-",)), cfg)
    return Player(Environments(cfg), frame, max_prompt_length=64)


Played = tuple[list[SampleMeta], dict[str, list[Tensor]]]


async def played(
    engine: Any, tokenizer: PreTrainedTokenizerBase, player: Player, sampling: SamplingParams = SAMPLING
) -> Played:
    dataset, plane = dataset_of(tokenizer), LocalDataPlane()
    worker = RolloutWorker(engine, plane, dataset, sampling=sampling, seed=1, player=player)
    metas = await worker.generate([Prompt(sample_id=i, domain="sums", row=i) for i in range(len(dataset))])
    fields = await plane.get([meta.sample_id for meta in metas], FIELDS)
    assert player.environments._process is not None
    await player.environments._process.stop()
    return metas, fields


def play(
    engine: Any, tokenizer: PreTrainedTokenizerBase, player: Player, sampling: SamplingParams = SAMPLING
) -> Played:
    return asyncio.run(played(engine, tokenizer, player, sampling))


def forced(folder: Path, tokens: Tensor, prompt_length: int) -> Tensor:
    """[R] log-probs of the response's tokens by one transformers pass over all of them."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        logprobs = model(tokens[None]).logits[0].float().log_softmax(-1)
    return logprobs[:-1].gather(-1, tokens[1:, None])[prompt_length - 1 :, 0]


def difference(folder: Path, meta: SampleMeta, fields: dict[str, list[Tensor]], i: int, mask: Tensor) -> float:
    own = forced(folder, fields["tokens"][i], meta.prompt_length)
    return (own - fields["rollout_logprobs"][i])[mask].abs().max().item()


def num_turns(mask: Tensor) -> int:
    """Runs of drawn tokens."""
    return int((mask & ~torch.cat([torch.tensor([False]), mask[:-1]])).sum())


def test_what_was_drawn_is_what_one_pass_over_the_trajectory_says(
    engine: TorchEngine, folder: Path, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    player = player_of(tokenizer, tmp_path, COUNTING, "Counting")
    metas, fields = play(engine, tokenizer, player)
    turns = [num_turns(mask) for mask in fields["loss_mask"]]
    assert set(turns) >= {1, 2, 3} and max(turns) >= 5, turns
    for i, meta in enumerate(metas):
        tokens, mask = fields["tokens"][i], fields["loss_mask"][i]
        assert len(mask) == meta.response_length == len(tokens) - meta.prompt_length
        assert meta.num_loss_tokens == int(mask.sum()) < meta.response_length or turns[i] == 1
        assert difference(folder, meta, fields, i, mask) < TOLERANCE
        assert (fields["rollout_logprobs"][i][~mask] == 0).all()
        assert set(fields["token_versions"][i].tolist()) == {3}
        response = tokens[meta.prompt_length :]
        ends = (mask & (response == EOS_ID)).sum()
        assert ends == turns[i] - meta.truncated  # every turn but a cut one ends with the token that was drawn
        # the given tokens are the template's text and the observation, nothing else
        assert tokenizer.decode(response[~mask]).count("\ntool:") == turns[i] - 1
        if not meta.truncated:
            assert fields["environment_reward"][i].item() == pytest.approx(1 + 0.25 * (turns[i] - 1))
    numbers = player.take_numbers()
    assert numbers["turns/sums"] == pytest.approx(sum(turns) / len(turns))
    assert 0 < numbers["given_share/sums"] < 1 and numbers["environment_errors/sums"] == 0
    drawn, rewards = (sum(float(one.sum()) for one in fields[name]) for name in ("loss_mask", "environment_reward"))
    assert numbers["turn_length/sums"] == pytest.approx(drawn / sum(turns))
    assert numbers["turn_reward/sums"] == pytest.approx(rewards / sum(turns)) and numbers["tool_errors/sums"] == 0


def test_given_tokens_that_count_are_seen(
    engine: TorchEngine, folder: Path, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    metas, fields = play(engine, tokenizer, player_of(tokenizer, tmp_path, COUNTING, "Counting"))
    i = next(i for i, mask in enumerate(fields["loss_mask"]) if not mask.all())
    assert difference(folder, metas[i], fields, i, torch.ones_like(fields["loss_mask"][i])) > 0.1


def test_a_trajectory_does_not_depend_on_its_neighbours(
    engine: TorchEngine, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    player = player_of(tokenizer, tmp_path, COUNTING, "Counting")
    _, whole = play(engine, tokenizer, player)
    _, again = play(engine, tokenizer, player_of(tokenizer, tmp_path, COUNTING, "Counting"))
    assert all(map(torch.equal, whole["tokens"], again["tokens"]))
    repeats = [tokens[tokens == EOS_ID].numel() for tokens in whole["tokens"]]
    assert max(repeats) > 1
    said = {tuple(tokens.tolist()) for tokens in whole["tokens"]}
    assert len(said) == len(whole["tokens"])


def test_limits_end_a_trajectory_as_truncated(
    engine: TorchEngine, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    player = player_of(tokenizer, tmp_path, COUNTING, "Counting", max_turns=2, max_tokens_per_turn=8,
                       max_tokens_per_observation=2)  # fmt: skip
    metas, fields = play(engine, tokenizer, player)
    for meta, mask, tokens in zip(metas, fields["loss_mask"], fields["tokens"], strict=True):
        assert num_turns(mask) <= 2 and mask[-1]  # nothing is given behind which nothing is drawn
        drawn = tokens[meta.prompt_length :][mask]
        assert len(drawn) <= 16
        given = tokenizer.decode(tokens[meta.prompt_length :][~mask])
        assert given in ("", *(f"\ntool:{n}:\nassistant:" for n in range(6)))
    assert any(meta.truncated for meta in metas) and not all(meta.truncated for meta in metas)
    short = replace(SAMPLING, max_new_tokens=20)
    metas, _ = play(engine, tokenizer, player_of(tokenizer, tmp_path, COUNTING, "Counting"), short)
    assert max(meta.response_length for meta in metas) <= 20


def test_an_environment_may_begin_with_a_prompt_of_its_own(
    engine: TorchEngine, folder: Path, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    metas, fields = play(engine, tokenizer, player_of(tokenizer, tmp_path, OPENING, "Opening"))
    text = "user:a prompt of mine\nassistant:"
    for i, meta in enumerate(metas):
        assert tokenizer.decode(fields["tokens"][i][: meta.prompt_length]) == text
        assert difference(folder, meta, fields, i, fields["loss_mask"][i]) < TOLERANCE
    small = player_of(tokenizer, tmp_path, OPENING, "Opening")
    small._max_prompt_length = 8
    with pytest.raises(UserError, match=r"began with a prompt of 32 tokens, data\.max_prompt_length is 8"):
        play(engine, tokenizer, small)


class HandingBack:
    """The engine, which hands every turn back after three tokens, once, as when new weights arrive."""

    def __init__(self, engine: TorchEngine) -> None:
        self.engine, self.num_back = engine, 0

    async def generate(self, asked: ToDraw, **_: Any) -> Any:
        drawn = await self.engine.generate(asked)
        if asked.sampling.max_new_tokens % 2:  # a turn that goes on: of ten tokens, three are there
            return drawn
        cut = []
        for one in drawn:
            is_cut = len(one.tokens) > 3
            self.num_back += is_cut
            names = ("tokens", "logprobs", "token_versions", "top_ids")
            cut.append(replace(one, finish_reason="handed_back", **{n: getattr(one, n)[:3] for n in names})
                       if is_cut else one)  # fmt: skip
        self.engine.weight_version += 1
        return cut


def test_a_turn_that_is_handed_back_goes_on_in_the_same_trajectory(
    engine: TorchEngine, folder: Path, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    generator = HandingBack(engine)
    player = player_of(tokenizer, tmp_path, COUNTING, "Counting", max_tokens_per_turn=10)
    metas, fields = play(generator, tokenizer, player)
    assert generator.num_back > len(metas)
    for i, meta in enumerate(metas):
        versions, mask = fields["token_versions"][i], fields["loss_mask"][i]
        assert difference(folder, meta, fields, i, mask) < TOLERANCE
        assert (versions.diff() >= 0).all() and meta.weight_version == versions[mask].min()
        assert meta.weight_version + meta.version_span == versions[mask].max()


def test_teachers_score_the_whole_trajectory_once(
    engine: TorchEngine, folder: Path, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    player = player_of(tokenizer, tmp_path, COUNTING, "Counting")
    teacher = make_hf_model(tmp_path / "teacher", seed=9, scale=0.1)
    scorer = TorchEngine.from_pretrained(teacher, TorchEngineConfig(dtype="float32"))
    dataset = dataset_of(tokenizer, 4)
    calls: list[int] = []

    async def run() -> tuple[list[SampleMeta], dict[str, list[Tensor]]]:
        plane = LocalDataPlane()
        worker = RolloutWorker(engine, plane, dataset, sampling=SAMPLING, seed=1, player=player)
        metas = await worker.generate([Prompt(sample_id=i, domain="sums", row=i) for i in range(4)])
        ask = scorer.score

        async def score(asked: ToScore) -> Any:
            calls.append(len(asked))
            return await ask(asked)

        scorer.score = score  # type: ignore[method-assign]
        assignment = Assignment({"one": TeacherConfig(model="-", domains=("sums",))})
        asked = {"one": Asked(own=5)}
        teachers = TeacherWorker({"one": teacher_of("one", scorer)}, assignment, plane, asked=asked, temperature=1.0)
        assert not await teachers.score(metas)
        names = ("tokens", "loss_mask", "teacher_token_logprobs", "teacher_ids", "teacher_logprobs")
        fields = await plane.get([meta.sample_id for meta in metas], names)
        assert player.environments._process is not None
        await player.environments._process.stop()
        return metas, fields

    metas, fields = asyncio.run(run())
    assert sum(calls) == 4
    for i, meta in enumerate(metas):
        mask = fields["loss_mask"][i]
        own = forced(teacher, fields["tokens"][i], meta.prompt_length)
        assert (own - fields["teacher_token_logprobs"][i])[mask].abs().max() < TOLERANCE
        # rows of given tokens have gone no further than the worker
        ids, logprobs, tokens = fields["teacher_ids"][i], fields["teacher_logprobs"][i], fields["tokens"][i]
        assert len(ids) == len(logprobs) == meta.num_loss_tokens
        with torch.no_grad():
            whole = AutoModelForCausalLM.from_pretrained(teacher)(tokens[None]).logits[0].float().log_softmax(-1)
        drawn = whole[meta.prompt_length - 1 : -1][mask]
        assert (drawn.gather(-1, ids.long()) - logprobs).abs().max() < TOLERANCE
    assert any(meta.num_loss_tokens < meta.response_length for meta in metas)


def test_rewards_judge_the_last_turn_or_take_the_environments(
    engine: TorchEngine, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    dataset = dataset_of(tokenizer)
    seen: list[Any] = []

    async def run(cfg: Any) -> list[Tensor]:
        player = player_of(tokenizer, tmp_path, COUNTING, "Counting")
        plane, rewards = LocalDataPlane(), build_rewards({"default": cfg})
        worker = RolloutWorker(engine, plane, dataset, sampling=SAMPLING, seed=1, player=player, samples_per_prompt=2)
        prompts = [Prompt(sample_id=i, domain="sums", row=i) for i in range(3)]
        metas = await worker.generate(prompts)
        score = rewards.score

        async def noted(items: Any) -> Any:
            graded = await score(items)
            seen.append([(item.response, one.value) for item, one in zip(items, graded, strict=True)])
            return graded

        rewards.score = noted  # type: ignore[method-assign]
        await RewardWorker(dataset, tokenizer, rewards, plane, has_environment=True).judge(prompts, metas)
        assert player.environments._process is not None
        await player.environments._process.stop()
        ids = [meta.sample_id for meta in metas]
        return (await plane.get(ids, ["environment_reward"]))["environment_reward"]

    given = asyncio.run(run(EnvironmentRewardConfig(type="environment")))
    assert [value for _, value in seen[0]] == [own.item() for own in given]
    assert len({value for _, value in seen[0]}) > 1
    asyncio.run(run(ExactMatchConfig(type="exact_match")))
    assert all("tool:" not in text and "assistant:" not in text for text, _ in seen[1])
    assert sum(value for _, value in seen[1]) > 0


def test_turns_that_are_answered_with_an_error_are_counted(
    engine: TorchEngine, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    source = COUNTING.replace('f"{self.left}: {text[:3]}"', "'error: no' if self.left else 'no error: 1'")
    player = player_of(tokenizer, tmp_path, source, "Counting")
    _, fields = play(engine, tokenizer, player)
    given = [tokens[-len(mask) :][~mask] for tokens, mask in zip(fields["tokens"], fields["loss_mask"], strict=True)]
    errors = sum(tokenizer.decode(ids).count("tool:error: no") for ids in given)
    turns = sum(map(num_turns, fields["loss_mask"]))
    assert player.take_numbers()["tool_errors/sums"] == pytest.approx(errors / turns) and 0 < errors < turns


def test_what_checks_and_validations_play_counts_to_no_step(
    engine: TorchEngine, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    player = player_of(tokenizer, tmp_path, COUNTING, "Counting")
    with apart():
        play(engine, tokenizer, player)
    assert player.take_numbers() == {}


def test_an_episode_that_fails_is_counted_and_closed(
    engine: TorchEngine, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    source = f"""
class Failing:
    async def reset(self, row, seed):
        return None

    async def step(self, text):
        raise RuntimeError("no")

    def close(self):
        with open({str(tmp_path / "closed")!r}, "a") as file:
            file.write("x")
"""
    player = player_of(tokenizer, tmp_path, source, "Failing", on_error="end")
    metas, _ = play(engine, tokenizer, player)
    failed = int(player.take_numbers()["environment_errors/sums"])
    assert 0 < failed <= len(metas) and (tmp_path / "closed").read_text() == len(metas) * "x"
