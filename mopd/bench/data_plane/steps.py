"""Samples of one optimizer step, of a given size in bytes: responses of very different lengths, all fields of a top-k
loss."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mopd.types import LOSS_FIELDS, SampleMeta

MEAN_RESPONSE = 1024
LONGEST_RESPONSE = 8192
PROMPT = 128
VOCAB_SIZE = 151_936
UNIT = 16
"""Samples of one put, and of one micro-batch."""


@dataclass(frozen=True, kw_only=True)
class StepData:
    """What the rollout and the teachers bring to one step."""

    metas: tuple[SampleMeta, ...]
    fields: dict[str, list[Tensor]]

    @property
    def num_bytes(self) -> int:
        """Of all tensors."""
        return sum(tensor.nbytes for tensors in self.fields.values() for tensor in tensors)

    def units(self) -> list[slice]:
        """Places of the samples that travel together."""
        return [slice(low, low + UNIT) for low in range(0, len(self.metas), UNIT)]


def make_step(num_bytes: int, *, top_k: int, seed: int = 0, mean_response: int = MEAN_RESPONSE) -> StepData:
    """About ``num_bytes``: log-normal lengths, seeded numbers."""
    random = np.random.default_rng(seed)
    per_token = 8 + 1 + 4 + 8 * top_k + 4
    metas: list[SampleMeta] = []
    fields: dict[str, list[Tensor]] = {name: [] for name in LOSS_FIELDS}
    left = num_bytes
    while left > 0:
        response = int(np.clip(random.lognormal(np.log(mean_response) - 0.5, 1.0), 8, LONGEST_RESPONSE))
        response = max(1, min(response, left // per_token))
        values = (
            torch.from_numpy(random.integers(0, VOCAB_SIZE, PROMPT + response)),
            torch.ones(response, dtype=torch.bool),
            torch.from_numpy(random.standard_normal(response, dtype=np.float32)),
            torch.from_numpy(random.integers(0, VOCAB_SIZE, (response, top_k), dtype=np.int32)),
            torch.from_numpy(random.standard_normal((response, top_k), dtype=np.float32)),
            torch.from_numpy(random.standard_normal(response, dtype=np.float32)),
        )
        for name, value in zip(LOSS_FIELDS, values, strict=True):
            fields[name].append(value)
        left -= sum(value.nbytes for value in values)
        metas.append(
            SampleMeta(
                sample_id=len(metas),
                domain="math",
                weight_version=0,
                prompt_length=PROMPT,
                response_length=response,
                num_loss_tokens=response,
            )
        )
    return StepData(metas=tuple(metas), fields=fields)


def padded(values: dict[str, list[Tensor]]) -> dict[str, Tensor]:
    """Every field in one padded tensor, as a micro-batch holds it: whatever brought the values, all bytes are read."""
    batch = {}
    for name, tensors in values.items():
        longest = max(tensor.shape[0] for tensor in tensors)
        batch[name] = tensors[0].new_zeros(len(tensors), longest, *tensors[0].shape[1:])
        for i, tensor in enumerate(tensors):
            batch[name][i, : tensor.shape[0]] = tensor
    return batch


def checksum(batch: dict[str, Tensor]) -> int:
    """Of the fields that are quick to add up: the same number whoever carried them."""
    return sum(int(batch[name].sum()) for name in ("tokens", "loss_mask"))
