"""HF -> Megatron -> HF gives back every bit, whatever the layout, family, tying, dtype and vocabulary size.

Each layout starts from the same Hugging Face folders, poisons the fresh model with NaN, loads, exports through the
atomic writer, and the exported folders are compared here. Four ranks run every layout in one start; TP1 x PP1 there has
DP4, so the ranks that must stay silent are exercised too. Not exercised: CUDA, NCCL, TransformerEngine's layer spec
and grouped experts (their names are tested in ``tests/unit/student/test_weights.py``).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from mopd.conversion.hf.reader import HfReader
from tests.fixtures.tiny_models import FAMILIES, make_hf_model, make_tokenizer

LAYOUTS = ("1x1x1", "2x1x1", "1x2x1", "2x2x1")
EXPERT_LAYOUTS = ("1x1x2", "1x1x4", "2x1x2x1", "2x1x2x2", "1x2x2", "2x2x2x1")
"""TP x PP x EP (x ETP)."""
ODD_VOCAB = 61
WITH_EXPERTS = ("qwen3_moe", "mixtral", "deepseek_v2", "deepseek_v3")
THOROUGH = ("llama-tied", "qwen3_moe-tied", "deepseek_v3-tied")
CHECKPOINTS = [f"{family}-{head}" for family in FAMILIES for head in ("tied", "untied")] + [
    "qwen3_moe-mixed",
    "qwen3-bf16",
]


def layouts_of(name: str) -> tuple[str, ...]:
    """Every layout for three checkpoints; for the others one of each dimension, or of all at once where untied."""
    family, kind = name.split("-")
    has_experts = family in WITH_EXPERTS
    if name in THOROUGH:
        return LAYOUTS + (EXPERT_LAYOUTS if has_experts else ())
    if kind == "untied":
        return ("2x2x2x1",) if has_experts else ("2x2x1",)
    return ("2x1x1", "1x2x1", "1x1x2") if has_experts else ("2x1x1", "1x2x1")


PLAN = [(name, layout) for name in CHECKPOINTS for layout in layouts_of(name)]

pytestmark = [pytest.mark.multirank, pytest.mark.slow]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("round_trip")


@pytest.fixture(scope="module")
def sources(folder: Path) -> list[Path]:
    made = []
    for seed, name in enumerate(CHECKPOINTS):
        family, kind = name.split("-")
        mixed = {"decoder_sparse_step": 2} if kind == "mixed" else {}
        source = make_hf_model(
            folder / name, family, seed, vocab_size=ODD_VOCAB, tie_word_embeddings=kind == "tied", **mixed
        )
        make_tokenizer(source)
        if kind == "bf16":
            weights = {name: tensor.bfloat16() for name, tensor in load_file(source / "model.safetensors").items()}
            save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
        made.append(source)
    return made


@pytest.fixture(scope="module")
def exported(folder: Path, sources: list[Path]) -> Path:
    """Folder of all exports."""
    plan = {layout: [name for name, own in PLAN if own == layout] for layout in (*LAYOUTS, *EXPERT_LAYOUTS)}
    root = Path(__file__).parents[3]
    script = Path(__file__).with_name("round_trip_ranks.py")
    torchrun = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTHONPATH": str(root)}
    done = subprocess.run(
        [*torchrun, str(script), str(folder), json.dumps(plan)],
        env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-6000:]
    return folder / "exported"


@pytest.mark.parametrize(("name", "layout"), PLAN)
def test_every_bit_comes_back(folder: Path, exported: Path, name: str, layout: str):
    before, after = HfReader(folder / name), HfReader(exported / f"{name}-{layout}")
    assert after.names == before.names
    for tensor in before.names:
        old, new = before.read(tensor), after.read(tensor)
        assert old.dtype == new.dtype and old.shape == new.shape, tensor
        assert torch.equal(old.view(torch.uint8), new.view(torch.uint8)), tensor


def test_export_keeps_the_other_files_and_loads_in_transformers(folder: Path, exported: Path):
    source, target = folder / "llama-tied", exported / "llama-tied-2x2x1"
    for path in source.iterdir():
        if not path.name.startswith("model"):
            assert (target / path.name).read_bytes() == path.read_bytes(), path.name
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        old, new = (AutoModelForCausalLM.from_pretrained(path)(tokens).logits for path in (source, target))
    assert torch.equal(old, new)
