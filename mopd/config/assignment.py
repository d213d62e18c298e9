"""Which teachers answer for a domain, and how much each one counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mopd.config.groups import TeacherConfig
from mopd.types import UserError


class Assignment:
    """Domain -> names of its teachers: one, or several for an ensemble. Values follow from ``teachers``.

    Example: with teachers ``a`` (domains x and y, weight 1), ``b`` (domain y, weight 3) and ``c`` (default),
    ``teachers_of("y")`` is ``("a", "b")``, ``weights_of("y")`` is ``(0.25, 0.75)``, ``teachers_of("z")`` is ``("c",)``.
    """

    def __init__(self, teachers: Mapping[str, TeacherConfig]) -> None:
        """``teachers`` in the order of the recipe, whose checks have passed."""
        self._weights = {name: teacher.weight for name, teacher in teachers.items()}
        self.default = next((name for name, teacher in teachers.items() if teacher.default), None)
        """The teacher of domains that nobody names."""
        self.by_domain: dict[str, tuple[str, ...]] = {}
        """Every domain that some teacher names."""
        for name, teacher in teachers.items():
            for domain in teacher.domains:
                self.by_domain[domain] = (*self.by_domain.get(domain, ()), name)

    @property
    def max_teachers(self) -> int:
        """D: most teachers of any domain."""
        return max((len(names) for names in self.by_domain.values()), default=1)

    def teachers_of(self, domain: str) -> tuple[str, ...]:
        """In order of the recipe. ``UserError`` that lists the known domains for one without a teacher."""
        if domain in self.by_domain:
            return self.by_domain[domain]
        if self.default is not None:
            return (self.default,)
        known = ", ".join(map(repr, sorted(self.by_domain)))
        raise UserError(
            f"no teacher answers for domain {domain!r} (known: {known}): add it to teachers.<name>.domains, or set "
            "default: true for one teacher"
        )

    def weights_of(self, domain: str) -> tuple[float, ...]:
        """Shares of ``teachers_of(domain)``; they add up to 1."""
        names = self.teachers_of(domain)
        if len(names) == 1:
            return (1.0,)
        raw = [weight for name in names if (weight := self._weights[name]) is not None]
        return tuple(weight / sum(raw) for weight in raw)

    def weight_table(self, domains: Sequence[str]) -> tuple[tuple[float, ...], ...]:
        """[domains][D] shares, 0 beyond a domain's own teachers."""
        rows = [self.weights_of(domain) for domain in domains]
        return tuple(row + (0.0,) * (self.max_teachers - len(row)) for row in rows)

    def domains_among(self, seen: Sequence[str]) -> tuple[str, ...]:
        """All domains that a sample may have when the data has those of ``seen``, in alphabetical order."""
        return tuple(sorted({*self.by_domain, *(seen if self.default is not None else ())}))

    def domains_of(self, name: str, seen: Sequence[str]) -> tuple[str, ...]:
        """Domains of ``seen`` that a teacher answers for, alone or with others."""
        return tuple(domain for domain in seen if name in self.teachers_of(domain))
