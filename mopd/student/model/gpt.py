"""The student: Megatron's ``GPTModel`` whose last stage hands its LM head to a hook."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.mappings import scatter_to_sequence_parallel_region
from torch import Tensor

from mopd.config.student import StudentConfig
from mopd.conversion.models.dims import ModelDims
from mopd.conversion.models.model_dims import Llama3Rope
from mopd.student.model.config import padded_vocab_size, rotary_base, transformer_config
from mopd.student.model.layer_specs import layer_specs
from mopd.student.parallel import Layout


@dataclass(frozen=True, eq=False)
class LMHead:
    """The two factors of this rank's logits, ``hidden @ weight.T``."""

    hidden: Tensor
    """[S, B, H], or this rank's share [S/tp, B, H] under sequence parallelism."""
    weight: Tensor
    """[V/tp, H]: the output layer's, or the embedding's where the two are tied."""


HeadHook = Callable[[LMHead], Tensor]
"""Takes this rank's head; returns what the last stage returns."""


class StudentModel(GPTModel):
    """A ``GPTModel`` that runs a hook where Megatron would compute logits and cross-entropy.

    The hook decides which rows become logits and how many of them exist at a time. There is no ``Float16Module``
    around this model (it would upcast what the model returns); its parameters already have the dtype.
    """

    def _preprocess(self, *, padding_mask: Tensor | None = None, **rest: Any) -> Any:
        """Megatron splits the padding mask along the sequence on the first stage only."""
        if padding_mask is not None and not self.pre_process and self.config.sequence_parallel:
            # [B, S] -> [B, S/tp]
            padding_mask = scatter_to_sequence_parallel_region(padding_mask.T.contiguous()).T.contiguous()
        return super()._preprocess(padding_mask=padding_mask, **rest)

    def _postprocess(self, hidden_states: Tensor, *, labels: HeadHook | None, **rest: Any) -> Tensor:
        """``GPTModel.forward`` passes its ``labels`` argument through unread; here it carries the hook.

        The output layer holds its weight but is not run, so nothing may hang on its forward: the overlapped parameter
        gather of Megatron's DDP would (``wrap_data_parallel`` leaves it off).
        """
        if not self.post_process or labels is None:
            return super()._postprocess(hidden_states=hidden_states, labels=labels, **rest)
        tied = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        return labels(LMHead(hidden_states, weight))


def build_model(student: StudentConfig, dims: ModelDims, layout: Layout) -> StudentModel:
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
        rotary_base=rotary_base(dims),
        **_rope_options(dims),
    )
    model.to(device=layout.device)
    _mark_shards(model)
    if dims.moe is not None:
        _hand_on_padding_mask(model)
    return model


def _mark_shards(model: StudentModel) -> None:
    """Tell Megatron which parameters are shards. It does so itself only where it also draws the weights; unmarked
    shards are left out of the gradient norm on all tensor-parallel ranks but the first."""
    for module in model.modules():
        if isinstance(module, (VocabParallelEmbedding, ColumnParallelLinear, RowParallelLinear)):
            dim = 1 if isinstance(module, RowParallelLinear) else 0
            if module.weight is not None:
                set_tensor_model_parallel_attributes(module.weight, is_parallel=True, dim=dim, stride=1)


def _hand_on_padding_mask(model: StudentModel) -> None:
    """Give every layer its micro-batch's padding mask. Megatron 0.16.1 gives none to the layers that
    ``recompute_method: block`` does not recompute, whose routers would then balance and count padding."""
    decoder: Any = model.decoder
    current: dict[str, Tensor | None] = {}

    def remember(module: Any, inputs: Any, options: dict[str, Any]) -> None:
        current["mask"] = options.get("padding_mask")

    def complete(module: Any, inputs: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        if options.get("padding_mask") is not None:
            return None
        return inputs, {**options, "padding_mask": current["mask"]}

    decoder.register_forward_pre_hook(remember, with_kwargs=True)
    for layer in decoder.layers:
        layer.register_forward_pre_hook(complete, with_kwargs=True)


def _rope_options(dims: ModelDims) -> dict[str, Any]:
    """Latent attention has a rope of its own, see ``transformer_config``."""
    if isinstance(dims.rope_scaling, Llama3Rope):
        return {"rope_scaling": True, "rope_scaling_factor": dims.rope_scaling.factor}
    return {}
