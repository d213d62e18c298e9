"""Who competes: a contender is what it overrides in the toys' recipes. A key that the loader refuses ends the tool."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

GENERAL = ("quickstart", "stochastic", "long", "conflict", "foreign")
TOYS = (*GENERAL, "decision", "shared", "half", "self")
REFERENCE = "forward_kl"
"""The contender that tables begin with: the recipes as they are, the quickstart's with equal shares."""


@dataclass(frozen=True, slots=True)
class Contender:
    """One line of a table."""

    name: str
    question: str
    """Heading of its table."""
    overrides: tuple[str, ...] = ()
    toys: tuple[str, ...] = GENERAL
    untrained: Literal["", "merge", "best teacher"] = ""
    """A model that no run makes: the mean of the teachers' weights, or the teacher that is best over all domains."""


LOSSES, TAILS, BASELINES = "Which loss", "Do tails matter", "Against the cheap alternatives"
STALE, TOKENS, CONFLICT = "What old samples and kept scores cost", "What fewer tokens cost", "Who starves"
WARM, REWARD = "What a warm-up gives", "Distillation and reward in one loss"
MERGE, GATE, VIEW = (
    "A merge where teachers disagree",
    "A teacher that is right on half of the prompts",
    "The student itself as teacher",
)
PAYLOADS, DECISION = "Which ids, by loss", "A token that decides"
EQUAL_BYTES = "Which ids, at 196 bytes a token"
"""What a hidden state of the toy's width, 96, takes: 24 ids and log-probs, or 12 of each side."""
OF_PAYLOADS = (PAYLOADS, EQUAL_BYTES, DECISION)
"""Tables of ``docs/losses.md``; the others are those of ``docs/learning.md``."""
KEPT = "runs/learning/kept/{toy}-{seed}"
"""Run folder of the earlier run, that of the recipe as it is: its samples and scores."""
REVERSE = ("loss.type=topk_reverse_kl", "loss.tail=bucket")
FULL = "teacher_defaults.payload=hidden"
REWARDED = ("rollout.samples_per_prompt=8", "loss.task_reward_weight=3", "loss.task_advantage=grpo")
BESIDE = ("rollout.placement.type=local", "teacher_defaults.placement.type=local")
"""Engines beside the trainer, which staleness above 0 needs."""

CONTENDERS = (
    Contender(REFERENCE, LOSSES),
    Contender("forward_kl, capped at 4 nats", LOSSES, ("loss.loss_max_clamp=4",)),
    Contender("forward_kl, softly capped at 4", LOSSES, ("loss.loss_soft_cap=4",)),
    Contender("reverse_kl", LOSSES, REVERSE),
    Contender("reverse_kl, generalized", LOSSES, ("loss.type=topk_reverse_kl", "loss.tail=generalized")),
    Contender("jsd", LOSSES, ("loss.type=topk_jsd",)),
    *(Contender(kind, LOSSES, (f"loss={{type: {kind}}}",)) for kind in ("k2", "k3", "k3_reverse")),
    Contender("policy_gradient", LOSSES, ("loss={type: policy_gradient, baseline: kl}",)),
    Contender("policy_gradient, domain", LOSSES, ("loss={type: policy_gradient, baseline: domain}",)),
    Contender("policy_gradient, no baseline", LOSSES, ("loss={type: policy_gradient, baseline: none}",)),
    *(
        Contender(f"{kind}, {tail}", TAILS, (f"loss.type=topk_{kind}", f"loss.tail={tail}"), ("stochastic",))
        for kind, tails in (
            ("forward_kl", ("none", "renormalize", "generalized")),
            ("reverse_kl", ("none", "renormalize")),
        )
        for tail in tails
    ),
    Contender("sft_on_teacher", BASELINES, ("objective=sft_on_teacher",)),
    Contender("off_policy_scores", BASELINES, ("objective=off_policy_scores",)),
    Contender("best single teacher", BASELINES, untrained="best teacher"),
    Contender("merge", BASELINES, untrained="merge"),
    *(
        Contender(f"staleness {n}", STALE, (f"schedule.max_staleness={n}", *BESIDE), ("quickstart", "long"))
        for n in (1, 2, 4)
    ),
    Contender(
        "half from an earlier run",
        STALE,
        (
            "schedule.on_policy_fraction=0.5",
            f"data.scored=[{KEPT}/samples]",
            f"data.scores_cache={KEPT}/scores",
        ),
        ("quickstart", "long"),
    ),
    *(
        Contender(
            f"warm-up of {steps} steps",
            WARM,
            (f"schedule.warm_up={{objective: sft_on_teacher, steps: {steps}}}",),
            ("long", "foreign"),
        )
        for steps in (10, 30)
    ),
    Contender("horizon of a quarter", TOKENS, ("rollout.horizon={start: 15}",), ("long",)),
    *(
        Contender(f"half, by {kind}", TOKENS, (f"loss.tokens={{largest: {kind}, share: 0.5}}",), ("quickstart", "long"))
        for kind in ("student_entropy", "divergence")
    ),
    Contender("domain_mean", CONFLICT, ("loss.aggregation=domain_mean",), ("conflict",)),
    Contender(
        "half for the short", CONFLICT, ("loss.domain_budget={short: 0.5, middle: 0.25, wide: 0.25}",), ("conflict",)
    ),
    Contender(
        "half as many of the easy",
        CONFLICT,
        ("data.domain_weights={reversal: 2, sorting: 2, next_letter: 1}",),
        ("quickstart",),
    ),
    Contender("adaptive mixing", CONFLICT, ("data.domain_weights=adaptive",), ("conflict",)),
    Contender(
        "with task reward",
        REWARD,
        ("loss.task_reward_weight=0.1", "rollout.samples_per_prompt=4", "schedule.prompts_per_step=24"),
        ("quickstart",),
    ),
    *(
        Contender(f"{name}, {payload}", PAYLOADS, (*keys, f"teacher_defaults.payload={payload}"), ("stochastic",))
        for name, keys, payloads in (
            ("forward_kl", (), ("student_topk", "union")),
            ("reverse_kl", REVERSE, ("student_topk", "union")),
            ("reverse_kl, sampled tail", (*REVERSE[:1], "loss.tail=sampled"), ("topk", "student_topk", "union")),
            ("jsd", ("loss.type=topk_jsd",), ("student_topk", "union")),
        )
        for payload in payloads
    ),
    *(
        Contender(f"{name}, hidden", PAYLOADS, (f"loss={{type: full_{name}}}", FULL), ("stochastic",))
        for name in (REFERENCE, "reverse_kl", "jsd")
    ),
    Contender(
        "reverse_kl, student_topk, staleness 4",
        PAYLOADS,
        (*REVERSE, "teacher_defaults.payload=student_topk", "schedule.max_staleness=4", *BESIDE),
        ("stochastic",),
    ),
    Contender(
        "reverse_kl, staleness 4", PAYLOADS, (*REVERSE, "schedule.max_staleness=4", *BESIDE), ("stochastic",)
    ),
    *(
        Contender(
            f"{name}, {payload} of {k}",
            EQUAL_BYTES,
            (*keys, f"teacher_defaults.payload={payload}", f"loss.top_k={k}"),
            ("stochastic",),
        )
        for name, keys in ((REFERENCE, ()), ("reverse_kl", REVERSE), ("jsd", ("loss.type=topk_jsd",)))
        for payload, k in (("topk", 24), ("student_topk", 24), ("union", 12))
    ),
    *(
        Contender(f"decision: {name}, {ids}", DECISION, (*keys, own), ("decision",))
        for name, keys in (("forward_kl", ()), ("reverse_kl", REVERSE))
        for ids, own in (
            ("topk", "teacher_defaults.payload=topk"),
            ("student_topk", "teacher_defaults.payload=student_topk"),
            ("union", "teacher_defaults.payload=union"),
            ("always_ids", "loss.always_ids=[<call>]"),
        )
    ),
    *(
        Contender(f"decision: {name}, hidden", DECISION, (f"loss={{type: full_{name}}}", FULL), ("decision",))
        for name in (REFERENCE, "reverse_kl")
    ),
    Contender("shared: forward_kl", MERGE, (), ("shared",)),
    Contender("shared: sft_on_teacher", MERGE, ("objective=sft_on_teacher",), ("shared",)),
    Contender("shared: best single teacher", MERGE, (), ("shared",), untrained="best teacher"),
    Contender("shared: merge", MERGE, (), ("shared",), untrained="merge"),
    *(
        Contender(f"half: {name}", GATE, (*REWARDED, *own), ("half",))
        for name, own in (
            ("distil", ("loss.task_reward_weight=0",)),
            ("reward", ("domains={mixed: {gate: {by: student_rewards, threshold: 0}}}",)),
            ("distil and reward, no gate", ()),
            ("gate", ("domains={mixed: {gate: {by: teacher_answers}}}",)),
        )
    ),
    Contender("self: frozen", VIEW, (), ("self",)),
    Contender("self: refreshed every 20 steps", VIEW, ("teachers.sorting.refresh={every_steps: 20}",), ("self",)),
    Contender("self: ema", VIEW, ("teachers.sorting.refresh={ema: 0.99}",), ("self",)),
    Contender("self: ema of 0.999", VIEW, ("teachers.sorting.refresh={ema: 0.999}",), ("self",)),
    Contender(
        "self: frozen, no view",
        VIEW,
        ("teachers.sorting.view=null", "preflight.require_better_teacher=false"),
        ("self",),
    ),
)  # fmt: skip
FIRST = {
    PAYLOADS: (REFERENCE, "reverse_kl", "jsd"),
    EQUAL_BYTES: tuple(f"{name}, hidden" for name in (REFERENCE, "reverse_kl", "jsd")),
    DECISION: (),
    MERGE: (),
    GATE: (),
    VIEW: (),
}
"""Table -> contenders of other tables that it begins with, where they are not ``REFERENCE`` alone."""
