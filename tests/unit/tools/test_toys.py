"""The toys of ``tools/make_toys.py``: what is constructed behaves as its tables say, in transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mopd.conversion.hf.pretrained import load_weights
from mopd.data.tokenizer import load_tokenizer
from tools import make_toys
from tools.toys.grammars import BOTH, EOS, SPECIAL, TOP_K, domains_of
from tools.toys.recipes import SETTINGS
from tools.toys.rewards import no_call, prefix_share


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("toys")
    for toy in SETTINGS:
        make_toys.make(toy, root / toy)
    return root


def rows(root: Path, split: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (root / "models" / f"{split}.jsonl").read_text().splitlines()]


def test_stochastic_teachers_are_as_unsure_as_promised(toys: Path) -> None:
    """On texts that the teacher itself draws, not on its table."""
    for domain in domains_of("stochastic"):
        model, tokenizer = load(toys / "stochastic/models/teachers" / domain.name)
        prompts = [
            row["prompt"] for row in rows(toys / "stochastic", "validation") if row["data_source"] == domain.name
        ]
        tokens_BS = torch.tensor(tokenizer(prompts[:32])["input_ids"])
        torch.manual_seed(0)
        drawn_BS = model.generate(tokens_BS, do_sample=True, top_k=0, max_new_tokens=16)
        assert all(token in domain.words for token in drawn_BS.flatten().tolist())
        logprobs = model(drawn_BS).logits[:, tokens_BS.shape[1] - 1 :].log_softmax(-1)
        entropy = -(logprobs.exp() * logprobs).sum(-1).mean()
        mass = logprobs.exp().topk(16).values.sum(-1).mean()
        assert len(domain.words) >= 512 and 1 < entropy < 4 and 0.6 < mass < 0.95, domain.name


def test_a_call_that_the_teacher_never_makes_decides(toys: Path) -> None:
    """It is far from the top k of the teacher, among the base's first, and ends an answer. On the teacher's top k, and
    in the mass outside, the base is its teacher."""
    (domain,) = domains_of("decision")
    teacher, tokenizer = load(toys / "decision/models/teachers/talk")
    base, _ = load(toys / "decision/models/base")
    assert tokenizer("<call>")["input_ids"] == [domain.call]
    words_BS = torch.tensor(list(domain.words))[:, None]
    of_teacher, of_base = (model(words_BS).logits[:, 0].softmax(-1) for model in (teacher, base))
    assert of_teacher[:, domain.call].max() < 1e-4 and 0.04 < of_base[:, domain.call].mean() < 0.1
    assert (of_base.topk(TOP_K).indices == domain.call).any(1).double().mean() > 0.9
    top = of_teacher.topk(TOP_K)
    held, kept = (probs.gather(1, top.indices) for probs in (of_teacher, of_base))
    assert (kept.sum(1) - held.sum(1)).abs().max() < 1e-3 and (kept / held).log().abs().max() < 0.01
    for model in (teacher, base):
        assert model(torch.tensor([[domain.call]])).logits[0, 0].argmax() == EOS
    assert [no_call(said) for said in ("w1 <call>", "w1 w2", "")] == [0.0, 1.0, 1.0]


@pytest.mark.parametrize("toy", ["long", "conflict", "foreign", "shared"])
def test_each_teacher_and_no_base_gives_the_right_answers(toys: Path, toy: str) -> None:
    base = right(toys / toy, "base")
    for domain in domains_of(toy):
        assert right(toys / toy, f"teachers/{domain.name}")[domain.name] == 1.0
        assert base[domain.name] < 0.5
    asked = {row["prompt"] for row in rows(toys / toy, "validation")}
    assert not asked & {row["prompt"] for row in rows(toys / toy, "train")}


def test_words_of_two_domains_are_followed_by_other_words_in_each() -> None:
    walk, hop = domains_of("shared")
    both = set(walk.words) & set(hop.words)
    assert walk.next_word is not None and hop.next_word is not None
    assert len(both) == BOTH and sum(walk.next_word[word] == hop.next_word[word] for word in both) < BOTH / 2


def test_a_teacher_that_is_right_on_half_of_the_prompts(toys: Path) -> None:
    """Its answers are right from the first word on, or wrong in it."""
    (domain,) = domains_of("half")
    share = right(toys / "half", "teachers/mixed", first=100)["mixed"]
    wrong = [
        row for row in rows(toys / "half", "validation") if number_of(row["prompt"].split()[-1]) in domain.mistaken
    ]
    assert 0.4 < share < 0.6 and share == 1 - len(wrong) / 100
    assert right(toys / "half", "base")["mixed"] < share


def test_what_is_made_twice_is_equal(toys: Path, tmp_path: Path) -> None:
    make_toys.make("conflict", tmp_path)
    made, again = (json.loads((root / "manifest.json").read_text())["models"] for root in (toys / "conflict", tmp_path))
    assert made == again and len(made["files"]) > 10


@pytest.mark.parametrize(
    ("said", "share"), [("w1 w2 w3 w4", 1.0), ("w1 w2 w9 w4", 0.5), ("", 0.0), ("w1 w2", 0.5), ("w1 w2 w3 w4 w5", 1.0)]
)
def test_a_chain_counts_up_to_its_first_mistake(said: str, share: float) -> None:
    assert prefix_share(said, "w1 w2 w3 w4", domain="x") == share


def number_of(word: str) -> int:
    return int(word[1:]) + len(SPECIAL)


def right(root: Path, name: str, first: int = 16) -> dict[str, float]:
    """Share of right greedy answers to the first held-out prompts of each domain."""
    model, tokenizer = load(root / "models" / name)
    shares = {}
    for domain in domains_of(root.name):
        own = [row for row in rows(root, "validation") if row["data_source"] == domain.name][:first]
        tokens_BS = torch.tensor(tokenizer([row["prompt"] for row in own])["input_ids"])
        answers_BS = model.generate(tokens_BS, do_sample=False, max_new_tokens=SETTINGS[root.name][2])
        texts = tokenizer.batch_decode(answers_BS[:, tokens_BS.shape[1] :], skip_special_tokens=True)
        truths = [row["reward_model"]["ground_truth"] for row in own]
        shares[domain.name] = sum(map(str.__eq__, texts, truths)) / len(own)
    return shares


def load(folder: Path) -> tuple[Any, Any]:
    return load_weights(folder, torch.float32)[0].eval(), load_tokenizer(str(folder))
