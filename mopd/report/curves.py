"""From records of steps to curves: what a metric is called in words, and how it is drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mopd.metrics import VOLATILE_PREFIXES
from mopd.report.charts import Point
from mopd.report.groups import is_group_metric

Curves = dict[str, dict[str, list[Point]]]
"""Metric -> domain -> points; a metric without domains has the one domain ``""``."""
OTHER = "other"
"""What is left of a step beside its phases."""
PHASE_NAMES = {
    "rollout": "Rollout",
    "teachers": "Scoring by the teachers",
    "wait_batch": "Waiting for a batch",
    "forward_backward": "Forward and backward",
    "optim_step": "Optimizer step",
    "weight_sync": "Weights to the rollout",
    "step": "Whole step",
    OTHER: "Other",
}
WITHOUT_DOMAINS = (*VOLATILE_PREFIXES, "moe/")
"""Beginnings of names whose other part is no domain."""
PRODUCER = ("rollout", "teachers")
"""Phases that make a batch; ``wait_batch`` is the trainer's wait for it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Panel:
    """One metric's chart."""

    title: str
    text: str = ""
    is_noisy: bool = True
    """An estimate from each step's few samples. What is counted or set is none."""
    from_zero: bool = True
    """False: what matters are small differences near 1."""


PANELS = {
    "kl_k1": Panel(
        title="KL(student ‖ teacher)",
        text="Nats per token, on the student's own tokens. 0: agrees with its teacher.",
    ),
    "loss": Panel(title="Loss", text="What the student minimised, per response token."),
    "topk_overlap": Panel(
        title="Top-k overlap",
        text="Share of the teacher's top-k tokens that are in the student's top-k.",
        from_zero=False,
    ),
    "kl_k3": Panel(
        title="KL, never-negative estimate", text="The same KL by another estimator, k3; KL(student ‖ teacher) is k1."
    ),
    "kl_net": Panel(
        title="KL above its floor",
        text="KL(student ‖ teacher) less what the teacher's engine measured against the teacher itself.",
    ),
    "kl_floor": Panel(
        title="Floor of the KL",
        text="What a teacher's engine measured against its own folder, before the first step.",
        is_noisy=False,
    ),
    "entropy": Panel(title="Student entropy", text="Nats per token."),
    "teacher_mass": Panel(
        title="Teacher mass in the top-k", text="Probability that the teacher's top-k captures.", from_zero=False
    ),
    "student_mass": Panel(
        title="Student mass in the teacher's top-k",
        text="Probability that the student gives to those tokens.",
        from_zero=False,
    ),
    "response_length": Panel(title="Response length", text="Tokens, mean over the step's responses."),
    "truncated_share": Panel(title="Truncated responses", text="Share cut at the length limit."),
    "clamped_share": Panel(title="Clamped tokens", text="Share whose loss met a clamp: their gradient is zero."),
    "tail_floored_share": Panel(
        title="Floored tails", text="Share of tokens whose mass outside the top-k met its numerical floor."
    ),
    "ratio": Panel(title="Policy ratio", text="PPO's ratio of new to old probability.", from_zero=False),
    "clip_fraction": Panel(title="Clipped tokens", text="Share that PPO's clip held back."),
    "correction_weight": Panel(title="Mismatch weight", text="Of trainer against rollout engine.", from_zero=False),
    "grad_norm": Panel(title="Gradient norm", text="Before clipping."),
    "lr": Panel(title="Learning rate", is_noisy=False),
    "staleness": Panel(title="Staleness", text="Weight versions that the oldest sample was behind.", is_noisy=False),
    "tokens": Panel(title="Tokens per step", text="Of prompts and responses.", is_noisy=False),
    "num_tokens": Panel(title="Loss tokens per step", text="Response tokens with a loss.", is_noisy=False),
    "num_samples": Panel(title="Samples per step", is_noisy=False),
    "replaced_samples": Panel(
        title="Replaced samples", text="Discarded because a teacher could not score them.", is_noisy=False
    ),
    "moe/load_max_over_mean": Panel(
        title="Load of the busiest expert", text="Over the mean of its layer's experts, mean over layers. 1: even."
    ),
    "moe/load_max_over_mean_worst_layer": Panel(
        title="Load of the busiest expert, least even layer", text="Over the mean of its layer's experts. 1: even."
    ),
    "moe/idle_experts_share": Panel(title="Idle experts", text="Share that got no token in the step."),
    "moe/load_balancing_loss": Panel(title="Load balancing loss", text="Without its coefficient."),
    "moe/seq_load_balancing_loss": Panel(title="Load balancing loss, by sequence", text="Without its coefficient."),
    "moe/global_load_balancing_loss": Panel(title="Load balancing loss, global", text="Without its coefficient."),
    "moe/z_loss": Panel(title="Router z-loss", text="Mean squared log-sum-exp of the router's logits."),
    "rate/train_tokens_per_s": Panel(title="Trained tokens per second", text="Over the whole step, rollout included."),
    "memory/student_peak_gib": Panel(title="Peak memory of the student", text="GiB.", is_noisy=False),
}
"""Metric -> its chart; others are named after themselves."""


def panel_of(metric: str) -> Panel:
    """How to show a metric, whatever it is called."""
    if metric in PANELS:
        return PANELS[metric]
    room, _, name = metric.partition("/")
    if room == "timing":
        phase = name.removesuffix("_s")
        return Panel(title=f"Time: {phase_name(phase).lower()}", text="Seconds per step.")
    return replace(Panel(title=in_words(metric)), is_noisy=False)


def in_words(name: str) -> str:
    """``some_new/metric`` as ``Some new metric``."""
    text = name.replace("_", " ").replace("/", " ").strip()
    return f"{text[:1].upper()}{text[1:]}" or name


def curves_by_metric(steps: Sequence[Mapping[str, Any]]) -> Curves:
    """All curves of a run, those of groups of engines left out."""
    curves: Curves = {}
    has_domains = {name.split("/", 1)[0] for record in steps for name in record if _domain_of(name)}
    for record in steps:
        for name, value in record.items():
            if is_group_metric(name):
                continue
            domain = _domain_of(name)
            metric = name.split("/", 1)[0] if domain else name
            if name == "step" or value is None or (not domain and metric in has_domains):
                continue
            curves.setdefault(metric, {}).setdefault(domain, []).append((record["step"], value))
    return curves


def is_zero(curves: Mapping[str, Sequence[Point]]) -> bool:
    """Nothing to see."""
    return all(value == 0 for points in curves.values() for _, value in points)


def _domain_of(name: str) -> str:
    return "" if name.startswith(WITHOUT_DOMAINS) else name.partition("/")[2]


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """What a part of the steps took."""

    mean_s: float
    """Seconds a step."""
    share: float
    """Of the whole step; all phases of a run add up to 1."""


def phases(steps: Sequence[Mapping[str, Any]]) -> dict[str, Phase]:
    """Phases that follow one another, by name, the longest first and ``other`` last: they add up to the steps.

    The trainer's wait for a batch is told by what it waited for, rollout and teachers, as long as these did not run
    beside the training of an earlier batch.
    """
    totals: dict[str, float] = {}
    for record in steps:
        for name, value in record.items():
            if name.startswith("timing/") and value is not None:
                phase = name.removeprefix("timing/").removesuffix("_s")
                totals[phase] = totals.get(phase, 0.0) + value
    whole = totals.pop("step", 0.0)
    if whole <= 0:
        return {}
    makes_batches = {name: total for name, total in totals.items() if name != "wait_batch"}
    waits = {name: total for name, total in totals.items() if name not in PRODUCER}
    chosen = makes_batches if sum(makes_batches.values()) <= whole else waits
    chosen = dict(sorted(chosen.items(), key=lambda item: -item[1]))
    chosen[OTHER] = max(0.0, whole - sum(chosen.values()))
    scale = sum(chosen.values())
    return {name: Phase(mean_s=total / len(steps), share=total / scale) for name, total in chosen.items()}


def phase_name(name: str) -> str:
    """In words."""
    return PHASE_NAMES.get(name, in_words(name))


def percents(shares: Sequence[float]) -> list[str]:
    """Shares that add up to 1 as percents that add up to 100.0, each rounded up or down to a tenth."""
    tenths = [int(1000 * share) for share in shares]
    by_rest = sorted(range(len(shares)), key=lambda i: tenths[i] - 1000 * shares[i])
    for i in by_rest[: 1000 - sum(tenths)]:
        tenths[i] += 1
    return [f"{number / 10:.1f} %" for number in tenths]
