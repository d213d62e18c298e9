"""A model as plain numbers: sizes and switches of its layers. No torch in this module."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from mopd.base.types import RouteShape, UserError
from mopd.config.student import ParallelConfig
from mopd.conversion.models.stages import ONE_STAGE, Stages, stages_of

SWIGLU_LIMIT = 7.0
"""What gpt-oss's activation clamps to."""
Naming = Literal["flat", "nested"]
"""Tensor naming of a Hugging Face checkpoint with vision. flat: ``visual.*`` and ``model.*``; nested:
``model.visual.*`` and ``model.language_model.*``. The head is ``lm_head`` in both."""

VOCAB_ROWS_MULTIPLE = 128
"""Multiple of the vocabulary rows of each tensor-parallel rank, as Megatron's ``make_vocab_size_divisible_by``: every
row of its logits then begins at a multiple of 16 bytes, which is what one lane of a GPU loads at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearRope:
    """Rope scaling that divides all positions."""

    factor: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Llama3Rope:
    """Rope scaling of Llama 3.1 and later."""

    factor: float
    """Factor by which long wavelengths grow."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192


@dataclass(frozen=True, kw_only=True, slots=True)
class YarnRope:
    """YaRN rope scaling."""

    factor: float
    original_max_positions: int
    beta_fast: float
    beta_slow: float
    mscale: float
    mscale_all_dim: float
    attention_factor: float | None = None
    """Factor of queries and keys; None if it follows from the others. Latent attention has none of its own."""
    is_truncated: bool = True
    """Whether the frequencies between which the scaling sets in are whole numbers."""

    @property
    def scale(self) -> float:
        """Factor of rotated queries, and of keys."""
        if self.attention_factor is not None:
            return self.attention_factor
        grown = 0.1 * math.log(max(self.factor, 1.0))
        return (grown * self.mscale + 1) / (grown * self.mscale_all_dim + 1)


RopeScaling = LinearRope | Llama3Rope | YarnRope


@dataclass(frozen=True, kw_only=True, slots=True)
class MlaDims:
    """Sizes of multi-head latent attention (DeepSeek-V2 and V3)."""

    q_lora_rank: int | None
    """Width of the compressed queries; None if queries are projected directly."""
    kv_lora_rank: int
    """Width of the compressed keys and values."""
    qk_nope_head_dim: int
    """Channels of a query or key head without position."""
    qk_rope_head_dim: int
    """Rotated channels of a query head; the keys' are shared by all heads."""
    v_head_dim: int
    """Channels of a value head."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowDims:
    """Layers whose tokens see only the last ones before them."""

    size: int
    """Tokens that one sees, itself included."""
    layers: tuple[bool, ...]
    """Flags of the layers: whether each has the window; the others see all tokens."""
    rotary_base: float | None
    """Base of these layers' rope, which is not scaled; None if their rope is that of the others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaDims:
    """Sizes of the gated delta nets that stand in the place of attention in some layers (Qwen3-Next, Qwen3.5)."""

    num_key_heads: int
    num_value_heads: int
    """Value heads, each with a state of its own; as many of them share each key head."""
    key_head_dim: int
    value_head_dim: int
    conv_size: int
    """Tokens that the convolution before the heads sees."""
    layers: tuple[bool, ...]
    """Flags of the layers: whether each has a gated delta net; the others have attention."""

    @property
    def key_rows(self) -> int:
        """Width of all keys, and of all queries."""
        return self.num_key_heads * self.key_head_dim

    @property
    def value_rows(self) -> int:
        """Width of all values, and of their gates."""
        return self.num_value_heads * self.value_head_dim

    @property
    def conv_rows(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.key_rows + self.value_rows

    @property
    def in_rows(self) -> int:
        """Rows of the input projection: the convolution's, the gates' and two for each value head."""
        return self.conv_rows + self.value_rows + 2 * self.num_value_heads

    @property
    def state_size(self) -> int:
        """Numbers that a layer keeps of a sequence: each value head's state, and the tokens that the convolution sees
        before the next."""
        return self.num_value_heads * self.key_head_dim * self.value_head_dim + self.conv_rows * (self.conv_size - 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class MoeDims:
    """Experts and router of a mixture-of-experts model.

    Example (Mixtral 8x7B): ``num_experts=8, experts_per_token=2, ffn_hidden_size=14336, layers=(True,) * 32,
    normalized=True``.
    """

    num_experts: int
    experts_per_token: int
    ffn_hidden_size: int
    """Width of one expert's gated MLP."""
    shared_ffn_hidden_size: int = 0
    """Width of the MLP that every token passes beside its experts; 0 for none."""
    shared_gate: bool = False
    """Whether what that MLP returns is multiplied by a gate of one channel."""
    layers: tuple[bool, ...]
    """Flags of the layers: whether each has experts."""
    score_function: Literal["softmax", "sigmoid"] = "softmax"
    normalized: bool
    """Whether the chosen experts' scores are divided by their sum."""
    scaling_factor: float = 1.0
    """Factor of the chosen experts' scores."""
    num_groups: int | None = None
    """Number of groups among whose best the experts are chosen; None for no groups."""
    group_topk: int | None = None
    """Number of groups to choose from."""
    expert_bias: bool = False
    """Whether a bias per expert takes part in the choice, but not in the score."""
    router_fp32: bool = False
    """Whether the router computes in fp32 whatever the model's dtype."""

    @property
    def route_shape(self) -> RouteShape:
        """What a rollout tells of the routers' choices."""
        return RouteShape(num_layers=sum(self.layers), num_choices=self.experts_per_token, num_experts=self.num_experts)


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionDims:
    """Sizes of the vision tower, and the tokens that stand for images.

    Example (Qwen2.5-VL-3B): ``patch_size=14, depth=32, hidden_size=1280, intermediate_size=3420, num_heads=16,
    out_hidden_size=2048, window_size=112, full_attention_blocks=(7, 15, 23, 31), mrope_section=(16, 24, 24)``.
    """

    naming: Naming
    """How the model's checkpoint names tensors."""
    image_token_id: int
    """Token that stands once for each merged patch of an image."""
    video_token_id: int
    vision_start_token_id: int
    vision_end_token_id: int
    patch_size: int
    """Side of a patch in pixels."""
    temporal_patch_size: int
    """Frames of a patch; an image is repeated to fill it."""
    spatial_merge_size: int
    """Side of a merged patch in patches."""
    in_channels: int
    depth: int
    """Number of blocks of the tower."""
    hidden_size: int
    num_heads: int
    intermediate_size: int
    """Width of a block's MLP."""
    out_hidden_size: int
    """Channels of a feature, which are the language model's."""
    window_size: int | None = None
    """Side of an attention window in pixels; None if every block sees the whole image."""
    full_attention_blocks: tuple[int, ...] = ()
    """Blocks that see the whole image in spite of ``window_size``."""
    num_position_embeddings: int | None = None
    """Number of learned positions, a square; None for rotary ones alone."""
    deepstack_layers: tuple[int, ...] = ()
    """Blocks whose features are also added after the language model's first layers, in this order."""
    mrope_section: tuple[int, int, int]
    """Rotary frequencies of time, height and width; together half of ``head_dim``."""
    mrope_interleaved: bool
    """Whether the three kinds of frequencies alternate; else they follow one another."""

    @property
    def token_ids(self) -> tuple[int, int, int, int]:
        """Ids that stand for vision, never for text."""
        return self.image_token_id, self.video_token_id, self.vision_start_token_id, self.vision_end_token_id


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelDims:
    """Sizes and switches of one decoder-only model, the same on every rank.

    Example (Qwen3-0.6B): ``family="qwen3", num_layers=28, hidden_size=1024, ffn_hidden_size=3072,
    num_attention_heads=16, num_query_groups=8, head_dim=128, vocab_size=151936, max_positions=40960,
    rotary_base=1e6, norm_epsilon=1e-6, tied_embeddings=True, qk_norm=True, qkv_bias=False``.
    """

    family: str
    """``model_type`` of the config: the key of the name table."""
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    """Width of the gated MLP (gate and up projections each)."""
    num_attention_heads: int
    num_query_groups: int
    """Key/value heads; each serves ``heads_per_group`` query heads."""
    head_dim: int
    """Channels of one head (``kv_channels`` in Megatron); need not be ``hidden_size / num_attention_heads``."""
    vocab_size: int
    """True vocabulary: rows of the embedding in the Hugging Face checkpoint, before padding."""
    max_positions: int
    rotary_base: float
    norm_epsilon: float
    """Epsilon of every RMSNorm."""
    tied_embeddings: bool
    """Whether the output layer shares the embedding matrix."""
    qk_norm: bool
    """Whether queries and keys pass an RMSNorm over ``head_dim``."""
    qkv_bias: bool
    """Whether the query, key and value projections have biases."""
    mla: MlaDims | None = None
    """Latent attention in place of grouped-query attention; ``head_dim`` then is that of a query."""
    moe: MoeDims | None = None
    """Experts; None for a dense model."""
    zero_centered_norms: bool = False
    """Whether norms multiply by 1 + w (a gated delta net's own by w)."""
    wide_qk_norm: bool = False
    """Whether the queries of all heads together pass one RMSNorm, and so the keys."""
    pre_norms: bool = True
    """Whether attention and MLP begin with a norm."""
    post_norms: bool = False
    """Whether attention and MLP also end with a norm."""
    scaled_embeddings: bool = False
    """Whether embeddings are multiplied by the root of ``hidden_size``, rounded as the weights are."""
    activation: Literal["silu", "gelu_tanh", "clamped_swiglu"] = "silu"
    """Function of the MLP's gate. ``clamped_swiglu``: gpt-oss's, which also clamps gate and up, and adds 1 to up."""
    linear_bias: bool = False
    """Whether attention's output, router and experts have biases too."""
    has_sinks: bool = False
    """Whether each attention head has a learned score that takes part in the softmax and stands for no token."""
    score_divisor: float | None = None
    """Number by whose root attention scores are divided; None for ``head_dim``."""
    window: WindowDims | None = None
    """Sliding windows of some layers; None if all layers see all tokens before."""
    delta: DeltaDims | None = None
    """Gated delta nets in the place of some layers' attention; None if all layers attend."""
    gated_attention: bool = False
    """Whether each query head has a gate, as wide as its answer."""
    rope_scaling: RopeScaling | None = None
    """Scaled rotary embedding; None for the plain one."""
    rotary_fraction: float = 1.0
    """Share of a head's channels, the first ones, that the rope turns."""
    num_mtp_layers: int = 0
    """Layers past the last one that predict tokens beyond the next (multi-token prediction). They are no part of the
    student: a checkpoint may have them, and they are copied as they are."""
    vision: VisionDims | None = None
    """The vision tower; None for a model of text."""

    @property
    def qkv_rows(self) -> int:
        """Rows of the merged projection of queries, their gates, keys and values."""
        asked = self.num_attention_heads * (2 if self.gated_attention else 1)
        return (asked + 2 * self.num_query_groups) * self.head_dim

    @property
    def heads_per_group(self) -> int:
        """Number of query heads that share one key/value head."""
        return self.num_attention_heads // self.num_query_groups

    def groups_on_rank(self, tensor_model_parallel_size: int) -> int:
        """Return the key/value heads that a rank computes with; if ranks share one, each computes it."""
        return max(1, self.num_query_groups // tensor_model_parallel_size)

    def is_moe_layer(self, layer: int) -> bool:
        """Return whether the layer (from 0) has experts."""
        return self.moe is not None and self.moe.layers[layer]

    def window_of(self, layer: int) -> int | None:
        """Return the window of a layer (from 0); None if it sees all tokens before."""
        return self.window.size if self.window is not None and self.window.layers[layer] else None

    def is_delta_layer(self, layer: int) -> bool:
        """Return whether the layer (from 0) has a gated delta net in the place of attention."""
        return self.delta is not None and self.delta.layers[layer]

    def layer_kind(self, layer: int) -> tuple[bool, bool]:
        """Return whether the layer has experts, and whether a gated delta net: layers of one kind have equal shapes."""
        return self.is_moe_layer(layer), self.is_delta_layer(layer)

    @property
    def num_attention_layers(self) -> int:
        """Number of layers whose tokens see all tokens before."""
        return self.num_layers - (0 if self.delta is None else sum(self.delta.layers))

    @property
    def has_own_layers(self) -> bool:
        """Whether layers have what TransformerEngine's have not: post-norms, windows, gated delta nets, norms of all
        heads together."""
        return self.post_norms or self.window is not None or self.delta is not None or self.wide_qk_norm

    @property
    def has_uniform_layers(self) -> bool:
        """Whether all layers have the same parameters; Megatron's checkpoints then stack them."""
        return self.delta is None and (self.moe is None or all(self.moe.layers))

    def padded_vocab_size(self, tensor_model_parallel_size: int) -> int:
        """Return the rows of Megatron's embedding: as many on each rank, a multiple of ``VOCAB_ROWS_MULTIPLE``."""
        multiple = VOCAB_ROWS_MULTIPLE * tensor_model_parallel_size
        return -(-self.vocab_size // multiple) * multiple


def check_routes(dims: ModelDims, *, replay_routes: bool) -> None:
    """Raise ``UserError`` where routes are to be replayed and the model has no experts."""
    if replay_routes and dims.moe is None:
        raise UserError(f"rollout.replay_routes is true, and model_type {dims.family} has no experts: remove it")


def check_layout(dims: ModelDims, parallel: ParallelConfig) -> None:
    """Refuse a parallel layout of the student that would split a head group, a row of an MLP, an expert's share or a
    layer.

    Raises:
        UserError: one line with both numbers and the key to set.
    """
    tp, etp = parallel.tensor_model_parallel_size, parallel.expert_tensor_parallel_size
    ep, cp = parallel.expert_model_parallel_size, parallel.context_parallel_size
    sp = parallel.sequence_parallel
    if problem := layout_problem(dims, stages_of(parallel), tp=tp, ep=ep, etp=etp, cp=cp, sp=sp):
        raise UserError(problem)


def check_layers(dims: ModelDims, transformer_impl: str) -> None:
    """Refuse TransformerEngine's layers for a model that has others.

    Raises:
        UserError: one line with the key to set.
    """
    if dims.has_own_layers and transformer_impl == "transformer_engine":
        raise UserError(
            f"student.transformer_impl is 'transformer_engine' and the layers of model_type {dims.family} are local "
            "ones: set it to 'auto' or 'local'"
        )


def layout_problem(
    dims: ModelDims,
    stages: Stages = ONE_STAGE,
    *,
    tp: int = 1,
    ep: int = 1,
    etp: int | None = None,
    cp: int = 1,
    sp: bool = True,
) -> str:
    """Return why ``check_layout`` refuses; empty for a layout that divides the model. ``etp`` None means ``tp``, as in
    Megatron; ``sp``: whether tensor-parallel ranks split sequences.

    Without, Megatron refuses to train experts, and each rank would keep only its own heads' part of the gradient of
    latent attention's rotary keys, which all heads share.
    """
    spelled, etp = "student.parallel.{}".format, tp if etp is None else etp
    needs = [name for name, part in (("experts", dims.moe), ("latent attention", dims.mla)) if part is not None]
    if needs and tp > 1 and not sp:
        return (
            f"{spelled('tensor_model_parallel_size')} is {tp} and the model has {' and '.join(needs)}: set "
            f"{spelled('sequence_parallel')}: true"
        )
    if cp > 1 and dims.delta is not None:
        return (
            f"{spelled('context_parallel_size')} is {cp} and model_type {dims.family} has gated delta nets, whose "
            "state goes from token to token: set it to 1"
        )
    if etp > 1 and dims.linear_bias:
        return (
            f"{spelled('expert_tensor_parallel_size')} is {etp} and the experts of model_type {dims.family} have "
            "biases, which each rank would add: set it to 1"
        )
    return division_problem(dims, stages, spelled, tp=tp, ep=ep, etp=etp) or _deepstack_problem(dims, stages)


def division_problem(
    dims: ModelDims, stages: Stages, spelled: Callable[[str], str], *, tp: int, ep: int, etp: int
) -> str:
    """Return why the degrees or the stages do not divide the model; empty if they do. ``spelled`` makes a key from a
    field's name."""
    has_dense_layers = dims.moe is None or not all(dims.moe.layers)
    # Ranks that share a key/value head have equal parts of the rows of its queries, keys and values. A norm of all
    # heads would count a shared one twice.
    is_shared = tp % dims.num_query_groups == 0 and dims.qkv_rows % tp == 0
    is_shared = is_shared and not (dims.gated_attention or dims.wide_qk_norm)
    needs = [
        ("tensor_model_parallel_size", tp, "key/value heads", tp if is_shared else dims.num_query_groups),
        ("tensor_model_parallel_size", tp, "attention heads", dims.num_attention_heads),
        ("tensor_model_parallel_size", tp, "MLP columns", dims.ffn_hidden_size if has_dense_layers else tp),
    ]
    if dims.delta is not None:
        needs.append(("tensor_model_parallel_size", tp, "key heads of gated delta nets", dims.delta.num_key_heads))
    if dims.moe is not None:
        needs += [
            ("tensor_model_parallel_size", tp, "columns of the shared experts", dims.moe.shared_ffn_hidden_size),
            ("expert_model_parallel_size", ep, "experts", dims.moe.num_experts),
            ("expert_tensor_parallel_size", etp, "columns of an expert", dims.moe.ffn_hidden_size),
        ]
    elif ep > 1:
        key = spelled("expert_model_parallel_size")
        return f"{key} is {ep} but model_type {dims.family} has no experts: set it to 1"
    for name, degree, what, size in needs:
        if size % degree:
            return f"{spelled(name)} {degree} does not divide the model's {size} {what}: set it to a divisor of {size}"
    return stages.problem(dims.num_layers, spelled)


def _deepstack_problem(dims: ModelDims, stages: Stages) -> str:
    """Return why the first stage cannot take DeepStack's features; empty if it has enough layers."""
    deepstack = 0 if dims.vision is None else len(dims.vision.deepstack_layers)
    on_first = len(stages.layers(dims.num_layers)[0][0])
    if on_first >= deepstack:
        return ""
    key, chunks = "student.parallel.num_layers_in_first_pipeline_stage", stages.virtual_pipeline_model_parallel_size
    which = "the first" if chunks == 1 else "the first chunk of the first"
    return (
        f"{key}: {which} of {stages.pipeline_model_parallel_size} stages has {on_first} layers, and features of the "
        f"vision tower are added after {deepstack}, which only that one has: set {deepstack * chunks} or more"
    )
