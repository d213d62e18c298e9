"""The recipe's custom loss: its user's function, tried before anything relies on it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from mopd.base.plugins import described, load_plugin
from mopd.base.types import UserError
from mopd.config.losses import CustomLossConfig
from mopd.losses.chunked.custom import LossProblem, RowFunction
from mopd.losses.trial import check_gradient, check_precision, try_loss

KEY = "loss.module"


def load_custom_loss(cfg: CustomLossConfig) -> tuple[RowFunction, tuple[str, ...]]:
    """Import and try the function of a ``custom`` loss; return it with its options, and the names of its metrics.

    Raises:
        UserError: it is not there, or ``try_loss`` refuses it.
    """
    function = load_plugin(KEY, cfg.module, "loss")
    return try_function(function, cfg.options, own_samples=cfg.own_samples, called=f"{KEY}: {cfg.module!r}")


def try_function(
    function: Callable[..., Any],
    options: Mapping[str, Any],
    *,
    own_samples: bool,
    called: str,
    whole: bool = False,
    same_gradient: bool = True,
) -> tuple[RowFunction, tuple[str, ...]]:
    """Try a loss and return it with its options, and the names of its metrics.

    Args:
        called: begins the line of an error.
        whole: also compare it with float64 and, with ``same_gradient``, its gradient with that of its value.

    Raises:
        UserError: the first problem, in one sentence.
    """
    bound: RowFunction = partial(function, **options)
    try:
        names = try_loss(bound, own_samples=own_samples)
        if whole:
            check_precision(bound, own_samples=own_samples)
        if whole and same_gradient:
            check_gradient(bound, own_samples=own_samples)
    except LossProblem as error:
        raise UserError(f"{called} {error}") from error
    except Exception as error:  # whatever the function raises
        file = inspect.getsourcefile(inspect.unwrap(function)) if inspect.isroutine(function) else None
        raise UserError(f"{called} fails: {described(error, file or '')}") from error
    return bound, names
