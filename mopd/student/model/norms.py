"""RMSNorms and row-parallel linear layers of the local layers."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import rms_norm

from mopd.student.parallel import sharded_rows


class RMSNorm(torch.nn.RMSNorm):
    """RMSNorm of the local layer spec. Megatron's own wrapper refuses sequence parallelism.

    The weight is replicated over tensor-parallel ranks; ``sequence_parallel`` on it makes Megatron sum its gradient.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        super().__init__(hidden_size, eps=eps, device=device, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class ZeroCenteredRMSNorm(RMSNorm):
    """RMSNorm that multiplies by 1 + w, in fp32, and holds w as checkpoints do: w + 1 would round in bf16."""

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x.float(), self.normalized_shape, 1 + self.weight.float(), self.eps).type_as(x)


class WideRMSNorm(torch.nn.Module):
    """RMSNorm of all heads of queries, or of keys, together. Each tensor-parallel rank has its own heads and their part
    of the weight, whose gradient is whole there: ranks have all tokens between the projections."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float, *, num_heads: int, group: dist.ProcessGroup
    ) -> None:
        """``hidden_size``: channels of a head; ``num_heads``: those of all ranks of the ``group``."""
        super().__init__()
        self._group, self._eps, self._width = group, eps, num_heads * hidden_size
        own = self._width // group.size()
        self.weight = torch.nn.Parameter(torch.empty(own, dtype=config.params_dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Norm [S, B, heads / tp, D], rounding once."""
        wide = x.flatten(-2).float()
        total = reduce_from_tensor_model_parallel_region(wide.square().sum(-1, keepdim=True), group=self._group)
        # Backward sums as well: what each rank returns depends on the squares of all.
        total = copy_to_tensor_model_parallel_region(total, group=self._group)
        return (self.weight * (wide * torch.rsqrt(total / self._width + self._eps))).to(x.dtype).view_as(x)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> Any:
        """Return Megatron's description of the weight for checkpoints."""
        return sharded_rows(self, "weight", self._group, prefix, sharded_offsets, metadata)


class BiasedRowParallel(RowParallelLinear):
    """An expert's second linear layer with a bias, which Megatron's MLP adds in place: autograd takes that from no view
    of another output. Megatron would sum the bias's gradient over tensor-parallel ranks, which have other experts."""

    def __init__(self, *sizes: Any, **options: Any) -> None:
        super().__init__(*sizes, **options)
        self.bias.sequence_parallel = False

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out, bias = super().forward(x)
        return out.clone(), bias


class NormedRowParallel(RowParallelLinear):
    """A row-parallel linear layer whose output, summed over ranks, is normed: Megatron's layers have no other place for
    a norm between attention or MLP and the residual sum."""

    def __init__(self, *sizes: Any, norm: type[RMSNorm], config: TransformerConfig, **options: Any) -> None:
        super().__init__(*sizes, config=config, **options)
        self.post_layernorm = norm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        out, _ = super().forward(x)
        return self.post_layernorm(out), None
