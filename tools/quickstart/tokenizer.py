"""A character tokenizer in Hugging Face format, chat template included."""

from __future__ import annotations

import string

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>", "<user>", "<assistant>")
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def build_tokenizer(more: tuple[str, ...] = (), chat_template: str = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    """One token per character, plus pad, bos, eos, unk, two roles of the chat template and ``more`` special ones."""
    vocabulary = {token: index for index, token in enumerate((*SPECIAL, " ", *string.ascii_lowercase, *more))}
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
