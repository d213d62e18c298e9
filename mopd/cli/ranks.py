"""Shared parts of the commands with a recipe: its arguments, and the way from one process to the student's ranks."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

from mopd.base.hardware import this_hardware
from mopd.base.types import UserError
from mopd.config.load import Loaded
from mopd.config.reading.tree import STANDARD_INPUT
from mopd.launch import failure
from mopd.launch.node import Place
from mopd.launch.nodes import Nodes


def add_recipe(parser: argparse.ArgumentParser, default: str | None = None) -> None:
    """The recipe and what overrides its keys: bare words or ``--set``, anywhere behind the recipe (``cli.main`` adds
    those that stand behind an option)."""
    add = parser.add_argument
    optional: dict[str, Any] = {} if default is None else {"nargs": "?", "default": default}
    about = "recipe file; docs/recipes.md lists every key" + ("" if default is None else " (default: standard input)")
    add("recipe", metavar="RECIPE", help=about, **optional)
    add("set", metavar="KEY=VALUE", nargs="*", action="extend", default=[], help="override keys (YAML values)")
    add("--set", metavar="KEY=VALUE", dest="set", action="append", default=[], help=argparse.SUPPRESS)


def on_students_ranks(
    loaded: Loaded,
    arguments: Sequence[str],
    work: Callable[[], int | None],
    checks: Callable[[], None] = lambda: None,
    *,
    nodes: Nodes | None = None,
    groups: Sequence[str] | None = None,
    cure: Callable[[], str] = lambda: "",
    ask: Callable[[], None] | None = None,
    watch: Callable[[], None] = lambda: None,
) -> failure.Ended:
    """Do the work, in a rank (``cli.main`` relays its errors and its code). Elsewhere: check the student's layout, the
    recipe's inputs, the GPUs of ``groups`` (all) and what ``checks`` adds, then start this command as ranks, here or on
    all ``nodes``. ``cure()`` ends the line of a rank's sudden end, ``ask`` is what the first SIGTERM does, ``watch``
    is called again and again while the ranks run."""
    from mopd.launch.checks.inputs import check_cuda, check_inputs, check_interface, check_machine, check_world_size
    from mopd.launch.heartbeat import beating

    if failure.is_rank():
        with beating(loaded.recipe.schedule.wait_timeout_s):
            check_world_size(loaded, failure.rank_and_world_size()[1])
            is_first = failure.group_rank() == 0
            if not failure.is_our_launchers():
                _raise_open_files(loaded, is_first=is_first)
            check_inputs(loaded, is_first=is_first)
            return failure.Ended(code=work() or 0)
    nodes = Nodes(Place()) if nodes is None else nodes
    if loaded.path == STANDARD_INPUT:
        raise UserError("recipe: the ranks cannot read standard input again: write it to a file and name that")
    check_machine(loaded, nodes.place.num_nodes)
    check_cuda(this_hardware())
    check_interface(loaded, "weight_sync")
    _raise_open_files(loaded, is_first=nodes.place.is_first)
    check_inputs(loaded, is_first=nodes.place.is_first)
    from mopd.placement.gpus import check_gpus

    # Replicas that a run starts are node 0's.
    check_gpus(loaded, groups if nodes.place.is_first else (), num_nodes=nodes.place.num_nodes)
    checks()
    nodes.meet("the checks")
    from mopd.launch.launch import launch
    from mopd.launch.preparing import for_ranks

    num_ranks = loaded.recipe.student.parallel.world_size // nodes.place.num_nodes
    command = [sys.executable, "-m", "mopd", *arguments]
    shared = for_ranks(loaded)
    return launch(command, num_ranks=num_ranks, nodes=nodes, shared=shared, cure=cure, ask=ask, watch=watch)


def _raise_open_files(loaded: Loaded, *, is_first: bool) -> None:
    """Raise the limit of this process and its children to what the ranks need."""
    from mopd.launch.checks.inputs import raise_open_files

    where, on_gpu = loaded.where("student", "parallel"), not this_hardware().without_cuda
    raise_open_files(loaded.recipe.student.parallel, where, on_gpu=on_gpu, is_first=is_first)
