"""One rank of ``test_streaming.py`` (under torchrun): real Megatron models beside folders that streaming has written.

Usage: torchrun --nproc-per-node N streaming_ranks.py FOLDER LAYOUTS NAME...   (LAYOUTS as in ``test_streaming.py``)
For every NAME and layout that streaming has written, ``FOLDER/NAME`` being the Hugging Face folder:

- ``FOLDER/NAME-streamed-LAYOUT`` is loaded by Megatron and must equal what the rank reads from the Hugging Face folder;
- the model is saved by Megatron into ``FOLDER/NAME-saved-LAYOUT``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from mopd.config.student import ParallelConfig, StudentConfig
from mopd.conversion.hf.reader import open_model
from mopd.student import cpu_shim, parallel
from mopd.student.checkpoints import checkpoint
from mopd.student.model.gpt import StudentModel, build_chunks
from mopd.student.weights import load_hf_into


def main(folder: Path, layouts: list[str], names: list[str], world_size: int) -> None:
    for text in layouts:
        tp, pp, ep, vp, last = (int(number) for number in (text + "x1x0").split("x")[:5])
        degrees = ParallelConfig(
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp,
            virtual_pipeline_model_parallel_size=vp,
            num_layers_in_last_pipeline_stage=last or None,
            data_parallel_size=world_size // (tp * pp),
            expert_model_parallel_size=ep,
            expert_tensor_parallel_size=1 if ep > 1 else None,
            sequence_parallel=tp > 1,
        )
        layout = parallel.initialize(degrees, timeout_s=120, seed=0)
        for name in names:
            if (folder / f"{name}-streamed-{text}").exists():
                compare_and_save(folder, name, text, degrees, layout)
        torch.distributed.barrier()
        parallel.destroy()


def compare_and_save(folder: Path, name: str, text: str, degrees: ParallelConfig, layout: parallel.Layout) -> None:
    reader, dims = open_model(folder / name)
    dtype = "bfloat16" if reader.dtype(min(reader.names)) == torch.bfloat16 else "float32"
    student = StudentConfig(model=str(folder / name), dtype=dtype, parallel=degrees)
    expected, loaded = (build_chunks(student, dims, layout) for _ in range(2))
    load_hf_into(expected, reader, dims, layout)
    for parameter in (parameter for chunk in loaded for parameter in chunk.parameters()):
        parameter.data.fill_(float("nan"))  # what the load forgets must not pass for loaded
    streamed = folder / f"{name}-streamed-{text}"
    checkpoint.verify(streamed)
    checkpoint.load_weights(streamed, *loaded)
    tensors, others = states(expected), states(loaded)
    assert tensors.keys() == others.keys()
    for key, tensor in tensors.items():
        assert tensor.dtype == others[key].dtype and torch.equal(tensor, others[key]), (name, text, key)
    state = {"source": str(folder / name), "dtype": dtype}
    sharded = {"model": checkpoint.sharded_weights(expected)}
    checkpoint.write(folder / f"{name}-saved-{text}", sharded, layout, state=state)


def states(chunks: list[StudentModel]) -> dict[str, torch.Tensor]:
    """Parameters and the buffers that a checkpoint holds."""
    named = ((f"{i}.{name}", value) for i, chunk in enumerate(chunks) for name, value in chunk.state_dict().items())
    return {name: value for name, value in named if isinstance(value, torch.Tensor)}


if __name__ == "__main__":
    with cpu_shim.activate():
        main(Path(sys.argv[1]), sys.argv[2].split(","), sys.argv[3:], int(os.environ["WORLD_SIZE"]))
        torch.distributed.destroy_process_group()
