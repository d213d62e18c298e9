"""Tests of what users write for mopd: ``docs/extending.md``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mopd.base.plugins import load_plugin
from mopd.base.types import UserError
from mopd.student.custom_loss import try_function

__all__ = ["UserError", "check_loss"]


def check_loss(
    function: Callable[..., Any] | str, *, own_samples: bool = False, same_gradient: bool = True, **options: Any
) -> None:
    """Try a loss of yours on small made rows, plain and extreme, as a run does before its first step and more.

    It must return one loss for each row, not look at other rows, leave its input as it is, have a gradient, which is
    that of its value by differences in float64, be finite on extreme rows, and say in fp32 what it says in float64.

    Args:
        function: the function, or its name as in ``loss.module``.
        own_samples: as in the recipe.
        same_gradient: False for a loss whose gradient is meant to be another than that of its value.
        **options: keywords of the function, as ``loss.options``.

    Raises:
        UserError: the first problem, in one sentence.
    """
    if isinstance(function, str):
        name, function = function, load_plugin("check_loss", function, "loss")
    else:
        name = getattr(function, "__name__", type(function).__name__)
    called = f"check_loss: {name!r}"
    try_function(function, options, own_samples=own_samples, called=called, whole=True, same_gradient=same_gradient)
