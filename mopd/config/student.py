"""Student sections of a recipe: the model that learns, its layout over ranks and its optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from mopd.config.values import (
    MAX_BYTES,
    MAX_PROCESSES,
    Checked,
    Count,
    Decay,
    Fraction,
    NotNegative,
    Positive,
    Processes,
    Whole,
    at_least,
)

Freeze = Literal["tower", "tower_and_merger", "none"]
FrozenPart = Literal["embeddings", "output_layer", "router", "expert_bias"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig(Checked):
    """Layout, of tensor x context x pipeline x data ranks (docs/parallelism.md)."""

    tensor_model_parallel_size: Processes = 1
    """Ranks that share each layer and the vocabulary."""
    context_parallel_size: Processes = 1
    """Ranks that share each sequence's tokens."""
    pipeline_model_parallel_size: Processes = 1
    """Stages of consecutive layers."""
    virtual_pipeline_model_parallel_size: Count = 1
    """Chunks of each stage (docs/parallelism.md#pipelines)."""
    data_parallel_size: Processes = 1
    """Copies of the student, which share the batch."""
    expert_model_parallel_size: Processes = 1
    """Ranks that share each layer's experts."""
    expert_tensor_parallel_size: Processes | None = None
    """Ranks that share each expert; absent: ``tensor_model_parallel_size``."""
    sequence_parallel: bool = False
    """With tensor parallelism: split activations along the sequence."""
    num_layers_in_first_pipeline_stage: Count | None = None
    """Layers beside embedding and vision tower; absent: as other stages."""
    num_layers_in_last_pipeline_stage: Count | None = None
    """Layers beside logits and loss."""

    def check(self) -> None:
        if self.world_size > MAX_PROCESSES:
            names = (f"{name}_parallel_size" for name in ("tensor_model", "context", "pipeline_model", "data"))
            sizes = " x ".join(f"{name} {getattr(self, name)}" for name in names)
            raise ValueError(f"{sizes} is {self.world_size} ranks: set at most {MAX_PROCESSES}")
        experts = self.expert_ranks
        if self.ranks_per_stage % experts:
            raise ValueError(
                f"expert_model_parallel_size {self.expert_model_parallel_size} x expert_tensor_parallel_size "
                f"{self.resolved_expert_tensor_parallel_size} does not divide tensor_model_parallel_size "
                f"{self.tensor_model_parallel_size} x context_parallel_size {self.context_parallel_size} x "
                f"data_parallel_size {self.data_parallel_size}: set "
                f"expert_tensor_parallel_size or data_parallel_size so that {experts} ranks of a stage hold the experts"
            )
        if self.sequence_parallel and self.tensor_model_parallel_size == 1:
            raise ValueError(
                "sequence_parallel is true but tensor_model_parallel_size is 1: set tensor_model_parallel_size >= 2"
            )
        self._check_stages()

    def _check_stages(self) -> None:
        """Refuse keys that need a pipeline where there is none, and layer counts of both of two stages."""
        names = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if self.virtual_pipeline_model_parallel_size > 1:
            given["virtual_pipeline_model_parallel_size"] = self.virtual_pipeline_model_parallel_size
        for name, number in given.items():
            if self.pipeline_model_parallel_size == 1:
                raise ValueError(
                    f"{name} is {number} but pipeline_model_parallel_size is 1: set pipeline_model_parallel_size >= 2, "
                    "or leave the key out"
                )
        if self.pipeline_model_parallel_size == 2 and all(name in given for name in names):
            raise ValueError(
                f"{names[0]} and {names[1]} are both set but pipeline_model_parallel_size is 2, so that each follows "
                "from the other: leave one of them out"
            )

    @property
    def resolved_expert_tensor_parallel_size(self) -> int:
        own = self.expert_tensor_parallel_size
        return self.tensor_model_parallel_size if own is None else own

    @property
    def expert_ranks(self) -> int:
        """Ranks that hold one copy of a layer's experts."""
        return self.expert_model_parallel_size * self.resolved_expert_tensor_parallel_size

    @property
    def num_copies(self) -> int:
        """Ranks that hold the same weights outside the experts, and add up their gradients."""
        return self.context_parallel_size * self.data_parallel_size

    @property
    def ranks_per_stage(self) -> int:
        return self.tensor_model_parallel_size * self.num_copies

    @property
    def world_size(self) -> int:
        return self.ranks_per_stage * self.pipeline_model_parallel_size


DEFAULT_LR, LORA_LR = 1e-6, 1e-5
"""Peak learning rates of all weights, and of adapters: the best is ten times as high, at every rank ("LoRA Without
Regret", Schulman and Thinking Machines Lab, 2025)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig(Checked):
    """Adam, its learning rate and clipping."""

    lr: Positive | None = None
    """Peak learning rate; absent: 1e-6, with ``lora`` 1e-5."""
    min_lr: NotNegative = 0.0
    """Learning rate after the decay."""
    lr_warmup_steps: Whole = 0
    """Steps of linear warm-up."""
    lr_decay_style: Literal["constant", "linear", "cosine"] = "cosine"
    """Shape of the decay."""
    weight_decay: NotNegative = 0.0
    """Decoupled, on matrices only."""
    adam_beta1: Decay = 0.9
    """Decay of the first moment."""
    adam_beta2: Decay = 0.95
    """Decay of the second moment."""
    adam_eps: Positive = 1e-8
    """Added to the denominator."""
    clip_grad: NotNegative = 1.0
    """Global gradient-norm limit; 0: none."""
    use_distributed_optimizer: bool = True
    """Shard states over data-parallel ranks."""
    offload_fraction: Fraction = 0.0
    """Share of states in host memory, stepped there (docs/parallelism.md#states-in-host-memory)."""

    def check(self) -> None:
        if self.offload_fraction and not self.use_distributed_optimizer:
            raise ValueError(
                f"offload_fraction is {self.offload_fraction} but use_distributed_optimizer is false: set "
                "use_distributed_optimizer: true, or offload_fraction: 0"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class MoeConfig(Checked):
    """Mixture of experts."""

    moe_router_load_balancing_type: Literal["aux_loss", "seq_aux_loss", "global_aux_loss"] = "aux_loss"
    """Balance over a micro-batch, each sequence, or the batch."""
    moe_aux_loss_coeff: NotNegative = 0.0
    """Weight of the balancing loss, in gradients alone."""
    moe_z_loss_coeff: NotNegative = 0.0
    """Weight of the router's z-loss."""
    moe_router_bias_update_rate: NotNegative = 0.0
    """Step of DeepSeek-V3's expert biases; 0 keeps them."""
    moe_grouped_gemm: bool = False
    """Compute a rank's experts at once; needs TransformerEngine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionConfig:
    """Vision tower."""

    freeze: Freeze = "tower"
    """What keeps its weights (docs/vision.md#what-is-trained)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraConfig(Checked):
    """Train low-rank adapters alone (docs/lora.md)."""

    rank: Count = 32
    """Rows of A, columns of B."""
    alpha: Positive = 32.0
    """An adapter adds ``alpha / rank * B A``."""
    dropout: NotNegative = 0.0
    """Must be 0."""
    target_modules: Literal["all_linear"] | tuple[str, ...] = "all_linear"
    """All linear layers of attention, MLP and experts, or those of these names, as ``[q_proj, v_proj]``."""
    init: Literal["kaiming_uniform", "gaussian"] = "kaiming_uniform"
    """Distribution of A; B begins at 0."""
    path: str | None = None
    """Adapter in PEFT's format to begin with."""

    def check(self) -> None:
        if self.dropout:
            raise ValueError(f"dropout is {self.dropout}: set 0, as the student must be the one that drew the samples")
        if not self.target_modules:
            raise ValueError("target_modules is empty: name layers, as in [q_proj, v_proj], or set all_linear")

    @property
    def scale(self) -> float:
        """Factor of B A."""
        return self.alpha / self.rank


@dataclass(frozen=True, kw_only=True, slots=True)
class StudentConfig(Checked):
    """The model that learns."""

    model: str
    """Hugging Face folder, or name of the Hub (``namespace/name[@revision]``)."""
    lora: LoraConfig | None = None
    """Train low-rank adapters alone (docs/lora.md)."""
    freeze: tuple[FrozenPart, ...] = ()
    """Parts that keep their weights (docs/parallelism.md)."""
    parallel: ParallelConfig = ParallelConfig()
    """Layout, of tensor x context x pipeline x data ranks (docs/parallelism.md)."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Adam, its learning rate and clipping."""
    moe: MoeConfig = MoeConfig()
    """Mixture of experts."""
    vision: VisionConfig = VisionConfig()
    """Vision tower."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """``auto``: bfloat16 on CUDA, else float32."""
    transformer_impl: Literal["auto", "local", "transformer_engine"] = "auto"
    """``auto``: TransformerEngine on CUDA where installed."""
    recompute: Literal["none", "selective", "full"] = "none"
    """What backward computes again: nothing, attention, or whole layers."""
    overlap: bool | None = None
    """Communicate while computing; absent: with CUDA and several data-parallel ranks."""
    packing: bool = True
    """Lay sequences end to end, instead of padding."""
    max_tokens_per_micro_batch: Count = 16384
    """Tokens of a micro-batch, over context-parallel ranks."""
    micro_batch_size: Count | None = None
    """Sequences of a micro-batch, instead."""
    lm_head_memory_budget_mib: Annotated[int, at_least(1, MAX_BYTES // 2**20)] = 1024
    """Memory of a rank for logits and their gradient."""
    megatron_overrides: Mapping[str, Any] = field(default_factory=dict)
    """Extra ``TransformerConfig`` fields that keep the model."""

    def check(self) -> None:
        if self.optimizer.min_lr > self.peak_lr:
            raise ValueError(
                f"optimizer.min_lr {self.optimizer.min_lr} is above optimizer.lr {self.peak_lr}: set min_lr <= lr"
            )
        if self.lora is not None and self.moe.moe_router_bias_update_rate:
            raise ValueError(
                f"moe.moe_router_bias_update_rate is {self.moe.moe_router_bias_update_rate} beside lora, which leaves "
                "the model's own weights as they are: set it to 0"
            )

        self._check_freeze()

    def _check_freeze(self) -> None:
        if self.lora is not None and self.freeze:
            raise ValueError(
                f"freeze names {', '.join(self.freeze)} beside lora, which freezes all of the model's own weights: "
                "remove freeze"
            )
        if "expert_bias" in self.freeze and self.moe.moe_router_bias_update_rate:
            raise ValueError(
                f"freeze names expert_bias and moe.moe_router_bias_update_rate is "
                f"{self.moe.moe_router_bias_update_rate}, which moves it: set the rate to 0, or leave expert_bias out"
            )

    @property
    def peak_lr(self) -> float:
        """``optimizer.lr``, or its default."""
        if self.optimizer.lr is not None:
            return self.optimizer.lr
        return DEFAULT_LR if self.lora is None else LORA_LR
