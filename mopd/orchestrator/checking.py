"""``mopd check``, once no model is needed any more: the preflight of a run, which writes nothing."""

from __future__ import annotations

from mopd.orchestrator.leading import Lead, Led
from mopd.preflight.checks import Preflight
from mopd.preflight.showing import print_checks, print_failures
from mopd.run.manifests import make_manifests
from mopd.types import UserError


def check(lead: Lead, *, as_json: bool) -> str | None:
    """Run the preflight and print its outcomes. ``UserError`` for the last one that failed, after the lines of the
    others."""
    recipe = lead.loaded.recipe
    manifests = make_manifests(recipe)

    async def work(led: Led) -> None:
        await led.student.publish(0)
        preflight = Preflight(recipe, led.workers, led.student, manifests, is_fresh=True)
        checks = [outcome async for outcome in preflight.run()]
        failed = [check for check in checks if check.status == "failed"]
        print_checks(checks, as_json=as_json)
        print_failures(failed[:-1])
        if failed:
            raise UserError(failed[-1].detail)

    return lead.with_workers(work, None)
