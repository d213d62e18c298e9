"""What no distribution can be is no answer: the validator by itself, and on every way that answers take."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mopd.config.groups import RoutingConfig
from mopd.engines.checks import check_generations, check_scores
from mopd.engines.interface import Generation, SamplingParams, Scores, StaleWeights, ToDraw, ToScore
from mopd.engines.replicas.interface import Replica, RouterLimits, SampleFailed
from mopd.engines.replicas.router import Router
from tests.fixtures.token_clock import run_on_token_clock

V, K = 12, 3
TOKENS = [torch.tensor([1, 5, 9, 7, 7]), torch.tensor([1, 4, 4]), torch.tensor([2, 3, 11, 0])]
STARTS = [3, 3, 2]  # 2, 0 and 2 response rows
IDS = [[[7, 2, 0], [1, 2, 3]], [], [[4, 11, 5], [8, 9, 10]]]
LOGPROBS = [[[-0.5, -1.5, -4.0], [-0.1, -4.0, -5.0]], [], [[-0.7, -0.9, -3.0], [0.0, -math.inf, -math.inf]]]
OWN = [[-0.5, -6.0], [], [-0.9, -30.0]]


def good() -> list[Scores]:
    return [
        Scores(
            ids=torch.tensor(ids, dtype=torch.int32).view(-1, K),
            logprobs=torch.tensor(logprobs, dtype=torch.float32).view(-1, K),
            token_logprobs=torch.tensor(own, dtype=torch.float32),
        )
        for ids, logprobs, own in zip(IDS, LOGPROBS, OWN, strict=True)
    ]


def changed(sequence: int, field: str, place: tuple[int, ...], value: float) -> list[Scores]:
    scores = good()
    tensor = getattr(scores[sequence], field).clone()
    tensor[place] = value
    scores[sequence] = replace(scores[sequence], **{field: tensor})
    return scores


def converted(sequence: int, field: str, convert: Callable[[Tensor], Any]) -> list[Scores]:
    scores = good()
    scores[sequence] = replace(scores[sequence], **{field: convert(getattr(scores[sequence], field))})
    return scores


def check(scores: Sequence[Scores], **changes: Any) -> None:
    vocab_size = changes.pop("vocab_size", V)
    check_scores(scores, ToScore(TOKENS, STARTS, **{"top_k": K, "temperature": 1.0, **changes}), vocab_size=vocab_size)


BAD_SCORES: dict[str, tuple[Callable[[], list[Scores]], str]] = {
    "id = V": (lambda: changed(0, "ids", (1, 2), V), r"sequence 0, response position 1: an id is outside .* 12 \(12\)"),
    "id < 0": (lambda: changed(2, "ids", (0, 0), -1), r"sequence 2, response position 0: an id is outside .*\(-1\)"),
    "id 2^31 - 1": (lambda: changed(2, "ids", (0, 0), 2**31 - 1), "outside the vocabulary"),
    "id twice": (lambda: changed(0, "ids", (1, 1), 1), "sequence 0, response position 1: an id stands twice"),
    "id twice apart": (lambda: changed(2, "ids", (1, 2), 8), "sequence 2, response position 1: an id stands twice"),
    "NaN": (lambda: changed(0, "logprobs", (1, 2), math.nan), r"above 0 or not a number \(nan\)"),
    "+inf": (lambda: changed(0, "logprobs", (1, 2), math.inf), r"above 0 or not a number \(inf\)"),
    "positive": (lambda: changed(0, "logprobs", (0, 0), 0.5), r"above 0 or not a number \(0.5\)"),
    "mass 2.3": (lambda: changed(0, "logprobs", (1, 1), -0.1), r"position 1: .*add up to more than 1 \(1.8"),
    "mass 1 + 3e-4": (lambda: changed(2, "logprobs", (1, 1), math.log(3e-4)), r"add up to more than 1 \(1.0003\)"),
    "all alike": (lambda: converted(0, "logprobs", torch.zeros_like), r"add up to more than 1 \(3\)"),
    "own NaN": (lambda: changed(0, "token_logprobs", (1,), math.nan), r"above 0 or not finite \(nan\)"),
    "own -inf": (lambda: changed(2, "token_logprobs", (1,), -math.inf), r"above 0 or not finite \(-inf\)"),
    "own +inf": (lambda: changed(0, "token_logprobs", (1,), math.inf), r"above 0 or not finite \(inf\)"),
    "own positive": (lambda: changed(0, "token_logprobs", (1,), 0.01), "above 0 or not finite"),
    "own differs": (lambda: changed(0, "token_logprobs", (0,), -0.6), "one log-prob in its row and another alone"),
    "own listed -inf": (lambda: changed(0, "logprobs", (0, 0), -math.inf), "one log-prob in its row and another"),
    "own too likely": (lambda: changed(0, "token_logprobs", (1,), -1.0), "of a row and of the response's token"),
    "out of order": (lambda: changed(0, "logprobs", (0, 1), -4.5), "sequence 0, response position 0: a more probable"),
    "out of order by a hair": (
        lambda: changed(0, "logprobs", (1, 2), math.nextafter(-4.0, 0) + 1e-6),
        "position 1: a more probable id stands behind a less probable one",
    ),
    "behind -inf": (
        lambda: changed(2, "logprobs", (1, 2), -50.0),
        "sequence 2, response position 1: a more probable id",
    ),
    "own above the last": (
        lambda: changed(0, "token_logprobs", (1,), -4.5),
        "than the last id of its row, but not listed",
    ),
    "int64 ids": (lambda: converted(0, "ids", Tensor.long), "ids is torch.int64"),
    "float64": (lambda: converted(0, "logprobs", Tensor.double), "logprobs is torch.float64"),
    "half": (lambda: converted(2, "token_logprobs", Tensor.half), "sequence 2: token_logprobs is torch.float16"),
    "a row less": (lambda: converted(2, "logprobs", lambda t: t[1:]), r"logprobs is .* \[1, 3\], expected .* \[2, 3\]"),
    "a row more": (lambda: converted(1, "token_logprobs", lambda t: torch.zeros(1)), "sequence 1: token_logprobs"),
    "a column less": (lambda: converted(0, "ids", lambda t: t[:, 1:]), r"ids is torch.int32 \[2, 2\]"),
    "flat": (lambda: converted(0, "ids", Tensor.flatten), r"ids is torch.int32 \[6\]"),
    "a list": (lambda: converted(0, "ids", Tensor.tolist), "ids is no tensor but list"),
    "an answer less": (lambda: good()[:2], "2 answers for 3 sequences"),
}


@pytest.mark.parametrize("name", BAD_SCORES)
def test_impossible_scores_are_named(name: str) -> None:
    scores, problem = BAD_SCORES[name]
    with pytest.raises(ValueError, match=problem) as caught:
        check(scores())
    assert "\n" not in str(caught.value)


POSSIBLE: dict[str, Callable[[], list[Scores]]] = {
    "good": good,
    "log-prob 5e-5 above 0": lambda: changed(2, "logprobs", (1, 0), 5e-5),
    "mass 1 + 5e-5": lambda: changed(2, "logprobs", (1, 1), math.log(5e-5)),
    "listed -inf": lambda: changed(0, "logprobs", (1, 2), -math.inf),
    "all of the mass elsewhere": lambda: changed(2, "logprobs", (1, 0), -math.inf),
    "equal log-probs": lambda: changed(0, "logprobs", (1, 2), -4.0),
    "own as probable as the last": lambda: changed(0, "token_logprobs", (1,), -5.0),
    "ids in any order": lambda: converted(0, "ids", lambda t: t[:, [0, 2, 1]]),
}


@pytest.mark.parametrize("name", POSSIBLE)
def test_rounding_and_impossible_ids_are_legal(name: str) -> None:
    check(POSSIBLE[name]())


def test_nothing_to_score_and_an_unknown_vocabulary() -> None:
    check_scores([], ToScore([], [], temperature=1.0, top_k=K), vocab_size=V)
    check_scores(good()[1:2], ToScore(TOKENS[1:2], STARTS[1:2], temperature=1.0, top_k=K), vocab_size=V)
    check(changed(0, "ids", (1, 2), V), vocab_size=None)
    with pytest.raises(ValueError, match="outside the vocabulary"):
        check(changed(0, "ids", (1, 2), -1), vocab_size=None)


@pytest.mark.parametrize("seed", range(60))
def test_any_change_of_a_row_is_found_or_harmless(seed: int) -> None:
    """Real rows with one entry moved, repeated, raised, lowered or made no number: what passes is what a distribution
    can be, with its most probable ids in order."""
    generator = torch.Generator().manual_seed(seed)
    every = (torch.randn(8, 50, generator=generator) * (1 + seed % 5)).log_softmax(-1)
    logprobs, ids = every.topk(6)
    tokens = torch.randint(50, (9,), generator=generator)
    own = every.gather(1, tokens[1:, None]).squeeze(1)
    check_scores(
        [Scores(ids=ids.int(), logprobs=logprobs, token_logprobs=own)],
        ToScore([tokens], [1], temperature=1.0, top_k=6),
        vocab_size=50,
    )
    row, one, other = (int(torch.randint(high, (), generator=generator)) for high in (8, 5, 5))
    values = [logprobs[row, one].item() + step for step in (-3.0, -0.01, 0.01, 3.0)]
    for value in (*values, logprobs[row, other].item(), 0.0, -0.0, math.nan, math.inf, -math.inf, 1e30, -1e30):
        changed_row = logprobs.clone()
        changed_row[row, one] = value
        listed = changed_row[row].exp().double().sum().item()
        is_listed = bool((ids[row] == tokens[1 + row]).any())
        is_own = bool(ids[row, one] == tokens[1 + row]) and abs(value - own[row].item()) > 1e-3 * max(1, -own[row])
        is_good = (
            not math.isnan(value)
            and changed_row[row].tolist() == sorted(changed_row[row].tolist(), reverse=True)
            and listed + (0.0 if is_listed else own[row].exp().item()) <= 1 + 1e-4
            and not is_own
        )
        scores = [Scores(ids=ids.int(), logprobs=changed_row, token_logprobs=own)]
        if is_good:
            check_scores(scores, ToScore([tokens], [1], temperature=1.0, top_k=6), vocab_size=50)
        else:
            with pytest.raises(ValueError, match=f"response position {row}: "):
                check_scores(scores, ToScore([tokens], [1], temperature=1.0, top_k=6), vocab_size=50)


def drawn(tokens: Any = (3, 4), logprobs: Any = (-1.0, 0.0), reason: Any = "stop", versions: Any = None) -> Generation:
    return Generation(
        tokens=torch.tensor(tokens, dtype=torch.int64),
        logprobs=torch.tensor(logprobs),
        finish_reason=reason,
        token_versions=torch.tensor(versions if versions is not None else [2] * len(tokens), dtype=torch.int32),
    )


BAD_GENERATIONS: dict[str, tuple[Generation, str]] = {
    "empty": (drawn((), ()), "response 1 has not 1 to 3 tokens .* but 0"),
    "too long": (drawn((1, 2, 3, 4), (-1.0,) * 4), "but 4"),
    "id = V": (drawn((3, V)), r"outside the vocabulary of 12 \(12\)"),
    "id < 0": (drawn((-1, 3)), r"\(-1\)"),
    "NaN": (drawn(logprobs=(-1.0, math.nan)), "above 0 or not finite"),
    "-inf": (drawn(logprobs=(-math.inf, -1.0)), "sequence 1, response position 0: .*above 0 or not finite"),
    "positive": (drawn(logprobs=(-1.0, 0.5)), "above 0 or not finite"),
    "a log-prob less": (drawn(logprobs=(-1.0,)), r"logprobs is torch.float32 \[1\]"),
    "int32": (replace(drawn(), tokens=torch.tensor([3, 4], dtype=torch.int32)), "tokens is torch.int32"),
    "two dimensions": (replace(drawn(), tokens=torch.ones(1, 2, dtype=torch.int64)), "1 to 3 tokens"),
    "a reason of its own": (drawn(reason="abort"), "unknown reason: 'abort'"),
    "no reason": (drawn(reason=None), "unknown reason: None"),
    "a version less": (drawn(versions=(2,)), r"token_versions is torch.int32 \[1\]"),
    "versions fall": (drawn(versions=(3, 2)), "response 1 .* falls"),
    "version -2": (drawn(versions=(-2, 3)), "a token of weight version -2"),
    "handed back, complete": (drawn((1, 2, 3), (-1.0,) * 3, "handed_back"), "has not 0 to 2 tokens .* but 3"),
    "handed back, too long": (drawn((1, 2, 3, 4), (-1.0,) * 4, "handed_back"), "but 4"),
}


ASKED = ToDraw([[1], [1]], SamplingParams(max_new_tokens=3), [0, 1])


@pytest.mark.parametrize("name", BAD_GENERATIONS)
def test_impossible_responses_are_named(name: str) -> None:
    generation, problem = BAD_GENERATIONS[name]
    check_generations([drawn()], ASKED, vocab_size=V)
    check_generations([], ASKED, vocab_size=V)
    with pytest.raises(ValueError, match=problem):
        check_generations([drawn(), generation], ASKED, vocab_size=V)


class Canned:
    """An engine of this process with the same answer for everything."""

    def __init__(self, answer: Callable[[], Any]) -> None:
        self.answer, self.num_calls, self.weight_version = answer, 0, -1

    async def score(self, *args: Any, **kwargs: Any) -> Any:
        self.num_calls += 1
        return self.answer()

    async def generate(self, *args: Any, **kwargs: Any) -> Any:
        self.num_calls += 1
        return self.answer()

    async def load_weights(self, weights: Iterable[tuple[str, Tensor]], weight_version: int) -> None: ...


def route(answers: Sequence[Callable[[], Any]], kind: Any, ask: Callable[[Router], Any], **limits: Any) -> Any:
    """What a group of engines with these answers says, and its replicas' numbers."""
    replicas = [Replica(name=f"math.{i}", engine=Canned(answer)) for i, answer in enumerate(answers)]
    settings = RouterLimits(**{"backoff_s": 0.0, "breaker_failures": 1, "breaker_reset_s": 60.0, **limits})
    router = Router("math", replicas, RoutingConfig(), kind=kind, limits=settings)
    router.vocab_size = V

    async def work() -> tuple[Any, Any]:
        try:
            outcome = await ask(router)
        except SampleFailed as error:
            outcome = error
        return outcome, router.take_numbers().replicas

    return run_on_token_clock(work())


async def score(router: Router) -> Any:
    return await router.score(ToScore(TOKENS[:1], STARTS[:1], top_k=K, temperature=1.0))


async def generate(router: Router) -> Any:
    return await router.generate(ToDraw([[1]], SamplingParams(max_new_tokens=3), [0]))


def test_another_replica_answers_and_the_bad_one_is_left_alone() -> None:
    bad = BAD_SCORES["id twice"][0]()[:1]
    outcome, numbers = route([lambda: bad, lambda: good()[:1]], "teacher", score)
    assert torch.equal(outcome[0].ids, good()[0].ids)
    assert (numbers[0].failures, numbers[0].state, numbers[1].failures) == (1, "open", 0)
    drawn_badly = BAD_GENERATIONS["id = V"][0]
    outcome, numbers = route([lambda: [drawn_badly], lambda: [drawn()]], "rollout", generate)
    assert outcome[0].tokens.tolist() == [3, 4]
    assert (numbers[0].failures, numbers[0].state, numbers[1].failures) == (1, "open", 0)


def test_when_none_is_left_one_line_names_group_replica_and_problem() -> None:
    bad = BAD_SCORES["id twice"][0]()[:1]
    outcome, _ = route([lambda: bad] * 2, "teacher", score, max_attempts=2)
    assert isinstance(outcome, SampleFailed) and "\n" not in str(outcome)
    assert str(outcome) == (
        "teacher 'math' could not answer for 1 samples: 2 attempts on math.0, math.1; last error: math.1: corrupt "
        "answer: sequence 0, response position 1: an id stands twice in one row"
    )


def test_a_teacher_with_other_weights_fails_instead_of_being_asked_for_ever() -> None:
    def stale() -> Any:
        raise StaleWeights("math.0: answered with weights 6, not -1")

    outcome, numbers = route([stale, lambda: good()[:1]], "teacher", score)
    assert len(outcome) == 1 and numbers[0].failures == 1
