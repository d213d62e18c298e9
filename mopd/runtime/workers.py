"""Rank 0's workers, built from a recipe: prompts, rollout engine, teachers, validation. Other ranks only follow."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from mopd.config.schema import Recipe, Teacher
from mopd.data.prompts import PromptDataset, check_domains_have_teachers, load_prompts
from mopd.data.stream import PromptStream
from mopd.data.tokenizer import load_tokenizer
from mopd.data_plane.local import LocalDataPlane
from mopd.engines.interface import Generator, SamplingParams
from mopd.engines.torch_engine import TorchEngine
from mopd.rewards.domains import DomainRewards, build_rewards
from mopd.rollout.worker import RolloutWorker, TaskAdvantage
from mopd.runtime.ranks import CommandChannel, StudentGroup
from mopd.runtime.validation import Validator
from mopd.student.worker import StudentWorker
from mopd.teachers.group import TeacherGroup
from mopd.teachers.routing import Routing
from mopd.teachers.worker import TeacherWorker
from mopd.types import UserError
from mopd.weight_sync.in_process import InProcessWeightSync

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What is read from disk before any model: it fails early and cheaply."""

    tokenizer: PreTrainedTokenizerBase
    train: PromptDataset
    validation: PromptDataset | None
    rewards: DomainRewards | None


@dataclass(frozen=True, kw_only=True)
class Workers:
    """Everything that the controller and the checks talk to."""

    inputs: Inputs
    prompts: PromptStream
    plane: LocalDataPlane
    student: StudentGroup
    generator: TorchEngine
    """Samples with the student's published weights."""
    rollout: RolloutWorker
    teacher_engines: dict[str, list[TorchEngine]]
    """Teacher -> its replicas."""
    teachers: TeacherWorker
    validator: Validator | None

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self.inputs.tokenizer

    @property
    def dataset(self) -> PromptDataset:
        """Training prompts."""
        return self.inputs.train

    @property
    def student_vocab_size(self) -> int:
        """Ids that the student can emit."""
        return self.generator.vocab_size

    def teacher_generator(self, name: str) -> Generator:
        """A replica of a teacher that can also generate."""
        return self.teacher_engines[name][0]

    def prefix_logits(self, name: str, tokens: Tensor) -> Tensor:
        """[V] fp32 logits of a teacher after ``tokens`` [L], by a plain forward: no batch, no padding, no cache."""
        model = self.teacher_engines[name][0].model
        with torch.inference_mode():
            logits: Tensor = model(input_ids=tokens[None].to(model.device), use_cache=False).logits[0, -1]
        return logits.float().cpu().clone()


def read_inputs(recipe: Recipe) -> Inputs:
    """Tokenizer, prompts and rewards.

    Raises:
        UserError: a file cannot be used, or a domain of the data has no teacher.
    """
    tokenizer = load_tokenizer(recipe.student.model)
    rewards = build_rewards(recipe.validation) if recipe.validation is not None else None
    train_needs_truth = recipe.needs_task_advantage and rewards is not None and rewards.needs_ground_truth
    train = load_prompts(recipe.data.train, recipe.data, tokenizer, needs_ground_truth=train_needs_truth)
    for warning in check_domains_have_teachers(train.domain_counts, recipe.teacher_by_domain):
        logger.warning("%s", warning)
    for domain, count in {**train.num_filtered, **train.num_truncated}.items():
        logger.warning("data.overlong_prompts %s: %d prompts of %s", recipe.data.overlong_prompts, count, domain)
    validation = None
    if rewards is not None:
        validation = load_prompts(
            recipe.data.validation, recipe.data, tokenizer, needs_ground_truth=rewards.needs_ground_truth
        )
        _check_validation_domains(recipe, train, validation)
    return Inputs(tokenizer=tokenizer, train=train, validation=validation, rewards=rewards)


def build_workers(
    recipe: Recipe,
    inputs: Inputs,
    worker: StudentWorker,
    plane: LocalDataPlane,
    channel: CommandChannel,
    *,
    validation_path: Path | None,
) -> Workers:
    """Construct and wire; loads every teacher. The generator has no weights until the student publishes."""
    device = worker.layout.device
    generator = TorchEngine.empty(recipe.student.model, recipe.rollout.engine, device)
    engines = {name: _load_replicas(teacher, device) for name, teacher in recipe.teachers.items()}
    _check_top_k(recipe, engines)
    groups = {name: TeacherGroup(name, group, vocab_size=group[0].vocab_size) for name, group in engines.items()}
    sampling = SamplingParams(
        max_new_tokens=recipe.rollout.max_response_length,
        temperature=recipe.rollout.temperature,
        top_p=recipe.rollout.top_p,
        top_k=recipe.rollout.top_k,
    )
    advantage = None
    if recipe.needs_task_advantage and inputs.rewards is not None:
        advantage = TaskAdvantage(inputs.train, inputs.tokenizer, inputs.rewards)
    return Workers(
        inputs=inputs,
        prompts=PromptStream(inputs.train, recipe.data.domain_weights, recipe.data_seed),
        plane=plane,
        student=StudentGroup(worker, channel, InProcessWeightSync([generator])),
        generator=generator,
        rollout=RolloutWorker(
            generator,
            plane,
            sampling=sampling,
            seed=recipe.seed,
            samples_per_prompt=recipe.rollout.samples_per_prompt,
            task_advantage=advantage,
        ),
        teacher_engines=engines,
        teachers=TeacherWorker(
            groups,
            Routing(recipe.teacher_by_domain),
            plane,
            top_k=recipe.loss.top_k,
            temperature=recipe.loss.temperature,
        ),
        validator=build_validator(recipe, inputs, validation_path),
    )


def build_validator(recipe: Recipe, inputs: Inputs, path: Path | None) -> Validator | None:
    """The validator of a recipe with a ``validation`` section."""
    if inputs.validation is None or inputs.rewards is None:
        return None
    return Validator(recipe, inputs.validation, inputs.tokenizer, inputs.rewards, path)


def _load_replicas(teacher: Teacher, device: torch.device) -> list[TorchEngine]:
    return [TorchEngine.from_pretrained(teacher.model, teacher.engine, device) for _ in range(teacher.replicas)]


def _check_top_k(recipe: Recipe, engines: dict[str, list[TorchEngine]]) -> None:
    for name, group in engines.items():
        if recipe.loss.top_k > group[0].vocab_size:
            raise UserError(
                f"loss.top_k is {recipe.loss.top_k} but teachers.{name}.model has a vocabulary of "
                f"{group[0].vocab_size}: lower loss.top_k"
            )


def _check_validation_domains(recipe: Recipe, train: PromptDataset, validation: PromptDataset) -> None:
    unknown = sorted(set(validation.domain_counts) - set(recipe.teacher_by_domain))
    if unknown:
        raise UserError(
            f"data.validation has domains {unknown} that no teacher answers for: remove these rows or name a teacher"
        )
    missing = sorted(set(train.domain_counts) - set(validation.domain_counts))
    if missing and recipe.preflight.require_better_teacher:
        raise UserError(
            f"data.validation has no row of domain {missing[0]!r}, so its teacher cannot be checked: add rows, or set "
            "preflight.require_better_teacher: false"
        )
