"""What is run: times of the stages, lengths of the responses, and the recipe that a controller gets."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from mopd.bench.pipeline.engines import Lengths
from mopd.config.load import load_recipe
from mopd.config.schema import Recipe
from mopd.files.temporary import TemporaryFolder

SHARES = {"chat": 0.2, "code": 0.3, "math": 0.5}
"""Domains of the stream; each has a teacher of its own, of the same name."""
PROMPT_LENGTH = 32
ROLLOUT_REPLICAS = 2
TEACHER_REPLICAS = 2
WAIT_S = 120.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """Seconds that each stage takes for a step's samples at its capacity, and what the samples are like."""

    name: str
    lengths: Lengths
    max_response_length: int
    top_k: int = 16
    num_prompts: int = 64
    """Of a step."""
    samples_per_prompt: int = 2
    max_sequences: int = 8
    """That one rollout replica works on at a time."""
    rollout_s: float = 0.0
    teacher_s: float = 0.0
    """Of each teacher, over its replicas."""
    slow_domain: str | None = None
    slow_factor: float = 4.0
    """How much longer its teacher takes."""
    train_s: float = 0.0
    """Forward, backward and optimizer."""
    stage_s: float = 0.0
    """For which the student hands its weights over."""
    send_s: float = 0.0
    """For which they travel, and nobody needs to wait."""
    swap_s: float = 0.0
    """For which a rollout replica stands still."""
    weights_mb: int = 0
    """Megabytes of real weights that are copied for handing over, go through the channel and are unpacked and checked
    beside it, in the place of ``stage_s`` and ``send_s``."""
    staleness: tuple[int, ...] = (1, 2)
    """Each ``max_staleness`` that is run, beside 0."""
    most_age: float | None = None
    """Goal of the samples' mean age in optimizer steps, at any staleness; ``None`` where the rollout decides it."""

    @property
    def num_samples(self) -> int:
        """Of a step."""
        return self.num_prompts * self.samples_per_prompt

    @property
    def s_per_drawn_token(self) -> float:
        """Of one of the responses that a rollout replica draws at a time."""
        at_a_time = ROLLOUT_REPLICAS * self.max_sequences
        return self.rollout_s * at_a_time / (self.num_samples * self.lengths.mean)

    def s_per_scored_token(self, domain: str) -> float:
        """Of one replica of the domain's teacher."""
        tokens = self.num_samples * SHARES[domain] * (PROMPT_LENGTH + self.lengths.mean)
        seconds = self.teacher_s * (self.slow_factor if domain == self.slow_domain else 1.0)
        return seconds * TEACHER_REPLICAS / tokens

    def scaled(self, factor: float) -> Scenario:
        """All times ``factor`` as long."""
        names = ("rollout_s", "teacher_s", "train_s", "stage_s", "send_s", "swap_s")
        return replace(self, **{name: factor * getattr(self, name) for name in names})


_TIMES: dict[str, Any] = {
    "rollout_s": 0.8,
    "teacher_s": 0.3,
    "train_s": 0.4,
    "stage_s": 0.05,
    "send_s": 0.1,
    "swap_s": 0.01,
}
SCENARIOS = (
    Scenario(name="constant", lengths=Lengths(mean=64), max_response_length=512, **_TIMES),
    Scenario(name="heavy_tailed", lengths=Lengths(mean=64, sigma=1.0), max_response_length=512, **_TIMES),
    Scenario(name="slow_domain", lengths=Lengths(mean=64), max_response_length=512, slow_domain="chat", **_TIMES),
    Scenario(
        name="real_weights",
        lengths=Lengths(mean=64, sigma=1.0),
        max_response_length=512,
        weights_mb=256,
        **(_TIMES | {"stage_s": 0.0, "send_s": 0.0}),
    ),
    Scenario(
        name="slow_trainer",
        lengths=Lengths(mean=64, sigma=1.0),
        max_response_length=512,
        staleness=(1, 4),
        most_age=2.0,
        **(_TIMES | {"rollout_s": 0.4, "teacher_s": 0.15, "train_s": 0.9}),
    ),
)


_REWARDED: dict[str, Any] = {"type": "policy_gradient", "task_reward_weight": 1.0, "correction": {"type": "tis"}}


def make_recipe(scenario: Scenario, *, max_staleness: int, steps: int) -> Recipe:
    """For a loss that needs a reward of every response beside the teachers', where a prompt has several responses."""
    group = {"engine": {"type": "torch"}, "placement": {"type": "local"}}
    tree: dict[str, Any] = {
        "run_dir": "runs/bench",
        "student": {
            "model": "none",
            "max_tokens_per_micro_batch": 2 * (PROMPT_LENGTH + scenario.max_response_length),
        },
        "teachers": {
            domain: {"model": "none", "domains": [domain], "replicas": TEACHER_REPLICAS, **group} for domain in SHARES
        },
        "data": {"train": ["none.jsonl"]},
        "rewards": {"default": {"type": "exact_match"}},
        "rollout": {
            **group,
            "replicas": ROLLOUT_REPLICAS,
            "samples_per_prompt": scenario.samples_per_prompt,
            "max_response_length": scenario.max_response_length,
            "on_new_weights": "continue" if max_staleness else "finish",
        },
        "loss": {"top_k": scenario.top_k, **(_REWARDED if scenario.samples_per_prompt > 1 else {})},
        "schedule": {
            "steps": steps,
            "prompts_per_step": scenario.num_prompts,
            "max_staleness": max_staleness,
            "wait_timeout_s": WAIT_S,
        },
        "checkpoint": {"keep_best": False},
        "preflight": {"require_better_teacher": False},
    }
    with TemporaryFolder("mopd-bench-") as folder:
        path = Path(folder) / "recipe.yaml"
        path.write_text(yaml.safe_dump(tree))
        return load_recipe(path).recipe
