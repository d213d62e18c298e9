"""What one process has found out reaches the ranks before they have joined: from our launcher through its folder, under
``torchrun`` through the store that its agent keeps."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable
from pathlib import Path

from mopd.files.reading import read_text
from mopd.files.writing import writing
from mopd.launch.failure import LAUNCH_DIR, rank_and_world_size
from mopd.types import UserError

FILE = "shared.json"
MAX_BYTES = 64 * 2**20
WAIT = datetime.timedelta(hours=24)
"""For the first rank of a machine, which may be fetching hundreds of gigabytes. If it ends, torchrun ends them all."""


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
    """Under raw ``torchrun``: the text of this machine, which one of its ranks makes.

    Args:
        first: makes that of rank 0's machine.
        others: makes that of another machine, from rank 0's text.

    Raises:
        UserError: torchrun keeps no store.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        raise UserError(
            "names of the Hub need the store of torchrun's agent, for all ranks to read one commit: start with "
            "torchrun's defaults, or name local folders and files"
        )
    from torch.distributed import TCPStore  # heavy, and most runs never come here

    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=WAIT)
    prefix = f"mopd/hub/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    machine = f"{prefix}/{os.environ['GROUP_RANK']}"
    rank, _ = rank_and_world_size()
    if rank == 0:
        text = first()
        store.set(f"{prefix}/first", text)
        store.set(machine, text)
    elif os.environ["LOCAL_RANK"] == "0":
        store.set(machine, others(str(store.get(f"{prefix}/first"), "utf-8")))
    return str(store.get(machine), "utf-8")
