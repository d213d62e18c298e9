"""Whether what a recipe says of single domains goes with the domains of its data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mopd.base.types import UserError
from mopd.config.schema import Recipe
from mopd.data.columns import Fields
from mopd.data.files import MISSING
from mopd.rewards.domains import DomainRewards
from mopd.rewards.interface import RewardItem


@dataclass(frozen=True, slots=True)
class GroundTruths:
    """Whether each row's ground truth is one that its domain's reward reads; a ``RowCheck``."""

    rewards: DomainRewards

    @property
    def columns(self) -> Sequence[str]:
        return ()

    def check(self, row: Mapping[str, Any], found: Fields, place: str) -> None:
        """Raise ``UserError`` with the place of a row whose ground truth is unusable. A domain without a reward is
        refused as such."""
        if not self.rewards.has(found.domain):
            return
        truth, extra = (None if one is MISSING else one for one in (found.ground_truth, found.extra_info))
        item = RewardItem(
            prompt="", response="", ground_truth=truth, extra_info=extra, domain=found.domain, place=place
        )
        self.rewards.of(found.domain).check(item)


def check_domains(recipe: Recipe, train: Mapping[str, int], validation: Mapping[str, int] | None) -> None:
    """Check the keys that name domains, and that validation knows all that are trained.

    Args:
        train, validation: rows by domain; ``validation`` is ``None`` in a recipe without the section.

    Raises:
        UserError: one line with the key and the domains.
    """
    for key, named in (
        ("loss.domain_budget", recipe.loss.domain_budget),
        ("data.domain_weights", recipe.data.fixed_weights),
    ):
        if named and set(named) != set(train):
            raise UserError(f"{key} names {sorted(named)}, the data has {sorted(train)}: name every domain or none")
    for domain in recipe.domains:
        if domain not in train:
            known = ", ".join(map(repr, train))
            raise UserError(f"domains names {domain!r}, of which data.train has no row (it has {known}): remove it")
    if validation is not None:
        _check_validation(recipe, train, validation)


def _check_validation(recipe: Recipe, train: Mapping[str, int], validation: Mapping[str, int]) -> None:
    watched = recipe.watched_domains
    for domain in watched:
        if domain not in validation:
            raise UserError(f"validation.watch names {domain!r}, but data.validation has no row of it: add some")
        if domain in train:
            raise UserError(
                f"validation.watch names {domain!r}, but data.train has {train[domain]} rows of it: a domain is "
                "trained or watched; remove it from one of them"
            )
    unknown = sorted(set(validation) - {*recipe.assignment.by_domain, *watched})
    if unknown and recipe.assignment.default is None:
        raise UserError(
            f"data.validation has domains {unknown} that no teacher answers for: remove these rows, name a teacher, "
            "or name them in validation.watch"
        )
    missing = sorted(set(train) - set(validation))
    if missing and recipe.preflight.require_better_teacher:
        raise UserError(
            f"data.validation has no row of domain {missing[0]!r}, so its teacher cannot be checked: add rows, or set "
            "preflight.require_better_teacher: false"
        )
    if missing and recipe.data.domain_weights == "adaptive":
        raise UserError(
            f"data.domain_weights is adaptive, but data.validation has no row of domain {missing[0]!r}: its "
            "head-room would not be known: add rows, or give every domain its weight"
        )
