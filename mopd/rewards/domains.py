"""The reward of each domain, as a recipe's ``rewards`` section names them.

Rewards that compare texts run on the event loop. Judged ones (math, code, schemas) may take long on a hostile response,
and the user's own function may do anything: both run in processes that start at the first call and answer one JSON line
for each batch (``process.py``).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mopd.base.files.json_text import read_json_object
from mopd.base.files.reading import resolved_file, shown_path
from mopd.base.types import UserError
from mopd.config.reading.tree import shown_key
from mopd.config.rewards import (
    DEFAULT,
    CodeConfig,
    CustomRewardConfig,
    EnvironmentRewardConfig,
    ExactMatchConfig,
    JsonSchemaConfig,
    MathConfig,
    MultipleChoiceConfig,
    RegexConfig,
    RewardConfig,
)
from mopd.rewards.graders.system_calls import architecture_named
from mopd.rewards.ground_truths import letter_of, schema_of, schema_problem, tests_of, text_of
from mopd.rewards.interface import Graded, Reward, RewardItem
from mopd.rewards.process import GIB, RewardProcess, ServedReward


class DomainRewards:
    """The rewards of a run by domain. Rewards with equal settings are one object."""

    def __init__(self, configs: Mapping[str, RewardConfig], rewards: Mapping[str, Reward]) -> None:
        """Keep configurations and rewards by the names of the recipe, domains and ``default``."""
        self._configs = dict(configs)
        self._rewards = dict(rewards)
        self.around_calls: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
        """Entered around each ``score``, whose deadline grows with the number of responses."""

    def name(self, domain: str) -> str:
        """Return key and type of a domain's reward, for messages; ``UserError`` with the key to add if it has none."""
        return f"{_key(self._known(domain))} ({self._configs[self._known(domain)].type})"

    def has(self, domain: str) -> bool:
        """Return whether a reward is in force for ``domain``."""
        return domain in self._rewards or DEFAULT in self._rewards

    def of(self, domain: str) -> Reward:
        """Return the reward in force for ``domain``; ``UserError`` if it has none."""
        return self._rewards[self._known(domain)]

    def unused(self, domains: Sequence[str]) -> list[str]:
        """Return the names that are none of ``domains``, probably misspelt."""
        return sorted(self._rewards.keys() - {*domains, DEFAULT})

    async def score(self, items: Sequence[RewardItem]) -> list[Graded]:
        """Return one outcome per item, in their order, each from its domain's reward."""
        groups: dict[int, tuple[Reward, list[int]]] = {}
        for i, item in enumerate(items):
            reward = self.of(item.domain)
            groups.setdefault(id(reward), (reward, []))[1].append(i)
        with self.around_calls():
            answers = await asyncio.gather(*(reward([items[i] for i in places]) for reward, places in groups.values()))
        result = [Graded(0.0, None)] * len(items)
        for (_, places), outcomes in zip(groups.values(), answers, strict=True):
            for i, outcome in zip(places, outcomes, strict=True):
                result[i] = outcome
        return result

    def close(self) -> None:
        """Close every reward, side by side: the end of a run has time for one."""
        rewards = {id(reward): reward for reward in self._rewards.values()}
        with ThreadPoolExecutor(max(1, len(rewards))) as pool:
            list(pool.map(lambda reward: reward.close(), rewards.values()))

    def _known(self, domain: str) -> str:
        if not self.has(domain):
            raise UserError(
                f"rewards has none for domain {domain!r} of the data: add {_key(domain)}, or {_key(DEFAULT)} for every "
                "domain that it does not name"
            )
        return domain if domain in self._rewards else DEFAULT


def build_rewards(configs: Mapping[str, RewardConfig]) -> DomainRewards:
    """Build the rewards of a ``rewards`` section; ``UserError`` for a file that it names and that cannot be used."""
    built: dict[RewardConfig, Reward] = {}
    for name, cfg in configs.items():
        if cfg not in built:
            built[cfg] = _build(cfg, _key(name))
    return DomainRewards(configs, {name: built[cfg] for name, cfg in configs.items()})


def _build(cfg: RewardConfig, key: str) -> Reward:
    if isinstance(cfg, ExactMatchConfig):
        return ComparedReward(_text_of, _exact_match)
    if isinstance(cfg, MultipleChoiceConfig):
        return ComparedReward(letter_of, _multiple_choice)
    if isinstance(cfg, EnvironmentRewardConfig):
        return ComparedReward(lambda item: None, _of_environment)
    return CustomReward(cfg) if isinstance(cfg, CustomRewardConfig) else JudgedReward(cfg, key)


def _key(name: str) -> str:
    return shown_key(("rewards", name))


class CustomReward(ServedReward):
    """Reward of the user's function. Every failure names the file and the function, and is final."""

    def __init__(self, cfg: CustomRewardConfig) -> None:
        """Find the file; the function is looked up at the first call. ``UserError`` if the file does not exist."""
        super().__init__(f"{shown_path(cfg.path)}: custom reward {cfg.function!r}")
        self._cfg = cfg
        self._path = resolved_file(cfg.path, cure="correct the path of the custom reward")

    def check(self, item: RewardItem) -> None:
        """Accept any row: only the function knows what it needs."""

    def _start(self) -> RewardProcess:
        return RewardProcess(
            "child.py",
            (str(self._path), self._cfg.function),
            max_bytes=int(self._cfg.max_memory_gib * GIB),
            folder=self._path.parent,
        )

    def _arguments(self, item: RewardItem) -> dict[str, Any]:
        """Return the function's keyword arguments."""
        names = ("prompt", "response", "ground_truth", "extra_info", "domain")
        return {name: getattr(item, name) for name in names}

    def _graded(self, value: Any, item: RewardItem) -> Graded:
        """Return the outcome of a number: the whole response was judged."""
        return Graded(float(value), item.response[:MAX_EXTRACTED])

    def _timeout_s(self, num_items: int) -> float:
        return self._cfg.timeout_s


JudgedConfig = MathConfig | RegexConfig | JsonSchemaConfig | CodeConfig
MAX_PROCESSES = 32
MAX_JUDGE_BYTES = 8 * GIB
"""Memory of the process that forks for every response, which holds a batch; its forks have a limit of their own."""
START_S = 60.0
"""Seconds for an import; also added to every batch's deadline."""
OVERHEAD_S = 3.0
"""Most seconds per response beyond its deadline: a fork, and ending what it has started."""


class JudgedReward(ServedReward):
    """One of these rewards, by its configuration."""

    def __init__(self, cfg: JudgedConfig, key: str) -> None:
        """Prepare the settings. ``key`` heads its errors. ``UserError`` for a file or a machine that cannot be used."""
        cure = ": see that the machine has memory and processes left"
        super().__init__(f"{key}: the {cfg.type} reward", cure)
        self._cfg = cfg
        self._num_processes = max(2, min(MAX_PROCESSES, len(os.sched_getaffinity(0)) // 2))
        self._settings = {**asdict(cfg), "num_processes": self._num_processes}
        if isinstance(cfg, JsonSchemaConfig) and cfg.path is not None:
            self._settings["path"] = _checked_schema(cfg.path, key)
        if isinstance(cfg, CodeConfig) and architecture_named(os.uname().machine) is None:
            raise UserError(
                f"{key}: the code reward knows no way to confine programs on {os.uname().machine}: run on x86_64 "
                "or aarch64, or write a custom reward"
            )

    def check(self, item: RewardItem) -> None:
        """Raise ``UserError`` unless the ground truth has a shape that the reward reads."""
        self._arguments(item)

    def _arguments(self, item: RewardItem) -> dict[str, Any]:
        arguments: dict[str, Any] = {"response": item.response}
        if isinstance(self._cfg, CodeConfig):
            return {**arguments, "tests": tests_of(item)}
        if isinstance(self._cfg, JsonSchemaConfig):
            return arguments if self._cfg.path is not None else {**arguments, "truth": schema_of(item)}
        if isinstance(self._cfg, RegexConfig) and not self._cfg.reads_ground_truth:
            return arguments
        return {**arguments, "truth": text_of(item, self._cfg.type)}

    def _start(self) -> RewardProcess:
        arguments = (self._cfg.type, json.dumps(self._settings))
        return RewardProcess("judge.py", arguments, max_bytes=MAX_JUDGE_BYTES)

    def _graded(self, value: Any, item: RewardItem) -> Graded:
        number, extracted, problem = value
        return Graded(float(number), extracted, problem)

    def _timeout_s(self, num_items: int) -> float:
        rounds = math.ceil(num_items / self._num_processes)
        each_again = num_items  # one at a time, see judge.py
        return START_S + (rounds + each_again) * (self._cfg.timeout_s + OVERHEAD_S)


def _checked_schema(path: str, key: str) -> str:
    """Return the absolute path of a JSON schema; ``UserError`` if it is none."""
    schema = read_json_object(path, cure=f"correct {key}.path")
    if problem := schema_problem(schema):
        raise UserError(f"{shown_path(path)}: no JSON schema ({problem}): correct {key}.path")
    return str(Path(path).resolve())


CHOICES = (
    re.compile(r"\\boxed\s*\{\s*(?:\\(?:text|textbf|mathrm|mathbf)\s*\{\s*)?\(?([A-Za-z])\)?\s*\}"),
    re.compile(r"\b(?:answer|choice|option)\b(?:\s+is)?(?:\s*:)?\s*[*_$]*\(?([A-Za-z])\b(?!['’])", re.I),
    re.compile(r"\(([A-Z])\)"),
    re.compile(r"^(?:[^\S\n]|[*_$])*([A-Z])(?:[.):]|(?:[^\S\n]|[*_$])*$)", re.M),
)
"""Forms of a choice, in order: a box, "Answer: C" or "the answer is (C)", "(C)", a letter that begins a line as "C." or
is all of it. The last match of the first form that occurs counts. They run on the event loop, so each takes time in
proportion to the response: no two neighbouring repeats take the same characters, no repeat goes on in the next line."""
MAX_EXTRACTED = 500


class ComparedReward:
    """A reward that compares texts on the event loop, with no process or file."""

    def __init__(self, check: Callable[[RewardItem], object], grade: Callable[[RewardItem], Graded]) -> None:
        """``check`` raises ``UserError`` for an unusable ground truth; ``grade`` judges one response."""
        self._check, self._grade = check, grade

    def check(self, item: RewardItem) -> None:
        """Raise ``UserError`` for an unusable ground truth."""
        self._check(item)

    async def __call__(self, items: Sequence[RewardItem]) -> list[Graded]:
        """Return one outcome per item."""
        return [self._grade(item) for item in items]

    def close(self) -> None:
        """Do nothing."""


def _text_of(item: RewardItem) -> str:
    return text_of(item, "exact_match")


def _of_environment(item: RewardItem) -> Graded:
    """Reward what the environment gave."""
    assert item.environment_reward is not None, "the recipe has an environment"
    return Graded(item.environment_reward, item.response[:MAX_EXTRACTED])


def _exact_match(item: RewardItem) -> Graded:
    """Reward 1 for the same text, without surrounding white space."""
    response = item.response.strip()
    equal = response == _text_of(item)
    return Graded(float(equal), response[:MAX_EXTRACTED], "" if equal else "another text than the ground truth")


def _multiple_choice(item: RewardItem) -> Graded:
    """Reward 1 if the response chooses the right letter."""
    right = letter_of(item)
    for pattern in CHOICES:
        found = pattern.findall(item.response)
        if found:
            chosen = found[-1].upper()
            return Graded(float(chosen == right), chosen, "" if chosen == right else "another choice")
    return Graded(0.0, None, "it names no choice")
