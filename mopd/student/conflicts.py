"""Cosines between the domains' gradients of one batch: who pulls the student where.

A domain's gradient is that of all trained weights, summed over ranks as the optimizer gets it, from a forward and
backward of its own. It is kept as a sketch: its entries change sign at random and are folded into ``WIDTH`` sums, so
that inner products are right to about 1 / sqrt(WIDTH) of the norms' product (tug-of-war sketch; Alon, Matias and
Szegedy, 1996). A cheaper choice would mislead: of a tiny student and three teachers the whole gradients had a cosine of
0.1, those of the final norm 0.9, since all of them scale the logits alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations

import torch
import torch.distributed as dist
from megatron.core.optimizer import ChainedOptimizer
from torch import Tensor

from mopd.student.parallel import Layout

WIDTH = 65_521
"""Numbers of a sketch. A prime: no column of a matrix is folded onto itself."""
PIECE = 1024 * WIDTH
"""Elements that get their signs together."""


def sketch_gradient(optimizer: ChainedOptimizer, layout: Layout) -> Tensor:
    """Return the sketch [WIDTH] fp32 of the gradient that the optimizer would step with. A rank takes the same signs in
    every sketch, others than other ranks take for their parts of the gradient. Collective."""
    optimizer.prepare_grads()
    parts = []
    for number, part in enumerate(optimizer.chained_optimizers):
        signs = torch.Generator(layout.device).manual_seed(layout.rank * len(optimizer.chained_optimizers) + number)
        own, place = torch.zeros(WIDTH, device=layout.device), 0
        pieces = (p for gradient in part.get_main_grads_for_grad_norm() for p in gradient.flatten().split(PIECE))
        for piece in pieces:
            flips = torch.randint(0, 2, piece.shape, generator=signs, device=layout.device, dtype=torch.int8)
            padded = torch.nn.functional.pad(piece * (1 - 2 * flips), (0, -piece.numel() % WIDTH))
            # Small tensors get places of their own.
            own += padded.view(-1, WIDTH).sum(0).roll(place)
            place = (place + piece.numel()) % WIDTH
        dist.all_reduce(own, group=part.get_grad_stats_parallel_group())
        parts.append(own)
    return torch.stack(parts).sum(0)


def cosines(sketches: Mapping[str, Tensor]) -> dict[str, float]:
    """Return ``gradient_cosine/A|B`` of each pair of domains."""
    return {
        f"gradient_cosine/{a}|{b}": float(torch.nn.functional.cosine_similarity(sketches[a], sketches[b], dim=0))
        for a, b in combinations(sketches, 2)
    }
