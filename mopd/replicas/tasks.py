"""Ending tasks: whatever happens, none is left behind unawaited."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, TypeVar

T = TypeVar("T")

CANCEL_GRACE_S = 5.0
"""How long a cancelled task may take to end; an engine call that does not let itself be cancelled is left to itself."""


async def cancel(tasks: Sequence[asyncio.Future[Any]]) -> None:
    """Cancel those that are not done, wait for their end, and take note of errors that nobody will ask for."""
    for task in tasks:
        task.cancel()
    pending = [task for task in tasks if not task.done()]
    if pending:
        await asyncio.wait(pending, timeout=CANCEL_GRACE_S)
    for task in tasks:
        if task.done() and not task.cancelled():
            task.exception()


async def all_or_none(tasks: Sequence[asyncio.Task[T]]) -> list[T]:
    """Results in order; the first error ends the others. The tasks have their own deadlines."""
    if not tasks:
        return []
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in tasks:
            if task.done():
                task.result()
        return [task.result() for task in tasks]
    finally:
        await cancel(tasks)
