"""One rank of the round trip (started by ``test_round_trip.py`` under torchrun): HF -> Megatron -> HF in every layout.

Usage: torchrun --nproc-per-node N round_trip_ranks.py TARGET LAYOUTS CHECKPOINT...   (LAYOUTS: "2x1,1x2" = TP x PP)
The exported folder of each checkpoint and layout is TARGET/<checkpoint>-tp<N>-pp<N>.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from mopd import cpu_shim
from mopd.config.schema import Parallel, Student
from mopd.conversion.dims import read_dims
from mopd.conversion.hf import HfReader, HfWriter
from mopd.student import parallel
from mopd.student.model import StudentModel, build_model
from mopd.student.weights import iter_hf_weights, load_hf_into


def main(target: Path, layouts: list[tuple[int, int]], checkpoints: list[Path], world_size: int) -> None:
    for tp, pp in layouts:
        degrees = Parallel(
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp,
            data_parallel_size=world_size // (tp * pp),
        )
        layout = parallel.initialize(degrees, timeout_s=120, seed=0)
        for checkpoint in checkpoints:
            round_trip(checkpoint, target / f"{checkpoint.name}-tp{tp}-pp{pp}", layout)
        parallel.destroy()


def round_trip(checkpoint: Path, target: Path, layout: parallel.Layout) -> None:
    dims, reader = read_dims(checkpoint), HfReader(checkpoint)
    dtype = "bfloat16" if reader.read("model.norm.weight").dtype == torch.bfloat16 else "float32"
    model = build_model(Student(model=str(checkpoint), dtype=dtype), dims, layout)
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))  # what the load forgets must not pass for loaded
    load_hf_into([model], reader, dims, tp_group=layout.tp_group)
    check_loaded(model, dims.vocab_size, layout)
    weights = iter_hf_weights(
        [model],
        dims,
        tp_group=layout.tp_group,
        pp_group=layout.pp_group,
        data_parallel_rank=layout.dp_rank,
    )
    if layout.rank != 0:
        assert list(weights) == []
        return
    with HfWriter(target, source=checkpoint, max_shard_bytes=40_000) as writer:
        for name, tensor in weights:
            writer.add(name, tensor)


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
        pairs = [tuple(int(n) for n in pair.split("x")) for pair in sys.argv[2].split(",")]
        main(
            Path(sys.argv[1]),
            [(tp, pp) for tp, pp in pairs],
            [Path(path) for path in sys.argv[3:]],
            int(os.environ["WORLD_SIZE"]),
        )
        torch.distributed.destroy_process_group()
