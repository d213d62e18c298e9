"""What one process has found out reaches the ranks before they have joined: from our launcher through its folder, under
``torchrun`` through the store that its agent keeps."""

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
from mopd.launch.failure import LAUNCH_DIR, group_rank, num_groups, rank_and_world_size
from mopd.launch.node import RUN_SECRET
from mopd.weights.signing import ForgedEntry

if TYPE_CHECKING:
    from torch.distributed import Store

FILE = "shared.json"
MAX_BYTES = 64 * 2**20
WAIT = datetime.timedelta(hours=24)
"""For the first rank of a machine, which may be fetching hundreds of gigabytes. If it ends, torchrun ends them all."""
_held: list[Store] = []
"""Stores that this process serves: they go with it."""


def to_ranks(launch_dir: Path, text: str) -> None:
    """Leave ``text`` for the ranks that are to start. Raises ``UserError`` where it cannot be written."""
    with writing(launch_dir):
        (launch_dir / FILE).write_text(text, encoding="utf-8")


def from_launcher() -> str | None:
    """In a rank: what our launcher left; ``None`` under raw ``torchrun``, or if it left nothing."""
    folder = os.environ.get(LAUNCH_DIR)
    if folder is None or not (Path(folder) / FILE).is_file():
        return None
    return read_text(Path(folder) / FILE, cure="start again", max_bytes=MAX_BYTES)


def once_per_machine(first: Callable[[], str], others: Callable[[str], str]) -> str:
    """Under raw ``torchrun``: the text of this machine, which one of its ranks makes. Returns when all machines have
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
    store, number = _agents_store(is_first=rank == 0), group_rank()
    prefix = f"mopd/recipe/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    if rank == 0:
        _tell(store, f"{prefix}/0", first)
    elif os.environ["LOCAL_RANK"] == "0":
        _tell(store, f"{prefix}/{number}", lambda: others(_hear(store, f"{prefix}/0")))
    text = _hear(store, f"{prefix}/{number}")
    if rank == 0:
        keys = [f"{prefix}/{machine}" for machine in range(num_groups())]
        _tell(store, f"{prefix}/all", lambda: "".join(_hear(store, key)[:0] for key in keys))
    _hear(store, f"{prefix}/all")
    return text


def _tell(store: Store, key: str, make: Callable[[], str]) -> None:
    """Leave a text, or the line of the ``UserError`` in its place."""
    try:
        told = {"text": make()}
    except UserError as error:
        told = {"error": str(error)}
    store.set(key, json.dumps(told))


def _hear(store: Store, key: str) -> str:
    """The text that somebody has left there. ``UserError`` with the line in its place, or for what none of us left."""
    try:
        told = parse_json(bytes(store.get(key)))
        if not isinstance(told, dict) or list(told) not in (["text"], ["error"]):
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
    if "error" in told:
        raise UserError(str(told["error"]))
    return str(told["text"])


def _agents_store(*, is_first: bool) -> Store:
    """A store that all ranks reach before they join: the one that torchrun's agent keeps, or rank 0's own, which lives
    on in this process until the ranks meet in it (``multi_tenant``)."""
    from torch.distributed import TCPStore  # heavy

    is_master = is_first and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=is_master,
        timeout=WAIT,
        wait_for_workers=False,
        multi_tenant=is_master,
    )
    if is_master:
        _held.append(store)
    return signed_store(store)


def signed_store(store: Store) -> Store:
    """Sign entries with the secret of the run, where it has one (``MOPD_RUN_SECRET``)."""
    from mopd.weights.store import SignedStore  # heavy

    secret = os.environ.get(RUN_SECRET)
    return SignedStore(store, secret) if secret else store
