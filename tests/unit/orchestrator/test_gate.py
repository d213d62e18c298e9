"""Gates: what becomes of a prompt by the student's rewards or the teacher's own answer, and what its samples hold.

Real engine, answers, rewards, data plane. That batches stay full: ``tests/integration/test_gates.py``.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mopd.base.types import Prompt, SampleMeta, UserError
from mopd.config.gates import GateConfig
from mopd.config.groups import Assignment, TeacherConfig, TorchEngineConfig
from mopd.config.load import load_recipe
from mopd.config.payloads import Asked
from mopd.config.rewards import ExactMatchConfig
from mopd.conversion.hf.manifest import Manifest
from mopd.data.prompts import PromptDataset, PromptRow
from mopd.data_plane.local import LocalDataPlane
from mopd.engines.interface import SamplingParams, ToDraw
from mopd.engines.torch.engine import TorchEngine
from mopd.losses import parallel_topk_distill
from mopd.orchestrator.answers import AnswerWorker
from mopd.orchestrator.gate import Gate
from mopd.orchestrator.rewards import RewardWorker
from mopd.orchestrator.teachers import TeacherWorker
from mopd.rewards.domains import build_rewards
from tests.fixtures.recipe import RECIPE
from tests.fixtures.samples import meta_of
from tests.fixtures.tiny_models import VOCAB_SIZE, make_hf_model, make_tokenizer
from tests.unit.orchestrator.groups import teacher_of

PROMPT_TOKENS = [(5 + i, 7) for i in range(4)]
GREEDY = SamplingParams(max_new_tokens=4, temperature=0.0)
NUM = 2
"""Responses of each prompt."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_hf_model(folder, scale=0.1)
    make_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def engine(folder: Path) -> TorchEngine:
    return TorchEngine.from_pretrained(folder, TorchEngineConfig(dtype="float32"))


class World:
    """A domain whose rows have these answers, and two responses of the student to each prompt."""

    def __init__(self, folder: Path, engine: TorchEngine, gate: GateConfig, truths: list[str], said: list[str]) -> None:
        self.tokenizer = make_tokenizer(folder)
        dataset = PromptDataset(
            [
                PromptRow(domain="math", text="", tokens=tokens, ground_truth=truth, extra_info=None, place="")
                for tokens, truth in zip(PROMPT_TOKENS, truths, strict=True)
            ]
        )
        self.plane = LocalDataPlane()
        groups = {"expert": teacher_of("expert", engine)}
        assignment = Assignment({"expert": TeacherConfig(model="m", domains=("math",))})
        self.teachers = TeacherWorker(groups, assignment, self.plane, asked={"expert": Asked(own=4)}, temperature=1.0)
        manifest = Manifest(path="", config_sha256="c", weights_sha256="w", tokenizer_sha256="t")
        more: dict[str, Any] = {"sampling": GREEDY, "seed": 1, "samples_per_prompt": 1, "vocab_size": VOCAB_SIZE}
        manifests = {"teachers.expert": manifest}
        answers = AnswerWorker(groups, assignment, manifests, self.plane, dataset, store=None, **more)
        rewards = RewardWorker(
            dataset, self.tokenizer, build_rewards({"default": ExactMatchConfig(type="exact_match")}), self.plane
        )
        self.gate = Gate({"math": gate}, rewards, self.teachers, answers, writes_advantages=True)
        self.prompts = [Prompt(sample_id=10 + row, domain="math", row=row) for row in range(len(truths))]
        self.responses = [self.tokenizer(text, add_special_tokens=False)["input_ids"] for text in said]
        self.metas = [
            meta_of((10 + i // NUM) * NUM + i % NUM, "math", prompt=2, response=len(own))
            for i, own in enumerate(self.responses)
        ]

    def sort(self, *fields: str) -> tuple[list[str], dict[str, list[Tensor]]]:
        """Verdicts, and fields of the samples whose prompts are not skipped."""

        async def run() -> tuple[list[str], dict[str, list[Tensor]]]:
            tokens = [torch.tensor([*PROMPT_TOKENS[i // NUM], *own]) for i, own in enumerate(self.responses)]
            said = [torch.full((len(own),), -1.5) for own in self.responses]
            masks = [torch.ones(len(own)).bool() for own in self.responses]
            await self.plane.put(self.metas, {"tokens": tokens, "loss_mask": masks, "rollout_logprobs": said})
            verdicts = await self.gate.sort(self.prompts, self.metas)
            kept = [self._ids(i) for i, verdict in enumerate(verdicts) if verdict in fields[0].split("+")]
            return [*verdicts], await self.plane.get([i for own in kept for i in own], fields[1:])

        return asyncio.run(run())

    def _ids(self, prompt: int) -> list[int]:
        return [meta.sample_id for meta in self._samples(prompt)]

    def _samples(self, prompt: int) -> list[SampleMeta]:
        return self.metas[prompt * NUM : (prompt + 1) * NUM]


TRUTHS = ["ab", "ab", "ab", "ab"]
SAID = ["xy", "yx", "ab", "xy", "ab", "ab", "xy", "ab"]
"""None, one, both and one of two responses are right."""


def test_the_students_rewards_decide(folder: Path, engine: TorchEngine) -> None:
    world = World(folder, engine, GateConfig(by="student_rewards"), TRUTHS, SAID)
    verdicts, fields = world.sort("distil+reinforce", "task_advantage")
    assert verdicts == ["distil", "reinforce", "skip", "reinforce"]
    found = [own.unique().tolist() for own in fields["task_advantage"]]
    assert found == [[0.0], [0.0], [0.5], [-0.5], [-0.5], [0.5]]


def test_a_reinforced_response_has_no_divergence(folder: Path, engine: TorchEngine) -> None:
    world = World(folder, engine, GateConfig(by="student_rewards"), TRUTHS, SAID)
    _, fields = world.sort("reinforce", "teacher_ids", "teacher_logprobs", "teacher_token_logprobs")
    for ids, logprobs, of_tokens in zip(*fields.values(), strict=True):
        assert ids.shape == logprobs.shape == (len(of_tokens), 4) and (of_tokens == -1.5).all()
        for loss, tail in (("forward_kl", "bucket"), ("reverse_kl", "generalized"), ("jsd", "bucket")):
            z = torch.randn(len(of_tokens), VOCAB_SIZE, requires_grad=True)
            value, _ = parallel_topk_distill(z, ids, logprobs, loss=loss, tail=tail)
            value.sum().backward()
            assert z.grad is not None and not value.any() and not z.grad.any()


def test_the_teachers_own_answer_decides(folder: Path, engine: TorchEngine) -> None:
    """It is right on every second row; a row is asked for once."""
    answers = asyncio.run(engine.generate(ToDraw(PROMPT_TOKENS, GREEDY, range(4))))
    tokenizer = make_tokenizer(folder)
    texts = tokenizer.batch_decode([own.tokens.tolist() for own in answers], skip_special_tokens=True)
    truths = [text if i % 2 else "ab" for i, text in enumerate(texts)]
    world = World(folder, engine, GateConfig(by="teacher_answers"), truths, SAID)
    verdicts, _ = world.sort("distil", "task_advantage")
    assert verdicts == ["skip", "distil", "skip", "distil"]
    world.gate.answers.teachers.clear()  # type: ignore[union-attr, attr-defined]
    asyncio.run(world.plane.discard([meta.sample_id for meta in world.metas]))
    assert world.sort("distil", "task_advantage")[0] == verdicts
    skipping = World(folder, engine, GateConfig(by="teacher_answers", others="skip"), truths, SAID[2:4] * 4)
    assert skipping.sort("distil", "task_advantage")[0] == verdicts


GATE = "domains: {math: {gate: {by: student_rewards}}}\nrollout: {samples_per_prompt: 2}\n"
TASK = "loss: {task_reward_weight: 1.0}\n"
REWARDS = "rewards: {default: {type: exact_match}}\n"


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        (GATE + TASK, "rewards is empty, but loss.task_reward_weight needs one for each domain"),
        (GATE.replace("rewards}", "rewards, others: skip}"), "rewards is empty, but domains.math.gate needs one"),
        (GATE + REWARDS, "domains.math.gate.others is 'reinforce', but loss.task_reward_weight is 0: set it"),
        (GATE + REWARDS + "loss: {type: k2}\n", "domains.math.gate is set, but loss.type 'k2' cannot leave a teacher"),
        (
            GATE + REWARDS + "loss: {task_reward_weight: 1.0, tail: renormalize}\n",
            "loss.type 'topk_forward_kl' with tail 'renormalize' cannot leave a teacher out",
        ),
        (
            GATE + REWARDS + "loss: {task_reward_weight: 1.0, tokens: {largest: divergence, share: 0.5}}\n",
            "domains.math.gate and loss.tokens are set",
        ),
        (GATE + REWARDS + TASK + "objective: sft_on_teacher\n", "trains on the teachers' own answers, where no gate"),
        (GATE.replace("student_rewards", "luck") + TASK + REWARDS, "domains.math.gate.by"),
        (GATE.replace("rewards}", "rewards, threshold: 2}") + TASK + REWARDS, "domains.math.gate.threshold is 2"),
    ],
)
def test_gates_that_cannot_decide(tmp_path: Path, more: str, problem: str) -> None:
    (tmp_path / "base.yaml").write_text(RECIPE[: RECIPE.index("rewards:")])
    (tmp_path / "recipe.yaml").write_text("base: base.yaml\n" + more)
    with pytest.raises(UserError) as raised:
        load_recipe(tmp_path / "recipe.yaml")
    assert problem in str(raised.value) and "\n" not in str(raised.value)
