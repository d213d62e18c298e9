"""Megatron's data-parallel gradient buffers, Adam and learning-rate schedule, and the guarded optimizer step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import ChainedOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor

from mopd.base.types import UserError
from mopd.config.schedule import ScheduleConfig
from mopd.config.student import OptimizerConfig as StudentOptimizerConfig
from mopd.config.student import StudentConfig
from mopd.conversion.models.dims import ModelDims
from mopd.student import cpu_shim
from mopd.student.memory.offload import main_weights_on_host, offload
from mopd.student.model.gpt import StudentModel
from mopd.student.parallel import Layout
from mopd.weights.sending import require_all_finite

BUCKET_SIZE: int | None = None
"""Number of parameters whose gradients are summed together while backward goes on. ``None``: Megatron's choice, 40
million or more."""


def overlaps(student: StudentConfig, dims: ModelDims, layout: Layout) -> bool:
    """Return whether communication between data-parallel ranks overlaps forward and backward.

    Raises:
        UserError: the recipe asks for it, but some weights get no gradient in some micro-batches.
    """
    trains_tower = dims.vision is not None and student.vision.freeze != "tower_and_merger"
    if student.overlap and trains_tower:
        raise UserError(
            "student.overlap is true but weights of the vision tower are trained, which get no gradient from a "
            "micro-batch without images: leave overlap out, or set student.vision.freeze: tower_and_merger"
        )
    if student.overlap is not None:
        return student.overlap
    return layout.device.type == "cuda" and layout.dp_size * layout.cp_size > 1 and not trains_tower


def wrap_data_parallel(
    chunks: Sequence[StudentModel], *, use_distributed_optimizer: bool, overlap: bool = False
) -> list[DistributedDataParallel]:
    """Wrap the model chunks with fp32 gradient buffers that are summed over data-parallel ranks.

    Gradients are sums, never means: ``calculate_per_token_loss`` keeps Megatron from dividing by the data-parallel
    degree, and the finalizer is called without the token count that it would divide by. With ``overlap``, call
    ``complete_weights`` before reading weights outside of a forward pass.
    """
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=use_distributed_optimizer,
        overlap_grad_reduce=overlap,
        overlap_param_gather=overlap and use_distributed_optimizer,
        bucket_size=BUCKET_SIZE,
    )
    config = chunks[0].config
    config.finalize_model_grads_func = _finalize_sums
    wrapped = [
        # Gradients of later chunks are complete while earlier ones are still computed: one bucket is enough.
        DistributedDataParallel(config=config, ddp_config=ddp_config, module=chunk, disable_bucketing=number > 0)
        for number, chunk in enumerate(chunks)
    ]
    if overlap:  # only the backward of a step's last micro-batch communicates
        config.no_sync_func = wrapped[0].no_sync if len(wrapped) == 1 else [chunk.no_sync for chunk in wrapped]
    return wrapped


def complete_weights(chunks: Sequence[DistributedDataParallel]) -> None:
    """Wait for the last step's weights from the other data-parallel ranks; otherwise the next forward pass does."""
    for chunk in chunks:
        if chunk.ddp_config.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)


def build_optimizer(
    config: StudentOptimizerConfig, chunks: Sequence[DistributedDataParallel], *, num_steps: int
) -> tuple[ChainedOptimizer, OptimizerParamScheduler]:
    """Return Adam over the wrapped model chunks and its schedule over ``num_steps`` optimizer steps, which
    ``set_learning_rate`` moves on.

    Weight decay is Megatron's default: biases and one-dimensional weights (norms) have none. With w warm-up steps, step
    i (from 0) runs at lr * (i + 1) / (w + 1): a straight line from 0 whose first step is not wasted.
    """
    lr, dtype = config.lr, chunks[0].module.config.params_dtype
    assert lr is not None, "the student's peak_lr"
    with main_weights_on_host() if config.offload_fraction else nullcontext():
        optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=lr,
                min_lr=config.min_lr,
                weight_decay=config.weight_decay,
                adam_beta1=config.adam_beta1,
                adam_beta2=config.adam_beta2,
                adam_eps=config.adam_eps,
                clip_grad=config.clip_grad,
                bf16=dtype == torch.bfloat16,
                params_dtype=dtype,
                use_distributed_optimizer=config.use_distributed_optimizer,
            ),
            list(chunks),
        )
    if config.offload_fraction:
        offload(optimizer, config.offload_fraction)
    scheduler = OptimizerParamScheduler(
        optimizer,
        # Megatron's warm-up starts at init_lr; the default 0 would make the first step change nothing.
        init_lr=lr / (config.lr_warmup_steps + 1),
        max_lr=lr,
        min_lr=config.min_lr,
        lr_warmup_steps=config.lr_warmup_steps,
        lr_decay_steps=num_steps,
        lr_decay_style=config.lr_decay_style,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=num_steps,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
    )
    return optimizer, scheduler


def set_learning_rate(scheduler: OptimizerParamScheduler, schedule: ScheduleConfig, weight_version: int) -> None:
    """Give the optimizer the learning rate of the step that follows ``weight_version`` steps."""
    scheduler.num_steps, scheduler.lr_decay_steps = schedule.learning_rate_steps(weight_version)
    scheduler.step(0)


@torch.no_grad()
def clear_moments(optimizer: ChainedOptimizer) -> None:
    """Set this rank's share of Adam's moments, and its count of steps, to 0; main weights stay as they are."""
    for part in optimizer.chained_optimizers:
        if part.is_stub_optimizer:
            continue
        for states in part.optimizer.state.values():
            # In place, not by dropping the states: a GPU's memory would be cut up anew, beside the step's activations.
            for name in states.keys() & {"exp_avg", "exp_avg_sq", "step"}:
                states[name].zero_()
        for group in part.optimizer.param_groups:
            if "step" in group:  # the fused Adam counts by group, torch's by parameter
                group["step"] = 0


def guarded_step(optimizer: ChainedOptimizer, chunks: Sequence[DistributedDataParallel]) -> float:
    """Clip by the global norm and step, unless the norm is not finite; return the norm before clipping.

    With a non-finite norm, weights and optimizer states stay untouched. Raise ``NonFiniteError`` if one of this rank's
    weights is NaN or infinite after the step: no later check precedes their way to the rollout. Two host
    synchronisations.
    """
    with cpu_shim.activate():
        # Megatron's ``step`` would clip and update whatever the norm is. Its parts are called one by one to look
        # between them.
        optimizer.prepare_grads()
        norm = float(optimizer.get_grad_norm())
        if not math.isfinite(norm):
            return norm
        for part in optimizer.chained_optimizers:
            parameters = part.get_parameters()
            if parameters and part.config.clip_grad > 0:
                clip_grad_by_total_norm_fp32(parameters, max_norm=part.config.clip_grad, total_norm=norm)
    optimizer.step_with_ready_grads()
    weights: dict[str, Tensor] = {}
    for number, chunk in enumerate(chunks):
        suffix = f" of chunk {number}" if number else ""
        trained = ((name, weight) for name, weight in chunk.module.named_parameters() if weight.requires_grad)
        weights |= {name + suffix: weight.detach() for name, weight in trained}
    require_all_finite(weights)
    return norm


def _finalize_sums(model: list[Any], num_tokens: Any, **options: Any) -> None:
    """Run Megatron's gradient reductions without its division by ``num_tokens``."""
    finalize_model_grads(model, None, **options)
