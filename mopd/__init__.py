"""mopd: multi-teacher on-policy distillation on Megatron-Core.

The names of ``__all__`` are the Python API (``docs/api.md``). They are imported when they are first used, so that
``import mopd`` loads nothing else of the package.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mopd.api import Callback, Recipe, Run, check, plan, train
    from mopd.base.types import UserError

__version__ = "0.2.0"
__all__ = ["Callback", "Recipe", "Run", "UserError", "check", "plan", "train"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'mopd' has no attribute {name!r}")
    return getattr(importlib.import_module("mopd.api"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
