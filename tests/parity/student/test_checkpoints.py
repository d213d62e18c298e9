"""A loaded student continues as the saved one would have.

Invariant: at the same layout weights, losses and gradient norms of the next two steps are equal bit for bit (fp32 and
bf16, plain and distributed optimizer, states in host memory); at another TP, CP, PP or DP, cut into stages otherwise,
or with another share of the states in host memory, the weights are equal bit for bit and the next losses within 1e-5
relative (a few pairs of layouts: ``make parity`` tries all). All but one checkpoint are written by a thread that is
held back until the saved student has trained on: no step reaches what it writes, and the bytes are those of a save that
waits.
Not exercised: loading a distributed optimizer's states with the plain one.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from transformers import AutoModelForCausalLM

from mopd.config.student import OptimizerConfig, ParallelConfig, StudentConfig
from mopd.conversion.models.reading import read_dims
from mopd.conversion.torch_dist.reader import TorchDistReader, read_hashes
from mopd.planning.memory.shards import checkpoint_bytes, shard
from mopd.student.checkpoints import checkpoint

pytestmark = [pytest.mark.multirank, pytest.mark.slow]

Results = dict[str, Any]
Dtype = Literal["float32", "bfloat16"]


@pytest.mark.parametrize(
    "name",
    [
        *("tp2", "tp2_plain", "tp2_waiting", "tp2_bf16_offload", "dp2_overlap", "vp4", "cp2"),
        *("tp2_warm_up", "dp2_warm_up", "dp2_offload_warm_up"),  # saved in a warm-up, at its end, after it
    ],
)
def test_same_layout_is_bit_exact(saved_ranks: Results, name: str) -> None:
    saved, loaded = saved_ranks[f"save/{name}"], saved_ranks[f"load/{name}/{name}"]
    assert loaded["loaded_hash"] == saved["saved_hash"] != saved["hash"]
    assert loaded["steps_after"] == saved["steps_after"]
    assert loaded["hash"] == saved["hash"]
    assert saved["was_saving"] is (name != "tp2_waiting")
    assert (loaded["weight_version"], loaded["extra"]) == (len(saved["steps"]), {"note": "kept"})


@pytest.mark.parametrize(
    "case", ["tp2/pp2", "tp2/dp2_offload", "dp2_overlap/tp2", "tp2_plain/pp2_plain", "vp4/vp2_last", "cp2/tp2"]
)
def test_other_layout_continues(saved_ranks: Results, case: str) -> None:
    saved, loaded = saved_ranks[f"save/{case.split('/')[0]}"], saved_ranks[f"load/{case}"]
    assert loaded["loaded_hash"] == saved["saved_hash"]
    for step, expected in zip(loaded["steps_after"], saved["steps_after"], strict=True):
        assert step["lr"] == expected["lr"]
        for name in expected:
            if name.startswith(("loss/", "weighted_loss/", "grad_norm")):
                assert step[name] == pytest.approx(expected[name], rel=1e-5), name


def test_states_are_loaded_a_few_at_a_time(saved_ranks: Results, student_folder: Path) -> None:
    """Three states of 2**13 numbers, or of the one parameter that has more."""
    reader = TorchDistReader(student_folder / "saved_dp2_overlap")
    largest = max(math.prod(reader.shape(key)) for key in reader.keys)
    rounds = saved_ranks["load/dp2_overlap/dp2_overlap"]["rounds"]
    assert len(rounds) > 3
    assert max(rounds) <= 3 * max(largest, 2**13) < sum(rounds)


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="torch writes a device's tensors in another order than the host's"
)
def test_bytes_do_not_depend_on_when_they_are_written(saved_ranks: Results, student_folder: Path) -> None:
    """Two students that have trained alike, saved either way: but for a number that torch draws into ``.metadata``."""
    beside, waiting = (student_folder / name for name in ("saved_tp2", "saved_tp2_waiting"))
    assert saved_ranks["save/tp2"]["saved_hash"] == saved_ranks["save/tp2_waiting"]["saved_hash"]
    checkpoint.verify(beside)
    hashes, others = (read_hashes(folder / "manifest.json") for folder in (beside, waiting))
    assert hashes.pop(".metadata") != others.pop(".metadata")
    assert hashes == others
    assert hashes.keys() == {"__0_0.distcp", "__1_0.distcp", "common.pt", "metadata.json", "state.json"}


@pytest.mark.parametrize(
    ("name", "dtype", "is_distributed", "num_bytes"),
    [("tp2", "float32", True, 16), ("tp2_plain", "float32", False, 12), ("tp2_bf16_offload", "bfloat16", True, 14)],
)
def test_plans_count_what_a_weight_takes(
    saved_ranks: Results,
    student_folder: Path,
    hf_model: Path,
    name: str,
    dtype: Dtype,
    is_distributed: bool,
    num_bytes: int,
) -> None:
    assert saved_ranks[f"save/{name}"]["saved_hash"]
    reader = TorchDistReader(student_folder / f"saved_{name}")
    nums = {key: math.prod(reader.shape(key)) for key in reader.keys}
    total = sum(num * reader.dtype(key).itemsize for key, num in nums.items())
    assert total / sum(num for key, num in nums.items() if not key.startswith("optimizer")) == num_bytes
    dims = read_dims(hf_model)
    optimizer = OptimizerConfig(use_distributed_optimizer=is_distributed)
    planned = checkpoint_bytes(dims, StudentConfig(model=str(hf_model), dtype=dtype, optimizer=optimizer))
    assert planned / shard(dims, ParallelConfig(), 0).num_weights == num_bytes


def test_export_is_the_trained_student(saved_ranks: Results, student_folder: Path, hf_model: Path) -> None:
    case = saved_ranks["tp2/save_hf"]
    exported = AutoModelForCausalLM.from_pretrained(student_folder / "exported", dtype=torch.float32).state_dict()
    sums = {name: float(tensor.double().sum()) for name, tensor in exported.items() if name in case["sums"]}
    assert sums == case["sums"]
    original = AutoModelForCausalLM.from_pretrained(hf_model, dtype=torch.float32).state_dict()
    assert not any(torch.equal(original[name], exported[name]) for name in sums if name.endswith("proj.weight"))


def test_a_refusal_reaches_every_rank(saved_ranks: Results) -> None:
    """Rank 0 finds the fault; had the other rank gone on, the job would have hung."""
    assert "already exists" in saved_ranks["tp2/save_hf"]["save_hf_again"]
    assert "no complete checkpoint" in saved_ranks["tp2/save_hf"]["load_incomplete"]


@pytest.mark.parametrize(
    ("case", "line"),
    [
        ("file in the way", "config.json/step: cannot be written: Not a directory"),
        ("rank 1", "__1_0.distcp: cannot be written: File too large"),
        ("folder removed", "_0.distcp: cannot be written: No such file or directory"),
        ("file removed", "__1_0.distcp: was removed before the checkpoint was whole"),
    ],
)
def test_a_refused_write_beside_the_steps_reaches_every_rank(saved_ranks: Results, case: str, line: str) -> None:
    """Nothing is left that could be taken for a checkpoint, and the next one is written well."""
    told = saved_ranks["tp2/save_hf"]["refused_saves"][case]
    assert line in told["line"]
    assert told["num_refused"] == 2
    assert not told["is_left"]


def test_the_optimizer_state_matters(saved_ranks: Results) -> None:
    """The steps after loading differ from those of a fresh optimizer, so equality above is not empty."""
    saved = saved_ranks["save/tp2"]
    assert saved["steps_after"][0]["lr"] != saved["steps"][0]["lr"]
    assert saved["steps_after"][1]["loss/math"] != saved["steps_after"][0]["loss/math"]
