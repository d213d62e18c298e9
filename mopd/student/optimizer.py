"""Megatron's data-parallel gradient buffers, Adam and learning-rate schedule, and the guarded optimizer step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import ChainedOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from mopd import cpu_shim
from mopd.config.student import OptimizerConfig as StudentOptimizerConfig
from mopd.student.model.gpt import StudentModel


def wrap_data_parallel(
    chunks: Sequence[StudentModel], *, use_distributed_optimizer: bool
) -> list[DistributedDataParallel]:
    """The model chunks with fp32 gradient buffers that are summed over data-parallel ranks.

    Gradients are sums, never means: ``calculate_per_token_loss`` keeps Megatron from dividing by the data-parallel
    degree, and the finalizer is called without the token count that it would divide by.
    """
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=use_distributed_optimizer
    )
    config = chunks[0].config
    config.finalize_model_grads_func = _finalize_sums
    return [
        # Gradients of later chunks are complete while earlier ones are still computed: one bucket is enough.
        DistributedDataParallel(config=config, ddp_config=ddp_config, module=chunk, disable_bucketing=number > 0)
        for number, chunk in enumerate(chunks)
    ]


def build_optimizer(
    config: StudentOptimizerConfig, chunks: Sequence[DistributedDataParallel], *, num_steps: int
) -> tuple[ChainedOptimizer, OptimizerParamScheduler]:
    """Adam over the wrapped model chunks and its schedule over ``num_steps`` optimizer steps.

    Weight decay is Megatron's default: biases and one-dimensional weights (norms) have none. With w warm-up steps, step
    i (from 0) runs at lr * (i + 1) / (w + 1): a straight line from 0 whose first step is not wasted.
    """
    dtype = chunks[0].module.config.params_dtype
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=config.lr,
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
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=config.lr / (config.lr_warmup_steps + 1),
        max_lr=config.lr,
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


def guarded_step(optimizer: ChainedOptimizer) -> float:
    """Clip by the global norm and step, unless the norm is not finite; returns the norm before clipping.

    A non-finite norm is returned with weights and optimizer states untouched. One host synchronisation.
    """
    with cpu_shim.activate():
        optimizer.prepare_grads()
        norm = float(optimizer.get_grad_norm())
        if not math.isfinite(norm):
            return norm
        for part in optimizer.chained_optimizers:
            parameters = part.get_parameters()
            if parameters and part.config.clip_grad > 0:
                clip_grad_by_total_norm_fp32(parameters, max_norm=part.config.clip_grad, total_norm=norm)
    optimizer.step_with_ready_grads()
    return norm


def _finalize_sums(model: list[Any], num_tokens: Any, **options: Any) -> None:
    """Megatron's gradient reductions without its division by ``num_tokens``."""
    finalize_model_grads(model, None, **options)
