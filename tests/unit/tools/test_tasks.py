"""The quickstart's questions and its tokenizer."""

from __future__ import annotations

from itertools import islice

import pytest

from tools.make_quickstart import LENGTHS, TRAIN_ROWS, VALIDATION_ROWS, complaints, prompts
from tools.quickstart.tasks import TASKS, questions
from tools.quickstart.tokenizer import build_tokenizer
from tools.quickstart.training import IGNORED, encode, prompt_ids


@pytest.mark.parametrize(
    ("domain", "text", "answer"),
    [("reversal", "bpac", "capb"), ("sorting", "bpaca", "aabcp"), ("next_letter", "bpac", "cabd")],
)
def test_answers(domain: str, text: str, answer: str) -> None:
    assert TASKS[domain].answer(text) == answer


def test_questions_are_the_same_for_the_same_seed_and_of_all_lengths() -> None:
    first, again, other = (list(islice(questions("sorting", (3, 8), seed), 200)) for seed in ("a", "a", "b"))
    assert first == again != other
    assert {len(question.answer) for question in first} == set(range(3, 9))


def test_no_training_prompt_is_a_validation_prompt_and_domains_are_mixed() -> None:
    by_split = prompts()
    train, validation = by_split["train"], by_split["validation"]
    assert (len(train), len(validation)) == (TRAIN_ROWS * len(TASKS), VALIDATION_ROWS * len(TASKS))
    assert not {q.prompt for q in train} & {q.prompt for q in validation}
    assert {q.domain for q in train[: len(TASKS)]} == set(TASKS)
    assert all(LENGTHS[0] <= len(q.answer) <= LENGTHS[1] for q in train)


def test_the_tokenizer_reads_one_character_per_token_and_gives_the_text_back() -> None:
    tokenizer = build_tokenizer()
    ids = tokenizer("rev abc", add_special_tokens=False)["input_ids"]
    assert len(ids) == 7 and tokenizer.unk_token_id not in ids
    assert tokenizer.decode(ids) == "rev abc"
    assert tokenizer("!")["input_ids"] == [tokenizer.unk_token_id]


def test_the_chat_template_ends_where_the_answer_begins() -> None:
    tokenizer = build_tokenizer()
    messages = [{"role": "user", "content": "rev ab"}, {"role": "assistant", "content": "ba"}]
    whole = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
    prompt = prompt_ids(tokenizer, "rev ab")
    assert whole[: len(prompt)] == prompt
    assert tokenizer.decode(whole[len(prompt) :]) == "ba<eos>"


def test_the_loss_sees_answers_and_their_end_only() -> None:
    tokenizer = build_tokenizer()
    asked = list(islice(questions("reversal", (3, 8), "x"), 6))
    tokens_BS, labels_BS = encode(tokenizer, asked)
    for question, tokens, labels in zip(asked, tokens_BS, labels_BS, strict=True):
        rows = (labels != IGNORED).nonzero().flatten()
        assert tokenizer.decode(labels[rows]) == question.answer + "<eos>"
        assert (tokens[rows + 1] == labels[rows]).all()


def test_models_that_break_the_promise_are_named() -> None:
    good = {"base": dict.fromkeys(TASKS, 0.3)} | {domain: dict.fromkeys(TASKS, 0.99) for domain in TASKS}
    assert complaints(good) == []
    bad = {**good, "sorting": dict.fromkeys(TASKS, 0.9), "base": {**good["base"], "reversal": 0.6}}
    assert [line.split(":")[0] for line in complaints(bad)] == ["base", "teacher sorting"]
