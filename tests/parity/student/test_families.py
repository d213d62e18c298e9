"""Students of families that differ from the ones of the other tests by their rows alone.

Invariant: at TP1, TP2, TP2+SP, PP2 and, with experts, EP2 log-probs equal transformers' (1e-4, fp32), and three
supervised steps have the loss and the gradient norm of plain PyTorch on transformers' model (1e-5), packed or padded.
``make test`` runs each family in one layout of two ranks, ``make families`` in all.
"""

from __future__ import annotations

import os
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from mopd.conversion.hf.reader import WEIGHTS_FILE
from tests.fixtures.tiny_models import add_mtp, make_hf_model
from tests.parity.student import weight_cases
from tests.parity.student.harness import run_ranks
from tests.parity.student.ranks import ADAM_EPS
from tests.parity.student.samples import make_samples
from tests.parity.student.test_layouts import assert_logprobs, assert_same_step
from tests.parity.student.test_weights import check, vllm_server

pytestmark = [pytest.mark.multirank, pytest.mark.slow]

Results = dict[str, Any]
IS_WHOLE = os.environ.get("MOPD_FAMILIES") == "all"
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 16}
OLMO_ROPES = {"sliding_attention": {"rope_type": "default", "rope_theta": 500000.0}, "full_attention": YARN}
GEMMA_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
}
MODELS: dict[str, dict[str, Any]] = {
    "seed_oss": {"family": "seed_oss", "tie_word_embeddings": False},
    "glm4_moe": {"family": "glm4_moe", "tie_word_embeddings": False},
    "phi3": {"family": "phi3", "tie_word_embeddings": False},
    "shared_head": {"family": "qwen2", "num_kv_heads": 1, "rope_parameters": YARN},
    "shared_head_norms": {"family": "qwen3", "num_kv_heads": 1},
    "gemma3": {"family": "gemma3_text", "num_layers": 4, "rope_parameters": GEMMA_ROPES},
    "gpt_oss": {
        "family": "gpt_oss",
        "num_layers": 4,
        "tie_word_embeddings": False,
        "rope_parameters": {**YARN, "truncate": False},
    },
    "minimax_m2": {"family": "minimax_m2", "tie_word_embeddings": False},
    "olmo3": {"family": "olmo3", "num_layers": 4, "tie_word_embeddings": False, "rope_parameters": OLMO_ROPES},
}
"""Those of a shared head have one key/value head, which two tensor-parallel ranks share."""
ONE = {"tp": 1, "pp": 1, "dp": 1, "sp": False}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": ONE,
    "tp2": {**ONE, "tp": 2},
    "tp2_sp": {**ONE, "tp": 2, "sp": True},
    "pp2": {**ONE, "pp": 2},
    "ep2": {**ONE, "dp": 2, "ep": 2},
    "tp2_sp_ep2": {**ONE, "tp": 2, "sp": True, "ep": 2, "etp": 1},
    "cp2": {**ONE, "cp": 2},
    "recompute": {**ONE, "tp": 2, "sp": True, "recompute": "full"},
}
STEPS = {"objective": "sft_on_teacher", "logprobs": True, "steps": 3}
FEW = {
    "seed_oss": "tp2_sp", "glm4_moe": "tp2_sp", "phi3": "tp2", "shared_head": "tp2", "shared_head_norms": "tp2_sp",
    "gemma3": "recompute", "gpt_oss": "tp2_sp", "olmo3": "tp2", "minimax_m2": "tp2_sp",
}  # fmt: skip


def _layouts_of(name: str) -> list[str]:
    """Experts have ranks of their own in one, and need sequence parallelism; windows meet parts of a sequence."""
    if not IS_WHOLE:
        return [FEW[name]]
    others = {
        "glm4_moe": ("tp2", "cp2", "recompute"), "gemma3": ("ep2",), "gpt_oss": ("tp2",), "olmo3": ("ep2",),
        "minimax_m2": ("tp2",),
    }.get(name, ("ep2", "cp2", "recompute"))  # fmt: skip
    if name != "gpt_oss":
        others = (*others, "tp2_sp_ep2")
    return [layout for layout in LAYOUTS if layout not in others]


CASES = [(name, layout) for name in MODELS for layout in _layouts_of(name)]
PADDED = [
    (name, layout) for name, layout in CASES if IS_WHOLE or name in ("glm4_moe", "shared_head", "gemma3", "gpt_oss")
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("families")
    made = {name: make_hf_model(folder / name, **keys) for name, keys in MODELS.items()}
    add_mtp(made["glm4_moe"])
    return made


def _case(models: dict[str, Path], name: str, layout: str) -> dict[str, Any]:
    return {**LAYOUTS[layout], "model": str(models[name]), **({"etp": 1} if name == "gpt_oss" else {})}


@pytest.fixture(scope="module")
def ranks(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Results:
    cases = {f"{name}/{layout}": {**_case(models, name, layout), **STEPS} for name, layout in CASES}
    folder = models["shared_head"]
    cases["shared_head/tp2/untrained"] = {
        **LAYOUTS["tp2"], "model": str(folder), "save_hf": str(folder.with_name("untrained"))
    }  # fmt: skip
    cases["glm4_moe/tp2_sp"]["save_hf"] = str(models["glm4_moe"].with_name("exported"))
    cases |= {
        f"{name}/{layout}/padded": {**_case(models, name, layout), **STEPS, "packing": False} for name, layout in PADDED
    }
    results: Results = {}
    for size in (1, 2):
        own = {name: case for name, case in cases.items() if (size == 1) == (name.split("/")[1] == "one")}
        if own:
            results |= run_ranks(size, {"model": "unused", "cases": own}, tmp_path_factory.mktemp("ranks"))
    return results


@lru_cache
def supervised(folder: Path, lrs: tuple[float, ...], frozen: tuple[str, ...] = ()) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step of plain PyTorch on transformers' model, with those learning rates.
    ``frozen``: ends of names of weights that are not trained."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for name, weight in model.named_parameters():
        weight.requires_grad_(not name.endswith(frozen or ("\n",)))
    trained = [p for p in model.parameters() if p.requires_grad]
    weights, plain = ([p for p in trained if (p.dim() > 1) == is_weight] for is_weight in (True, False))
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=ADAM_EPS)
    seen = []
    for step, lr in enumerate(lrs, start=1):
        drawn: dict[str, Any] = {"vocab_size": model.config.vocab_size, "top_k": 8, "seed": step}
        metas, fields = make_samples(16, first_id=100 * step, **drawn)
        total = torch.zeros(())
        for meta, tokens, mask in zip(metas, fields["tokens"], fields["loss_mask"], strict=True):
            rows, wanted = model(tokens[None]).logits[0, meta.prompt_length - 1 : -1], tokens[meta.prompt_length :]
            total += torch.nn.functional.cross_entropy(rows[mask], wanted[mask], reduction="sum")
        loss = total / sum(meta.num_loss_tokens for meta in metas)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        seen.append((loss.item(), float(norm)))
    return seen


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_three_steps_equal_plain_pytorch(ranks: Results, models: dict[str, Path], name: str, layout: str) -> None:
    assert_logprobs(ranks[f"{name}/{layout}"], models[name])
    steps = ranks[f"{name}/{layout}"]["steps"]
    expected = supervised(models[name], tuple(step["lr"] for step in steps))
    for step, (loss, norm) in zip(steps, expected, strict=True):
        assert step["weighted_loss/math"] + step["weighted_loss/code"] == pytest.approx(loss, rel=1e-5)
        assert step["grad_norm"] == pytest.approx(norm, rel=1e-4)  # in fp32, see Case.exact_grad_norm
        # Experts that tensor-parallel or expert-parallel ranks spread have an optimizer of their own.
        if "ep2" not in layout and (name != "gpt_oss" or LAYOUTS[layout]["tp"] == 1):
            assert step["exact_grad_norm"] == pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize(("name", "layout"), PADDED)
def test_packed_sequences_equal_padded_ones(ranks: Results, name: str, layout: str) -> None:
    packed, padded = ranks[f"{name}/{layout}"], ranks[f"{name}/{layout}/padded"]
    assert packed["is_packed"] == [True] and padded["is_packed"] == [False]
    for step, expected in zip(packed["steps"], padded["steps"], strict=True):
        assert_same_step(step, expected)


def test_a_shared_head_comes_back_bit_by_bit(ranks: Results, models: dict[str, Path]) -> None:
    before, after = (load_file(models["shared_head"].with_name(n) / WEIGHTS_FILE) for n in ("shared_head", "untrained"))
    assert ranks["shared_head/tp2/untrained"]["steps"] == [] and before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_an_export_has_what_predicts_further_tokens(ranks: Results, models: dict[str, Path]) -> None:
    """Multi-token prediction: copied bit by bit; all else is trained."""
    before, after = (load_file(models["glm4_moe"].with_name(name) / WEIGHTS_FILE) for name in ("glm4_moe", "exported"))
    assert before.keys() == after.keys()
    same = [name for name in before if torch.equal(before[name], after[name])]
    assert [name for name in same if "bias" not in name] == sorted(n for n in before if n.startswith("model.layers.2."))


@pytest.mark.vllm
@pytest.mark.timeout(900)
@pytest.mark.skipif(not IS_WHOLE or find_spec("vllm") is None, reason="make families, with vLLM")
@pytest.mark.parametrize(
    ("family", "keys"),
    [
        ("seed_oss", {}),
        ("phi3", {"hidden_size": 128}),
        ("gemma3_text", {"num_layers": 4}),
        ("olmo3", {"num_layers": 4}),
    ],
)
def test_vllm_follows_the_student(tmp_path: Path, family: str, keys: dict[str, Any]) -> None:
    """In fp32, before and after updates by each way; heads of 32 channels, as vLLM's attention on a CPU wants them."""
    model = str(make_hf_model(tmp_path / "model", family, scale=0.1, **keys))
    with vllm_server(model, tmp_path, 1) as url:
        case = weight_cases.case_of(model, "tp2", urls=[url])
        found = run_ranks(2, {"model": model, "cases": {"sends": case}}, tmp_path / "ranks", timeout_s=850)
    check(found["sends"], atol=1e-3)
