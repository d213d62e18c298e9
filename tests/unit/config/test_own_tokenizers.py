"""Teachers with another tokenizer: what a recipe then has, and which keys are refused beside it."""

from __future__ import annotations

from pathlib import Path

import pytest

from mopd.base.types import LOSS_FIELDS, ROLLOUT_FIELDS, TOKEN_FIELD, UserError
from tests.unit.config.test_payloads import recipe_of

OWN = "teachers.a.tokenizer=own"
SAMPLED = ("loss={type: k2}", "teacher_defaults.payload=sampled")
EVERY = ("teacher_defaults.tokenizer=own", "teacher_defaults.tokenizer_map={<pad>: null}")


def test_a_map_is_inherited_token_by_token(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, *EVERY, *SAMPLED, 'teachers.b.tokenizer_map={"<think>": "<reason>"}')
    assert recipe.own_tokenizers == ("a", "b")
    assert recipe.teachers["b"].tokenizer_map == {"<pad>": None, "<think>": "<reason>"}


def test_fields_and_lengths(tmp_path: Path) -> None:
    sampled, topk = recipe_of(tmp_path, OWN, *SAMPLED), recipe_of(tmp_path, OWN)
    assert sampled.loss_fields(1) == (*ROLLOUT_FIELDS, TOKEN_FIELD) and not sampled.has_chunks
    assert topk.loss_fields(1) == (*LOSS_FIELDS, "chunk_advantage") and topk.has_chunks
    plain = topk.longest_sequence("b")
    assert topk.longest_sequence("a") == plain + topk.rollout.max_response_length
    assert topk.longest_sequence() == plain


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["teachers.a.tokenizer_map={<pad>: null}"], "tokenizer_map is set, but tokenizer is 'student'"),
        (
            ["teachers.a={model: student, refresh: frozen, domains: [a], tokenizer: own}"],
            "tokenizer is 'own', but refresh is set, and the student reads its own",
        ),
        ([OWN, "teachers.a.tokenizer_map={<pad>: 3}"], "teachers.a.tokenizer_map.<pad>: expected text or null"),
        *(
            ([OWN, f"teacher_defaults.payload={payload}"], f"teachers.a.tokenizer is 'own' and payload '{payload}'")
            for payload in ("student_topk", "union")
        ),
        (
            [OWN, "teacher_defaults.payload=hidden", "loss={type: full_jsd}"],
            "teachers.a.tokenizer is 'own' and payload 'hidden'",
        ),
        ([OWN, "loss={type: policy_gradient}"], "reads the sampled token alone, and its metrics rows"),
        ([OWN, "loss={type: topk_reverse_kl}"], "but loss.tail is 'generalized': set tail: bucket"),
        ([OWN, "loss.tokens={largest: divergence, share: 0.5}"], "set tokens: all"),
        ([OWN, "loss.always_ids=[3]"], "loss.always_ids names the student's ids: remove it"),
        (
            [
                OWN,
                "schedule.max_staleness=1",
                "rollout.placement={type: local}",
                "teacher_defaults.placement={type: local}",
            ],
            "max_staleness",
        ),
        ([OWN, "rollout.top_p=0.9"], "a teacher's tokenizer 'own' estimates an expectation over the student's own"),
        ([OWN, "objective=sft_on_teacher"], "but objective or schedule.warm_up trains on responses of which nobody"),
        (
            [OWN, "rollout.environment={type: python_tool}"],
            "rollout.environment is 'python_tool', but teachers.a.tokenizer is 'own', and a chunk may hold",
        ),
        (
            [OWN, "teachers.b.domains=[a, b]", "teachers.a.weight=1", "teachers.b.weight=1", "combine=mean_logprob"],
            "combine is 'mean_logprob', but a teacher's tokenizer is 'own', whose chunks the mean alone joins",
        ),
        (
            [OWN, "domains={a: {gate: {by: student_rewards, others: skip}}}", "rewards={default: {type: exact_match}}"],
            "domains.a.gate is set, but teachers.a.tokenizer is 'own', whose chunks have an advantage of their own",
        ),
        ([OWN, "data.scored=[x]", "schedule.on_policy_fraction=0.5"], "but data.scored trains on responses of which"),
    ],
)
def test_what_is_refused(tmp_path: Path, overrides: list[str], line: str) -> None:
    with pytest.raises(UserError) as refusal:
        recipe_of(tmp_path, *overrides)
    assert line in str(refusal.value) and "\n" not in str(refusal.value)
