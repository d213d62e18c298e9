"""Supervised training of a tiny Qwen3 on questions and answers, in plain PyTorch. Shapes: B questions, S tokens."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from tools.quickstart.tasks import Question, questions

SHORT = (2, 4)
"""Letters of an input that a model answers by itself, where it is shown the answers of longer ones."""
IGNORED = -100
"""Label of tokens without a loss (cross_entropy's ``ignore_index``)."""


@dataclass(frozen=True, slots=True)
class Phase:
    """One stretch of supervised training."""

    domains: tuple[str, ...]
    lengths: tuple[int, int]
    steps: int
    batch_size: int
    lr: float
    seed: str
    shows_answers: bool = False
    """Whether every second prompt ends with its answer, which the model learns to copy."""


def new_model(tokenizer: PreTrainedTokenizerFast, shape: dict[str, int], seed: int) -> Qwen3ForCausalLM:
    """A Qwen3 with fresh weights; ``shape`` holds the sizes of its config."""
    torch.manual_seed(seed)
    options: dict[str, Any] = {"max_position_embeddings": 128, **shape}
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.05,
        dtype="float32",
        **options,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config.do_sample = True
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model


def prompt_ids(tokenizer: PreTrainedTokenizerFast, prompt: str) -> list[int]:
    """Token ids of a one-message chat, ready for the assistant's answer."""
    messages = [{"role": "user", "content": prompt}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def encode(tokenizer: PreTrainedTokenizerFast, batch: Sequence[Question]) -> tuple[Tensor, Tensor]:
    """``pad_rows`` of questions, each a one-message chat."""
    pairs = [(prompt_ids(tokenizer, question.prompt), question.answer) for question in batch]
    return pad_rows(tokenizer, pairs)


def pad_rows(tokenizer: PreTrainedTokenizerFast, pairs: Sequence[tuple[list[int], str]]) -> tuple[Tensor, Tensor]:
    """Right-padded ``(tokens, labels)`` of prompt ids with their answers, both [B, S] int64.

    A label is the next token; answers and eos only.
    """
    rows = []
    for prompt, text in pairs:
        answer = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        rows.append((prompt + answer, [IGNORED] * (len(prompt) - 1) + answer + [IGNORED]))
    width = max(len(tokens) for tokens, _ in rows)
    pad = tokenizer.pad_token_id
    tokens_BS = torch.tensor([tokens + [pad] * (width - len(tokens)) for tokens, _ in rows])
    labels_BS = torch.tensor([labels + [IGNORED] * (width - len(labels)) for _, labels in rows])
    return tokens_BS, labels_BS


def _mixed(phase: Phase, held_out: frozenset[str]) -> Iterator[Question]:
    """Questions of the phase's domains in turn, without those kept for validation."""
    streams = itertools.cycle([questions(domain, phase.lengths, phase.seed) for domain in phase.domains])
    plain = (question for question in (next(stream) for stream in streams) if question.prompt not in held_out)
    if not phase.shows_answers:
        yield from plain
    short = _mixed(replace(phase, lengths=SHORT, shows_answers=False), held_out)
    for question in plain:
        yield replace(question, prompt=f"{question.prompt} {question.answer}")
        yield next(short)


def learning_rate(step: int, steps: int, lr: float) -> float:
    """Warm-up over the first twentieth, then a cosine down to a twentieth of the peak ``lr``."""
    warmup = max(1, steps // 20)
    if step < warmup:
        return lr * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return lr * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done)))


def train(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    phase: Phase,
    held_out: frozenset[str],
    report: Callable[[int, float], None],
) -> float:
    """Train ``model`` in place; ``report(step, loss)`` is called after each step. Returns seconds taken."""
    stream = _mixed(phase, held_out)
    batches = (encode(tokenizer, list(itertools.islice(stream, phase.batch_size))) for _ in range(phase.steps))
    return fit(model, map(as_inputs, batches), steps=phase.steps, lr=phase.lr, report=report)


def as_inputs(batch: tuple[Tensor, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
    """What ``pad_rows`` made, as ``fit`` takes it."""
    tokens_BS, labels_BS = batch
    return {"input_ids": tokens_BS}, labels_BS


def fit(
    model: nn.Module,
    batches: Iterable[tuple[Mapping[str, Tensor], Tensor]],
    *,
    steps: int,
    lr: float,
    report: Callable[[int, float], None],
) -> float:
    """``train`` on ``steps`` batches: arguments of the model's forward, and labels as those of ``pad_rows``."""
    started = time.monotonic()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.01)
    model.train()
    for step, (inputs, labels_BS) in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps, lr)
        # Right padding and a causal mask: no answer token can see the padding, so no attention mask is needed.
        logits_BSV = model(**inputs, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits_BSV.flatten(0, 1), labels_BS.flatten(), ignore_index=IGNORED)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        report(step + 1, loss.item())
    return time.monotonic() - started


@torch.no_grad()
def exact_match(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, asked: Sequence[Question]) -> float:
    """Share of questions whose greedy answer is exactly right."""
    model.eval()
    prompts = [prompt_ids(tokenizer, question.prompt) for question in asked]
    width = max(map(len, prompts))
    tokens_BS = torch.tensor([[tokenizer.pad_token_id] * (width - len(row)) + row for row in prompts])
    visible_BS = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in prompts])
    room = max(len(question.answer) for question in asked) + 2
    output = model.generate(
        input_ids=tokens_BS, attention_mask=visible_BS, max_new_tokens=room, do_sample=False, temperature=None
    )
    answers = tokenizer.batch_decode(output[:, width:], skip_special_tokens=True)
    return sum(answer == question.answer for answer, question in zip(answers, asked, strict=True)) / len(asked)
