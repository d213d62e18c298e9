"""One rank of ``test_streaming.py`` (under torchrun): real Megatron models beside folders that streaming has written.

Usage: torchrun --nproc-per-node N streaming_ranks.py FOLDER LAYOUTS NAME...   (LAYOUTS: "2x1x1,1x1x2" = TP x PP x EP)
For every NAME and layout, ``FOLDER/NAME`` being the Hugging Face folder:

- ``FOLDER/NAME-streamed-LAYOUT`` is loaded by Megatron and must equal what the rank reads from the Hugging Face folder;
- the model is saved by Megatron into ``FOLDER/NAME-saved-LAYOUT``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from mopd import cpu_shim
from mopd.config.student import ParallelConfig, StudentConfig
from mopd.conversion.hf.reader import open_model
from mopd.conversion.models.reading import read_dims
from mopd.conversion.torch_dist.writer import CONTENT
from mopd.student import parallel
from mopd.student.checkpoints import checkpoint
from mopd.student.model.gpt import StudentModel, build_model
from mopd.student.weights import load_hf_into


def main(folder: Path, layouts: list[str], names: list[str], world_size: int) -> None:
    for text in layouts:
        tp, pp, ep = (int(degree) for degree in text.split("x"))
        degrees = ParallelConfig(
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp,
            data_parallel_size=world_size // (tp * pp),
            expert_model_parallel_size=ep,
            expert_tensor_parallel_size=1 if ep > 1 else None,
            sequence_parallel=tp > 1,
        )
        layout = parallel.initialize(degrees, timeout_s=120, seed=0)
        for name in names:
            if ep == 1 or read_dims(folder / name).moe is not None:
                compare_and_save(folder, name, text, layout)
        parallel.destroy()


def compare_and_save(folder: Path, name: str, text: str, layout: parallel.Layout) -> None:
    reader, dims = open_model(folder / name)
    dtype = "bfloat16" if reader.dtype(min(reader.names)) == torch.bfloat16 else "float32"
    expected, loaded = (
        build_model(StudentConfig(model=str(folder / name), dtype=dtype), dims, layout) for _ in range(2)
    )
    load_hf_into([expected], reader, dims, layout)
    for parameter in loaded.parameters():
        parameter.data.fill_(float("nan"))  # what the load forgets must not pass for loaded
    streamed = folder / f"{name}-streamed-{text}"
    checkpoint.verify(streamed)
    checkpoint.load_weights(streamed, loaded)
    tensors, others = states(expected), states(loaded)
    assert tensors.keys() == others.keys()
    for key, tensor in tensors.items():
        assert tensor.dtype == others[key].dtype and torch.equal(tensor, others[key]), (name, text, key)
    state = {"source": str(folder / name), "dtype": dtype}
    sharded = {"model": expected.sharded_state_dict(metadata=dict(CONTENT))}
    checkpoint.write(folder / f"{name}-saved-{text}", sharded, layout, state=state)


def states(model: StudentModel) -> dict[str, torch.Tensor]:
    """Parameters and the buffers that a checkpoint holds."""
    return {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}


if __name__ == "__main__":
    with cpu_shim.activate():
        main(Path(sys.argv[1]), sys.argv[2].split(","), sys.argv[3:], int(os.environ["WORLD_SIZE"]))
        torch.distributed.destroy_process_group()
