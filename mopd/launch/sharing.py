"""The way of one process's findings to the ranks before they have joined: from our launcher through its folder, under
``torchrun`` through the store of its agent."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from mopd.base.files.json_text import parse_json
from mopd.base.files.reading import read_text
from mopd.base.files.writing import writing
from mopd.base.types import UserError
from mopd.launch.failure import LAUNCH_DIR, agent_store, group_rank, has_agent_store, num_groups, rank_and_world_size
from mopd.launch.node import RUN_SECRET
from mopd.weights.signing import ForgedEntry

if TYPE_CHECKING:
    from torch.distributed import Store

FILE = "shared.json"
MAX_BYTES = 64 * 2**20
WAIT = datetime.timedelta(hours=24)
"""Deadline for the first rank of a machine, which may be fetching hundreds of gigabytes; its end is torchrun's too."""


def to_ranks(launch_dir: Path, text: str) -> None:
    """Leave ``text`` for the ranks that are to start. Raises ``UserError`` where it cannot be written."""
    with writing(launch_dir):
        (launch_dir / FILE).write_text(text, encoding="utf-8")


def from_launcher() -> str | None:
    """Return, in a rank, what our launcher left; ``None`` under raw ``torchrun``, or if it left nothing."""
    folder = os.environ.get(LAUNCH_DIR)
    if folder is None or not (Path(folder) / FILE).is_file():
        return None
    return read_text(Path(folder) / FILE, cure="start again", max_bytes=MAX_BYTES)


def once_per_machine(first: Callable[[], str], others: Callable[[str], str]) -> str:
    """Return, under raw ``torchrun``, the text of this machine, which one of its ranks makes, once all machines have
    theirs.

    Args:
        first: makes that of rank 0's machine.
        others: makes that of another machine, from rank 0's text.

    Raises:
        UserError: on every rank, where one of the machines has raised it.
    """
    rank, world_size = rank_and_world_size()
    if world_size == 1:
        return first()
    if not has_agent_store():
        raise UserError(
            "TORCHELASTIC_USE_AGENT_STORE is not True: start the ranks with mopd train or torchrun, whose agent keeps "
            "a store for them (TORCH_DISABLE_SHARE_RDZV_TCP_STORE turns it off)"
        )
    store, own = signed_store(agent_store("start", WAIT.total_seconds())), f"recipe/{group_rank()}"
    if rank == 0:
        _put(store, "recipe/0", first)
    elif os.environ["LOCAL_RANK"] == "0":
        _put(store, own, lambda: others(_get(store, "recipe/0")))
    text = _get(store, own)
    if rank == 0:
        keys = [f"recipe/{machine}" for machine in range(num_groups())]
        _put(store, "recipe/all", lambda: "".join(_get(store, key)[:0] for key in keys))
    _get(store, "recipe/all")
    return text


def _put(store: Store, key: str, make: Callable[[], str]) -> None:
    """Leave a text, or the line of the ``UserError`` in its place."""
    try:
        entry = {"text": make()}
    except UserError as error:
        entry = {"error": str(error)}
    store.set(key, json.dumps(entry))


def _get(store: Store, key: str) -> str:
    """Wait for an entry and return its text. ``UserError`` with the line in its place, or for a foreign entry."""
    try:
        entry = parse_json(bytes(store.get(key)))
        if not isinstance(entry, dict) or list(entry) not in (["text"], ["error"]):
            raise ValueError("no text and no error")
    except (ForgedEntry, ValueError) as error:
        what = error if isinstance(error, ForgedEntry) else f"the store's entry {key!r} is none of this run's ({error})"
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise UserError(
            f"MASTER_ADDR {address}: {what}: set {RUN_SECRET} to the same on all nodes, or keep other users "
            "from this port"
        ) from None
    except RuntimeError as error:  # torch's errors of its store
        raise UserError("the run has ended before all machines had agreed on a recipe: see the first one's") from error
    if "error" in entry:
        raise UserError(str(entry["error"]))
    return str(entry["text"])


def signed_store(store: Store) -> Store:
    """Sign entries with the secret of the run, where it has one (``MOPD_RUN_SECRET``)."""
    from mopd.weights.store import SignedStore  # heavy

    secret = os.environ.get(RUN_SECRET)
    return SignedStore(store, secret) if secret else store
