"""Who worked, who waited and for whom, and how old the samples were, from records of steps."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from mopd.base.metrics import StepMetrics
from mopd.report.build import build_report
from mopd.report.charts import histogram
from mopd.report.pipeline import ages_line, lengths_line, pipeline_line, summarise_ages, summarise_pipeline
from mopd.report.sinks import LiveProgress, PlainProgress
from tests.fixtures.runs import DOMAINS, STEPS, make_run, step_record, stream_record
from tests.unit.report.conftest import shown, terminal

CLOSED = "timing/window_closed_s"


def stage(name: str, *records: dict[str, Any]) -> tuple[float, float, float]:
    found = summarise_pipeline(records)
    assert found is not None
    return found.stages[name].busy, found.stages[name].starved, found.stages[name].blocked


def test_shares_of_every_stage() -> None:
    found = summarise_pipeline([stream_record(step) for step in range(1, 4)])
    assert found is not None
    shares = {name: (one.busy, one.starved, one.blocked) for name, one in found.stages.items()}
    assert list(shares) == [
        "rollout", "teachers/code", "teachers/maths", "teachers/own", "rewards", "trainer", "weight_sync"
    ]  # fmt: skip
    assert shares["rollout"] == pytest.approx((0.95, 0.01875, 0.03125))
    assert shares["teachers/maths"] == pytest.approx((0.25, 0.75, 0))
    assert shares["rewards"] == pytest.approx((0.25, 0.75, 0))
    assert shares["trainer"] == pytest.approx((0.5, 0.375, 0.125))
    assert shares["weight_sync"] == pytest.approx((0.625 / 4, 1 - 0.625 / 4, 0))


def test_the_stage_that_bounds_and_the_replicas_that_would_not() -> None:
    """7.5 s of rollout replicas beside 2 s of the trainer: four would keep up. Exact multiples are not rounded up."""
    found = summarise_pipeline([stream_record(step) for step in range(1, 11)])
    assert found is not None and found.bound_by == "rollout"
    balanced = {name: (one.replicas, one.balanced_replicas) for name, one in found.stages.items()}
    assert balanced["rollout"] == (2, 4)
    assert balanced["teachers/code"] == balanced["teachers/own"] == (2, 1)
    assert balanced["trainer"] == balanced["rewards"] == (None, None)


def test_without_replicas_times_the_groups_own_is_taken() -> None:
    record = stream_record(1)
    del record["rollout/replica_busy_s"]
    found = summarise_pipeline([record])
    assert found is not None and found.stages["rollout"].balanced_replicas == 2  # 3.8 s / 2 s


def test_a_trainer_that_hardly_waits_bounds_the_step_whatever_else_is_busy() -> None:
    record = stream_record(1) | {"timing/wait_batch_s": 0.1, "timing/weight_sync_s": 0.05, "rollout/busy_s": 4.0}
    found = summarise_pipeline([record])
    assert found is not None and found.bound_by == "trainer"
    assert stage("trainer", record)[0] < stage("rollout", record)[0]


def test_time_beyond_the_step_counts_once() -> None:
    """Sampling goes on during a validation between two steps, whose seconds are no step's."""
    assert stage("rollout", stream_record(1) | {"rollout/busy_s": 9.0, CLOSED: 1.0}) == (1, 0, 0)
    assert stage("rollout", stream_record(1) | {"rollout/busy_s": 3.0, CLOSED: 9.0}) == (0.75, 0, 0.25)
    assert stage("trainer", stream_record(1) | {"timing/wait_batch_s": 5.0}) == (0, 1, 0)


@pytest.mark.parametrize("seed", range(10))
def test_shares_add_up_to_one_whatever_the_clocks_say(seed: int) -> None:
    rng = random.Random(seed)
    records = [stream_record(step) for step in range(1, 20)]
    for record in records:
        for name in record:
            if name.startswith("timing/") or "busy_s" in name:
                record[name] = rng.choice([0.0, None, 5 * rng.random()])
    found = summarise_pipeline([*records, stream_record(20)])
    assert found is not None
    for one in found.stages.values():
        assert one.busy + one.starved + one.blocked == pytest.approx(1)
        assert min(one.busy, one.starved, one.blocked) >= 0


def test_records_that_do_not_know_who_was_blocked_tell_nothing() -> None:
    assert summarise_pipeline([step_record(1)]) is None
    assert summarise_pipeline([]) is None
    assert summarise_pipeline([{"step": 1, CLOSED: 1.0}]) is None


def test_ages_versions_and_counts() -> None:
    found = summarise_ages([stream_record(step) for step in range(1, 101)])
    assert found is not None
    assert found.shares == pytest.approx({"0": 0.25, "1": 0.5, "2": 0.25})
    assert (found.response_versions_mean, found.response_versions_max) == (1.25, 3)
    assert found.refused_samples == {DOMAINS[0]: 0, DOMAINS[1]: 2, DOMAINS[2]: 2}
    assert found.refused_tokens == {DOMAINS[0]: 0, DOMAINS[1]: 1800, DOMAINS[2]: 1800}
    assert found.replaced_samples == dict.fromkeys(DOMAINS, 0)
    assert found.trained_length == dict.fromkeys(DOMAINS, 256)
    assert found.drawn_length == pytest.approx(dict(zip(DOMAINS, (300, *2 * [601_800 / 2002]), strict=True)))
    assert summarise_ages([step_record(1)]) is None
    replaced = summarise_ages([{"step": 1, "replaced_samples/math": 3.0}])
    assert replaced is not None and replaced.replaced_samples == {"math": 3} and replaced.shares == {}


def test_one_line_for_a_terminal() -> None:
    record = stream_record(50)
    found = summarise_pipeline([record])
    assert found is not None
    assert pipeline_line(found) == (
        "busy/starved/blocked %  rollout 95/2/3  teacher code 25/75/0  teacher maths 25/75/0  teacher own 25/75/0  "
        "rewards 25/75/0  trainer 50/38/12  weight sync 16/84/0  bound by rollout; balanced with replicas: rollout 2 → "
        "4, teacher code 2 → 1, teacher maths 2 → 1, teacher own 2 → 1"
    )
    ages = summarise_ages([record])
    assert ages is not None and ages_line(ages) == (
        "samples  0 steps behind 25 %, 1 steps behind 50 %, 2 steps behind 25 %, 1.25 versions a response, 2 refused"
    )
    lengths = {DOMAINS[0]: 300, DOMAINS[1]: 329, DOMAINS[2]: 329}
    refused = {DOMAINS[1], DOMAINS[2]}
    assert lengths_line(ages) == "mean length drawn, trained, refused  " + "; ".join(
        f"{domain} {lengths[domain]} tokens, 256{', 900' if domain in refused else ''}" for domain in sorted(DOMAINS)
    )


def test_progress_shows_the_last_step_as_lines_and_below_the_live_table() -> None:
    """A log has a line of each; old records have none."""
    console = terminal(300)
    progress = PlainProgress(console, 2, 0)
    progress.log(StepMetrics(step=1, values=step_record(1)))
    progress.log(StepMetrics(step=2, values=stream_record(2)))
    progress.close()
    lines = shown(console).splitlines()
    assert [line for line in lines if "starved" in line] == lines[-2:-1]
    assert lines[-2].startswith("  busy/starved/blocked %  rollout 95/2/3") and lines[-1].startswith("  samples  0 st")
    live = LiveProgress(terminal(), 2, 0, {})
    live.log(StepMetrics(step=2, values=stream_record(2)))
    live.close()
    table = terminal(300)
    table.print(live._draw())
    assert "bound by rollout" in shown(table) and "samples  0 steps" in shown(table)


def test_report_and_page(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", streams=True)
    build_report(run)
    told = json.loads((run / "report.json").read_text())
    assert told["pipeline"]["bound_by"] == "rollout" and told["pipeline"]["stages"]["rollout"]["balanced_replicas"] == 4
    assert told["samples"]["shares"]["1"] == pytest.approx(0.5) and told["samples"]["response_versions_max"] == 3
    assert told["samples"]["refused_samples"][DOMAINS[1]] == STEPS // 50
    page = (run / "report.html").read_text()
    for text in ("bound by: rollout", "Busy share of each stage", "1.25 versions of the weights", "95.0 %"):
        assert text in page
    assert page.count('class="bar') == 3 and "refused: too old" in page
    assert re.search(r'data-label="refused">8</td>\s*<td class="number" data-label="tokens">900</td>', page)


def test_a_run_without_these_numbers_has_no_such_sections(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    report = build_report(run)
    page = (run / "report.html").read_text()
    assert report.pipeline is None and report.samples is None
    assert "Who works and who waits" not in page and "Age of the samples" not in page and "100.0 %" in page


def test_a_histogram_of_many_numbers_names_some() -> None:
    bars = [(float(age), 1 / (1 + age)) for age in range(200)]
    svg = str(histogram(bars, label="ages"))
    assert svg.count("<rect") == 200 and svg.count('text-anchor="middle"') <= 6
    assert histogram([], label="none") == ""
