"""The student: Megatron's ``GPTModel`` whose last stage hands its LM head to a hook.

Its layers are TransformerEngine's, or Megatron's local ones adapted: their norms are our ``RMSNorm``, and a checkpoint
gets the keys that TransformerEngine's spec writes (``conversion/torch_dist/plan.py``), so that one folder loads under
both. A model that takes images gets the tower's features in place of the image tokens' embeddings, a rope of three
axes, and DeepStack's features added after the first layers.

Letters: S tokens of a sequence, B sequences, N image tokens, H channels, D channels of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.models.common.embeddings.rotary_pos_embedding import MultimodalRotaryEmbedding, RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.post_training.modelopt.layers import Linear
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.mappings import scatter_to_sequence_parallel_region
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor, nn

from mopd.base.text import one_line
from mopd.base.types import UserError
from mopd.config.student import StudentConfig
from mopd.conversion.models.dims import ModelDims
from mopd.student.attention import CoreAttention, EngineAttention, PackedSequences, RowParams, RowRotary
from mopd.student.model.config import rotary_base, transformer_config, uses_transformer_engine
from mopd.student.model.gated_delta_net import GatedAttention, GatedDeltaNet
from mopd.student.model.norms import BiasedRowParallel, NormedRowParallel, RMSNorm, WideRMSNorm, ZeroCenteredRMSNorm
from mopd.student.model.ropes import PairedRotary, scaled_frequencies
from mopd.student.parallel import Layout
from mopd.student.vision import ImageInput, image_features, make_tower

_FUSED_INPUT_NORM = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
_FUSED_MLP_NORM = {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}
_FUSED_LATENT_NORMS = {
    "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_",
    "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_",
}
"""Norms that TransformerEngine fuses into the following linear layer -> their key prefixes there."""


@dataclass(frozen=True, eq=False)
class LMHead:
    """The two factors of this rank's logits, ``hidden @ weight.T``."""

    hidden: Tensor
    """[S, B, H], or this rank's share [S/tp, B, H] under sequence parallelism."""
    weight: Tensor
    """[V/tp, H]: the output layer's weight, or the embedding's if the two are tied."""


HeadHook = Callable[[LMHead], Tensor]
"""Function of this rank's LM head; its result is the output of the last stage."""


class StudentModel(GPTModel):
    """A ``GPTModel`` that runs a hook where Megatron would compute logits and cross-entropy.

    The hook decides which rows become logits and how many of them exist at a time. There is no ``Float16Module``
    around this model (it would upcast what the model returns); its parameters already have the dtype.

    With vision, positions have three axes, and the first chunk has a tower. The model is then built with
    ``scatter_embedding_sequence_parallel=False``: features go into whole sequences, which are split afterwards.
    """

    vision_model: nn.Module
    """The vision tower; exists in the first chunk of the first stage of a model with vision only."""

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        *,
        packed: PackedSequences | None = None,
        samples: tuple[Tensor, int] | None = None,
        images: ImageInput | None = None,
        routes: tuple[Tensor, Tensor] | None = None,
        **options: Any,
    ) -> Tensor:
        """Run ``GPTModel.forward`` on right-padded sequences [B, S], or on ``packed`` ones [1, T]. ``position_ids`` are
        of that shape, with vision [3, B, S].

        ``samples`` is read by expert routers beside packed sequences: the sample of each row [T] of this rank, and how
        many samples there are; also ``routes`` (``student/model/replay.py``). ``images`` is read by the first chunk of
        a model with vision.
        """
        params = self._sequences(input_ids, position_ids, packed)
        if params is not None:
            params.samples = samples  # Megatron hands it to every layer, and to its recomputation
            params.routes = routes
        if hasattr(self, "vision_model"):
            embedded = self.embedding(input_ids=input_ids, position_ids=None)
            options["decoder_input"], context = with_images(
                embedded, self.vision_model, images, sequence_parallel=self.config.sequence_parallel
            )
            options["extra_block_kwargs"] = {"context": context}
        output: Tensor = super().forward(input_ids, position_ids, None, packed_seq_params=params, **options)
        return output

    def _sequences(
        self, input_ids: Tensor, position_ids: Tensor, packed: PackedSequences | None
    ) -> PackedSeqParams | None:
        """Return where sequences begin, in the form that the kind of layers takes."""
        if not _takes_rows(self.config):
            return None if packed is None else packed.megatron_params()
        cp_group = self.pg_collection.cp
        rows = RowParams(
            # Right-padded sequences have the same positions, and a rope of three axes reads its own.
            position_ids.flatten(0, -2)[0],
            (input_ids.shape[1] * cp_group.size(),) if packed is None else packed.lengths,
            is_packed=packed is not None or input_ids.shape[0] == 1,
            cp_size=cp_group.size(),
            cp_rank=cp_group.rank(),
        )
        rows.packed = packed
        return rows

    def _preprocess(self, *, padding_mask: Tensor | None = None, **rest: Any) -> Any:
        """Split the padding mask along the sequence on later stages too; Megatron does so on the first only."""
        if padding_mask is not None and not self.pre_process and self.config.sequence_parallel:
            # [B, S] -> [B, S/tp]
            padding_mask = scatter_to_sequence_parallel_region(padding_mask.T.contiguous()).T.contiguous()
        return super()._preprocess(padding_mask=padding_mask, **rest)

    def _postprocess(self, hidden_states: Tensor, *, labels: HeadHook | None, **rest: Any) -> Tensor:
        """Run the hook on the last stage. ``GPTModel.forward`` passes its ``labels`` argument through unread; here it
        carries the hook.

        The output layer holds its weight but is not run, so what Megatron's DDP does before its forward is done here.
        """
        if not self.post_process or labels is None:
            output: Tensor = super()._postprocess(hidden_states=hidden_states, labels=labels, **rest)
            return output
        # With overlap_param_gather DDP waits for the gathered weights in a forward pre-hook of the layer.
        for wait_for_weight in self.output_layer._forward_pre_hooks.values():
            wait_for_weight(self.output_layer, ())
        tied = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        return labels(LMHead(hidden_states, _with_counted_gradient(weight)))


def _with_counted_gradient(weight: Tensor) -> Tensor:
    """Return the head's weight such that DDP counts its gradient, which goes to ``main_grad`` past autograd. An
    embedding of the same stage announces a weight that it shares, so that one is returned as it is."""
    if not hasattr(weight, "main_grad") or getattr(weight, "zero_out_wgrad", False):
        return weight
    announced: Tensor = _CountedGradient.apply(weight)
    announced.main_grad = weight.main_grad  # type: ignore[attr-defined]
    return announced


class _CountedGradient(torch.autograd.Function):
    """``apply(weight)`` -> the weight. If no gradient comes back, autograd gets memory of ``main_grad`` for one: DDP
    discards it, and takes a missing gradient for an error if it overlaps its sums with backward."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.weight = weight
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Tensor:
        if grad is not None:
            return grad
        weight = ctx.weight
        weight.grad_added_to_main_grad = True
        stand_in: Tensor = weight.main_grad.detach().view(-1).view(weight.dtype)[: weight.numel()].view_as(weight)
        return stand_in


def build_model(student: StudentConfig, dims: ModelDims, layout: Layout) -> StudentModel:
    """Return the only chunk that ``build_chunks`` makes for a layout without virtual stages."""
    (model,) = build_chunks(student, dims, layout)
    return model


def build_chunks(student: StudentConfig, dims: ModelDims, layout: Layout) -> list[StudentModel]:
    """Build this rank's part of the model on ``layout.device``: its model chunks (one without virtual stages), which
    share one configuration. The weights are uninitialised memory.

    Raises:
        UserError: the layout or an override does not fit the model, as ``transformer_config`` says; or a variable of
            TransformerEngine's (``NVTE_…``) does not fit the overrides.
    """
    config = transformer_config(student, dims, layout)
    try:
        return [_build_chunk(student, dims, layout, config, chunk) for chunk in range(layout.vp_size)]
    except (AssertionError, RuntimeError, ValueError) as error:
        if "NVTE_" not in str(error):
            raise
        named = dict(student.megatron_overrides)
        raise UserError(f"student.megatron_overrides {named}: Megatron refuses: {one_line(error)}") from error


def _build_chunk(
    student: StudentConfig, dims: ModelDims, layout: Layout, config: TransformerConfig, chunk: int
) -> StudentModel:
    vp_stage = None if layout.vp_size == 1 else chunk
    model = StudentModel(
        config=config,
        transformer_layer_spec=_layer_specs(student, dims, layout, config, vp_stage),
        vocab_size=dims.padded_vocab_size(layout.tp_size),
        max_sequence_length=dims.max_positions,
        pre_process=layout.is_first_stage and chunk == 0,
        post_process=layout.is_last_stage and chunk == layout.vp_size - 1,
        parallel_output=True,
        share_embeddings_and_output_weights=dims.tied_embeddings,
        position_embedding_type="rope" if dims.vision is None else "mrope",
        scatter_embedding_sequence_parallel=dims.vision is None,
        rotary_base=rotary_base(dims),
        vp_stage=vp_stage,
        rotary_percent=dims.rotary_fraction,
    )
    if dims.rope_scaling is not None and dims.mla is None:
        rope: Any = model.rotary_pos_emb
        rope.inv_freq = scaled_frequencies(rope.inv_freq, dims, dims.rope_scaling)
    if dims.vision is not None:
        _add_vision(model, student, dims)
    if dims.window is not None and dims.window.rotary_base is not None:
        windowed = RotaryEmbedding(
            dims.head_dim,
            1.0,
            rotary_base=dims.window.rotary_base,
            use_cpu_initialization=config.use_cpu_initialization,
        )
        model.rotary_pos_emb = PairedRotary(model.rotary_pos_emb, windowed)
        layers: Any = model.get_submodule("decoder.layers")
        for layer in layers:
            own = partial(PairedRotary.choose, is_windowed=dims.window.layers[layer.layer_number - 1])
            layer.register_forward_pre_hook(own, with_kwargs=True)
    if dims.scaled_embeddings and model.pre_process:
        scale = torch.tensor(dims.hidden_size**0.5, dtype=config.params_dtype).item()
        model.embedding.register_forward_hook(lambda module, inputs, embedded: embedded * scale)
    if _takes_rows(config):
        _turn_by_position(model, dims)
    model.to(device=layout.device)
    _mark_shards(model)
    if dims.moe is not None:
        _hand_on_padding_mask(model)
    return model


def _add_vision(model: StudentModel, student: StudentConfig, dims: ModelDims) -> None:
    """Add rope, tower and DeepStack to a chunk of a family with vision."""
    assert dims.vision is not None
    model.rotary_pos_emb.cp_group = None  # the positions are this rank's already; Megatron would cut them again
    if dims.vision.mrope_interleaved:
        model.rotary_pos_emb = InterleavedRotary(
            kv_channels=dims.head_dim, rotary_percent=1.0, rotary_base=rotary_base(dims)
        )
    if model.pre_process:
        model.vision_model = make_tower(student, model.config.params_dtype)
        layers: Any = model.get_submodule("decoder.layers")
        for number in range(len(dims.vision.deepstack_layers)):
            layers[number].register_forward_hook(partial(_add_feature, number))


def _takes_rows(config: TransformerConfig) -> bool:
    """Return whether ropes turn each row by its own position, which only TransformerEngine's fused rope does not."""
    return not (config.transformer_impl == "transformer_engine" and config.apply_rope_fusion)


def _turn_by_position(model: StudentModel, dims: ModelDims) -> None:
    """Give ropes that take rows the rows' positions. A rope of three axes reads positions by itself."""
    if dims.mla is not None:
        layers: Any = model.get_submodule("decoder.layers")
        for layer in layers:
            layer.self_attention.rotary_pos_emb = RowRotary(layer.self_attention.rotary_pos_emb, is_latent=True)
    elif dims.vision is None:
        model.rotary_pos_emb = RowRotary(model.rotary_pos_emb, is_latent=False)


def _mark_shards(model: StudentModel) -> None:
    """Mark which parameters are shards. Megatron does so itself only when it also draws the weights; unmarked shards
    are left out of the gradient norm on all tensor-parallel ranks but the first."""
    for module in model.modules():
        if isinstance(module, (VocabParallelEmbedding, ColumnParallelLinear, RowParallelLinear)):
            dim = 1 if isinstance(module, RowParallelLinear) else 0
            if module.weight is not None:
                set_tensor_model_parallel_attributes(module.weight, is_parallel=True, dim=dim, stride=1)
            if getattr(module, "is_expert", False) and model.config.expert_tensor_parallel_size == 1:
                # Each tensor-parallel rank's tokens make a part of the gradient, which Megatron sums with EP > 1 alone.
                for parameter in module.parameters():
                    parameter.allreduce = model.config.tensor_model_parallel_size == 1 and parameter.allreduce
            if isinstance(module, BiasedRowParallel):  # each rank has tokens of its own
                set_tensor_model_parallel_attributes(module.bias, is_parallel=True, dim=0, stride=1)
        elif isinstance(module, WideRMSNorm):
            set_tensor_model_parallel_attributes(module.weight, is_parallel=True, dim=0, stride=1)
        elif isinstance(module, CoreAttention) and module.softmax_offset is not None:
            set_tensor_model_parallel_attributes(module.softmax_offset, is_parallel=True, dim=0, stride=1)


def _hand_on_padding_mask(model: StudentModel) -> None:
    """Give every layer its micro-batch's padding mask. Megatron 0.16.1 passes none to the layers that
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


def _layer_specs(
    student: StudentConfig, dims: ModelDims, layout: Layout, config: TransformerConfig, vp_stage: int | None
) -> ModuleSpec | TransformerBlockSubmodules:
    """Return the layers of chunk ``vp_stage`` of this pipeline stage, or of the whole stage (``None``)."""
    _mark_missing_imports()
    if uses_transformer_engine(student, dims):
        if dims.moe is None:
            spec = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=dims.qk_norm)
        else:
            spec = get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)
        if _takes_rows(config):
            for layer in [spec] if dims.moe is None else spec.layer_specs:
                layer.submodules.self_attention.submodules.core_attention = EngineAttention
        return spec
    first = get_transformer_layer_offset(config, vp_stage)
    layers = [_local_spec(dims, layout, first + i) for i in range(get_num_layers_to_build(config, vp_stage))]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=_norm(dims))


def _norm(dims: ModelDims) -> type[RMSNorm]:
    return ZeroCenteredRMSNorm if dims.zero_centered_norms else RMSNorm


def _mark_missing_imports() -> None:
    """Work around two modules of Megatron 0.16.1 that do not notice that TransformerEngine is missing: one reads a name
    that its failed import left undefined, the other takes the stand-ins of a failed import for the real classes."""
    if not HAVE_TE:
        moe_utils.te_general_gemm = None
        multi_latent_attention.HAVE_TE = False


def _local_spec(dims: ModelDims, layout: Layout, number: int) -> ModuleSpec:
    """Return layer ``number`` (from 0 over the whole model)."""
    is_latent, has_experts, norm = dims.mla is not None, dims.is_moe_layer(number), _norm(dims)
    layer = get_gpt_layer_local_spec(
        num_experts=dims.moe.num_experts if dims.moe is not None and has_experts else None,
        qk_layernorm=dims.qk_norm or is_latent,
        multi_latent_attention=is_latent,
        normalization="RMSNorm",
    )
    submodules, attention = layer.submodules, layer.submodules.self_attention.submodules
    submodules.input_layernorm = submodules.pre_mlp_layernorm = norm if dims.pre_norms else IdentityOp
    if dims.is_delta_layer(number):
        submodules.self_attention = ModuleSpec(module=GatedDeltaNet, params={"sizes": dims.delta})
    elif dims.gated_attention:
        submodules.self_attention.module = GatedAttention
    window = dims.window_of(number)
    # A scaled rope scales scores too, and is not the windowed layers' where they have their own.
    has_own_rope = window is not None and dims.window is not None and dims.window.rotary_base is not None
    scale = (dims.score_divisor or dims.head_dim) ** -0.5 if has_own_rope else None
    attention.core_attention = ModuleSpec(
        module=CoreAttention, params={"window": window, "scale": scale, "has_sinks": dims.has_sinks}
    )
    if dims.linear_bias:
        submodules.mlp.submodules.experts.submodules.linear_fc2 = BiasedRowParallel
    if dims.post_norms:
        ended = ModuleSpec(module=NormedRowParallel, params={"norm": norm})
        attention.linear_proj = submodules.mlp.submodules.linear_fc2 = ended
    keys = {} if has_experts else dict(_FUSED_MLP_NORM)
    if is_latent:
        attention.q_layernorm = attention.kv_layernorm = RMSNorm
        # Not split over ranks, as under TransformerEngine. Split, the gradient of the keys' shared rotary part lacks
        # the other ranks' heads in Megatron 0.16.1.
        attention.linear_q_down_proj = attention.linear_kv_down_proj = Linear
        keys |= _FUSED_LATENT_NORMS
    else:
        keys |= _FUSED_INPUT_NORM
        if dims.qk_norm:
            attention.q_layernorm = attention.k_layernorm = norm
        if dims.wide_qk_norm:
            attention.q_layernorm, attention.k_layernorm = (
                ModuleSpec(module=WideRMSNorm, params={"num_heads": heads, "group": layout.tp_group})
                for heads in (dims.num_attention_heads, dims.num_query_groups)
            )
    # Gated delta nets are never TransformerEngine's, and its keys never theirs.
    submodules.sharded_state_dict_keys_map = keys if dims.delta is None else {}
    return layer


class InterleavedRotary(MultimodalRotaryEmbedding):
    """Qwen3-VL's rope: of every three frequencies one is the time's, one the height's and one the width's, as long as
    height and width have any; the rest is the time's. Megatron's rope puts the axes one after another."""

    def forward(self, position_ids: Tensor, mrope_section: list[int], cp_group: Any = None) -> Tensor:
        """Return the angles [S, B, 1, D] of ``position_ids`` [3, B, S]."""
        each = position_ids.to(self.inv_freq)[..., None] * self.inv_freq
        angles = each[0]
        for axis in (1, 2):
            own = slice(axis, 3 * mrope_section[axis], 3)
            angles[..., own] = each[axis][..., own]
        return torch.cat((angles, angles), dim=-1).transpose(0, 1)[:, :, None].contiguous()


def with_images(
    embedded: Tensor, tower: nn.Module, images: ImageInput | None, *, sequence_parallel: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the decoder's input from ``embedded`` [S, B, H] and, if the tower has them, DeepStack's features
    [layers, S, B, H], zero where no image is; under sequence parallelism this rank's part of S of both."""

    def share(hidden: Tensor) -> Tensor:
        # Backward gathers the gradient: every tensor-parallel rank's tower needs all of it.
        return scatter_to_sequence_parallel_region(hidden) if sequence_parallel else hidden

    if images is None:
        return share(embedded), None
    features, deeper = image_features(tower, images)
    placed = share(_placed(features, images.rows, embedded))
    if not deeper:
        return placed, None
    empty = torch.zeros_like(embedded)
    return placed, torch.stack([share(_placed(each, images.rows, empty)) for each in deeper])


def _placed(features: Tensor, rows: Tensor, into: Tensor) -> Tensor:
    """Return ``into`` [S, B, H] with ``features`` [N, H] in its flat ``rows`` [N]."""
    return into.flatten(0, 1).index_copy(0, rows, features.to(into.dtype)).view_as(into)


def _add_feature(number: int, layer: Any, inputs: Any, output: tuple[Tensor, Tensor | None]) -> Any:
    """Add a feature of DeepStack to the output of layer ``number``, as a forward hook.

    Features come to a layer as ``context``, which self-attention ignores: Megatron's schedule and recomputation carry
    it, and its gradient, with the micro-batch that it belongs to.
    """
    hidden, context = output
    return output if context is None else (hidden + context[number], context)
