"""Weights of a student that no step changes: beside adapters, in the vision tower, by ``student.freeze``. No torch in
this module."""

from __future__ import annotations

from mopd.base.types import UserError
from mopd.config.student import FrozenPart, StudentConfig
from mopd.conversion.models import families
from mopd.conversion.models.adapted import adapted_parts
from mopd.conversion.models.dims import ModelDims
from mopd.conversion.models.rows import EMBEDDING, LM_HEAD, Param
from mopd.conversion.models.towers import is_trained


def part_of(param: Param) -> FrozenPart | None:
    """Return the part of a model that ``student.freeze`` can name which a row belongs to; ``None`` for the others."""
    if param.hf == EMBEDDING.hf:  # a tied head is the embedding's second copy
        return "embeddings"
    if param is LM_HEAD:
        return "output_layer"
    endings: dict[str, FrozenPart] = {"mlp.router.weight": "router", "mlp.router.expert_bias": "expert_bias"}
    return next((part for ending, part in endings.items() if param.megatron[0].endswith(ending)), None)


def is_frozen(param: Param, student: StudentConfig) -> bool:
    """Return whether no step changes a row's weights, those that adapters are merged into apart."""
    if student.lora is not None:
        return not adapted_parts(param, student.lora.target_modules)
    if param.is_vision:
        return not is_trained(param.megatron[0], student.vision.freeze)
    return part_of(param) in student.freeze


def constant_names(dims: ModelDims, student: StudentConfig) -> frozenset[str]:
    """Return the Hugging Face names of the tensors that training does not change; the same on every rank."""
    frozen = (placed for placed in families.all_params(dims) if is_frozen(placed.param, student))
    return frozenset(name for placed in frozen for name in placed.hf_names)


def check_freeze(dims: ModelDims, student: StudentConfig) -> None:
    """Refuse parts of ``student.freeze`` that the model does not have.

    Raises:
        UserError: one line with the part and those that there are.
    """
    rows = [param for layer in range(dims.num_layers) for param in families.layer_params(dims, layer)]
    rows += [EMBEDDING] if dims.tied_embeddings else [EMBEDDING, LM_HEAD]
    known = sorted({part for param in rows if (part := part_of(param)) is not None})
    for part in student.freeze:
        if part not in known:
            tied = ", whose head is its embedding," if part == "output_layer" else ""
            raise UserError(
                f"student.freeze names {part}, which this model of model_type {dims.family}{tied} does not have: name "
                f"some of {', '.join(known)}"
            )
