"""HF -> Megatron -> HF gives back every bit, whatever the layout, family, tying, dtype and vocabulary size.

Each layout starts from the same Hugging Face folders, poisons the fresh model with NaN, loads, exports through the
atomic writer, and the exported folders are compared here. Four ranks run every layout in one start; TP1 x PP1 there has
DP4, so the ranks that must stay silent are exercised too. Not exercised: CUDA, NCCL, TransformerEngine's layer spec
(its names are tested in ``tests/unit/student/test_weights.py``).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from mopd.conversion.hf import HfReader
from tests.fixtures.tiny_models import make_hf_model, make_tokenizer

LAYOUTS = ((1, 1), (2, 1), (1, 2), (2, 2))
ODD_VOCAB = 61
CHECKPOINTS = [f"{family}-{head}" for family in ("llama", "qwen2", "qwen3") for head in ("tied", "untied")]

pytestmark = [pytest.mark.multirank, pytest.mark.slow]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("round_trip")


@pytest.fixture(scope="module")
def sources(folder: Path) -> list[Path]:
    made = []
    for seed, name in enumerate(CHECKPOINTS):
        family, head = name.split("-")
        source = make_hf_model(folder / name, family, seed, vocab_size=ODD_VOCAB, tie_word_embeddings=head == "tied")
        make_tokenizer(source)
        made.append(source)
    bf16 = make_hf_model(folder / "bf16", "qwen3", vocab_size=ODD_VOCAB)
    weights = {name: tensor.bfloat16() for name, tensor in load_file(bf16 / "model.safetensors").items()}
    save_file(weights, bf16 / "model.safetensors", metadata={"format": "pt"})
    return [*made, bf16]


@pytest.fixture(scope="module")
def exported(folder: Path, sources: list[Path]) -> Path:
    """Folder of all exports."""
    layouts = ",".join(f"{tp}x{pp}" for tp, pp in LAYOUTS)
    root = Path(__file__).parents[3]
    script = Path(__file__).with_name("round_trip_ranks.py")
    torchrun = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTHONPATH": str(root)}
    done = subprocess.run(
        [*torchrun, str(script), str(folder / "exported"), layouts, *(str(source) for source in sources)],
        env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-6000:]
    return folder / "exported"


@pytest.mark.parametrize(("tp", "pp"), LAYOUTS)
@pytest.mark.parametrize("name", [*CHECKPOINTS, "bf16"])
def test_every_bit_comes_back(folder: Path, exported: Path, name: str, tp: int, pp: int):
    before, after = HfReader(folder / name), HfReader(exported / f"{name}-tp{tp}-pp{pp}")
    assert after.names == before.names
    for tensor in before.names:
        old, new = before.read(tensor), after.read(tensor)
        assert old.dtype == new.dtype and old.shape == new.shape, tensor
        assert torch.equal(old.view(torch.uint8), new.view(torch.uint8)), tensor


def test_export_keeps_the_other_files_and_loads_in_transformers(folder: Path, exported: Path):
    source, target = folder / "qwen3-tied", exported / "qwen3-tied-tp2-pp2"
    for path in source.iterdir():
        if not path.name.startswith("model"):
            assert (target / path.name).read_bytes() == path.read_bytes(), path.name
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        old, new = (AutoModelForCausalLM.from_pretrained(path)(tokens).logits for path in (source, target))
    assert torch.equal(old, new)
