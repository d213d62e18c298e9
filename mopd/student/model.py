"""The student: Megatron's ``GPTModel`` whose last stage hands its logits to a hook."""

from __future__ import annotations

from collections.abc import Callable

from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from torch import Tensor

from mopd.config.schema import Student
from mopd.conversion.dims import ModelDims
from mopd.student.model_config import layer_specs, padded_vocab_size, transformer_config
from mopd.student.parallel import Layout

LogitsHook = Callable[[Tensor], Tensor]
"""Takes this rank's logits [S, B, V/tp] in the model's dtype; returns what the last stage returns."""


class StudentModel(GPTModel):
    """A ``GPTModel`` that runs a hook on the vocabulary-parallel logits where Megatron would run cross-entropy.

    The logits stay where the output layer wrote them: [S, B, V/tp], never transposed, gathered or upcast. There is no
    ``Float16Module`` around this model (it would upcast what the model returns); its parameters already have the dtype.
    """

    def compute_language_model_loss(self, labels: LogitsHook, logits: Tensor) -> Tensor:
        """``GPTModel.forward`` passes its ``labels`` argument through unread; here it carries the hook."""
        return labels(logits)


def build_model(student: Student, dims: ModelDims, layout: Layout) -> StudentModel:
    """This rank's part of the model on ``layout.device``; the weights are uninitialised memory.

    Raises:
        UserError: see ``transformer_config``.
    """
    config = transformer_config(student, dims, layout)
    model = StudentModel(
        config=config,
        transformer_layer_spec=layer_specs(student, dims, config),
        vocab_size=padded_vocab_size(dims, layout),
        max_sequence_length=dims.max_positions,
        pre_process=layout.is_first_stage,
        post_process=layout.is_last_stage,
        parallel_output=True,
        share_embeddings_and_output_weights=dims.tied_embeddings,
        position_embedding_type="rope",
        rotary_base=_rotary_base(dims),
    )
    model.to(device=layout.device)
    _mark_shards(model)
    return model


def _mark_shards(model: StudentModel) -> None:
    """Tell Megatron which parameters are shards. It does so itself only where it also draws the weights; unmarked
    shards are left out of the gradient norm on all tensor-parallel ranks but the first."""
    for module in model.modules():
        if isinstance(module, (VocabParallelEmbedding, ColumnParallelLinear, RowParallelLinear)):
            dim = 1 if isinstance(module, RowParallelLinear) else 0
            if module.weight is not None:
                set_tensor_model_parallel_attributes(module.weight, is_parallel=True, dim=dim, stride=1)


def _rotary_base(dims: ModelDims) -> float:
    """An integral base stays an integer: powers of the two differ in the last bit, and checkpoints store integers."""
    return int(dims.rotary_base) if dims.rotary_base.is_integer() else dims.rotary_base
