"""Where the tensors of a Hugging Face checkpoint lie in a transformers model.

A model usually has a parameter of each name. transformers 5 keeps all experts of a layer in two parameters
(``gate_up_proj`` [E, 2F, H] and ``down_proj`` [E, H, F]) and names Mixtral's blocks anew, while checkpoints keep one
tensor per expert and the old names.
"""

from __future__ import annotations

from torch import Tensor
from transformers import PreTrainedModel

_FUSED_GATE_UP = ".mlp.experts.gate_up_proj"
_FUSED_DOWN = ".mlp.experts.down_proj"
_MIXTRAL_BLOCK = {".mlp.": ".block_sparse_moe.", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def weight_slots(model: PreTrainedModel) -> dict[str, Tensor]:
    """Checkpoint name -> the memory of its values, in the checkpoint's shape: writing there loads the tensor. Every
    weight of the model occurs once (tied ones under their first name)."""
    persistent = model.state_dict().keys()
    slots: dict[str, Tensor] = dict(model.named_parameters())
    slots |= {name: buffer for name, buffer in model.named_buffers() if name in persistent}
    split: dict[str, Tensor] = {}
    for name, tensor in slots.items():
        split |= _split_experts(name, tensor)
    if model.config.model_type == "mixtral":
        return {_mixtral_name(name): tensor for name, tensor in split.items()}
    return split


def _split_experts(name: str, tensor: Tensor) -> dict[str, Tensor]:
    if name.endswith(_FUSED_GATE_UP):
        prefix = name.removesuffix("gate_up_proj")
        parts = {"gate_proj": 0, "up_proj": 1}
        return {
            f"{prefix}{e}.{part}.weight": own.chunk(2)[half]
            for e, own in enumerate(tensor)
            for part, half in parts.items()
        }
    if name.endswith(_FUSED_DOWN):
        prefix = name.removesuffix("down_proj")
        return {f"{prefix}{e}.down_proj.weight": own for e, own in enumerate(tensor)}
    return {name: tensor}


def _mixtral_name(name: str) -> str:
    if ".mlp." not in name:
        return name
    for new, old in _MIXTRAL_BLOCK.items():
        name = name.replace(new, old)
    return name
