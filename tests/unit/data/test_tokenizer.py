"""Two tokenizers are the same when every id that the student can emit means the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from mopd.base.types import UserError
from mopd.config.rollout import RolloutConfig
from mopd.data.tokenizer import compare_tokenizers, load_tokenizer, read_texts, stops_of
from tests.fixtures.tiny_models import CHARACTERS, VOCAB_SIZE, make_tokenizer


def test_equal_padded_and_larger_vocabularies_are_fine(tmp_path: Path) -> None:
    student = make_tokenizer(tmp_path / "a")
    larger = make_tokenizer(tmp_path / "b", characters=CHARACTERS + "!%")
    assert compare_tokenizers(student, load_tokenizer(tmp_path / "a"), VOCAB_SIZE) == []
    assert compare_tokenizers(student, larger, VOCAB_SIZE + 64) == []
    assert compare_tokenizers(larger, student, VOCAB_SIZE) == []  # ids that the student's matrix cannot emit


def test_other_meanings_are_listed(tmp_path: Path) -> None:
    student = make_tokenizer(tmp_path / "a")
    swapped = make_tokenizer(tmp_path / "b", characters="ba" + CHARACTERS[2:])
    smaller = make_tokenizer(tmp_path / "c", characters=CHARACTERS[:-1])
    differences = compare_tokenizers(student, swapped, VOCAB_SIZE)
    assert len(differences) == 1 and f"2 of {VOCAB_SIZE} ids" in differences[0] and "3 is 'a' / 'b'" in differences[0]
    (difference,) = compare_tokenizers(student, smaller, VOCAB_SIZE)
    assert f"{VOCAB_SIZE - 1} is '\\n' / None" in difference


def test_special_ids(tmp_path: Path) -> None:
    student, teacher = make_tokenizer(tmp_path / "a"), make_tokenizer(tmp_path / "b")
    teacher.eos_token = "<bos>"
    assert compare_tokenizers(student, teacher, VOCAB_SIZE) == [
        "eos_token_id is 2 for the student and 1 for the teacher"
    ]
    teacher = make_tokenizer(tmp_path / "b")
    teacher.pad_token = None  # padding is never read: an absent one is fine, a different one is not
    assert compare_tokenizers(student, teacher, VOCAB_SIZE) == []
    teacher.pad_token = "a"
    assert compare_tokenizers(student, teacher, VOCAB_SIZE) == [
        "pad_token_id is 0 for the student and 3 for the teacher"
    ]


def test_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere: no such folder"):
        load_tokenizer(tmp_path / "nowhere")
    with pytest.raises(UserError, match="no tokenizer files"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match=r"tokenizer\.json: not valid JSON"):
        load_tokenizer(tmp_path)


def test_texts_that_end_responses_are_cut_from_what_is_read(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path)
    responses = [tokenizer(text)["input_ids"] for text in ("ab>c", "a.b>", "abc<eos>", "")]
    assert read_texts(responses, tokenizer) == ["ab>c", "a.b>", "abc", ""]
    assert read_texts(responses, tokenizer, (">", ".b")) == ["ab", "a", "abc", ""]


def test_what_ends_a_response_is_read_by_the_tokenizer(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path)
    cfg = RolloutConfig(stop=("\n\n",), stop_token_ids=(5, "<bos>"), ignore_eos=True)
    assert stops_of(cfg, tokenizer) == {"stop": ("\n\n",), "stop_token_ids": (5, 1), "ignore_eos": True}
    with pytest.raises(UserError, match=f"rollout.stop_token_ids names {VOCAB_SIZE}, which is no token"):
        stops_of(RolloutConfig(stop_token_ids=(VOCAB_SIZE,)), tokenizer)
