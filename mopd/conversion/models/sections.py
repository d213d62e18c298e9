"""Sections of ``student`` about parts that not every model has. No torch in this module."""

from __future__ import annotations

from mopd.base.types import UserError
from mopd.config.student import MoeConfig, StudentConfig, VisionConfig
from mopd.conversion.models.dims import ModelDims


def check_sections(dims: ModelDims, student: StudentConfig) -> None:
    """Refuse a section about experts or a tower that the model does not have.

    Raises:
        UserError: one line with the section.
    """
    if dims.moe is None and student.moe != MoeConfig():
        raise UserError(f"student.moe is set but model_type {dims.family} has no experts: remove the section")
    if dims.vision is None and student.vision != VisionConfig():
        raise UserError(f"student.vision is set but model_type {dims.family} has no vision: remove the section")
