"""Construction of the workers that make samples, from a recipe: rollout, teachers, rewards, validation. They work in
the orchestrator's process."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from mopd.base.files.records import Records
from mopd.base.types import RouteShape, UserError
from mopd.config.losses import REWARDED
from mopd.config.payloads import always_ids_of, token_ids
from mopd.config.schema import Recipe
from mopd.conversion.models.dims import check_routes
from mopd.conversion.models.reading import read_dims
from mopd.data.cross_tokenizer import CrossTokenizer
from mopd.data.image_processing import sees_images
from mopd.data.prompts import (
    PromptDataset,
    check_domains_have_teachers,
    check_texts_have_domains,
    load_prompts,
    require_vision_teachers,
)
from mopd.data.tokenizer import compare_tokenizers, load_tokenizer, stops_of
from mopd.data.turns import TurnFrame
from mopd.data.views import Views
from mopd.data.vision_prompts import VisionPrompts, read_vision
from mopd.data_plane.interface import Storage
from mopd.engines.interface import Generator, SamplingParams
from mopd.engines.replicas.interface import info_of
from mopd.engines.replicas.router import Router
from mopd.engines.replicas.statistics import group_metrics
from mopd.environments.process import Environments
from mopd.launch.checks.domains import check_domains
from mopd.orchestrator.answers import AnswerWorker
from mopd.orchestrator.gate import Gate
from mopd.orchestrator.prefixes import build_prefixes, check_references
from mopd.orchestrator.rewards import RewardWorker
from mopd.orchestrator.rollout import RolloutWorker, reward_item
from mopd.orchestrator.teachers import TeacherGroup, TeacherWorker
from mopd.orchestrator.trajectories import Player
from mopd.orchestrator.validation import Validator
from mopd.orchestrator.weights.sync import GroupWeightSync
from mopd.placement.groups import Groups
from mopd.placement.interface import ROLLOUT
from mopd.placement.sharing.rollout import TurnsGenerator
from mopd.placement.sharing.turns import GpuTurns
from mopd.report.run_files import RunFiles
from mopd.rewards.domains import DomainRewards, build_rewards
from mopd.run.manifests import make_manifests

NUM_CHECKED = 8
"""First prompts behind which turns are rendered before a run (``TurnFrame.check``)."""
logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Files that are read before any model: they fail early and cheaply."""

    tokenizer: PreTrainedTokenizerBase
    always_ids: tuple[int, ...]
    """Ids of ``loss.always_ids``."""
    stops: Mapping[str, Any]
    """What ends a response (``stops_of``)."""
    train: PromptDataset
    validation: PromptDataset | None
    rewards: DomainRewards | None
    vision: VisionPrompts | None
    """Description of how the student reads images, where it sees any."""
    cross: Mapping[str, CrossTokenizer]
    """Readers of teachers with another tokenizer, by name."""
    environments: Environments | None = None
    """Environment of responses of several turns, if the recipe has one."""
    frame: TurnFrame | None = None
    """What the chat template writes between two of their turns."""

    def player(self, recipe: Recipe) -> Player | None:
        """Return a new player in the environment, if there is one."""
        if self.environments is None or self.frame is None:
            return None
        return Player(self.environments, self.frame, max_prompt_length=recipe.data.max_prompt_length)


@dataclass(frozen=True, kw_only=True)
class Workers:
    """All workers that make samples, and the groups that the checks ask."""

    inputs: Inputs
    plane: Storage
    weights: GroupWeightSync | None
    """Sender of the student's weights to the rollout, where there is one."""
    refreshed: Mapping[str, GroupWeightSync]
    """The same for each teacher that is the student and gets its new weights, by name."""
    routers: dict[str, Router]
    """``rollout`` or ``teachers.NAME`` -> its replicas as one engine; teachers that share a group have the same."""
    rollout: RolloutWorker | None
    """Present where some steps are on-policy, or the student is validated."""
    answers: AnswerWorker | None
    """Present where some steps train on the teachers' own answers, or responses begin with them."""
    teacher_groups: dict[str, TeacherGroup]
    """Teacher -> its group."""
    teachers: TeacherWorker
    rewards: RewardWorker | None
    """Present where the loss, or a gate, needs rewards of training samples."""
    gate: Gate | None
    """Present where a domain has one."""
    validator: Validator | None
    turns: GpuTurns | None
    """Turns of student and rollout, where they share GPUs."""

    @property
    def generator(self) -> Generator:
        """Generator with the student's published weights."""
        assert self.rollout is not None, "nothing asks it in a recipe without a rollout"
        return self.rollout.generator

    def take_numbers(self) -> dict[str, float]:
        """Return the metrics of every group since the last call."""
        values: dict[str, float] = {}
        for router in dict.fromkeys(self.routers.values()):
            values |= group_metrics(router.take_numbers())
        for source in (self.turns, self.rollout, self.rewards, self.answers, self.teachers):
            values |= {} if source is None else source.take_numbers()
        return values

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self.inputs.tokenizer

    @property
    def dataset(self) -> PromptDataset:
        """Training prompts."""
        return self.inputs.train


def read_inputs(recipe: Recipe) -> Inputs:
    """Read tokenizer, prompts and rewards.

    Raises:
        UserError: a file cannot be used, a domain of the data has no teacher or no reward, or a ground truth is none
            for its reward.
    """
    tokenizer = load_tokenizer(recipe.student.model)
    stops = stops_of(recipe.rollout, tokenizer)
    always_ids = token_ids(always_ids_of(recipe.loss), tokenizer.get_vocab(), "loss.always_ids")
    rewards = build_rewards(recipe.rewards) if recipe.needs_rewards else None
    vision = read_vision(recipe.student.model, recipe.data.max_pixels, tokenizer)
    assignment = recipe.assignment
    others = {name: load_tokenizer(recipe.teachers[name].model) for name in recipe.own_tokenizers}
    cross = {name: _cross_tokenizer(recipe, name, tokenizer, own, vision) for name, own in others.items()}
    views = Views({**dict.fromkeys(others), **recipe.views}, assignment, others)
    train = load_prompts(recipe.data.train, recipe.data, tokenizer, vision, views)
    for warning in check_domains_have_teachers(
        train.domain_counts, assignment.by_domain, default_teacher=assignment.default
    ):
        logger.warning("%s", warning)
    for domain, count in {**train.num_filtered, **train.num_truncated}.items():
        logger.warning("data.overlong_prompts %s: %d prompts of %s", recipe.data.overlong_prompts, count, domain)
    validation = None
    if recipe.validation is not None:
        validation = load_prompts(recipe.data.validation, recipe.data, tokenizer, vision, views)
    check_domains(recipe, train.domain_counts, None if validation is None else validation.domain_counts)
    check_texts_have_domains(recipe.data, {*train.domain_counts, *(validation.domain_counts if validation else ())})
    sighted = [name for name, teacher in recipe.teachers.items() if vision is not None and sees_images(teacher.model)]
    for dataset in (train, validation):
        if dataset is not None:
            counts = {d: count for d, count in dataset.image_counts.items() if d not in recipe.watched_domains}
            require_vision_teachers(counts, assignment, sighted)
    if rewards is not None:
        for dataset in (train if recipe.needs_task_advantage or recipe.gates else None, validation):
            if dataset is not None:
                _check_ground_truths(dataset, rewards)
        for name in rewards.unused(list(train.domain_counts)):
            logger.warning("rewards names %r, but the data has no row of it", name)
    if recipe.rollout.prefix is not None:
        check_references(recipe.rollout.prefix, train, tokenizer)
    environment = recipe.rollout.environment
    frame = None if environment is None else TurnFrame(tokenizer, recipe.data, environment)
    if frame is not None:
        frame.check([*train.rows[:NUM_CHECKED], *(validation.rows[:NUM_CHECKED] if validation is not None else ())])
    return Inputs(
        tokenizer=tokenizer,
        always_ids=always_ids,
        stops=stops,
        train=train,
        validation=validation,
        rewards=rewards,
        vision=vision,
        cross=cross,
        environments=None if environment is None else Environments(environment),
        frame=frame,
    )


def build_routers(groups: Groups) -> dict[str, Router]:
    """Build one router for each group that was started."""
    return {
        key: Router(plan.name, groups.replicas(key), plan.group.routing, kind=plan.kind)
        for key, plan in groups.plans.items()
    }


def with_guests(routers: Mapping[str, Router], groups: Groups) -> dict[str, Router]:
    """Return the router of each teacher, those that share a group's too."""
    hosts = {f"teachers.{name}": f"teachers.{host}" for name, host in groups.hosts.items()}
    return {**routers, **{key: routers[host] for key, host in hosts.items() if host in routers}}


async def build_workers(recipe: Recipe, inputs: Inputs, plane: Storage, groups: Groups, *, vocab_size: int) -> Workers:
    """Construct and wire, on the event loop that ``groups`` was started on. The rollout has no weights until the
    student publishes. ``vocab_size`` is the student's, without padding."""
    routers = build_routers(groups)
    teachers = {name: await teacher_group(name, routers, groups) for name in recipe.teachers}
    answers = weights = rollout = None
    if recipe.draws_answers or recipe.takes_prefixes:
        answers = await _answer_worker(recipe, inputs, plane, teachers, vocab_size)
    if ROLLOUT in routers:
        routers[ROLLOUT].vocab_size = vocab_size
        weights = GroupWeightSync(routers[ROLLOUT], on_running=recipe.on_new_weights)
        rollout = _rollout_worker(recipe, inputs, plane, groups, routers[ROLLOUT], answers)
    rewards = None
    loss, judges = recipe.loss, inputs.rewards if recipe.needs_task_advantage or recipe.gates else None
    if isinstance(loss, REWARDED) and judges is not None:
        rewards = RewardWorker(
            inputs.train,
            inputs.tokenizer,
            judges,
            plane,
            form=loss.task_advantage,
            cut_texts=recipe.rollout.cut_texts,
            has_environment=inputs.environments is not None,
        )
    refreshed = {name: GroupWeightSync(routers[f"teachers.{name}"]) for name in recipe.refreshed}
    sources = {f"teachers.{name}": sync for name, sync in refreshed.items()}
    groups.watch(routers, sources if weights is None else {ROLLOUT: weights, **sources})
    worker = TeacherWorker(
        teachers,
        recipe.assignment,
        plane,
        asked=recipe.asked,
        always_ids=inputs.always_ids,
        temperature=recipe.loss.temperature,
        dataset=inputs.train,
        cross=inputs.cross,
        keep_going=recipe.on_failure == "replace",
    )
    gate = None
    if recipe.gates:
        assert rewards is not None, "a recipe with gates has rewards"
        own = None
        if any(one.by == "teacher_answers" for one in recipe.gates.values()):
            own = replace(await _answer_worker(recipe, inputs, plane, teachers, vocab_size), samples_per_prompt=1)
        gate = Gate(recipe.gates, rewards, worker, own, writes_advantages=recipe.needs_task_advantage)
    return Workers(
        inputs=inputs,
        plane=plane,
        weights=weights,
        refreshed=refreshed,
        routers=with_guests(routers, groups),
        rollout=rollout,
        answers=answers,
        rewards=rewards,
        teacher_groups=teachers,
        teachers=worker,
        gate=gate,
        validator=build_validator(recipe, inputs),
        turns=groups.turns,
    )


def _rollout_worker(
    recipe: Recipe, inputs: Inputs, plane: Storage, groups: Groups, router: Router, answers: AnswerWorker | None
) -> RolloutWorker:
    cfg = recipe.rollout
    sampling = SamplingParams(
        max_new_tokens=cfg.max_response_length,
        temperature=cfg.temperature,
        top_p=cfg.top_p,
        top_k=cfg.top_k,
        min_p=cfg.min_p,
        presence_penalty=cfg.presence_penalty,
        repetition_penalty=cfg.repetition_penalty,
        **inputs.stops,
        num_top_ids=max(asked.student for asked in recipe.asked.values()),
        routes=_routes(recipe),
    )
    generator: Generator = router
    if groups.turns is not None:
        generator = TurnsGenerator(router, functools.partial(groups.kept_awake, ROLLOUT))
    return RolloutWorker(
        generator,
        plane,
        inputs.train,
        sampling=sampling,
        seed=recipe.seed,
        samples_per_prompt=cfg.samples_per_prompt,
        masked_tail=cfg.masked_tail or 0,
        limit=recipe.response_limit,
        player=inputs.player(recipe),
        prefixes=build_prefixes(recipe, inputs.train, inputs.tokenizer, None if answers is None else answers.draw),
    )


def _routes(recipe: Recipe) -> RouteShape | None:
    """Return the shape of the routes that the rollout is asked for."""
    if not recipe.rollout.replay_routes:
        return None
    dims = read_dims(Path(recipe.student.model))
    check_routes(dims, replay_routes=True)
    return None if dims.moe is None else dims.moe.route_shape


async def _answer_worker(
    recipe: Recipe, inputs: Inputs, plane: Storage, teachers: Mapping[str, TeacherGroup], vocab_size: int
) -> AnswerWorker:
    folder = recipe.answers.folder or RunFiles(Path(recipe.run_dir)).answers
    return AnswerWorker(
        teachers,
        recipe.assignment,
        await asyncio.to_thread(make_manifests, recipe),
        plane,
        inputs.train,
        sampling=SamplingParams(
            max_new_tokens=recipe.rollout.max_response_length,
            temperature=recipe.answers.temperature,
            **inputs.stops,
        ),
        seed=recipe.seed,
        samples_per_prompt=recipe.rollout.samples_per_prompt,
        masked_tail=recipe.rollout.masked_tail or 0,
        vocab_size=vocab_size,
        vision_ids=() if inputs.vision is None else inputs.vision.token_ids,
        store=Records(folder, {"content": "answers"}),
    )


async def teacher_group(name: str, routers: Mapping[str, Router], groups: Groups) -> TeacherGroup:
    """Return a teacher that was started."""
    key = f"teachers.{groups.hosts[name]}"
    info, plan, teacher = await info_of(groups.replicas(key)[0]), groups.plans[key], groups.teachers[name]
    return TeacherGroup(
        name,
        routers[key],
        vocab_size=info.vocab_size,
        hidden_size=read_dims(Path(plan.model), takes_quantised=True).hidden_size if teacher.payload == "hidden" else 0,
        sees_images=info.image_processing is not None,
        kept_awake=functools.partial(groups.kept_awake, key),
        adapter="" if teacher.adapter is None or teacher.stock else name,
    )


def build_validator(recipe: Recipe, inputs: Inputs) -> Validator | None:
    """Build the validator of a recipe with a ``validation`` section; ``None`` without."""
    if inputs.validation is None or inputs.rewards is None:
        return None
    return Validator(recipe, inputs.validation, inputs.tokenizer, inputs.rewards, inputs.player(recipe))


def _cross_tokenizer(
    recipe: Recipe,
    name: str,
    student: PreTrainedTokenizerBase,
    teacher: PreTrainedTokenizerBase,
    vision: VisionPrompts | None,
) -> CrossTokenizer:
    """Return the reader of a teacher with ``tokenizer: own``. ``UserError`` if that is the student's, or cannot be
    read in the student's bytes."""
    key = f"teachers.{name}"
    if vision is not None:
        raise UserError(f"{key}.tokenizer is own, but student.model sees images, whose tokens no text is: remove it")
    if not compare_tokenizers(student, teacher, read_dims(Path(recipe.student.model)).vocab_size):
        raise UserError(
            f"{key}.tokenizer is own, but {key}.model {recipe.teachers[name].model} has the student's tokenizer: "
            "remove that key, and every token is compared"
        )
    special = recipe.teachers[name].tokenizer_map
    return CrossTokenizer(student, teacher, special, most_tokens=recipe.longest_response(name), key=key)


def _check_ground_truths(dataset: PromptDataset, rewards: DomainRewards) -> None:
    for row in range(len(dataset)):
        item = reward_item(dataset, row, "")
        rewards.of(item.domain).check(item)
