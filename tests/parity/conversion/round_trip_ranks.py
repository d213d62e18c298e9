"""One rank of the round trip (started by ``test_round_trip.py`` under torchrun): HF -> Megatron -> HF in every layout.

Usage: torchrun --nproc-per-node N round_trip_ranks.py FOLDER PLAN
PLAN: JSON, {"2x1x2x1" (TP x PP x EP (x ETP)): [names of checkpoints in FOLDER]}. The exported folder of each checkpoint
and layout is FOLDER/exported/<checkpoint>-<layout>.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

from mopd.config.student import ParallelConfig, StudentConfig
from mopd.conversion.hf.reader import HfReader
from mopd.conversion.hf.writer import write_folder
from mopd.conversion.models.reading import read_dims
from mopd.student import cpu_shim, parallel
from mopd.student.model.gpt import StudentModel, build_model
from mopd.student.weights import iter_hf_weights, load_hf_into


def main(folder: Path, plan: dict[str, list[str]], world_size: int) -> None:
    for name, checkpoints in plan.items():
        tp, pp, ep, *etp = (int(degree) for degree in name.split("x"))
        degrees = ParallelConfig(
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp,
            data_parallel_size=world_size // (tp * pp),
            expert_model_parallel_size=ep,
            expert_tensor_parallel_size=etp[0] if etp else None,
            sequence_parallel=tp > 1,
        )
        layout = parallel.initialize(degrees, timeout_s=120, seed=0)
        for checkpoint in checkpoints:
            round_trip(folder / checkpoint, folder / "exported" / f"{checkpoint}-{name}", layout)
        torch.distributed.barrier()
        parallel.destroy()


def round_trip(checkpoint: Path, target: Path, layout: parallel.Layout) -> None:
    dims, reader = read_dims(checkpoint), HfReader(checkpoint)
    dtype = "bfloat16" if reader.read("model.norm.weight").dtype == torch.bfloat16 else "float32"
    model = build_model(StudentConfig(model=str(checkpoint), dtype=dtype), dims, layout)
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))  # what the load forgets must not pass for loaded
    load_hf_into([model], reader, dims, layout)
    check_loaded(model, dims.vocab_size, layout)
    weights = iter_hf_weights([model], dims, layout)
    if layout.rank != 0:
        assert list(weights) == []
        return
    write_folder(target, weights, source=checkpoint, max_shard_bytes=40_000)


def check_loaded(model: StudentModel, vocab_size: int, layout: parallel.Layout) -> None:
    """Every parameter was written, and vocabulary rows past the true size are zero."""
    for name, parameter in model.named_parameters():
        assert torch.isfinite(parameter).all(), name
        if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
            first = layout.tp_rank * parameter.shape[0]
            padding = parameter[max(0, vocab_size - first) :]
            assert padding.shape[0] == max(0, min(parameter.shape[0], first + parameter.shape[0] - vocab_size))
            assert not padding.any(), name


if __name__ == "__main__":
    with cpu_shim.activate():
        main(Path(sys.argv[1]), json.loads(sys.argv[2]), int(os.environ["WORLD_SIZE"]))
        torch.distributed.destroy_process_group()
