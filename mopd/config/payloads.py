"""What a teacher is asked for at each response token, and pairs of keys from which nothing can be learnt.

A row's *support* is the ids at which the teacher's log-probs are known: some that the teacher itself finds most
probable, and some that it is given. Every payload is a number of each; ``hidden`` has no ids, but the teacher's hidden
states, of which its output matrix makes the logits of all ids.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Literal, NamedTuple

from mopd.base.types import UserError
from mopd.config.losses import (
    CustomLossConfig,
    FullLossConfig,
    KLLossConfig,
    Loss,
    MismatchCorrectionConfig,
    PolicyGradientConfig,
    TopKLossConfig,
)

Payload = Literal["topk", "sampled", "student_topk", "union", "hidden"]
Combine = Literal["weighted_mean", "mean_logprob", "mean_probability", "best_reward", "per_token_lowest_entropy"]


class Asked(NamedTuple):
    """Numbers of ids at which a teacher's log-probs are asked for, beside the sampled token's own.

    Example: ``union`` with ``top_k: 16`` and two ``always_ids`` is ``own=16, student=16, always=2``: a row of 34
    places, of which those that repeat an id are empty.
    """

    own: int = 0
    """The teacher's most probable ids."""
    student: int = 0
    """The student's most probable ids, as the rollout reported them."""
    always: int = 0
    """``loss.always_ids``."""
    hidden: bool = False
    """Whether the states that its output matrix reads are asked for."""

    @property
    def given(self) -> int:
        """Ids that the teacher is given."""
        return self.student + self.always

    @property
    def width(self) -> int:
        """Places of a row."""
        return self.own + self.given


def asked(payload: Payload, loss: Loss) -> Asked:
    """Return what a payload asks of a teacher."""
    return Asked(
        own=loss.top_k if payload in ("topk", "union") else 0,
        student=loss.top_k if payload in ("student_topk", "union") else 0,
        always=len(always_ids_of(loss)),
        hidden=payload == "hidden",
    )


def always_ids_of(loss: Loss) -> tuple[int | str, ...]:
    """Return ``loss.always_ids``; estimators of the sampled token and losses over the vocabulary have none."""
    return () if isinstance(loss, (KLLossConfig, FullLossConfig)) else loss.always_ids


def reads_support(loss: Loss) -> bool:
    """Return whether the loss itself, not only a metric, reads the rows of ids."""
    if isinstance(loss, PolicyGradientConfig):
        return loss.baseline == "kl"
    return isinstance(loss, (TopKLossConfig, CustomLossConfig))


def require_payloads(
    teachers: Mapping[str, tuple[Payload, str]],
    loss: Loss,
    *,
    elsewhere: Mapping[str, bool],
    is_ensemble: bool,
) -> None:
    """``ValueError`` where teachers' payloads, the loss and the origin of the samples do not go together.

    Args:
        teachers: each one's payload, and ``EngineGroupConfig.scores_own_ids_only``.
        loss: the recipe's.
        elsewhere: keys of samples that the rollout does not draw, and whether each is set.
        is_ensemble: whether some domain has several teachers.
    """
    for name, (payload, own_ids_only) in teachers.items():
        _require_payload(f"teachers.{name}", payload, loss)
        wants = asked(payload, loss)
        if own_ids_only and (wants.given or wants.hidden):
            has_key = wants.student or wants.hidden
            what = f"teachers.{name}.payload is {payload!r}" if has_key else "loss.always_ids is set"
            cure = "serve the teacher with `mopd serve` and remove protocol"
            cure = "engine: {type: vllm}" if own_ids_only.startswith("engine") else cure
            raise ValueError(
                f"{what}, but teachers.{name}.{own_ids_only}, a server that gives log-probs of its own top k alone: "
                f"set payload: topk or sampled and no always_ids, or {cure}"
            )
        for key in [key for key, is_set in elsewhere.items() if is_set and wants.student]:
            raise ValueError(
                f"teachers.{name}.payload is {payload!r}, but {key} trains on responses of which nobody told the "
                f"student's most probable ids: set payload: topk, or change {key}"
            )
    payloads = {name: payload for name, (payload, _) in teachers.items()}
    if isinstance(loss, FullLossConfig) and is_ensemble:
        raise ValueError(
            f"loss.type is {loss.type!r}, but a domain has several teachers, and hidden states of one alone travel: "
            "leave the domain in one teacher's domains, or set loss.type: topk_forward_kl and payload: topk"
        )
    if isinstance(loss, CustomLossConfig) and is_ensemble:
        raise ValueError(
            "loss.type is 'custom', but a domain has several teachers, and the function sees the row of one: leave the "
            "domain in one teacher's domains, or set loss.type: topk_forward_kl"
        )
    if len({payload == "sampled" for payload in payloads.values()}) > 1:
        raise ValueError(
            "teachers have payload 'sampled' and others, but the samples of one batch need the same fields: set "
            "teacher_defaults.payload for all of them"
        )
    if isinstance(loss, TopKLossConfig) and loss.tail == "sampled" and is_ensemble:
        raise ValueError(
            "loss.tail is 'sampled', but a domain has several teachers, whose log-probs of the sampled token travel as "
            "one mean: set tail: bucket"
        )
    _require_gradient(payloads, loss)


def require_combine(
    combine: Combine,
    loss: Loss,
    payloads: Collection[Payload],
    *,
    is_ensemble: bool,
    unknown_rewards: str | None,
    draws_answers: bool,
    has_own_tokenizers: bool,
) -> None:
    """``ValueError`` where a rule for several teachers has nothing to work on. ``unknown_rewards``: why the rewards of
    teachers are not known, if they are not; ``draws_answers``: some steps train on the teachers' own answers."""
    chooses = combine == "best_reward"
    problems = {
        "no domain has several teachers": not is_ensemble,
        f"loss.type is {loss.type!r}, where weighted_mean already is the mean of log-probs": (
            combine == "mean_logprob" and not isinstance(loss, TopKLossConfig)
        ),
        "payload 'sampled' has no ids whose entropy could be had": (
            combine == "per_token_lowest_entropy" and "sampled" in payloads
        ),
        "a teacher's tokenizer is 'own', whose chunks the mean alone joins": has_own_tokenizers,
        f"{unknown_rewards}": chooses and unknown_rewards is not None,
        "objective or schedule.warm_up trains on answers, which teachers give by their weights": (
            chooses and draws_answers
        ),
    }
    for problem in [problem for problem, is_so in problems.items() if is_so and combine != "weighted_mean"]:
        raise ValueError(f"combine is {combine!r}, but {problem}: set combine: weighted_mean, or change that")


def require_own_tokenizers(
    payloads: Mapping[str, Payload], loss: Loss, *, max_staleness: int, elsewhere: Mapping[str, bool]
) -> None:
    """``ValueError`` where teachers with another tokenizer, by name with payloads, cannot do what the recipe asks.

    Args:
        payloads: those of these teachers.
        loss: the recipe's.
        max_staleness: ``schedule.max_staleness``.
        elsewhere: keys of samples that the rollout does not draw, and whether each is set.
    """
    for name, payload in payloads.items():
        key = f"teachers.{name}.tokenizer is 'own'"
        if payload not in ("topk", "sampled"):
            raise ValueError(
                f"{key} and payload {payload!r}, but ids and rows of the student are nothing to that teacher: set "
                "payload: sampled, or topk"
            )
        if payload == "topk" and not isinstance(loss, TopKLossConfig):
            raise ValueError(
                f"{key} and payload 'topk', but loss.type {loss.type!r} reads the sampled token alone, and its metrics "
                "rows that this teacher has not: set payload: sampled (and loss.baseline: domain or none)"
            )
        for what, is_set in elsewhere.items():
            if is_set:
                raise ValueError(
                    f"{key}, but {what} trains on responses of which nobody told the student's log-probs, by which a "
                    "chunk's are divided: remove one of them"
                )
        if isinstance(loss, TopKLossConfig):
            problems = {
                f"loss.tail is {loss.resolved_tail!r}: set tail: bucket, where ids that one of them lacks belong": (
                    loss.resolved_tail != "bucket"
                ),
                "loss.tokens chooses by a score that chunks of several tokens have not: set tokens: all": (
                    loss.tokens != "all"
                ),
                "loss.always_ids names the student's ids: remove it": bool(loss.always_ids),
                f"schedule.max_staleness is {max_staleness}, and chunks need the current student's own samples: set "
                "max_staleness: 0, or loss.type: policy_gradient with a correction": max_staleness > 0,
            }
            for problem, is_so in problems.items():
                if is_so:
                    raise ValueError(f"{key}, but {problem}")


def _require_payload(key: str, payload: Payload, loss: Loss) -> None:
    """``ValueError`` where the payload of the teacher ``key`` does not carry what the loss reads, or more than that."""
    if (payload == "hidden") != isinstance(loss, FullLossConfig):
        cure = "loss.type: full_forward_kl, full_reverse_kl or full_jsd, or another payload"
        if payload != "hidden":
            cure = "payload: hidden, for all in teacher_defaults, or another loss.type"
        raise ValueError(
            f"{key}.payload is {payload!r} and loss.type {loss.type!r}, but hidden states and losses over the whole "
            f"vocabulary need each other: set {cure}"
        )
    if payload == "sampled":
        if reads_support(loss):
            baseline = ", or loss.baseline: domain" if isinstance(loss, PolicyGradientConfig) else ""
            raise ValueError(
                f"{key}.payload is 'sampled', but loss.type {loss.type!r} reads log-probs of more ids than the sampled "
                f"token: set payload: topk, or loss.type: k2{baseline}"
            )
        if always_ids_of(loss) or loss.tokens != "all":
            what = "always_ids" if always_ids_of(loss) else "tokens"
            raise ValueError(
                f"{key}.payload is 'sampled', which has no row of ids, but loss.{what} is set: set payload: topk, or "
                f"remove loss.{what}"
            )
    elif payload not in ("topk", "hidden") and not reads_support(loss):
        raise ValueError(
            f"{key}.payload is {payload!r}, but loss.type {loss.type!r} reads the sampled token alone: set payload: "
            "sampled or topk"
        )


def _require_gradient(payloads: Mapping[str, Payload], loss: Loss) -> None:
    """``ValueError`` for pairs of keys with which a loss is constant, its gradient 0, or its target blind: the student
    would learn nothing, or what nobody means, and no metric would show why."""
    if isinstance(loss, TopKLossConfig):
        for name, payload in payloads.items():
            alone = asked(payload, loss)
            if loss.resolved_tail == "renormalize" and loss.top_k == 1 and not alone.always:
                raise ValueError(
                    f"loss.tail renormalize with top_k 1 and teachers.{name}.payload {payload!r} gives no gradient: a "
                    "distribution over one id is always 1; raise top_k or choose another tail"
                )
            if payload == "student_topk" and loss.type == "topk_forward_kl" and loss.resolved_tail == "none":
                raise ValueError(
                    f"loss.tail none of topk_forward_kl with teachers.{name}.payload 'student_topk' drives all mass "
                    "into the student's own ids, whatever the teacher says: set tail: bucket, or payload: union"
                )
    correction = loss.correction
    if correction is not None:
        _require_reach(correction)


def _require_reach(correction: MismatchCorrectionConfig) -> None:
    """``ValueError`` where a sample of the current student itself, whose ratio is 1, would be left out."""
    if correction.type in ("icepop", "gate") and not correction.low <= 1 <= correction.high:
        raise ValueError(
            f"loss.correction keeps ratios from {correction.low:g} to {correction.high:g}, so that the student's own "
            "tokens, whose ratio is 1, give no gradient: set low to 1 or less and high to 1 or more"
        )
    bounds = correction.sequence
    if bounds is not None and not bounds.low <= 1 <= bounds.high:
        raise ValueError(
            f"loss.correction.sequence keeps mean ratios from {bounds.low:g} to {bounds.high:g}, so that the student's "
            "own responses, whose ratio is 1, give no gradient: set low to 1 or less and high to 1 or more"
        )


def token_ids(tokens: Sequence[int | str], vocabulary: Mapping[str, int], key: str) -> tuple[int, ...]:
    """Return the ids of ``tokens``, which are ids or texts of single tokens. ``UserError`` with ``key`` for one that
    ``vocabulary``, of the student's tokenizer, does not have, or that is named twice."""
    known, found = set(vocabulary.values()), list[int]()
    for token in tokens:
        number = vocabulary.get(token, -1) if isinstance(token, str) else token
        if number not in known:
            raise UserError(
                f"{key} names {token!r}, which is no token of student.model's tokenizer: name one that is, as its "
                "tokenizer.json writes it, or its id"
            )
        if number in found:
            raise UserError(f"{key} names token {number} twice ({token!r}): remove one of them")
        found.append(number)
    return tuple(found)
