"""Which teacher answers for a domain."""

from __future__ import annotations

from collections.abc import Mapping

from mopd.types import UserError


class Routing:
    """Domain -> name of its teacher."""

    def __init__(self, teacher_by_domain: Mapping[str, str]) -> None:
        self._teacher_by_domain = dict(teacher_by_domain)

    def teacher_of(self, domain: str) -> str:
        """``UserError`` that lists the known domains for one without a teacher."""
        if domain not in self._teacher_by_domain:
            known = ", ".join(map(repr, sorted(self._teacher_by_domain)))
            raise UserError(
                f"no teacher answers for domain {domain!r} (known: {known}): add it to teachers.<name>.domains"
            )
        return self._teacher_by_domain[domain]
