"""``mopd stop``: ask a run to end after its step, with a checkpoint."""

from __future__ import annotations

import argparse
import getpass
from collections.abc import Sequence
from pathlib import Path

from mopd.base.files.reading import shown_path
from mopd.base.hardware import node_name
from mopd.base.types import UserError

ABOUT = "end a run after its step, with a checkpoint"
EXAMPLES = "example: mopd stop runs/quickstart"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Light to import, as all of this file."""
    parser.add_argument("run", type=Path, metavar="RUN", help="the run's folder, from any machine that sees it")
    parser.add_argument("--by", metavar="TEXT", help="who asks instead of a user, for the line that ends the run")


def run(args: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Leave the request and return at once; the exit code. ``UserError`` without such a folder."""
    if not args.run.is_dir():
        raise UserError(f"{shown_path(args.run)!r} is no folder: name the run_dir of a run")
    from mopd.run.folder import RunDir
    from mopd.run.stopping import request_stop

    folder = RunDir(args.run)
    by = args.by or f"mopd stop ({_user()} on {node_name()})"
    request_stop(folder.path, by, is_users=args.by is None)
    if folder.is_held():
        print(f"{shown_path(args.run)}: asked to stop; it ends after its step and a checkpoint, with exit code 75")
    else:
        print(f"{shown_path(args.run)}: asked to stop; no run is in there now, and the next one forgets the request")
    return 0


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user may have a number only
        return "a user without a name"
