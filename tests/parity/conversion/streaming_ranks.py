"""One rank of ``test_streaming.py`` (under torchrun): real Megatron models beside folders that streaming has written.

Usage: torchrun --nproc-per-node N streaming_ranks.py FOLDER PLAN
PLAN: JSON, {LAYOUT: {"keys": of ``ParallelConfig``, "names": [NAME, …]}}; ``FOLDER/NAME`` is a Hugging Face folder.
For every NAME of every LAYOUT:

- ``FOLDER/NAME-streamed-LAYOUT`` is loaded by Megatron and must equal what the rank reads from the Hugging Face folder;
- the model is exported into ``FOLDER/NAME-exported-LAYOUT``, and saved by Megatron into ``FOLDER/NAME-saved-LAYOUT``.
"""

from __future__ import annotations

import json
import os
import sys
from itertools import chain
from pathlib import Path

import torch

from mopd.config.student import ParallelConfig, StudentConfig
from mopd.conversion.hf.reader import open_model
from mopd.conversion.hf.writer import mtp_tensors, write_folder
from mopd.student import cpu_shim, parallel
from mopd.student.checkpoints import checkpoint
from mopd.student.model.gpt import StudentModel, build_chunks
from mopd.student.weights import iter_hf_weights, load_hf_into


def main(folder: Path, plan: dict[str, dict[str, object]], world_size: int) -> None:
    for text, own in plan.items():
        keys: dict[str, int] = own["keys"]  # type: ignore[assignment]
        names: list[str] = own["names"]  # type: ignore[assignment]
        tp, pp = (keys[f"{name}_model_parallel_size"] for name in ("tensor", "pipeline"))
        degrees = ParallelConfig(**keys, data_parallel_size=world_size // (tp * pp), sequence_parallel=tp > 1)  # type: ignore[arg-type]
        layout = parallel.initialize(degrees, timeout_s=120, seed=0)
        for name in names:
            compare_and_save(folder, name, text, degrees, layout)
        torch.distributed.barrier()
        parallel.destroy()


def compare_and_save(folder: Path, name: str, text: str, degrees: ParallelConfig, layout: parallel.Layout) -> None:
    reader, dims = open_model(folder / name)
    dtype = "bfloat16" if reader.dtype(min(reader.names)) == torch.bfloat16 else "float32"
    student = StudentConfig(model=str(folder / name), dtype=dtype, parallel=degrees)
    expected, loaded = (build_chunks(student, dims, layout) for _ in range(2))
    for parameter in (parameter for chunk in (*expected, *loaded) for parameter in chunk.parameters()):
        parameter.data.fill_(float("nan"))  # what the load forgets must not pass for loaded
    load_hf_into(expected, reader, dims, layout)
    streamed = folder / f"{name}-streamed-{text}"
    checkpoint.verify(streamed)
    checkpoint.load_weights(streamed, *loaded)
    tensors, others = states(expected), states(loaded)
    assert tensors.keys() == others.keys()
    for key, tensor in tensors.items():
        assert tensor.dtype == others[key].dtype and torch.equal(tensor, others[key]), (name, text, key)
    weights = iter_hf_weights(expected, dims, layout)
    if layout.rank == 0:
        weights = chain(weights, mtp_tensors(dims, folder / name))
        write_folder(folder / f"{name}-exported-{text}", weights, source=folder / name, max_file_bytes=40_000)
    else:
        assert list(weights) == []
    state = {"source": str(folder / name), "dtype": dtype}
    sharded = {"model": checkpoint.sharded_weights(expected)}
    checkpoint.write(folder / f"{name}-saved-{text}", sharded, layout, state=state)


def states(chunks: list[StudentModel]) -> dict[str, torch.Tensor]:
    """Parameters and the buffers that a checkpoint holds."""
    named = ((f"{i}.{name}", value) for i, chunk in enumerate(chunks) for name, value in chunk.state_dict().items())
    return {name: value for name, value in named if isinstance(value, torch.Tensor)}


if __name__ == "__main__":
    with cpu_shim.activate():
        main(Path(sys.argv[1]), json.loads(sys.argv[2]), int(os.environ["WORLD_SIZE"]))
        torch.distributed.destroy_process_group()
