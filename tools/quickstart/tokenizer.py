"""Two tokenizers in Hugging Face format, chat templates included: of characters, and of bytes and pairs of letters."""

from __future__ import annotations

import random
import string

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>", "<user>", "<assistant>")
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def build_tokenizer(
    more: tuple[str, ...] = (), chat_template: str = CHAT_TEMPLATE, characters: str = ""
) -> PreTrainedTokenizerFast:
    """One token per letter and for each of ``characters``, plus pad, bos, eos, unk, two roles of the chat template and
    ``more`` special ones."""
    tokens = (*SPECIAL, " ", *string.ascii_lowercase, *more, *characters)
    vocabulary = {token: index for index, token in enumerate(tokens)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=["<user>", "<assistant>", *more],
        clean_up_tokenization_spaces=False,
        model_max_length=128,
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def build_other_tokenizer(num_pairs: int = 64) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with special tokens of its own: the 256 bytes, and ``num_pairs`` pairs of letters that
    are one token each."""
    letters = string.ascii_lowercase[:16]
    pairs = random.Random(0).sample([(one, other) for one in letters for other in letters], num_pairs)
    texts = (*sorted(pre_tokenizers.ByteLevel.alphabet()), *(one + other for one, other in pairs))
    special = ("<|pad|>", "<|start|>", "<|end|>", "<|user|>", "<|assistant|>")
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate((*special, *texts))}, pairs))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<|pad|>",
        bos_token="<|start|>",
        eos_token="<|end|>",
        additional_special_tokens=["<|user|>", "<|assistant|>"],
        clean_up_tokenization_spaces=False,
        model_max_length=128,
    )
    tokenizer.chat_template = CHAT_TEMPLATE.replace("<{{ message['role'] }}>", "<|{{ message['role'] }}|>").replace(
        "<assistant>", "<|assistant|>"
    )
    return tokenizer
