"""Loading a tokenizer, and comparing two of them: do the same ids mean the same tokens?"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from mopd.base.types import UserError
from mopd.config.payloads import token_ids
from mopd.config.rollout import RolloutConfig
from mopd.conversion.hf import pretrained


def load_tokenizer(folder: str | Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a local Hugging Face folder. Raise ``UserError`` with the folder if there is none."""
    if not Path(folder).is_dir():
        raise UserError(f"{folder}: no such folder: name a local Hugging Face checkpoint")
    if not any(Path(folder).glob("*tokenizer*")) and not any(Path(folder).glob("vocab*")):
        raise UserError(f"{folder}: no tokenizer files (tokenizer.json, tokenizer_config.json): copy them there")
    return pretrained.load_tokenizer(Path(folder))


def read_texts(
    responses: Sequence[Sequence[int]], tokenizer: PreTrainedTokenizerBase, cut_texts: Sequence[str] = ()
) -> list[str]:
    """Return responses as rewards and people read them: without special tokens, and up to the first of
    ``cut_texts``."""
    texts: list[str] = tokenizer.batch_decode([list(tokens) for tokens in responses], skip_special_tokens=True)
    return [text[: min((at for cut in cut_texts if (at := text.find(cut)) >= 0), default=None)] for text in texts]


def stops_of(cfg: RolloutConfig, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return what ends a response, as fields of ``SamplingParams``. ``UserError`` for a token that there is not."""
    ids = token_ids(cfg.stop_token_ids, tokenizer.get_vocab(), "rollout.stop_token_ids") if cfg.stop_token_ids else ()
    return {"stop": cfg.stop, "stop_token_ids": ids, "ignore_eos": cfg.ignore_eos}


def compare_tokenizers(
    student: PreTrainedTokenizerBase,
    teacher: PreTrainedTokenizerBase,
    student_vocab_size: int,
    unasked: Collection[int] = (),
) -> list[str]:
    """Return the differences that matter to the teacher's scores, one sentence each; empty if there are none.

    Compared: the token of every id that the student can emit (below ``student_vocab_size``, the rows of its output
    matrix) and the ids of eos, bos and pad. A larger teacher vocabulary, and ids that only pad the student's matrix,
    are fine. A special token that one side does not define is not a difference, except eos. Ids of ``unasked`` never
    reach the teacher.
    """
    student_tokens = {
        i: token for token, i in student.get_vocab().items() if i < student_vocab_size and i not in unasked
    }
    teacher_tokens = {i: token for token, i in teacher.get_vocab().items()}
    differences = []
    unlike = sorted(i for i, token in student_tokens.items() if teacher_tokens.get(i) != token)
    if unlike:
        listed = ", ".join(f"{i} is {student_tokens[i]!r} / {teacher_tokens.get(i)!r}" for i in unlike[:3])
        differences.append(
            f"{len(unlike)} of {len(student_tokens)} ids mean different tokens (student / teacher): {listed}"
        )
    for name in ("eos", "bos", "pad"):
        ours, theirs = getattr(student, f"{name}_token_id"), getattr(teacher, f"{name}_token_id")
        if ours != theirs and (name == "eos" or None not in (ours, theirs)):
            differences.append(f"{name}_token_id is {ours} for the student and {theirs} for the teacher")
    return differences
