"""``mopd convert``: a Hugging Face folder to Megatron's distributed format and back, on as many ranks as asked for.

A Megatron folder loads at any layout: the degrees given here only say how many ranks share the work.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, Literal

from mopd import cpu_shim
from mopd.config.schema import Parallel, Student
from mopd.conversion.dims import read_config, read_dims
from mopd.conversion.hf import HfReader, HfWriter
from mopd.student import checkpoint, parallel
from mopd.student.model import StudentModel, build_model
from mopd.student.model_checkpoint import load_model, save_model
from mopd.student.parallel import Layout
from mopd.student.weights import iter_hf_weights, load_hf_into
from mopd.types import UserError

Dtype = Literal["float32", "bfloat16"]
TIMEOUT_S = 3600.0
"""Deadline of a wait between ranks; one may read much longer than another."""


def hf_to_megatron(
    source: Path, out: Path, *, tensor_model_parallel_size: int, pipeline_model_parallel_size: int
) -> None:
    """Convert the Hugging Face folder ``source`` into the new folder ``out``, bit for bit, in its own dtype.

    Raises:
        UserError: the checkpoint cannot be read or carried.
    """
    dtype = _dtype(source)
    with _joined(tensor_model_parallel_size, pipeline_model_parallel_size) as layout, cpu_shim.activate():
        model = _build(source, dtype, layout)
        load_hf_into([model], HfReader(source), read_dims(source), tp_group=layout.tp_group)
        save_model(out, model, layout, state={"source": str(source.resolve()), "dtype": dtype})


def megatron_to_hf(
    source: Path, out: Path, *, tensor_model_parallel_size: int, pipeline_model_parallel_size: int
) -> None:
    """Convert a checkpoint folder of a run, or of ``hf_to_megatron``, into the new Hugging Face folder ``out``.

    Config, generation config and tokenizer come from the folder that the weights once came from, which the checkpoint
    names.

    Raises:
        UserError: the checkpoint is incomplete or changed, or that folder is gone.
    """
    with _joined(tensor_model_parallel_size, pipeline_model_parallel_size) as layout, cpu_shim.activate():
        parallel.raise_together(layout, partial(checkpoint.verify, source))
        state = checkpoint.read_state(source)
        origin = _origin(source, state)
        model = _build(origin, state["dtype"], layout)
        load_model(source, model)
        weights = iter_hf_weights(
            [model],
            read_dims(origin),
            tp_group=layout.tp_group,
            pp_group=layout.pp_group,
            data_parallel_rank=layout.dp_rank,
        )
        if layout.rank:
            for _ in weights:
                raise RuntimeError("weights arrived at a rank other than 0")
            return
        with HfWriter(out, source=origin) as writer:
            for name, tensor in weights:
                writer.add(name, tensor)


def _origin(source: Path, state: Mapping[str, Any]) -> Path:
    """The Hugging Face folder whose config and tokenizer the weights belong to."""
    origin = Path(state["source"])
    if (origin / "config.json").is_file():
        return origin
    raise UserError(f"{source}: its config and tokenizer came from {str(origin)!r}, which is gone: restore that folder")


def _joined(tensor_model_parallel_size: int, pipeline_model_parallel_size: int) -> AbstractContextManager[Layout]:
    sizes = Parallel(
        tensor_model_parallel_size=tensor_model_parallel_size,
        pipeline_model_parallel_size=pipeline_model_parallel_size,
    )
    return parallel.joined(sizes, timeout_s=TIMEOUT_S, seed=0)


def _build(folder: Path, dtype: Dtype, layout: Layout) -> StudentModel:
    student = Student(model=str(folder), dtype=dtype)
    return build_model(student, read_dims(folder), layout)


def _dtype(folder: Path) -> Dtype:
    config = read_config(folder)
    name = config.get("dtype", config.get("torch_dtype", "float32"))
    if name == "float32":
        return "float32"
    if name == "bfloat16":
        return "bfloat16"
    raise UserError(
        f"{folder / 'config.json'}: dtype {name!r} cannot be carried bit for bit: convert the weights to float32 or "
        "bfloat16 first"
    )
