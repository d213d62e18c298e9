"""Teachers and rollout replicas in the report and in the progress display."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mopd.base.metrics import StepMetrics
from mopd.report.build import build_report, print_summary
from mopd.report.groups import group_values
from mopd.report.sinks import LiveProgress, PlainProgress
from tests.unit.report.conftest import shown, step_record, terminal, write_lines


def group_record(step: int, *, breaker: float = 0.0, retries: float = 0.0) -> dict[str, float | None]:
    """A teacher of two replicas whose name has a slash, and a rollout group of one."""
    group = {
        "samples": 10.0,
        "tokens": 1000.0 * step,
        "busy_s": 2.0,
        "tokens_per_s": 500.0 * step,
        "latency_p50_s": 0.1 * step,
        "latency_p95_s": 0.2 * step,
        "latency_p99_s": 0.3 * step,
        "queue_depth": float(step % 7),
        "in_flight_tokens": 300.0,
        "payload_bytes": 2.0**20,
        "retries": retries,
        "replicas": 2.0,
        "replicas_up": 2.0 - (breaker > 0),
    }
    replica = {"samples": 5.0, "tokens": 400.0, "busy_s": 1.0, "failures": 3.0, "breaker": breaker}
    return {
        **{f"teachers/{metric}/open/maths": value for metric, value in group.items()},
        **{f"teachers/{metric}/open/maths.0": value for metric, value in replica.items()},
        "teachers/latency_p95_s/open/maths.0": None,
        **{f"rollout/{metric}": value for metric, value in group.items() if metric != "payload_bytes"},
    }


@pytest.fixture
def grouped_run(run_dir: Path) -> Path:
    records: list[dict[str, Any]] = [{**step_record(s), **group_record(s)} for s in range(1, 41)]
    write_lines(run_dir / "metrics.jsonl", records)
    return run_dir


def test_sums_rates_and_medians_over_all_steps(grouped_run: Path) -> None:
    build_report(grouped_run)
    groups = json.loads((grouped_run / "report.json").read_text())["groups"]
    assert list(groups) == ["teachers", "rollout"] and list(groups["teachers"]) == ["open/maths", "open/maths.0"]
    teacher, replica, rollout = *groups["teachers"].values(), groups["rollout"]["all"]
    tokens = 1000 * sum(range(1, 41))
    assert (teacher["samples"], teacher["tokens"]) == (400, tokens)
    assert teacher["tokens_per_s"] == pytest.approx(tokens / 80)
    assert teacher["latency_p50_s"] == pytest.approx(0.1 * 20.5)
    assert teacher["latency_p99_s"] == pytest.approx(0.3 * 20.5)
    assert (teacher["queue_depth"], teacher["in_flight_tokens"]) == (6, 300)
    assert teacher["payload_bytes"] == 40 * 2**20 and rollout["payload_bytes"] is None
    assert (teacher["retries"], teacher["failures"]) == (0, None)
    assert (replica["retries"], replica["failures"], replica["latency_p95_s"]) == (None, 120, None)


def test_a_run_without_groups_numbers_has_no_groups(run_dir: Path) -> None:
    assert build_report(run_dir).groups == {}
    assert "Teachers and rollout replicas" not in (run_dir / "report.html").read_text()


def test_the_page_and_the_summary_show_them(grouped_run: Path) -> None:
    console = terminal(80)
    print_summary(build_report(grouped_run), console)
    for text in ("teacher open/maths.0", "│rollout ", "10,250", "40.0", "2050/"):
        assert text in shown(console)
    html = (grouped_run / "report.html").read_text()
    for text in ("Teachers and rollout replicas", "<th>teacher open/maths.0</th>", "40.0 MiB", "2.05 s"):
        assert text in html
    assert 'aria-label="Teachers: seconds per request, p95 over steps"' in html
    assert 'aria-label="Rollout: tokens per second over steps"' in html
    assert "teachers/latency_p95_s/open" not in html  # no chart per replica and metric


def test_domains_are_not_mixed_up_with_groups() -> None:
    values = group_values({"kl_k1/open/maths": 1.0, "teachers/samples/a/b": 2.0, "rollout/breaker/1": 0.0, "step": 3})
    assert values == {"teachers": {"a/b": {"samples": 2.0}}, "rollout": {"1": {"breaker": 0.0}}}


def test_the_live_table_shows_every_group_and_replica() -> None:
    console = terminal(140, force_terminal=True)
    progress = LiveProgress(console, 40, 0, {})
    record = {k: v for k, v in group_record(2, breaker=2.0, retries=4.0).items() if v is not None}
    values = {"loss": 1.0, "kl_k1/open/maths": 0.5, "kl_floor/open/maths": 1.26e-8, **record}
    progress.log(StepMetrics(step=2, values=values))
    progress.close()
    table = terminal(80)
    table.print(progress._draw())
    lines = shown(table).splitlines()
    teacher = next(line for line in lines if line.startswith("teacher open/maths "))
    assert teacher.split()[2:] == ["1/2", "1,000", "200/400/600", "1.05", "2", "300", "4"]
    (heading,) = (line for line in lines if line.startswith("domain"))
    (domain,) = (line for line in lines if line.startswith("open/maths"))
    assert "KL floor" in heading and domain.split() == ["open/maths", "0.500", "1.3e-08"]
    assert "broken" in next(line for line in lines if line.startswith("teacher open/maths.0"))


def test_plain_lines_tell_rates_and_each_trouble_once() -> None:
    console = terminal(140)
    progress = PlainProgress(console, 5, 0, clock=lambda: 0.0)
    for step, breaker in ((1, 0.0), (2, 2.0), (3, 2.0), (4, 0.0), (5, 0.0)):
        retries = 3.0 if step == 2 else 0.0
        record = {k: v for k, v in group_record(step, breaker=breaker, retries=retries).items() if v is not None}
        progress.log(StepMetrics(step=step, values={"loss": 1.0, "kl_floor/open/maths": 1.26e-8, **record}))
    text = shown(console)
    assert text.startswith("  KL floor  open/maths 1.3e-08\n") and text.count("floor") == 1
    assert text.count("  teachers  open/maths 500 tokens/s p95 0.2 s 1.05 MB\n") == 1
    assert text.count("step 2/5  teacher open/maths.0 broken\n") == 1 and text.count("broken") == 1
    assert text.count("step 2/5  teacher open/maths: 3 retries\n") == 1
    assert text.count("works again") == 1 and "step 4/5  teacher open/maths.0 works again\n" in text
