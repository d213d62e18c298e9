"""Planned memory of the trainer beside that of real Megatron students, rank by rank, at seven layouts (interleaved and
uneven stages and states in host memory among them), and with a vision tower frozen and trained beside fewer layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mopd.conversion.models.reading import read_dims
from mopd.planning.memory.activations import HeadShape
from mopd.planning.memory.shards import BYTES, average_bytes, offloaded_bytes, shard, tensor_bytes
from tests.fixtures.tiny_models import make_hf_model
from tests.fixtures.vision import make_vision_model
from tests.parity.student.harness import run_ranks
from tests.parity.student.ranks import make_recipe

pytestmark = pytest.mark.timeout(3600)  # more than a start of ranks may take

SIZES: dict[str, Any] = {"hidden_size": 128, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32, "ffn_size": 256}
VOCAB_SIZE = 24_001
"""Size at which logits outweigh everything else in the head, and no multiple of a tensor-parallel degree."""
MODELS = {
    "dense": {"family": "qwen3", "num_layers": 4, "tie_word_embeddings": False},
    "tied": {"family": "qwen3", "num_layers": 4, "tie_word_embeddings": True},
    "experts": {"family": "qwen3_moe", "num_layers": 2, "tie_word_embeddings": False},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "TP2": {"model": "dense", "tp": 2, "pp": 1, "dp": 2, "sp": False, "distributed_optimizer": False, "ema": 0.9},
    "PP2": {"model": "dense", "tp": 1, "pp": 2, "last_stage_layers": 1, "dp": 2, "sp": False, "dtype": "bfloat16"},
    "DP4 distributed optimizer": {"model": "dense", "tp": 1, "pp": 1, "dp": 4, "sp": False, "head_mib": 1},
    "TP2xPP2": {"model": "dense", "tp": 2, "pp": 2, "dp": 1, "sp": True},
    "EP2": {"model": "experts", "tp": 1, "pp": 1, "dp": 4, "sp": False, "ep": 2, "offload": 1.0, "ema": 0.9},
    "tied": {"model": "tied", "tp": 1, "pp": 2, "vp": 2, "dp": 2, "sp": False},
    "recompute": {"model": "dense", "tp": 1, "pp": 1, "dp": 4, "sp": False, "dtype": "bfloat16", "recompute": "full"},
}
CASES = {name: {"micro_batch_size": 16, **case} for name, case in LAYOUTS.items()}
TOWERS: dict[str, dict[str, Any]] = {
    "tower frozen": {"tp": 2, "pp": 2, "dp": 1, "sp": True, "freeze": "tower_and_merger"},
    "tower trained": {"tp": 1, "pp": 2, "dp": 2, "sp": False, "freeze": "none", "first_stage_layers": 1},
}
PARTS = ("weights", "gradients", "optimizer", "offloaded", "averages")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    made = {
        name: str(make_hf_model(root / name, vocab_size=VOCAB_SIZE, **{**SIZES, **model}))
        for name, model in MODELS.items()
    }
    (root / "rows.jsonl").write_text('{"prompt": "a", "answer": "b", "domain": "math"}\n')
    return {**made, "vision": str(make_vision_model(root / "vision", num_layers=4))}


@pytest.fixture(scope="module")
def measured(folders: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    sight = {"model": "vision", "with_images": False, "processor": folders["vision"]}
    data = {"data": str(Path(folders["vision"]).parent / "rows.jsonl")}
    job = {"models": folders, "cases": CASES | {name: {**case, **sight, **data} for name, case in TOWERS.items()}}
    return run_ranks(4, job, tmp_path_factory.mktemp("job"), script=Path(__file__).with_name("ranks.py"))


@pytest.mark.multirank
@pytest.mark.parametrize("name", [*CASES, *TOWERS])
def test_bytes_of_tensors_are_those_of_every_rank(name: str, measured: dict[str, Any], folders: dict[str, str]) -> None:
    case = {**CASES, **TOWERS}[name]
    student = make_recipe(folders[case.get("model", "vision")], case).student
    dims = read_dims(Path(student.model))
    assert len(measured[name]) == 4
    for rank in measured[name]:
        own = shard(dims, student.parallel, rank["stage"])
        planned = {**tensor_bytes(own, student), "offloaded": offloaded_bytes(own, student)}
        planned["averages"] = average_bytes(own, student) if "ema" in case else 0
        for part in PARTS:
            assert planned[part] == pytest.approx(rank[part], rel=0.05), (name, rank["rank"], part)


@pytest.mark.multirank
@pytest.mark.parametrize("name", CASES)
def test_the_head_takes_what_is_planned(name: str, measured: dict[str, Any], folders: dict[str, str]) -> None:
    case = CASES[name]
    student = make_recipe(folders[case["model"]], case).student
    dims = read_dims(Path(student.model))
    heads = {rank["rank"]: rank["head"] for rank in measured[name] if rank["head"] is not None}
    assert len(heads) == 4 // case["pp"]
    for rank, head in heads.items():
        columns = dims.padded_vocab_size(case["tp"]) // case["tp"]
        is_padded = (rank % case["tp"] + 1) * columns > dims.vocab_size
        shape = HeadShape(
            rows=head["rows"],
            tokens=head["tokens"],
            hidden=dims.hidden_size,
            columns=columns,
            element=BYTES[student.dtype],
            ranks=case["tp"],
            splits_sequence=case["sp"],
            copies=student.dtype == "bfloat16" or is_padded,
        )
        budget = student.lm_head_memory_budget_mib * 2**20
        assert (shape.rows_at_once(budget) < head["rows"]) == ("head_mib" in case)
        assert shape.peak(budget) == pytest.approx(head["peak"], rel=0.1), (name, head)
