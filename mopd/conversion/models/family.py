"""One model family: the meaning of its ``config.json`` and the rows of its name table, as one of the files of ``known``
gives them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from mopd.conversion.models.config_keys import Keys
from mopd.conversion.models.dims import MlaDims, MoeDims
from mopd.conversion.models.rows import Param


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """The layers of one ``model_type``, and what its configs have that others' have not."""

    architecture: str
    """The one architecture of it that is supported."""
    published_code: str = ""
    """Code that published checkpoints name in ``auto_map`` though transformers has the architecture itself."""
    dense: tuple[Param, ...] = ()
    """Rows of a layer with one MLP; empty if the family has none."""
    moe: tuple[Param, ...] = ()
    """Rows of a layer with experts."""
    kv_heads_default_to_heads: bool = False
    """Whether an absent ``num_key_value_heads`` means one per attention head."""
    head_dim_defaults_to_share: bool = False
    """Whether an absent ``head_dim`` means ``hidden_size / num_attention_heads``."""
    rotary_base: float | None = None
    """Base of the rope if the config names none; None if the format requires it."""
    default_window: int | None = None
    """Sliding window that an absent ``sliding_window`` means; None for full attention."""
    ropes: tuple[str, ...] = ("linear", "llama3", "yarn")
    """Kinds of rope that are supported beside the plain one."""
    rotary_fraction: float | None = None
    """Share of a head's channels that the rope turns if the config does not say; None if the family turns all whatever
    the config says."""
    qk_norm: bool | str = False
    """Whether queries and keys are normed, or the key of the config that says so."""
    qkv_bias: bool | str = False
    """Whether query, key and value projections have biases, or the key of the config that says so."""
    layer_types: tuple[str, ...] = ("full_attention",)
    """Kinds of layers that a config may name in ``layer_types``."""
    activation: str = "silu"
    """The supported ``hidden_act``."""
    quantised: str = ""
    """The ``quant_method`` of checkpoints that the reader turns into bfloat16; empty if there is none."""
    spelled: Callable[[Keys], Keys] | None = None
    """Function that returns the config with its keys spelled as other families spell them; None if they are."""
    stacked_experts: bool = False
    """Whether checkpoints keep all experts of a layer in one tensor (``conversion/hf/stacked.py``)."""
    renamed: tuple[tuple[str, str], ...] = ()
    """Parts of the names of a layer's experts in transformers, and what checkpoints have in their place."""
    attention: Literal["sdpa", "eager"] = "sdpa"
    """Kind of attention by which transformers computes the model."""
    vllm_on_cpu: str = ""
    """What vLLM does with the family on a CPU, where it is refused then; empty if it serves it there."""
    has_vision: bool = False
    latent_attention: Callable[[Keys], MlaDims] | None = None
    """Reader of latent attention; None for grouped-query attention."""
    experts: Callable[[Keys], MoeDims] | None = None
    """Reader of experts and router; None for a dense model."""
    mtp_prefix: str = ""
    """Beginning of the names of layers of multi-token prediction, which a checkpoint may have whatever its config says;
    empty if they are numbered as layers past the last, as many as the config says."""
    is_text_of_vision: bool = False
    """Whether the rope may have the keys of one of three axes, whose positions are equal for text."""
    more: Callable[[Keys], dict[str, Any]] | None = None
    """Reader of further fields of ``ModelDims``, which refuses what cannot be carried; None if the family has none."""
