"""What a metric is called and how it is drawn; where the time of a step goes."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from mopd.report.build import build_report
from mopd.report.charts import Series, extremes, line_chart
from mopd.report.curves import curves_by_metric, panel_of, percents, phases
from tests.fixtures.runs import DOMAINS, STEPS, make_run, step_record, stream_record

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    run = make_run(tmp_path_factory.mktemp("runs") / "run")
    build_report(run)
    return (run / "report.html").read_text()


def figure(page: str, metric: str) -> str:
    """The figure of a metric."""
    (found,) = [text for text in re.findall(r"<figure>.*?</figure>", page, re.S) if f"<code>{metric}</code>" in text]
    return found


def test_phases_follow_one_another_and_add_up_to_the_step() -> None:
    """What made the batch lies within the wait for it, and would be counted twice."""
    found = phases([step_record(1), step_record(2)])
    assert list(found) == ["wait_batch", "forward_backward", "weight_sync", "optim_step", "other"]
    assert found["wait_batch"].mean_s == 1.01 and found["wait_batch"].share == pytest.approx(1.01 / 2.25)
    assert sum(phase.mean_s for phase in found.values()) == pytest.approx(2.25)
    assert sum(phase.share for phase in found.values()) == pytest.approx(1)


def test_work_beside_training_is_in_no_phase() -> None:
    found = phases([stream_record(1)])
    assert {name: phase.share for name, phase in found.items()} == {
        "wait_batch": 0.375,
        "forward_backward": 0.375,
        "weight_sync": 0.125,
        "optim_step": 0.0625,
        "stage_weights": 0.03125,
        "other": 0.03125,
    }


@pytest.mark.parametrize("seed", range(20))
def test_percents_add_up_to_a_hundred(seed: int) -> None:
    rng = random.Random(seed)
    parts = [rng.random() ** 4 for _ in range(rng.randint(1, 9))]
    shares = [part / sum(parts) for part in parts]
    shown = [float(text.removesuffix(" %")) for text in percents(shares)]
    assert sum(shown) == pytest.approx(100)
    assert all(abs(100 * share - number) < 0.1 for share, number in zip(shares, shown, strict=True))


def test_what_is_set_or_counted_is_drawn_as_it_is(page: str) -> None:
    for metric in ("lr", "memory/student_peak_gib", "num_tokens", "tokens"):
        assert 'class="faint' not in figure(page, metric), metric
    for metric in ("kl_k1", "loss", "grad_norm"):
        assert 'class="faint' in figure(page, metric), metric
    heights = [float(y) for y in re.findall(r"[\d.]+,([\d.]+)", figure(page, "memory/student_peak_gib"))]
    assert heights.count(min(heights)) == 1, "the one peak is there, as high as it was"


@pytest.mark.parametrize(
    "metric", ["staleness", "drawn_samples", "drawn_tokens", "refused_tokens", "response_versions/max"]
)
def test_numbers_of_an_asynchronous_run_are_drawn_as_they_are(metric: str) -> None:
    assert not panel_of(metric).is_noisy and panel_of("response_versions/mean").is_noisy


def test_extremes_lose_no_peak() -> None:
    rng = random.Random(0)
    points = [(float(x), rng.random()) for x in range(10_000)]
    kept = extremes(points, 300)
    assert len(kept) <= 300 and kept == sorted(kept)
    assert max(y for _, y in kept) == max(y for _, y in points)
    assert min(y for _, y in kept) == min(y for _, y in points)


def test_always_zero_is_named_and_not_drawn(page: str) -> None:
    assert "<code>clamped_share</code>" in page
    assert not [text for text in re.findall(r"<figure>.*?</figure>", page, re.S) if "clamped_share" in text]
    assert re.search(r"2 curves are always 0</summary>.*?Clamped tokens.*?Staleness", page, re.S)


def test_the_axis_of_a_kl_begins_at_zero_unless_something_is_below(page: str) -> None:
    assert ">0</text>" in figure(page, "kl_k1")
    lowest = {}
    for low in (0.4, -0.4, -0.01):
        svg = line_chart([Series(name="a", index=0, points=[(0, 0.9), (1, low)])], label="x", from_zero=True)
        lowest[low] = min(float(text) for text in re.findall(r'text-anchor="end">([^<]*)<', svg))
    assert lowest[0.4] == lowest[-0.01] == 0 and lowest[-0.4] < -0.3


def test_a_metric_without_domains_is_one_curve() -> None:
    record = {"step": 1, "moe/z_loss": 0.5, "moe/idle_experts_share": 0.1, "timing/step_s": 1.0, "kl_k1/a/b": 2.0}
    curves = curves_by_metric([record | {"staleness_share/0": 1.0, "response_versions/max": 2.0}])
    assert curves["response_versions/max"] == {"": [(1, 2.0)]} and not any("share/0" in name for name in curves)
    assert "0" not in {domain for by_domain in curves.values() for domain in by_domain}
    assert curves["moe/z_loss"] == {"": [(1, 0.5)]} and curves["kl_k1"] == {"a/b": [(1, 2.0)]}


def test_every_metric_of_the_docs_has_a_title_in_words() -> None:
    lines = (ROOT / "docs" / "metrics.md").read_text().split("| `METRIC` |")[0].splitlines()
    named = {name for line in lines if line.startswith("| `") for name in re.findall(r"`([^`]+)`", line.split("|")[1])}
    named = {name.removesuffix("/DOMAIN").strip("/ ") for name in named} - {"step", "timing/PHASE_s", ""}
    for name in sorted(name for name in named if "…" not in name):
        title = panel_of(name).title
        assert title[0].isupper() and "_" not in title, name


def test_every_domain_has_its_curve(page: str) -> None:
    titles = re.findall(r"<title>(.*?)</title>", figure(page, "kl_k1"))
    assert sorted(titles)[0].startswith("google-research") and len(set(titles)) == len(DOMAINS)
    assert all(title.endswith(f"at step {STEPS}") for title in titles)
