"""Linear layers of a model that low-rank adapters can stand beside. No torch in this module."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from mopd.base.types import UserError
from mopd.config.student import StudentConfig
from mopd.conversion.models import families
from mopd.conversion.models.dims import ModelDims
from mopd.conversion.models.families import Placed
from mopd.conversion.models.rows import Param

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""Files of an adapter in PEFT's format."""
Targets = Literal["all_linear"] | Sequence[str]
"""What gets adapters: all linear layers, or those with these last names (``q_proj``)."""
_MERGES = ("qkv", "gate_up", "rows", "columns", "replicated")
"""Cuts of weights beside which a pair of factors can be cut alike."""
_SUFFIX = ".weight"


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapted:
    """One Hugging Face module that has an adapter."""

    module: str
    """Its name; that of its weight without ``.weight``."""
    num_outputs: int
    num_inputs: int


def adapted_parts(param: Param, targets: Targets) -> tuple[int, ...]:
    """Return which of a row's Hugging Face tensors are weights of linear layers with adapters."""
    if param.merge not in _MERGES or "{layer}" not in param.megatron[0] or ".router." in param.megatron[0]:
        return ()
    return tuple(
        number
        for number, tensor in enumerate(param.hf)
        if len(tensor.shape) == 2
        and tensor.name.endswith(_SUFFIX)
        and (targets == "all_linear" or _last(tensor.name) in targets)
    )


def adapted(placed: Placed, targets: Targets) -> list[Adapted]:
    """Return the modules of one placed row that have adapters."""
    return [
        Adapted(
            module=placed.hf_names[part].removesuffix(_SUFFIX),
            num_outputs=placed.hf_shapes[part][0],
            num_inputs=placed.hf_shapes[part][1],
        )
        for part in adapted_parts(placed.param, targets)
    ]


def adapted_modules(dims: ModelDims, targets: Targets) -> Iterator[Adapted]:
    """Yield every module with an adapter, in checkpoint order."""
    for placed in families.all_params(dims):
        yield from adapted(placed, targets)


def target_names(dims: ModelDims, targets: Targets) -> list[str]:
    """Return the last names of all modules with adapters, sorted.

    Raises:
        UserError: the model has no such linear layer; or head and embedding are asked for.
    """
    params = {param for layer in range(dims.num_layers) for param in families.layer_params(dims, layer)}
    known = {_last(param.hf[part].name) for param in params for part in adapted_parts(param, "all_linear")}
    for name in () if targets == "all_linear" else targets:
        if name in ("lm_head", "embed_tokens"):
            raise UserError(
                f"student.lora.target_modules names {name!r}: head and embedding keep their weights, as engines apply "
                f"no adapters to them: name some of {', '.join(sorted(known))}"
            )
        if name not in known:
            raise UserError(
                f"student.lora.target_modules names {name!r}, which is no linear layer of model_type {dims.family}: "
                f"name some of {', '.join(sorted(known))}"
            )
    return sorted(known if targets == "all_linear" else set(targets))


def check_lora(dims: ModelDims, student: StudentConfig) -> None:
    """Refuse a student whose model or layout its adapters do not go with; none is asked of one without them.

    Raises:
        UserError: one line with the key to set.
    """
    if student.lora is None:
        return
    target_names(dims, student.lora.target_modules)
    if dims.vision is not None and student.vision.freeze != "tower_and_merger":
        raise UserError(
            f"student.lora trains adapters alone, but student.vision.freeze {student.vision.freeze!r} trains a part of "
            "the vision tower: set student.vision.freeze: tower_and_merger"
        )
    problem = _cannot_be_adapted(dims)
    if problem:
        raise UserError(f"student.lora: the layers of model_type {dims.family} {problem}: remove student.lora")
    tp, etp = student.parallel.tensor_model_parallel_size, student.parallel.resolved_expert_tensor_parallel_size
    if tp > dims.num_query_groups and dims.mla is None:
        raise UserError(
            f"student.parallel.tensor_model_parallel_size is {tp} beside student.lora, and the model has "
            f"{dims.num_query_groups} key/value heads: set it to {dims.num_query_groups} or less"
        )
    if dims.moe is not None and etp not in (1, tp):
        raise UserError(
            f"student.parallel.expert_tensor_parallel_size is {etp} beside student.lora and "
            f"tensor_model_parallel_size {tp}: set it to 1 or {tp}"
        )


def _cannot_be_adapted(dims: ModelDims) -> str:
    """Return what of the model's layers an adapter beside Megatron's would not stand beside in the Hugging Face model;
    empty if there is nothing."""
    if dims.post_norms:
        return "norm what attention and MLP return, an adapter's part too"
    if dims.delta is not None:
        return "have gated delta nets, which take no adapters yet"
    parts = {"qkv": 3, "gate_up": 2}
    params = [param for layer in range(dims.num_layers) for param in families.layer_params(dims, layer)]
    if any(len(param.hf) != parts.get(param.merge, len(param.hf)) for param in params):
        return "are merged in its checkpoints (qkv_proj, gate_up_proj), which take no adapters yet"
    return ""


def _last(name: str) -> str:
    return name.removesuffix(_SUFFIX).rpartition(".")[2]
