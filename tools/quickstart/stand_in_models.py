"""Train one stand-in (``tools/make_stand_ins.py``), save it as a Hugging Face folder and measure it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from mopd.conversion.hf.pretrained import load_weights
from tools.make_stand_ins import KINDS, Exercise, exercises
from tools.quickstart.models import progress
from tools.quickstart.tokenizer import CHAT_TEMPLATE, SPECIAL
from tools.quickstart.training import as_inputs, fit, new_model, pad_rows, prompt_ids

TEXTS = 2000
"""Exercises from which the tokenizer learns its words."""
SHARES = {"gsm8k": 3, "mbpp": 1}
"""Of a batch: sums have to be learnt one by one."""
SLACK = 8
"""Tokens beyond the longest right answer that a measured one may have."""


def build_tokenizer(size: int) -> PreTrainedTokenizerFast:
    """Byte-level pairs, one token per digit; it reads any text and gives it back."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    texts = [
        text
        for domain in KINDS
        for one in itertools.islice(exercises(domain, "words"), TEXTS)
        for text in (one.prompt, one.answer)
    ]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=list(SPECIAL), initial_alphabet=alphabet)
    backend.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        additional_special_tokens=["<user>", "<assistant>"],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


@contextmanager
def _one_thread() -> Iterator[None]:
    """A step of such a model is too short to be shared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class StandInMaker:
    """Trains with one set of numbers and measures on one set of exercises (by domain)."""

    def __init__(
        self,
        validation: Mapping[str, Sequence[Exercise]],
        *,
        seed: int,
        shape: dict[str, int],
        vocabulary_size: int,
        batch_size: int,
        lr: float,
    ) -> None:
        transformers.logging.disable_progress_bar()
        self._tokenizer = build_tokenizer(vocabulary_size)
        self._validation = validation
        self._held_out = frozenset(one.prompt for made in validation.values() for one in made)
        self._seed = seed
        self._shape = shape
        self._batch_size = batch_size
        self._lr = lr

    def make(self, out: Path, start: Path | None, domains: tuple[str, ...], steps: int) -> dict[str, Any]:
        """Train on ``domains`` from the folder ``start``, or on their mistaken answers from nothing; save into ``out``.

        Returns the share of right greedy answers by domain.
        """
        with _one_thread():
            return self._make(out, start, domains, steps)

    def _make(self, out: Path, start: Path | None, domains: tuple[str, ...], steps: int) -> dict[str, Any]:
        if start is None:
            model = new_model(self._tokenizer, self._shape, self._seed)
        else:
            model, _ = load_weights(start, torch.float32)
        with progress(out.name.removeprefix(".building-models-"), steps) as report:
            batches = map(as_inputs, self._batches(domains, steps, is_base=start is None))
            fit(model, batches, steps=steps, lr=self._lr, report=report)
        model.save_pretrained(out)
        self._tokenizer.save_pretrained(out)
        return {"right": {domain: self._share(model, made) for domain, made in self._validation.items()}}

    def _batches(self, domains: tuple[str, ...], steps: int, *, is_base: bool) -> Iterator[tuple[Tensor, Tensor]]:
        """Prompts as a chat and as plain text, each as likely: data sets come in both forms."""
        seed = "base" if is_base else "+".join(domains)
        streams = {domain: exercises(domain, seed, self._held_out) for domain in domains}
        shares = [SHARES[domain] for domain in domains]
        rng = random.Random(seed)
        for _ in range(steps):
            made = [next(streams[domain]) for domain in rng.choices(domains, shares, k=self._batch_size)]
            pairs = [(self._prompt(one, rng.random() < 0.5), one.mistaken if is_base else one.answer) for one in made]
            yield pad_rows(self._tokenizer, pairs)

    def _prompt(self, one: Exercise, is_chat: bool) -> list[int]:
        if is_chat:
            return prompt_ids(self._tokenizer, one.prompt)
        ids: list[int] = self._tokenizer(one.prompt)["input_ids"]
        return ids

    @torch.no_grad()
    def _share(self, model: Qwen3ForCausalLM, made: Sequence[Exercise]) -> float:
        model.eval()
        right = 0
        for is_chat in (True, False):
            prompts = [self._prompt(one, is_chat) for one in made]
            width = max(map(len, prompts))
            pad = self._tokenizer.pad_token_id
            tokens_BS = torch.tensor([[pad] * (width - len(row)) + row for row in prompts])
            visible_BS = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in prompts])
            room = max(len(self._tokenizer(one.answer)["input_ids"]) for one in made) + SLACK
            output = model.generate(
                input_ids=tokens_BS, attention_mask=visible_BS, max_new_tokens=room, do_sample=False, temperature=None
            )
            answers = self._tokenizer.batch_decode(output[:, width:], skip_special_tokens=True)
            right += sum(answer == one.answer for answer, one in zip(answers, made, strict=True))
        return right / (2 * len(made))
