"""Loss sections of a recipe, a union by ``type``. Formulas: ``docs/losses.md``."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from mopd.config.values import (
    MAX_NUMBER,
    Checked,
    Fraction,
    NotNegative,
    Positive,
    Share,
    at_least,
    check_reference,
    require_fraction,
)

MAX_TOP_K = 2**20
"""No vocabulary is larger."""
Aggregation = Literal["token_mean", "sequence_mean", "domain_mean", "token_sum"]
Objective = Literal["on_policy", "sft_on_teacher", "off_policy_scores"]
"""What a step trains on."""
SUM_TOLERANCE = 1e-6
"""Largest difference between 1 and the sum of shares: what writing them with six digits costs."""
TaskAdvantage = Literal["mean", "leave_one_out", "grpo"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LargestTokensConfig(Checked):
    """Tokens on which the student is least sure, or farthest from its teacher."""

    largest: Literal["student_entropy", "divergence"]
    """What ranks a response's tokens (docs/losses.md#which-tokens-count-losstokens)."""
    share: Share
    """Share of a response's loss tokens that count, rounded up."""


Tokens = Literal["all"] | LargestTokensConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class TopKLossConfig(Checked):
    """Divergence on the top-k tokens of every response position (docs/losses.md)."""

    type: Literal["topk_forward_kl", "topk_reverse_kl", "topk_jsd"] = "topk_forward_kl"
    """KL(teacher||student), KL(student||teacher), or Jensen-Shannon."""
    top_k: Annotated[int, at_least(1, MAX_TOP_K)] = 64
    """Ids per position, of those that ``teachers.NAME.payload`` names."""
    always_ids: tuple[int | str, ...] = ()
    """Tokens, as texts or ids, that are among every position's ids."""
    tail: Literal["bucket", "generalized", "renormalize", "none", "sampled"] | None = None
    """What becomes of the mass outside the ids (docs/losses.md#top-k-losses-parallel_topk_distill); absent: generalized
    for reverse KL, else bucket."""
    beta: Fraction = 0.5
    """Weight of the teacher in the mixture of ``topk_jsd``."""
    temperature: Positive = 1.0
    """Divides the logits of both sides."""
    aggregation: Aggregation = "token_mean"
    """How token losses become one number (docs/losses.md#from-token-losses-to-one-number-token_weights)."""
    domain_budget: Mapping[str, float] = field(default_factory=dict)
    """Share of the loss's weight of every domain, sum 1; empty: by tokens, or responses
    (docs/losses.md#domain-budgets)."""
    logprob_min_clamp: float | None = None
    """Floor of both sides' log-probs, with gradient 0."""
    entry_max_clamp: Positive | None = None
    """Cap of each id's own term of the divergence, with gradient 0."""
    loss_max_clamp: Positive | None = None
    """Cap of a token's loss, with gradient 0."""
    loss_soft_cap: Positive | None = None
    """Cap that keeps a gradient: above c a loss x becomes c (1 + log(x / c)). The recommended stabiliser."""
    task_reward_weight: NotNegative = 0.0
    """Weight of the task advantage's policy gradient beside the divergence."""
    task_advantage: TaskAdvantage = "mean"
    """As ``task_advantage`` of ``type: policy_gradient``."""
    correction: MismatchCorrectionConfig | None = None
    """As ``correction`` of ``type: policy_gradient``, for the task advantage and ``tail: sampled`` alone."""
    tokens: Tokens = "all"
    """Tokens that count: all, or a share of each response."""

    def check(self) -> None:
        if self.tail == "sampled" and self.type != "topk_reverse_kl":
            raise ValueError(
                f"tail is 'sampled', but the student's own tokens estimate no {self.type}: set tail: bucket, or type: "
                "topk_reverse_kl"
            )
        if self.correction is not None and not self.is_sampled:
            raise ValueError(
                f"correction is set, but {self.type} without task_reward_weight and tail: sampled takes samples of any "
                "policy: remove it, or set one of them"
            )
        if self.logprob_min_clamp is not None and not -MAX_NUMBER <= self.logprob_min_clamp < 0:
            raise ValueError(f"logprob_min_clamp is {self.logprob_min_clamp}: set a negative number, for example -10")
        if self.loss_max_clamp is not None and self.loss_soft_cap is not None:
            raise ValueError("loss_max_clamp and loss_soft_cap are both set: keep one")

    @property
    def is_sampled(self) -> bool:
        """Some term of the loss rests on the sampled token, which must then be the student's own."""
        return self.tail == "sampled" or self.task_reward_weight > 0

    @property
    def holds_entries(self) -> bool:
        """Some clamp holds single ids of a token."""
        return self.logprob_min_clamp is not None or self.entry_max_clamp is not None

    @property
    def resolved_tail(self) -> str:
        """The tail in force."""
        if self.tail is not None:
            return self.tail
        return "generalized" if self.type == "topk_reverse_kl" else "bucket"


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceMaskConfig(Checked):
    """Leaves out whole responses by their mean ratio."""

    low: NotNegative = 0.9
    """Least mean ratio."""
    high: Positive = 1.1
    """Largest mean ratio."""

    def check(self) -> None:
        _check_bounds(self.low, self.high)


@dataclass(frozen=True, kw_only=True, slots=True)
class MismatchCorrectionConfig(Checked):
    """Weights for samples of another policy (docs/losses.md#samples-of-another-policy-correction)."""

    type: Literal["none", "tis", "icepop", "gate"]
    """Form of the weight."""
    low: NotNegative = 0.5
    """Lower bound of the ratio (icepop, gate)."""
    high: Positive = 2.0
    """Upper bound of the ratio."""
    sequence: SequenceMaskConfig | None = None
    """Also leave out whole responses."""

    def check(self) -> None:
        _check_bounds(self.low, self.high)
        if self.type == "none" and self.sequence is None:
            raise ValueError("type is 'none' and sequence is absent: nothing is corrected; set one of them")

    @property
    def of_tokens(self) -> tuple[str, float, float] | None:
        """Type and bounds as the loss functions of ``mopd.losses`` take them."""
        return None if self.type == "none" else (self.type, self.low, self.high)


def _check_bounds(low: float, high: float) -> None:
    if high <= low:
        raise ValueError(f"high is {high} and low is {low}: set high above low")


@dataclass(frozen=True, kw_only=True, slots=True)
class KLLossConfig(Checked):
    """Estimator of a KL from the sampled token alone."""

    type: Literal["k2", "k3", "k3_reverse"]
    """k2: gradient of reverse KL; k3: of forward KL; k3_reverse: k3's value with k2's gradient."""
    top_k: Annotated[int, at_least(1, MAX_TOP_K)] = 16
    """Ids per position, for metrics only."""
    temperature: Positive = 1.0
    """Divides the logits of both sides; must equal ``rollout.temperature``."""
    aggregation: Aggregation = "token_mean"
    """How token losses become one number (docs/losses.md#from-token-losses-to-one-number-token_weights)."""
    domain_budget: Mapping[str, float] = field(default_factory=dict)
    """Share of the loss's weight of every domain, sum 1; empty: by tokens, or responses
    (docs/losses.md#domain-budgets)."""
    tokens: Tokens = "all"
    """Tokens that count: all, or a share of each response."""
    loss_max_clamp: Positive | None = None
    """Cap of a token's loss, with gradient 0."""
    correction: MismatchCorrectionConfig | None = None
    """Weight of tokens that another policy drew. Required with ``schedule.max_staleness`` above 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyGradientConfig(Checked):
    """Policy gradient with the advantage -(student - teacher log-prob) - baseline (+ weight x task advantage)."""

    type: Literal["policy_gradient"]
    """Loss type."""
    baseline: Literal["kl", "domain", "none"] = "kl"
    """What is subtracted from the advantage (docs/losses.md#policy-gradient-parallel_policy_gradient)."""
    task_reward_weight: NotNegative = 0.0
    """Weight of the task advantage."""
    task_advantage: TaskAdvantage = "mean"
    """A response's reward less the mean over its prompt's responses, or over the others; grpo also divides by the
    standard deviation."""
    old_logprobs: Literal["student", "rollout"] = "student"
    """p_old of the PPO ratio: the student's own (ratio 1) or the rollout's."""
    clip_ratio_low: Positive = 0.2
    """PPO clip below 1."""
    clip_ratio_high: Positive = 0.2
    """PPO clip above 1."""
    dual_clip: float | None = None
    """Bound of the loss for negative advantages (dual-clip PPO)."""
    correction: MismatchCorrectionConfig | None = None
    """Weight of tokens that another policy drew. Required with ``schedule.max_staleness`` above 0."""
    top_k: Annotated[int, at_least(1, MAX_TOP_K)] = 16
    """Ids per position, for the baseline and metrics."""
    always_ids: tuple[int | str, ...] = ()
    """As in a top-k loss."""
    temperature: Positive = 1.0
    """Divides the logits of both sides; must equal ``rollout.temperature``."""
    aggregation: Aggregation = "token_mean"
    """How token losses become one number (docs/losses.md#from-token-losses-to-one-number-token_weights)."""
    domain_budget: Mapping[str, float] = field(default_factory=dict)
    """Share of the loss's weight of every domain, sum 1; empty: by tokens, or responses
    (docs/losses.md#domain-budgets)."""
    tokens: Tokens = "all"
    """Tokens that count: all, or a share of each response."""

    def check(self) -> None:
        if self.correction is not None and self.correction.type == "gate" and self.old_logprobs == "rollout":
            raise ValueError(
                "correction.type is 'gate' and old_logprobs is 'rollout': the gate already holds that ratio; "
                "set old_logprobs: student"
            )
        if self.dual_clip is not None and not 1 < self.dual_clip <= MAX_NUMBER:
            raise ValueError(f"dual_clip is {self.dual_clip}: set a number above 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class FullLossConfig(Checked):
    """Divergence over the whole vocabulary, from the teacher's hidden states (``payload: hidden``)."""

    type: Literal["full_forward_kl", "full_reverse_kl", "full_jsd"]
    """KL(teacher||student), KL(student||teacher), or Jensen-Shannon."""
    beta: Fraction = 0.5
    """Weight of the teacher in the mixture of ``full_jsd``."""
    skew: NotNegative = 0.0
    """Weight of the averaged side in the mixture (docs/losses.md#the-whole-vocabulary-payload-hidden)."""
    temperature: Positive = 1.0
    """Divides the logits of both sides."""
    aggregation: Aggregation = "token_mean"
    """How token losses become one number (docs/losses.md#from-token-losses-to-one-number-token_weights)."""
    domain_budget: Mapping[str, float] = field(default_factory=dict)
    """Share of the loss's weight of every domain, sum 1; empty: by tokens, or responses
    (docs/losses.md#domain-budgets)."""
    # What other losses have as keys.
    top_k: ClassVar[int] = 0
    tokens: ClassVar[Literal["all"]] = "all"
    correction: ClassVar[None] = None
    task_reward_weight: ClassVar[float] = 0.0

    def check(self) -> None:
        if self.skew >= 1:
            raise ValueError(f"skew is {self.skew:g}: set at least 0 and less than 1")
        if self.skew and self.type == "full_jsd":
            raise ValueError(f"skew is {self.skew:g} and type 'full_jsd', whose mixture is beta's: set skew: 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class CustomLossConfig(Checked):
    """A function of yours (docs/extending.md#a-loss)."""

    type: Literal["custom"]
    """Loss type."""
    module: str
    """The function: ``file.py:name``, ``package.module:name``, or an entry point ``mopd.losses``."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keywords of the function."""
    own_samples: bool = False
    """Whether the function reads log-probs of the sampled token."""
    top_k: Annotated[int, at_least(1, MAX_TOP_K)] = 64
    """Ids per position, as in a top-k loss."""
    always_ids: tuple[int | str, ...] = ()
    """As in a top-k loss."""
    temperature: Positive = 1.0
    """Divides the logits of both sides."""
    aggregation: Aggregation = "token_mean"
    """How token losses become one number (docs/losses.md#from-token-losses-to-one-number-token_weights)."""
    domain_budget: Mapping[str, float] = field(default_factory=dict)
    """Share of the loss's weight of every domain, sum 1; empty: by tokens, or responses
    (docs/losses.md#domain-budgets)."""
    # What other losses have as keys.
    tokens: ClassVar[Literal["all"]] = "all"
    correction: ClassVar[None] = None
    task_reward_weight: ClassVar[float] = 0.0

    def check(self) -> None:
        check_reference("module", self.module)


Loss = TopKLossConfig | KLLossConfig | PolicyGradientConfig | FullLossConfig | CustomLossConfig


def has_domain_baseline(loss: Loss) -> bool:
    """Return whether the loss reads the ``baseline`` field, which the step's batch as a whole determines."""
    return isinstance(loss, PolicyGradientConfig) and loss.baseline == "domain"


def check_domain_budget(loss: Loss) -> None:
    """Raise ``ValueError`` unless ``loss.domain_budget`` is empty, or holds shares that the aggregation can keep."""
    budget = loss.domain_budget
    for domain, share in budget.items():
        require_fraction(f"loss.domain_budget.{domain}", share, low_open=True)
    if budget and loss.aggregation in ("domain_mean", "token_sum"):
        raise ValueError(
            f"loss.domain_budget is set and loss.aggregation is {loss.aggregation!r}, which sets the domains' "
            "shares itself: set aggregation: token_mean or sequence_mean, or remove domain_budget"
        )
    total = math.fsum(budget.values())
    if budget and abs(total - 1) > SUM_TOLERANCE:
        shares = ", ".join(f"{domain} {share:g}" for domain, share in budget.items())
        raise ValueError(f"loss.domain_budget sums to {total:g} ({shares}): set shares that sum to 1")


def budget_of(loss: Loss, domains: Collection[str]) -> Mapping[str, float]:
    """Share of the loss's weight that each of the ``domains`` is to get; empty where that follows from the tokens."""
    if loss.aggregation == "domain_mean":
        return dict.fromkeys(domains, 1 / len(domains))
    return loss.domain_budget


def require_own_samples(
    loss: Loss,
    *,
    biased: str,
    temperature: float,
    max_staleness: int,
    stored_share: float = 0.0,
    quantized: str = "",
    has_chunks: bool = False,
) -> None:
    """Check that the rollout draws what a loss of the sampled token needs: samples of the student itself, or a
    correction for old ones. ``ValueError`` otherwise. Divergences over ids of a row take samples of any policy, unless
    the loss also has chunks of several tokens (``has_chunks``, for teachers with another tokenizer). ``biased`` is
    ``RolloutConfig.biased``, ``quantized`` how the rollout rounds the student's weights, if it does."""
    what = f"loss.type {loss.type!r}"
    if isinstance(loss, FullLossConfig) or (isinstance(loss, CustomLossConfig) and not loss.own_samples):
        return
    if isinstance(loss, TopKLossConfig):
        if not loss.is_sampled and not has_chunks:
            return
        what = f"loss.task_reward_weight {loss.task_reward_weight:g}"
        if loss.tail == "sampled":
            what = "loss.tail 'sampled'"
        elif has_chunks:
            what = "a teacher's tokenizer 'own'"
    if biased:
        raise ValueError(
            f"{what} estimates an expectation over the student's own distribution, but {biased}: remove that, or set "
            "a top-k loss without task_reward_weight"
        )
    if temperature != loss.temperature:
        raise ValueError(
            f"loss.temperature is {loss.temperature} but rollout.temperature is {temperature}: {what} needs them equal"
        )
    if isinstance(loss, CustomLossConfig):  # it has the sampler's log-probs, and corrects by itself
        return
    old = f"schedule.max_staleness is {max_staleness}", "schedule.max_staleness: 0"
    if stored_share:
        old = "data.scored names samples of other weights", "leave data.scored out"
    elif quantized:
        old = f"rollout.engine.extra.quantization is {quantized!r}", "leave it out"
    if (max_staleness > 0 or stored_share or quantized) and loss.correction is None:
        raise ValueError(
            f"{old[0]}, but {what} estimates an expectation over the current student's own samples and loss.correction "
            f"is absent: set it, for example loss.correction: {{type: icepop}}, or {old[1]}"
        )


def require_dense_loss(loss: Loss, key: str) -> None:
    """``ValueError`` for a loss that cannot train on the teachers' own answers; ``key`` is what asks for that."""
    if isinstance(loss, FullLossConfig) or (isinstance(loss, CustomLossConfig) and not loss.own_samples):
        return
    if not isinstance(loss, TopKLossConfig):
        raise ValueError(
            f"{key} is 'off_policy_scores', which trains on the teachers' answers, but loss.type {loss.type!r} "
            "estimates an expectation over the student's own samples: set loss.type: topk_forward_kl, topk_reverse_kl "
            "or topk_jsd"
        )
    if loss.is_sampled:
        what = "tail 'sampled'" if loss.tail == "sampled" else f"task_reward_weight {loss.task_reward_weight:g}"
        raise ValueError(
            f"{key} is 'off_policy_scores', which trains on the teachers' answers, but loss.{what} is a policy "
            "gradient over the student's own samples: remove it"
        )
