"""Load balance over experts: the scale of the auxiliary losses, and measurements of the routers.

Megatron attaches the auxiliary losses to the routers' outputs, where they add to the gradient alone. It scales them for
gradients that are divided by a token count afterwards (``calculate_per_token_loss``); here gradients are sums and
nothing is divided, so the scale goes into the coefficients: what is minimised beside the loss is the mean of the
auxiliary losses over the micro-batches of all data-parallel ranks. Unlike the loss, it depends on how a batch is cut.

Two of them are replaced, because padding must not weigh. The z-loss is a mean over the real tokens of a micro-batch,
whatever tensor-parallel rank holds them; Megatron's is a mean of each rank's own mean. The sequence loss is a mean over
the real sequences; Megatron's weighs each by its length squared, and counts sequences of padding alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import (
    MoEAuxLossAutoScaler,
    clear_aux_losses_tracker,
    get_moe_layer_wise_logging_tracker,
    save_to_aux_losses_tracker,
)
from torch import Tensor

from mopd.config.student import MoeConfig
from mopd.conversion.models.dims import MoeDims
from mopd.student.model.gpt import StudentModel
from mopd.student.parallel import Layout

_LOSS_NAMES = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}
"""Type of the balancing loss -> the name under which Megatron logs it."""
_Z_LOSS = "z_loss"


class Balance:
    """Scales the router losses of one rank and counts routed tokens. Call ``begin`` before a step's passes and
    ``metrics`` after them."""

    def __init__(self, chunks: Sequence[StudentModel], moe: MoeConfig, dims: MoeDims, layout: Layout) -> None:
        self._moe = moe
        self._layout = layout
        self._num_moe_layers = sum(dims.layers)
        self._num_micro_batches = 0
        get_moe_layer_wise_logging_tracker().clear()  # may be a former model's, with another number of layers
        # [L, E]: tokens that this rank's routers sent, by layer of the whole model and expert
        self._tokens = torch.zeros(len(dims.layers), dims.num_experts, dtype=torch.float64, device=layout.device)
        self._routers: list[Any] = []
        own: list[Any] = [layer for chunk in chunks for layer in chunk.decoder.layers]
        for layer in own:
            if dims.layers[layer.layer_number - 1]:
                self._routers.append(layer.mlp.router)
                _adapt(layer.mlp.router, layout, self._tokens[layer.layer_number - 1])
                layer.register_forward_pre_hook(_set_samples, with_kwargs=True)

    def begin(self, num_micro_batches: int) -> None:
        """Clear the last step's numbers; every data-parallel rank is about to run ``num_micro_batches``."""
        self._num_micro_batches = num_micro_batches
        self._tokens.zero_()
        clear_aux_losses_tracker()
        for router in self._routers:
            # Nothing divides the summed gradients afterwards, so the mean over terms is taken in the coefficients.
            router.config.moe_aux_loss_coeff = self._moe.moe_aux_loss_coeff / self._num_terms
            z_loss = self._moe.moe_z_loss_coeff / (num_micro_batches * self._layout.dp_size)
            router.config.moe_z_loss_coeff = z_loss or None

    def metrics(self) -> dict[str, float]:
        """Return the step's numbers under their metric names, equal on every rank. Collective, one host
        synchronisation."""
        balance = _LOSS_NAMES[self._moe.moe_router_load_balancing_type]
        tracker = get_moe_layer_wise_logging_tracker()
        logged = [
            tracker[name]["values"].sum().double() if name in tracker else self._tokens.new_zeros(())
            for name in (balance, _Z_LOSS)
        ]
        flat = torch.cat([self._tokens.flatten(), torch.stack(logged)])
        dist.all_reduce(flat)
        values = _load(flat[:-2].view_as(self._tokens))
        # Tensor-parallel ranks hold parts of each term.
        terms = {balance: self._num_terms, _Z_LOSS: self._num_micro_batches * self._layout.dp_size}
        coefficients = {balance: self._moe.moe_aux_loss_coeff, _Z_LOSS: self._moe.moe_z_loss_coeff}
        for (name, num_terms), total in zip(terms.items(), flat[-2:].tolist(), strict=True):
            if coefficients[name]:
                values[f"moe/{name}"] = total / num_terms / self._num_moe_layers
        return values

    @property
    def _num_terms(self) -> int:
        """Number of balancing losses whose mean is minimised: one per data-parallel rank, save for the global loss."""
        is_global = self._moe.moe_router_load_balancing_type == "global_aux_loss"
        return self._num_micro_batches * (1 if is_global else self._layout.dp_size)


def _set_samples(layer: Any, inputs: Any, options: dict[str, Any]) -> None:
    """Give the layer's router the sample of each row (see ``StudentModel``), before a pass and before its
    recomputation."""
    layer.mlp.router.samples = getattr(options.get("packed_seq_params"), "samples", None)


def _adapt(router: Any, layout: Layout, tokens: Tensor) -> None:
    """Replace the methods of a Megatron router as the module docstring says, and count the tokens [E] that it sends."""
    router.calculate_per_token_loss = False
    router.apply_z_loss = partial(_apply_z_loss, router)
    router._apply_seq_aux_loss = partial(_apply_sequence_loss, router, layout)
    router._apply_expert_bias = partial(_apply_with_mask_per_token, router._apply_expert_bias)
    router.register_forward_hook(partial(_count, tokens))


def _count(tokens: Tensor, router: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Add the tokens [E] of a pass with gradients (recomputed passes would count twice)."""
    if torch.is_grad_enabled():
        tokens.add_((output[1] & _real(output[1], *inputs[1:])[:, None]).sum(0))


def _real(rows: Tensor, padding: Tensor | None = None) -> Tensor:
    """Return [T] bool: which of ``rows`` [T, ...] are real tokens. The mask has any shape of T entries; none: all."""
    return rows.new_ones(len(rows), dtype=torch.bool) if padding is None else ~padding.reshape(-1)


def _apply_z_loss(router: Any, logits: Tensor, padding_mask: Tensor | None = None) -> Tensor:
    """Replace ``TopKRouter.apply_z_loss``: attach the loss to the logits [T, E] in passes with gradients only."""
    coefficient = router.config.moe_z_loss_coeff
    if coefficient is None or not (router.training and torch.is_grad_enabled()):
        return logits
    real = _real(logits, padding_mask)
    num_tokens = real.sum()
    dist.all_reduce(num_tokens, group=router.tp_cp_group)
    squares = logits.float().logsumexp(-1).square()
    loss = (squares * real).sum() / num_tokens.clamp(min=1)
    save_to_aux_losses_tracker(_Z_LOSS, loss, router.layer_number, router.config.num_layers)
    attached: Tensor = MoEAuxLossAutoScaler.apply(logits, loss * coefficient)
    return attached


def _apply_sequence_loss(
    router: Any,
    layout: Layout,
    probs: Tensor,
    scores: Tensor,
    routing_map: Tensor,
    length: int,
    num: int,
    with_padding_mask: bool = False,
) -> Tensor:
    """Replace ``TopKRouter._apply_seq_aux_loss``: per sequence, experts x sum over experts of (share of choices x mean
    score), from scores and choices [T, E] that are zero at padding."""
    name = "seq_aux_loss"
    coefficient = router.get_aux_loss_coeff(name)
    if coefficient == 0:
        return probs
    if router.samples is None:
        index_T, num_samples = torch.arange(num, device=scores.device).repeat(length), num
    else:
        index_T, num_samples = router.samples
        if layout.sequence_parallel:
            index_T = index_T.chunk(layout.tp_size)[layout.tp_rank]

    def by_sample(values: Tensor) -> Tensor:
        return values.new_zeros(num_samples, *values.shape[1:]).index_add(0, index_T, values)

    chosen_NE = by_sample(routing_map.to(scores.dtype))
    # A sequence's tokens are spread over tensor- and context-parallel ranks: count the choices of all.
    dist.all_reduce(chosen_NE, group=router.tp_cp_group)
    choices_N = chosen_NE.sum(1)
    products_N = by_sample((scores * chosen_NE[index_T]).sum(1))
    losses_N = router.num_experts * router.topk * products_N / choices_N.clamp(min=1).square()
    loss = coefficient * losses_N.sum() / (choices_N > 0).sum().clamp(min=1)
    attached: Tensor = router.attach_and_log_load_balancing_loss(
        probs, coefficient, loss, _LOSS_NAMES[name], router.tp_cp_group
    )
    return attached


def _apply_with_mask_per_token(
    apply: Callable[..., None], routing_map: Tensor, padding_mask: Tensor | None = None
) -> None:
    """Work around Megatron 0.16.1, which combines a routing map [T, E] with a mask [T] that does not broadcast."""
    apply(routing_map, padding_mask=None if padding_mask is None else padding_mask[:, None])


def _load(tokens: Tensor) -> dict[str, float]:
    """Measure how even the load is, from tokens [L, E] over all ranks; layers without experts are zero rows."""
    used = tokens[tokens.sum(1) > 0]
    peaks = used.max(1).values / used.mean(1)
    return {
        "moe/load_max_over_mean": float(peaks.mean()),
        "moe/load_max_over_mean_worst_layer": float(peaks.max()),
        "moe/idle_experts_share": float((used == 0).double().mean()),
    }
