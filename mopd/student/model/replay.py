"""Router replay (R3): the student's routers choose the experts that the rollout's chose.

Where both choose for themselves, rounding and newer weights send some tokens to other experts than those that drew the
response, and log-probs jump. Of a replayed row only the choice is the rollout's: the scores of the chosen experts are
the student's own, and its router learns by them. The auxiliary losses read the router's own choice. Rows whose choice
nobody has told, a sequence's last token and padding, go their own way.

Megatron's routers ask an object for their choice (``RouterReplay``). Here it is one of ours that is handed the routes
with each pass of its layer, recomputed passes included: Megatron's own queue would have to be driven from outside.

Letters: T rows, k experts of a token, E layers with experts, n domains.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mopd.base.types import UserError
from mopd.conversion.models.dims import MoeDims
from mopd.student.model.gpt import StudentModel
from mopd.student.parallel import Layout

Routes = tuple[Tensor, Tensor]
"""Experts [T, E, k] of each row, -1 where they are not known; and the rows' domains [T]."""
TopK = Callable[..., tuple[Tensor, Tensor]]


class Replay:
    """Replays routes in the routers of one rank, and measures how often they would have chosen alike. Call ``begin``
    before a step's passes and ``metrics`` after them."""

    def __init__(self, chunks: Sequence[StudentModel], dims: MoeDims, layout: Layout, domains: Sequence[str]) -> None:
        """Raise ``UserError`` for overrides under which a router does not know its pass."""
        _check(chunks[0].config)
        self._domains = domains
        self._layers = [number for number, has_experts in enumerate(dims.layers) if has_experts]
        # [2, E, n]: choices that were alike, and all, of this rank's passes with gradients
        size = 2, len(self._layers), len(domains)
        self._counts = torch.zeros(size, dtype=torch.float64, device=layout.device)
        own: list[Any] = [layer for chunk in chunks for layer in chunk.decoder.layers]
        for layer in own:
            if dims.layers[layer.layer_number - 1]:
                column = self._layers.index(layer.layer_number - 1)
                layer.mlp.router.router_replay = _Choice(self._counts[:, column])
                layer.register_forward_pre_hook(partial(_hand_over, column, layout), with_kwargs=True)

    def begin(self) -> None:
        """Clear the last step's numbers."""
        self._counts.zero_()

    def metrics(self) -> dict[str, float]:
        """Return the shares of choices in which the student's router agrees with the rollout's: of all, by layer and by
        domain, equal on every rank. Collective."""
        counts = self._counts.clone()
        dist.all_reduce(counts)
        alike, total = counts
        names = [f"route_agreement_by_layer/{number}" for number in self._layers]
        shares = dict(zip(names, (alike.sum(1) / total.sum(1)).tolist(), strict=True))
        of_domains = (alike.sum(0) / total.sum(0)).tolist()
        shares |= {
            f"route_agreement/{name}": share
            for name, share, seen in zip(self._domains, of_domains, total.sum(0).tolist(), strict=True)
            if seen
        }
        return shares | {"moe/route_agreement": float(alike.sum() / total.sum())}


class _Choice:
    """The choice of one router, in the place of Megatron's ``RouterReplay``."""

    def __init__(self, counts: Tensor) -> None:
        """``counts`` [2, n]: what ``Replay`` measures of this layer."""
        self._counts = counts
        self.routes: Routes | None = None
        """Experts [T, k] and domains [T] of the pass that is under way; ``None``: each row goes its own way."""

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None, choose: TopK
    ) -> tuple[Tensor, Tensor]:
        """Return scores and numbers [T, k] of the experts, from scores [T, experts]."""
        own_scores, own = choose(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if self.routes is None:
            return own_scores, own
        given, domains = self.routes
        is_known = given[:, :1] >= 0
        if torch.is_grad_enabled():  # a recomputed pass has none the first time
            alike = (own[:, :, None] == given[:, None, :]).any(-1) & is_known
            self._counts[0].index_add_(0, domains, alike.sum(1).double())
            self._counts[1].index_add_(0, domains, is_known[:, 0].double() * topk)
        chosen = torch.where(is_known, given, own)
        return scores.gather(1, chosen), chosen


def _hand_over(column: int, layout: Layout, layer: Any, inputs: Any, options: dict[str, Any]) -> None:
    """Give a layer's router its rows' routes (see ``StudentModel``), before a pass and before its recomputation."""
    routes: Routes | None = getattr(options.get("packed_seq_params"), "routes", None)
    if routes is not None:
        given, domains = routes[0][:, column].long(), routes[1]
        if layout.sequence_parallel:
            given, domains = (rows.chunk(layout.tp_size)[layout.tp_rank] for rows in (given, domains))
        routes = given, domains
    layer.mlp.router.router_replay.routes = routes


def _check(config: Any) -> None:
    problem = ""
    if config.moe_router_fusion:
        problem = "moe_router_fusion is true, which replays nothing"
    elif config.recompute_granularity == "selective" and {"moe", "mlp"} & set(config.recompute_modules):
        problem = f"recompute_modules is {config.recompute_modules}, where a router does not know its micro-batch"
    if problem:
        raise UserError(f"rollout.replay_routes is true, but student.megatron_overrides.{problem}: remove one of them")
