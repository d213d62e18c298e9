"""This process's connection to Ray, which is global: replicas and samples share it, and the last one ends it."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from mopd.base.text import last_line
from mopd.base.types import UserError
from mopd.placement.gpus import visible_gpus

RELEASE_S = 10.0
"""Seconds for a cluster to notice that resources that it shows as taken were given back by a run that just ended."""
_address: str | None = None
"""Address of the connected cluster; ``None`` also for a cluster of this machine alone."""
_num_holders = 0
"""Calls of ``connect`` without their ``disconnect``; 0 without a connection."""


def connect(key: str, address: str | None, *, num_cpus: float, gpus: Sequence[int]) -> Any:
    """Connect to ``address``, or (``None``) start a cluster of this machine that ends with the last ``disconnect``.

    Args:
        key: the recipe's section that asks, for errors.
        address: as the recipe says it.
        num_cpus: a cluster of this machine has at least so many logical ones.
        gpus: of this machine, those that a cluster of this machine gets.

    Returns:
        The ``ray`` module.

    Raises:
        UserError: the package is missing, the cluster cannot be reached, or another one is connected.
    """
    global _address, _num_holders
    if _num_holders and _address != address:
        raise UserError(
            f"{key}.address is {address!r}, but this run already uses the Ray cluster {_address!r}: one run uses "
            "one (placement.address, data_plane.address)"
        )
    options = _own_cluster(num_cpus, gpus) if address is None and not _num_holders else {"address": address}
    try:
        import ray
        import ray.exceptions
        import ray.util.scheduling_strategies
    except ImportError as error:
        raise UserError(f"{key}.type needs Ray, but the package is not installed: pip install 'mopd[ray]'") from error
    if not _num_holders:
        try:
            with _showing(gpus if address is None else ()):
                ray.init(log_to_driver=False, configure_logging=False, **options)
        except (ConnectionError, RuntimeError, ValueError, OSError, ray.exceptions.RayError) as error:
            raise UserError(f"{key}.address {address!r}: cannot connect to Ray: {last_line(error)}") from error
        _address = address
    _num_holders += 1
    return ray


def disconnect() -> None:
    """Give up one ``connect``; the last call leaves the cluster, and ends it if it was started here."""
    global _num_holders
    _num_holders -= 1
    if not _num_holders:
        import ray

        ray.shutdown()


def _own_cluster(num_cpus: float, gpus: Sequence[int]) -> dict[str, Any]:
    # A cluster for this run alone: no other run needs to reach it, and none may use it. Ray keeps the first token
    # that it meets in a process.
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    if "ray" not in sys.modules:  # too late otherwise; Ray then decides for a token by itself, with a warning
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ |= {
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # despite its name: one machine only, so loopback addresses
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    return {
        "address": "local",
        "num_cpus": max(os.cpu_count() or 1, int(num_cpus)),
        "num_gpus": len(gpus),
        "include_dashboard": False,
    }


@contextmanager
def _showing(gpus: Sequence[int]) -> Iterator[None]:
    """Processes that are started meanwhile see these GPUs only; without any, nothing is changed."""
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(visible_gpus(gpus))
    try:
        yield
    finally:
        if gpus and before is None:
            del os.environ["CUDA_VISIBLE_DEVICES"]
        elif gpus and before is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = before
