"""What a step's record gets besides the student's numbers: the groups' work and the floor of the measured KL."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from mopd.config.assignment import Assignment
from mopd.files.json_text import read_json_object
from mopd.files.reading import shown_path
from mopd.metrics import StepMetrics
from mopd.replicas.watch import GroupWatch
from mopd.types import UserError


class StepWatch:
    """Adds ``teachers/…`` and ``rollouts/…`` (see ``mopd.replicas.watch``), ``kl_floor/DOMAIN`` and ``kl_net/DOMAIN``.

    ``kl_floor`` is the KL that a domain's teachers measured against their own folders before the first step; ``kl_net``
    is ``kl_k1`` less that.
    """

    def __init__(self, groups: GroupWatch, assignment: Assignment, floors: Mapping[str, float]) -> None:
        """``floors`` by teacher; a domain with a teacher that could not be compared has no floor."""
        self._groups, self._assignment, self._floors = groups, assignment, dict(floors)

    def __call__(self, metrics: StepMetrics) -> StepMetrics:
        """The record with these numbers."""
        values = self._groups.flush()
        for domain, kl in metrics.by_domain("kl_k1").items():
            names = self._assignment.teachers_of(domain)
            if all(name in self._floors for name in names):
                weights = self._assignment.weights_of(domain)
                floor = sum(w * self._floors[name] for w, name in zip(weights, names, strict=True))
                values |= {f"kl_floor/{domain}": floor, f"kl_net/{domain}": kl - floor}
        return metrics.plus(values)


def read_floors(path: Path) -> dict[str, float]:
    """Teacher -> KL floor; rounding can make a KL of 0 negative, which is a floor of 0.

    Raises:
        UserError: the file is not what ``write_parity`` writes.
    """
    cure = "restore the file that the run wrote, or remove it: the preflight then measures again"
    floors = {}
    for name, measured in read_json_object(path, cure=cure).items():
        kl = measured.get("kl") if isinstance(measured, dict) else None
        if not isinstance(kl, (int, float)) or isinstance(kl, bool):
            raise UserError(f"{shown_path(path)}: {name[:80]!r} has no number kl: {cure}")
        floors[name] = max(0.0, kl)
    return floors
