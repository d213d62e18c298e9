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
    """Tokens that count (docs/losses.md#which-tokens-count-losstokens)."""

    largest: Literal["student_entropy", "divergence"]
    """What ranks a response's tokens."""
    share: Share
    """Share of each response."""


Tokens = Literal["all"] | LargestTokensConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class TopKLossConfig(Checked):
    """Divergence on some ids of every position (docs/losses.md)."""

    type: Literal["topk_forward_kl", "topk_reverse_kl", "topk_jsd"] = "topk_forward_kl"
    """KL(teacher||student), KL(student||teacher), or Jensen-Shannon."""
    top_k: Annotated[int, at_least(1, MAX_TOP_K)] = 64
    """Ids per position, by ``teachers.NAME.payload``."""
    always_ids: tuple[int | str, ...] = ()
    """Tokens, as texts or ids, added at every position."""
    tail: Literal["bucket", "generalized", "renormalize", "none", "sampled"] | None = None
    """What becomes of mass outside the ids (docs/losses.md#top-k-losses-parallel_topk_distill); absent: generalized for
    reverse KL, else bucket."""
    beta: Fraction = 0.5
    """The teacher's weight in ``topk_jsd``."""
    temperature: Positive = 1.0
    """Divides both sides' logits."""
    aggregation: Aggregation = "token_mean"
    """From token losses to one number (docs/losses.md#from-token-losses-to-one-number-token_weights)."""
    domain_budget: Mapping[str, float] = field(default_factory=dict)
    """Domains' shares of the weight, sum 1 (docs/losses.md#domain-budgets)."""
    logprob_min_clamp: float | None = None
    """Floor of log-probs (docs/losses.md#clamps-and-caps)."""
    entry_max_clamp: Positive | None = None
    """Cap of each id's term."""
    loss_max_clamp: Positive | None = None
    """Cap of a token's loss."""
    loss_soft_cap: Positive | None = None
    """The same with a gradient: the recommended stabiliser."""
    task_reward_weight: NotNegative = 0.0
    """Weight of the task advantage."""
    task_advantage: TaskAdvantage = "mean"
    """Reward less its prompt's mean, or less the others' mean; grpo also divides by the deviation."""
    correction: MismatchCorrectionConfig | None = None
    """As with ``policy_gradient``, for the task advantage and ``tail: sampled``."""
    tokens: Tokens = "all"
    """Tokens that count (docs/losses.md#which-tokens-count-losstokens)."""

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
    """Bounds of a response's mean ratio, beyond which it is left out."""

    low: NotNegative = 0.9
    """Lower bound."""
    high: Positive = 1.1
    """Upper bound."""

    def check(self) -> None:
        _check_bounds(self.low, self.high)


@dataclass(frozen=True, kw_only=True, slots=True)
class MismatchCorrectionConfig(Checked):
    """Weight of tokens that another policy drew (docs/losses.md#samples-of-another-policy-correction)."""

    type: Literal["none", "tis", "icepop", "gate"]
    """Form."""
    low: NotNegative = 0.5
    """Lower bound of the ratio (icepop, gate)."""
    high: Positive = 2.0
    """Upper bound."""
    sequence: SequenceMaskConfig | None = None
    """Bounds of a response's mean ratio, beyond which it is left out."""

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
    """Estimate of a KL from the sampled token."""

    type: Literal["k2", "k3", "k3_reverse"]
    """Gradient of reverse KL; of forward KL; k3's value with k2's gradient."""
    top_k: Annotated[int, at_least(1, MAX_TOP_K)] = 16
    """Ids per position, for metrics."""
    temperature: Positive = 1.0
    """As ``rollout.temperature``."""
    aggregation: Aggregation = "token_mean"
    """From token losses to one number (docs/losses.md#from-token-losses-to-one-number-token_weights)."""
    domain_budget: Mapping[str, float] = field(default_factory=dict)
    """Domains' shares of the weight, sum 1 (docs/losses.md#domain-budgets)."""
    tokens: Tokens = "all"
    """Tokens that count (docs/losses.md#which-tokens-count-losstokens)."""
    loss_max_clamp: Positive | None = None
    """Cap of a token's loss."""
    correction: MismatchCorrectionConfig | None = None
    """Weight of tokens that another policy drew, required for stale samples."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyGradientConfig(Checked):
    """Policy gradient; the advantage is teacher less student log-prob, less a baseline, plus a weighted task
    advantage."""

    type: Literal["policy_gradient"]
    """Loss type."""
    baseline: Literal["kl", "domain", "none"] = "kl"
    """What is subtracted from the advantage (docs/losses.md#policy-gradient-parallel_policy_gradient)."""
    task_reward_weight: NotNegative = 0.0
    """Weight of the task advantage."""
    task_advantage: TaskAdvantage = "mean"
    """Reward less its prompt's mean, or less the others' mean; grpo also divides by the deviation."""
    old_logprobs: Literal["student", "rollout"] = "student"
    """Whose p_old the PPO ratio has; the student's makes it 1."""
    clip_ratio_low: Positive = 0.2
    """PPO clip below 1."""
    clip_ratio_high: Positive = 0.2
    """PPO clip above 1."""
    dual_clip: float | None = None
    """Dual-clip PPO's bound."""
    correction: MismatchCorrectionConfig | None = None
    """Weight of tokens that another policy drew, required for stale samples."""
    top_k: Annotated[int, at_least(1, MAX_TOP_K)] = 16
    """Ids per position, for baseline and metrics."""
    always_ids: tuple[int | str, ...] = ()
    """Tokens, as texts or ids, added at every position."""
    temperature: Positive = 1.0
    """As ``rollout.temperature``."""
    aggregation: Aggregation = "token_mean"
    """From token losses to one number (docs/losses.md#from-token-losses-to-one-number-token_weights)."""
    domain_budget: Mapping[str, float] = field(default_factory=dict)
    """Domains' shares of the weight, sum 1 (docs/losses.md#domain-budgets)."""
    tokens: Tokens = "all"
    """Tokens that count (docs/losses.md#which-tokens-count-losstokens)."""

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
    """Divergence over the whole vocabulary, with ``payload: hidden``
    (docs/losses.md#the-whole-vocabulary-payload-hidden)."""

    type: Literal["full_forward_kl", "full_reverse_kl", "full_jsd"]
    """KL(teacher||student), KL(student||teacher), or Jensen-Shannon."""
    beta: Fraction = 0.5
    """The teacher's weight in ``full_jsd``."""
    skew: NotNegative = 0.0
    """Weight of the averaged side in a mixture."""
    temperature: Positive = 1.0
    """Divides both sides' logits."""
    aggregation: Aggregation = "token_mean"
    """From token losses to one number (docs/losses.md#from-token-losses-to-one-number-token_weights)."""
    domain_budget: Mapping[str, float] = field(default_factory=dict)
    """Domains' shares of the weight, sum 1 (docs/losses.md#domain-budgets)."""
    task_reward_weight: NotNegative = 0.0
    """Weight of the task advantage."""
    task_advantage: TaskAdvantage = "mean"
    """Reward less its prompt's mean, or less the others' mean; grpo also divides by the deviation."""
    correction: MismatchCorrectionConfig | None = None
    """As with ``policy_gradient``, for the task advantage."""
    tokens: Tokens = "all"
    """Tokens that count (docs/losses.md#which-tokens-count-losstokens)."""
    # What other losses have as a key.
    top_k: ClassVar[int] = 0

    @property
    def is_sampled(self) -> bool:
        """Some term of the loss rests on the sampled token, which must then be the student's own."""
        return self.task_reward_weight > 0

    def check(self) -> None:
        if self.correction is not None and not self.is_sampled:
            raise ValueError(
                f"correction is set, but {self.type} without task_reward_weight takes samples of any policy: remove "
                "it, or set task_reward_weight"
            )
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
    """Function, or entry point ``mopd.losses``."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Its keywords."""
    own_samples: bool = False
    """It reads the sampled token's log-probs."""
    top_k: Annotated[int, at_least(1, MAX_TOP_K)] = 64
    """Ids per position, by ``teachers.NAME.payload``."""
    always_ids: tuple[int | str, ...] = ()
    """Tokens, as texts or ids, added at every position."""
    temperature: Positive = 1.0
    """Divides both sides' logits."""
    aggregation: Aggregation = "token_mean"
    """From token losses to one number (docs/losses.md#from-token-losses-to-one-number-token_weights)."""
    domain_budget: Mapping[str, float] = field(default_factory=dict)
    """Domains' shares of the weight, sum 1 (docs/losses.md#domain-budgets)."""
    # What other losses have as keys.
    tokens: ClassVar[Literal["all"]] = "all"
    correction: ClassVar[None] = None
    task_reward_weight: ClassVar[float] = 0.0

    def check(self) -> None:
        check_reference("module", self.module)


Loss = TopKLossConfig | KLLossConfig | PolicyGradientConfig | FullLossConfig | CustomLossConfig
REWARDED = (TopKLossConfig, PolicyGradientConfig, FullLossConfig)
"""Losses that a task reward may join."""


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
    quantised: str = "",
    has_chunks: bool = False,
) -> None:
    """Check that the rollout draws what a loss of the sampled token needs: samples of the student itself, or a
    correction for old ones. ``ValueError`` otherwise. Divergences over ids of a row take samples of any policy, unless
    the loss also has chunks of several tokens (``has_chunks``, for teachers with another tokenizer). ``biased`` is
    ``RolloutConfig.biased``, ``quantised`` how the rollout rounds the student's weights, if it does."""
    what = f"loss.type {loss.type!r}"
    if isinstance(loss, CustomLossConfig) and not loss.own_samples:
        return
    if isinstance(loss, (TopKLossConfig, FullLossConfig)):
        if not loss.is_sampled and not has_chunks:
            return
        what = f"loss.task_reward_weight {loss.task_reward_weight:g}"
        if isinstance(loss, TopKLossConfig) and loss.tail == "sampled":
            what = "loss.tail 'sampled'"
        elif has_chunks:
            what = "a teacher's tokenizer 'own'"
    if biased:
        raise ValueError(
            f"{what} estimates an expectation over the student's own distribution, but {biased}: remove that, or set "
            "a divergence without task_reward_weight"
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
    elif quantised:
        old = f"rollout.engine.extra.quantization is {quantised!r}", "leave it out"
    if (max_staleness > 0 or stored_share or quantised) and loss.correction is None:
        raise ValueError(
            f"{old[0]}, but {what} estimates an expectation over the current student's own samples and loss.correction "
            f"is absent: set it, for example loss.correction: {{type: icepop}}, or {old[1]}"
        )


def require_dense_loss(loss: Loss, key: str) -> None:
    """``ValueError`` for a loss that cannot train on the teachers' own answers; ``key`` is what asks for that."""
    if isinstance(loss, CustomLossConfig) and not loss.own_samples:
        return
    if not isinstance(loss, (TopKLossConfig, FullLossConfig)):
        raise ValueError(
            f"{key} is 'off_policy_scores', which trains on the teachers' answers, but loss.type {loss.type!r} "
            "estimates an expectation over the student's own samples: set loss.type: topk_forward_kl, topk_reverse_kl "
            "or topk_jsd"
        )
    if loss.is_sampled:
        has_tail = isinstance(loss, TopKLossConfig) and loss.tail == "sampled"
        what = "tail 'sampled'" if has_tail else f"task_reward_weight {loss.task_reward_weight:g}"
        raise ValueError(
            f"{key} is 'off_policy_scores', which trains on the teachers' answers, but loss.{what} is a policy "
            "gradient over the student's own samples: remove it"
        )
