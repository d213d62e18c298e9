"""A rank's part of the trainer: the parallel layout, its share of the student, and the way to the other ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from mopd.config.schema import Recipe
from mopd.data_plane.local import LocalDataPlane
from mopd.launch.ranks import CommandChannel
from mopd.placement.gpus import local_rank
from mopd.student import parallel
from mopd.student.worker import StudentWorker


@contextmanager
def joined(
    recipe: Recipe, seen_domains: Sequence[str] | None
) -> Iterator[tuple[StudentWorker, LocalDataPlane, CommandChannel]]:
    """Join the other ranks and build the student.

    Args:
        seen_domains: rank 0's domains of the data, which a default teacher answers for; ``None`` on other ranks, which
            never read the data and are told.
    """
    timeout_s = recipe.schedule.wait_timeout_s
    with parallel.joined(
        recipe.student.parallel, timeout_s=timeout_s, seed=recipe.seed, local_rank=local_rank()
    ) as layout:
        channel = CommandChannel(layout.control_group)
        if seen_domains is None:
            domains = channel.receive()["domains"]
        else:
            domains = list(recipe.assignment.domains_among(seen_domains))
            channel.send({"domains": domains})
        plane = LocalDataPlane(layout.control_group)
        yield StudentWorker(recipe, plane, domains), plane, channel
