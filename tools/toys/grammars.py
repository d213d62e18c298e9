"""Teachers and bases that are constructed: which word follows a word, written into the weights of a Qwen3 of one layer.

A teacher's layer adds nothing to the stream, so that its logits are those that the LM head gives to the last word's
embedding: a table. The base has the same embeddings, a table of its own, and a layer with random weights, by which it
can learn to read more than the last word. All models of a toy share one vocabulary of ``w0``, ``w1``, …

==============  ===================  ==================================================================================
toy             domains              what it can tell
==============  ===================  ==================================================================================
``stochastic``  calm, plain, wild    what the tail outside the top k is worth: 512 words each, no right answer
``long``        walk, hop            whether mistakes are followed by others: 60 words, each from the one before it
``conflict``    short, middle, wide  who starves: what follows a word depends on the prompt's first one
``foreign``     near, far            what another origin costs: the base is mostly right about near, never about far
``decision``    talk                 what a token outside the top k decides: the base is its teacher, but for a call
                                     that has a part of the mass outside
``shared``      walk, hop            what a merge gives where teachers disagree: a fifth of the words is in both domains
``half``        mixed                what a gate gives: the teacher is right after half of the words, and answers stay
                                     in their half
==============  ===================  ==================================================================================
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from tools.toys.rewards import CALL

SPECIAL = ("<pad>", "<eos>", "<unk>")
EOS = 1
HIDDEN = 96
SURE, UNSURE = 8.0, 4.0
"""Logit of the word that follows, others 0: of a teacher (0.97 of the mass), and of the base (about 0.4)."""
ROWS = {"train": 4000, "validation": 100}
PROMPT_WORDS = 4
CHAIN = 60
"""Words of an answer of ``long``."""
BOTH = 9
"""Words that both domains of ``shared`` have, each followed by words of its own choice."""
OUTSIDE = -8.0
"""Logit of words of other domains."""
TOP_K, CALLED = 16, 0.3
"""The recipes' ``loss.top_k``, and the base's share of ``CALL``, the token that decides, in the mass outside the
teacher's top k."""


@dataclass(frozen=True, kw_only=True)
class Domain:
    """One domain: whom its words follow, and what its prompts are."""

    name: str
    words: range
    """Ids of its words."""
    next_word: Mapping[int, int] | None = None
    """The word (or ``EOS``) after each word; ``None``: a random distribution, in ``logits``."""
    mistaken: Mapping[int, int] = field(default_factory=dict)
    """The word that the teacher takes for the next one, where it is wrong."""
    starts: Sequence[int]
    """Words that may end a prompt."""
    length: int
    """Words of an answer that no ``EOS`` ends."""
    mark: int | None = None
    """Word that begins every prompt."""
    call: int | None = None
    """Id of ``CALL``, which ends an answer and stands in none of its teacher's."""


def domains_of(toy: str) -> list[Domain]:
    """Return the domains of a toy; equal calls return equal ones."""
    rng = random.Random(toy)
    first = len(SPECIAL)
    made = []
    for number, (name, size) in enumerate(SIZES[toy].items()):
        if toy == "conflict":
            words = range(first + len(SIZES[toy]), first + len(SIZES[toy]) + 40)
            path = rng.sample(list(words), len(words))
            follows = dict(zip(path, (*path[1:], EOS), strict=True))
            starts, mark = path[len(path) - 1 - size : len(path) - 1 - size // 2], first + number
            made.append(Domain(name=name, words=words, next_word=follows, starts=starts, length=size, mark=mark))
            continue
        if toy == "shared":
            words, mark = (
                range(first + 2 + number * (size - BOTH), first + 2 + number * (size - BOTH) + size),
                first + number,
            )
            follows = {word: rng.choice(words) for word in words}
            made.append(Domain(name=name, words=words, next_word=follows, starts=words, length=12, mark=mark))
            continue
        words = range(first, first := first + size)
        if toy == "half":
            halves = [words[: size // 2], words[size // 2 :]]
            follows = {word: rng.choice(half) for half in halves for word in half}
            mistaken = {
                word: rng.choice([other for other in halves[1] if other != follows[word]]) for word in halves[1]
            }
            made.append(Domain(name=name, words=words, next_word=follows, mistaken=mistaken, starts=words, length=4))
            continue
        table = None if name in SPREADS else {word: rng.choice(words) for word in words}
        length = {"stochastic": 16, "long": CHAIN, "foreign": 12, "decision": 32}[toy]
        call = words.stop if toy == "decision" else None
        made.append(Domain(name=name, words=words, next_word=table, starts=words, length=length, call=call))
    return made


SIZES: Mapping[str, Mapping[str, int]] = {
    "stochastic": {"calm": 512, "plain": 512, "wild": 512},
    "long": {"walk": 45, "hop": 45},
    "conflict": {"short": 2, "middle": 10, "wide": 30},
    "foreign": {"near": 40, "far": 40},
    "decision": {"talk": 64},
    "shared": {"walk": 45, "hop": 45},
    "half": {"mixed": 40},
}
"""Toy -> domain -> its words, or, of ``conflict``, those of its longest answers."""
SPREADS = {"calm": 4.0, "plain": 3.2, "wild": 2.5, "talk": 1.5}
"""Standard deviation of the logits of a teacher without right answers: the smaller, the more words share the mass."""
KNOWN = {"long": 0.5, "shared": 0.5, "near": 0.7, "far": 0.0}
"""Share of the words after which the base is right."""


def make(toy: str, out: Path) -> dict[str, Any]:
    """Write base, teachers and prompts. Returns each teacher's entropy in nats and the mass of its top 16 words."""
    transformers.logging.disable_progress_bar()
    domains, rng = domains_of(toy), torch.Generator().manual_seed(0)
    size = max(domain.call or max(domain.words) for domain in domains) + 1
    tokenizer = build_tokenizer(size, has_call=toy == "decision")
    embeddings_VH = torch.randn(size, HIDDEN, generator=rng)
    if toy == "stochastic":  # a word's domain has a direction of its own, so that one head can hold all tables
        for number, domain in enumerate(domains):
            embeddings_VH[domain.words.start : domain.words.stop, : len(domains)] = 0
            embeddings_VH[domain.words.start : domain.words.stop, number] = 4.0
    embeddings_VH /= embeddings_VH.square().mean(1, keepdim=True).sqrt()  # so that the last norm changes nothing
    tables = {domain.name: _table(domain, embeddings_VH, rng) for domain in domains}
    facts = {}
    for domain in domains:
        head_VH = _head(embeddings_VH, tables[domain.name])
        _save(_model(embeddings_VH, head_VH, None), tokenizer, out / "teachers" / domain.name)
        probs = (embeddings_VH[list(domain.words)] @ head_VH.T).softmax(-1)
        entropy = -(probs * probs.clamp(min=1e-30).log()).sum(-1).mean().item()
        top16 = probs.topk(16).values.sum(-1).mean().item()
        facts[domain.name] = {"entropy": round(entropy, 2), "top16": round(top16, 3)}
    for domain in domains:
        if domain.mistaken:  # the base has no part in the teacher's mistakes
            tables[domain.name] = _table(replace(domain, mistaken={}), embeddings_VH, rng)
    known = torch.stack([_base_table(toy, domain, tables[domain.name], rng) for domain in domains])
    # The base knows the mean of the tables of the domains that have a word.
    rows = _rows_of(domains, size)
    shares = (rows / rows.sum(0).clamp(min=1))[:, :, None]
    known = known.mean(0) if toy == "conflict" else (known * shares).sum(0)
    seed = None if toy == "decision" else 0  # without a layer that draws it away from its teacher
    _save(_model(embeddings_VH, _head(embeddings_VH, known), seed), tokenizer, out / "base")
    _write_prompts(toy, domains, out)
    return facts


def build_tokenizer(size: int, *, has_call: bool = False) -> PreTrainedTokenizerFast:
    """One token per word, words apart by spaces; with ``has_call`` the last one is ``CALL``."""
    names = [*SPECIAL, *(f"w{i}" for i in range(size - len(SPECIAL)))]
    words = {word: i for i, word in enumerate((*names[:-1], CALL) if has_call else names)}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", model_max_length=128
    )


def _rows_of(domains: Sequence[Domain], size: int) -> Tensor:
    """Return 1 for each domain's own words and call, [domains, V]."""
    own = [{*domain.words, domain.call} for domain in domains]
    return torch.tensor([[float(word in words) for word in range(size)] for words in own])


def _table(domain: Domain, embeddings_VH: Tensor, rng: torch.Generator) -> Tensor:
    """Return a teacher's logits after each word, [V, V]. After words of other domains it goes back to its own."""
    size, own = len(embeddings_VH), slice(domain.words.start, domain.words.stop)
    table = torch.full((size, size), OUTSIDE)
    if domain.next_word is None:
        logits = embeddings_VH @ torch.randn(HIDDEN, len(domain.words), generator=rng)
        table[:, own] = logits / logits.std() * SPREADS[domain.name]
        if domain.call is not None:
            table[domain.call] = OUTSIDE
            table[domain.call, EOS] = SURE
        return table
    table[:, own] = 0.0
    for word, follows in (dict(domain.next_word) | dict(domain.mistaken)).items():
        table[word, follows] = SURE
    return table


def _base_table(toy: str, domain: Domain, table: Tensor, rng: torch.Generator) -> Tensor:
    """Return what the base believes: a blurred table of the teacher, or another word after those it does not know."""
    if domain.next_word is None:
        if domain.call is None:
            return torch.where(table == OUTSIDE, table, 0.6 * table)
        base, words = table.clone(), list(domain.words)
        top = table[words].log_softmax(1).topk(TOP_K)
        base[words] = table[words].log_softmax(1) + math.log(1 - CALLED)
        base[words, domain.call] = math.log(CALLED) + (1 - top.values.exp().sum(1)).log()
        base[words] = base[words].scatter(1, top.indices, top.values)
        return base
    size, blurred = len(table), table * (1.0 if toy == "foreign" else UNSURE / SURE)
    is_known = torch.rand(size, generator=rng) < KNOWN.get(domain.name, KNOWN.get(toy, 1.0))
    others = torch.randint(domain.words.start, domain.words.stop, (size,), generator=rng)
    if toy == "half":  # rewards find the right word, as the second one, where the teacher is wrong
        can_find = torch.tensor([word in domain.mistaken for word in range(size)])
        return torch.where(can_find[:, None], blurred, blurred.clamp(max=0)).scatter(1, others[:, None], UNSURE + 0.5)
    return torch.where(is_known[:, None], blurred, blurred[others])  # it takes the word for another


def _head(embeddings_VH: Tensor, table_VV: Tensor) -> Tensor:
    """Return the LM head, [V, HIDDEN], that gives each word's embedding the logits of its row, as nearly as it can."""
    solved: Tensor = torch.linalg.lstsq(embeddings_VH.double(), table_VV.double(), driver="gelsd").solution
    return solved.T.float()


def _model(embeddings_VH: Tensor, head_VH: Tensor, seed: int | None) -> Qwen3ForCausalLM:
    """Return a model of these tables; ``seed`` draws a base's layer, ``None`` makes a teacher's that adds nothing."""
    torch.manual_seed(seed or 0)
    config = Qwen3Config(
        vocab_size=len(embeddings_VH),
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=0,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        initializer_range=0.02 if seed is None else 0.05,
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = EOS, 0
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(embeddings_VH)
        model.lm_head.weight.copy_(head_VH)
        if seed is None:
            for layer in model.model.layers:
                layer.self_attn.o_proj.weight.zero_()
                layer.mlp.down_proj.weight.zero_()
    return model


def _save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _write_prompts(toy: str, domains: Sequence[Domain], out: Path) -> None:
    """Write ``train.jsonl`` and ``validation.jsonl``; no prompt stands in both."""
    seen: set[str] = set()
    for split in ("validation", "train"):
        rng = random.Random(f"{toy}/{split}")
        lines: list[str] = []
        while len(lines) < ROWS[split] * len(domains):
            domain = domains[len(lines) % len(domains)]
            inner = [rng.choice(domain.words) for _ in range(PROMPT_WORDS - 1)]
            prompt = [*([domain.mark] if domain.mark is not None else []), *inner, rng.choice(domain.starts)]
            text = _text(prompt)
            if split == "train" and text in seen:
                continue
            seen.add(text)
            truth = {"ground_truth": _text(_answer(domain, prompt[-1]))}
            lines.append(json.dumps({"data_source": domain.name, "prompt": text, "reward_model": truth}))
        (out / f"{split}.jsonl").write_text("\n".join(lines) + "\n")


def _answer(domain: Domain, word: int) -> list[int]:
    answer: list[int] = []
    while domain.next_word is not None and len(answer) < domain.length and (word := domain.next_word[word]) != EOS:
        answer.append(word)
    return answer


def _text(words: Sequence[int]) -> str:
    return " ".join(f"w{word - len(SPECIAL)}" for word in words)
