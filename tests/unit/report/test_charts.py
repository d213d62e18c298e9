"""Line charts: ticks, thinning, and positions on the drawing."""

from __future__ import annotations

import math
import random
import re

import pytest

from mopd.report.charts import HEIGHT, WIDTH, Series, line_chart, running_mean, short, thin, ticks


@pytest.mark.parametrize("seed", range(50))
def test_ticks_are_few_round_and_enclose_the_data(seed: int) -> None:
    rng = random.Random(seed)
    low = rng.uniform(-1, 1) * 10 ** rng.randint(-6, 6)
    high = low + rng.random() * 10 ** rng.randint(-6, 6)
    marks = ticks(low, high)
    step = marks[1] - marks[0]
    assert 2 <= len(marks) <= 7
    assert marks[0] <= low + step * 1e-6 and marks[-1] >= high - step * 1e-6
    digits = step / 10 ** math.floor(math.log10(step) + 1e-6)
    assert min(abs(digits - round_number) for round_number in (1, 2, 5)) < 1e-3


def test_ticks_of_a_constant_enclose_it() -> None:
    for value in (0.0, 3.0, -2e-5):
        marks = ticks(value, value)
        assert marks[0] < value < marks[-1]


@pytest.mark.parametrize(("low", "high"), [(0.0, 3e-16), (-2e-15, 5e-15), (1.0, 1.0 + 2e-15), (1e9, 1e9 + 1e-6)])
def test_values_at_the_resolution_of_floats_are_drawn(low: float, high: float) -> None:
    """A student that starts as its teacher has losses of rounding noise."""
    marks = ticks(low, high)
    assert marks[0] <= low and high <= marks[-1]
    assert len(set(marks)) == len(marks)
    drawn = line_chart([Series(name="a", index=0, points=[(0, low), (1, high)], goal=None, has_marks=True)], label="x")
    assert "nan" not in drawn


def test_thinning_keeps_the_mean_and_the_range_of_steps() -> None:
    points = [(float(x), float(x % 7)) for x in range(1000)]
    few = thin(points, 100)
    assert len(few) == 100
    assert sum(y for _, y in few) / 100 == pytest.approx(sum(y for _, y in points) / 1000)
    assert few[0][0] < 10 and few[-1][0] > 989
    assert thin(points[:100], 100) == points[:100]


def test_a_running_mean_of_a_line_is_the_line() -> None:
    line = [(float(x), 2.0 * x) for x in range(20)]
    assert running_mean(line, 5)[2:-2] == line[2:-2]


def test_every_point_lies_on_the_drawing_and_higher_values_lie_higher() -> None:
    svg = line_chart(
        [Series(name="a", index=0, points=[(0, 5), (10, -3), (20, 8)], goal=12, has_marks=True)], label="x"
    )
    dots = [(float(x), float(y)) for x, y in re.findall(r'cx="([\d.]+)" cy="([\d.]+)"', svg)]
    assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y in dots)
    assert dots[0][0] < dots[1][0] < dots[2][0]
    assert dots[2][1] < dots[0][1] < dots[1][1]


@pytest.mark.parametrize("num", [3, 20])
def test_a_curve_is_named_with_its_last_value(num: int) -> None:
    svg = line_chart([Series(name="a", index=0, points=[(s, 50 + s) for s in range(num)])], label="x")
    titles = re.findall(r"<polyline[^>]*><title>([^<]*)<", svg)
    assert titles and set(titles) == {f"a: {49 + num} at step {num - 1}"}


def test_labels_tell_close_ticks_apart() -> None:
    svg = line_chart([Series(name="a", index=0, points=[(s, 1 - s * 1e-5) for s in range(10)])], label="x")
    labels = re.findall(r'text-anchor="end">([^<]*)<', svg)
    assert len(set(labels)) == len(labels) >= 2


def test_no_points_no_drawing() -> None:
    assert line_chart([Series(name="a", index=0, points=[])], label="x") == ""


def test_a_single_point_is_drawn() -> None:
    assert "<circle" in line_chart([Series(name="a", index=9, points=[(1, 1)])], label="x")


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (0.05, "0.05"), (1234, "1234"), (12345, "12.3k"), (3e-6, "3e-06"), (2.5e6, "2.5M")]
)
def test_short_numbers(value: float, text: str) -> None:
    assert short(value) == text
