"""From records of steps to curves: what a metric is called in words, and how it is drawn."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mopd.base.metrics import VOLATILE_PREFIXES
from mopd.report.charts import Point
from mopd.report.groups import is_group_metric
from mopd.report.pipeline import AGE_SHARE

Curves = dict[str, dict[str, list[Point]]]
"""Metric -> domain -> points; a metric without domains has the one domain ``""``."""
OTHER = "other"
"""Name of the phase that holds the rest of a step."""
PHASE_NAMES = {
    "rollout": "Rollout",
    "answers": "Teachers' answers",
    "teachers": "Scoring by the teachers",
    "rewards": "Judging by the rewards",
    "window_closed": "Rollout held back",
    "wait_batch": "Waiting for a batch",
    "pack": "Packing",
    "forward_backward": "Forward and backward",
    "optim_step": "Optimizer step",
    "stage_weights": "Handing the weights over",
    "weight_sync": "Weights to the rollout",
    "step": "Whole step",
    OTHER: "Other",
}
SHARES = ("prompts_share", "tokens_share", "loss_weight_share", "loss_share", "gradient_share")
"""Metrics of a domain's share of a step, from what it gets to what comes of it."""
GRADIENT_COSINE = "gradient_cosine"
"""Metric of pairs of domains."""
WITHOUT_DOMAINS = (*VOLATILE_PREFIXES, "moe/", "packing/", "response_versions/")
"""Prefixes of metrics whose second part is not a domain."""
TRAINER_PHASES = (
    "wait_batch", "pack", "forward_backward", "optim_step", "stage_weights", "weight_sync", "keep_samples",
)  # fmt: skip
"""Phases of the trainer, one after another; all other phases run beside it, or while it waits."""


@dataclass(frozen=True, slots=True)
class Panel:
    """Title, text and form of one metric's chart."""

    title: str
    text: str = ""
    is_noisy: bool = True
    """Whether each value is an estimate from few samples; False for what is counted or set."""
    from_zero: bool = True
    """Whether the y axis begins at 0; False where small differences near 1 matter."""


PANELS = {
    "kl_k1": Panel("KL(student ‖ teacher)", "Nats per token, on the student's own tokens. 0: agrees with its teacher."),
    "loss": Panel("Loss", "What the student minimised, per response token."),
    "topk_overlap": Panel("Top-k overlap", "Share of the teacher's top-k tokens that are in the student's top-k.",
        from_zero=False),
    "kl_k3": Panel("KL, never-negative estimate", "The same KL by another estimator, k3; KL(student ‖ teacher) is k1."),
    "kl_net": Panel("KL above its floor",
        "KL(student ‖ teacher) less what the teacher's engine measured against the teacher itself."),
    "kl_floor": Panel("Floor of the KL",
        "What a teacher's engine measured against its own folder, before the first step.", is_noisy=False),
    "entropy": Panel("Student entropy", "Nats per token."),
    "teacher_mass": Panel("Teacher mass in the top-k", "Probability that the teacher's top-k captures.",
        from_zero=False),
    "student_mass": Panel("Student mass in the teacher's top-k", "Probability that the student gives to those tokens.",
        from_zero=False),
    "response_length": Panel("Response length", "Tokens, mean over the step's responses."),
    "turns": Panel("Turns of a response", "Of the student, mean."),
    "given_share": Panel("Given tokens", "Share of the responses' tokens that template and environment wrote."),
    "prefix_length": Panel("Given prefix", "Tokens, mean over responses.", is_noisy=False),
    "turn_length": Panel("Turn length", "Tokens that the student drew in a turn, mean."),
    "turn_reward": Panel("Reward of a turn", "What the environment gave, mean over turns."),
    "tool_errors": Panel("Tool errors", "Share of turns that the tool answered with an error."),
    "environment_errors": Panel("Failures of the environment", "Responses that they ended.", is_noisy=False),
    "truncated_share": Panel("Truncated responses", "Share cut at the length limit."),
    "repeated_share": Panel("Repetition", "Share of a response's 4-grams that stand earlier in it."),
    "clamped_share": Panel("Clamped tokens", "Share whose loss met a clamp: their gradient is zero."),
    "clamped_entries": Panel("Clamped entries", "Share of the ids whose own term met a clamp."),
    "teacher_disagreement": Panel("Disagreement of teachers", "Nats per token, of several teachers of a domain."),
    "teacher_chosen_share": Panel("Surest teacher", "Share of tokens at which each teacher was the surest of several."),
    "tail_floored_share": Panel("Floored tails",
        "Share of tokens whose mass outside the top-k met its numerical floor."),
    "ratio": Panel("Policy ratio", "PPO's ratio of new to old probability.", from_zero=False),
    "clip_fraction": Panel("Clipped tokens", "Share that PPO's clip held back."),
    "baseline": Panel("Baseline", "What the policy gradient subtracts from the advantage."),
    "correction_weight": Panel("Mismatch weight", "Of trainer against rollout engine.", from_zero=False),
    "grad_norm": Panel("Gradient norm", "Before clipping."),
    "prompts_share": Panel("Prompts by domain", "Share of the step's samples; dotted: the stream's.", is_noisy=False),
    "prompts_share_target": Panel("Prompts by domain, target",
        "Share that the stream gives; adaptive ones change with each validation.", is_noisy=False),
    "tokens_share": Panel("Loss tokens by domain", "Share of the step's.", is_noisy=False),
    "loss_weight_share": Panel("Weight in the loss by domain",
        "Share of the token weights; dotted: loss.domain_budget.", is_noisy=False),
    "loss_share": Panel("Loss by domain", "Share of what was minimised, without its sign."),
    "gradient_share": Panel("Gradient by domain",
        "Share of the norm of the gradient of the hidden states at the LM head."),
    "absent_domains": Panel("Domains without a loss token", "Their budget went to the others.", is_noisy=False),
    GRADIENT_COSINE: Panel("Cosine between domains’ gradients", "Below 0: what helps one harms the other.",
        is_noisy=False, from_zero=False),
    "lr": Panel("Learning rate", is_noisy=False),
    "rollout_kl": Panel("KL(rollout ‖ student)", "Nats per token: how far off-policy the samples were."),
    "masked_sequences_share": Panel("Responses left out",
        "Share that the sequence mask of the correction kept out of the loss."),
    "staleness": Panel("Staleness", "Optimizer steps that the weights behind the oldest sample lagged.",
        is_noisy=False),
    "drawn_samples": Panel("Drawn samples", "Responses that ended since the last step.", is_noisy=False),
    "drawn_tokens": Panel("Tokens of drawn samples", "Of their responses.", is_noisy=False),
    "refused_tokens": Panel("Tokens of refused samples", "Of their responses.", is_noisy=False),
    "response_versions/mean": Panel("Versions in a response", "Of the weights that drew its tokens, mean.",
        from_zero=False),
    "response_versions/max": Panel("Versions in a response, most", "Of the weights that drew its tokens.",
        is_noisy=False),
    "refused_samples": Panel("Refused samples", "Too old when their batch came; their prompts were drawn again.",
        is_noisy=False),
    "tokens": Panel("Tokens per step", "Of prompts and responses.", is_noisy=False),
    "num_tokens": Panel("Loss tokens per step", "Response tokens with a loss.", is_noisy=False),
    "num_samples": Panel("Samples per step", is_noisy=False),
    "dropped_samples": Panel("Dropped samples", "Discarded because one of the prompt's was cut.", is_noisy=False),
    "replaced_samples": Panel("Replaced samples", "Discarded because a teacher could not score them.", is_noisy=False),
    "gate_distil": Panel("Distilled prompts", "By their domain's gate.", is_noisy=False),
    "gate_reinforce": Panel("Reinforced prompts", "By their domain's gate.", is_noisy=False),
    "gate_skip": Panel("Skipped prompts", "By their domain's gate; others took their place.", is_noisy=False),
    "rate/vision_tower_share": Panel("Vision tower",
        "Its part of the first pipeline stage's forward and backward passes."),
    "rate/pipeline_bubble_share": Panel("Pipeline bubble",
        "Part of the passes of a step in which ranks do not compute."),
    "packing/padding_share": Panel("Padding", "Share of the tokens that the student computed.", is_noisy=False),
    "packing/cost_max_over_mean": Panel("Load of the busiest data-parallel rank",
        "Over the mean of the ranks. 1: even.", is_noisy=False, from_zero=False),
    "moe/load_max_over_mean": Panel("Load of the busiest expert",
        "Over the mean of its layer's experts, mean over layers. 1: even."),
    "moe/load_max_over_mean_worst_layer": Panel("Load of the busiest expert, least even layer",
        "Over the mean of its layer's experts. 1: even."),
    "moe/idle_experts_share": Panel("Idle experts", "Share that got no token in the step."),
    "moe/load_balancing_loss": Panel("Load balancing loss", "Without its coefficient."),
    "moe/seq_load_balancing_loss": Panel("Load balancing loss, by sequence", "Without its coefficient."),
    "moe/global_load_balancing_loss": Panel("Load balancing loss, global", "Without its coefficient."),
    "moe/route_agreement": Panel("Agreement of routes",
        "Share of the rollout's experts that the student would choose."),
    "route_agreement": Panel("Agreement of routes", "Share of the rollout's experts that the student would choose."),
    "route_agreement_by_layer": Panel("Agreement of routes by layer",
        "Share of the rollout's experts that the student would choose."),
    "moe/z_loss": Panel("Router z-loss", "Mean squared log-sum-exp of the router's logits."),
    "rate/train_tokens_per_s": Panel("Trained tokens per second", "Over the whole step, rollout included."),
    "memory/student_peak_gib": Panel("Peak memory of the student", "GiB.", is_noisy=False),
}  # fmt: skip
"""Metric -> its chart; others are named after themselves."""


def panel_of(metric: str) -> Panel:
    """Return the chart of a metric, whatever its name."""
    if metric in PANELS:
        return PANELS[metric]
    if turn := re.fullmatch(r"turn_(\d+)_kl", metric):
        return Panel(
            f"KL(student ‖ teacher) in turn {turn[1]}", "Nats per drawn token, log-prob of rollout less teacher."
        )
    room, _, name = metric.partition("/")
    if room == "timing":
        phase = name.removesuffix("_s")
        return Panel(f"Time: {phase_name(phase).lower()}", "Seconds per step.")
    return Panel(in_words(metric), is_noisy=False)


def in_words(name: str) -> str:
    """Write ``some_new/metric`` as ``Some new metric``."""
    text = name.replace("_", " ").replace("/", " ").strip()
    return f"{text[:1].upper()}{text[1:]}" or name


def curves_by_metric(steps: Sequence[Mapping[str, Any]]) -> Curves:
    """Return all curves of a run but those of groups of engines and of single ages of samples."""
    curves: Curves = {}
    has_domains = {name.split("/", 1)[0] for record in steps for name in record if _domain_of(name)}
    for record in steps:
        for name, value in record.items():
            if is_group_metric(name) or name.startswith(f"{AGE_SHARE}/"):
                continue
            domain = _domain_of(name)
            metric = name.split("/", 1)[0] if domain else name
            if name == "step" or value is None or (not domain and metric in has_domains):
                continue
            curves.setdefault(metric, {}).setdefault(domain, []).append((record["step"], value))
    return curves


def mean_shares(curves: Curves, domains: Sequence[str]) -> list[dict[str, Any]]:
    """Return a row for each domain: the mean over the steps of each of its ``SHARES``, and of what it was to be."""

    def mean(metric: str, domain: str) -> float | None:
        values = [value for _, value in curves.get(metric, {}).get(domain, ())]
        return sum(values) / len(values) if values else None

    return [
        {"name": domain, "cells": [(mean(name, domain), mean(f"{name}_target", domain)) for name in SHARES]}
        for domain in domains
    ]


def is_zero(curves: Mapping[str, Sequence[Point]]) -> bool:
    """Return whether every value is 0, so that a chart would show nothing."""
    return all(value == 0 for points in curves.values() for _, value in points)


def _domain_of(name: str) -> str:
    return "" if name.startswith(WITHOUT_DOMAINS) else name.partition("/")[2]


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """Time that one part of the steps took."""

    mean_s: float
    """Seconds a step."""
    share: float
    """Share of the whole step; all phases of a run add up to 1."""


def phases(steps: Sequence[Mapping[str, Any]]) -> dict[str, Phase]:
    """Return the trainer's consecutive phases by name, the longest first and ``other`` last; they add up to the steps.
    What its wait for a batch consisted of is in no phase (``pipeline.py``)."""
    whole = sum(record.get("timing/step_s") or 0.0 for record in steps)
    if whole <= 0:
        return {}
    totals = {phase: [record.get(f"timing/{phase}_s") for record in steps] for phase in TRAINER_PHASES}
    found = {phase: sum(value or 0.0 for value in values) for phase, values in totals.items() if any(values)}
    chosen = dict(sorted(found.items(), key=lambda item: -item[1]))
    chosen[OTHER] = max(0.0, whole - sum(chosen.values()))
    scale = sum(chosen.values())
    return {name: Phase(mean_s=total / len(steps), share=total / scale) for name, total in chosen.items()}


def phase_name(name: str) -> str:
    """Return a phase's name in words."""
    return PHASE_NAMES.get(name, in_words(name))


def percents(shares: Sequence[float]) -> list[str]:
    """Format shares that add up to 1 as percents that add up to 100.0, each rounded up or down to a tenth."""
    tenths = [int(1000 * share) for share in shares]
    by_rest = sorted(range(len(shares)), key=lambda i: tenths[i] - 1000 * shares[i])
    for i in by_rest[: 1000 - sum(tenths)]:
        tenths[i] += 1
    return [f"{number / 10:.1f} %" for number in tenths]
