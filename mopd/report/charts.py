"""Line charts and histograms as inline SVG in the page's colours (CSS variables ``--series-0`` …), light or dark.

Own, not matplotlib's: its SVG has fixed colours for one scheme, 2.3 times the bytes (three curves of 400 steps: 52 kB,
here 22 kB) and takes seven times as long (160 ms and 22 ms on a busy machine, after 2.6 s of imports). A library that
draws in the browser would bring megabytes of script into a page that has none.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter

from markupsafe import Markup, escape

WIDTH, HEIGHT = 420, 230
RIGHT, TOP, BOTTOM = 26, 10, 28
MIN_LEFT, CHARACTER = 44, 7.5
"""Least width of the y axis' labels, and width of a character (of the larger type on a phone)."""
NUM_COLOURS = 8
"""Number of colours; further series repeat them with a dashed line."""
NEARLY_ZERO = 0.05
"""Share of the highest value below which a negative value counts as noise around 0."""
MAX_POINTS = 300
"""Largest number of points of a drawn curve; longer ones are thinned."""
MOST_NUMBERS = 12
"""Largest number of bars that each get a label on the axis."""
BAR_SHARE = 0.7
"""Width of a bar, as a share of the distance between bars."""

Point = tuple[float, float]
Scale = Callable[[float], float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """One curve. ``points`` are (step, value) in order of steps."""

    name: str
    index: int
    """Number of the colour: the same domain has the same one in every chart."""
    points: Sequence[Point]
    goal: float | None = None
    """A horizontal line in the same colour, for example the teacher's reward."""
    has_marks: bool = False
    """Few measured points, drawn as dots."""
    is_noisy: bool = False
    """An estimate from each step's few samples: drawn faint under its running mean. Other curves are drawn as they are,
    no peak left out."""


def named_series(curves: Mapping[str, Sequence[Point]], *, is_noisy: bool) -> list[Series]:
    """Make a series of each curve, with colours in order."""
    return [
        Series(name=name, index=index, points=points, is_noisy=is_noisy)
        for index, (name, points) in enumerate(curves.items())
    ]


def line_chart(series: Sequence[Series], *, label: str, from_zero: bool = False) -> Markup:
    """Draw curves as one SVG; ``label`` describes it to screen readers. Return an empty text if no series has a point.

    Args:
        from_zero: the y axis begins at 0 where nothing, or next to nothing, is below.
    """
    series = [one for one in series if one.points]
    if not series:
        return Markup()
    xs = [x for one in series for x, _ in one.points]
    ys = [y for one in series for _, y in one.points] + [one.goal for one in series if one.goal is not None]
    if from_zero and min(ys) >= 0:
        ys.append(0.0)
    y_ticks = ticks(min(ys), max(ys))
    if from_zero and -min(ys) < NEARLY_ZERO * max(ys):  # noise below 0 gets room, not a tick of its own
        y_ticks = [tick for tick in y_ticks if tick >= 0]
    x_ticks = [x for x in ticks(min(xs), max(xs)) if min(xs) <= x <= max(xs)]
    y_range = min(y_ticks[0], *ys), max(y_ticks[-1], *ys)
    left, x_scale, y_scale, axes = _axes((min(xs), max(xs)), x_ticks, y_range, y_ticks)
    return _svg(label, [axes, *(part for one in series for part in _curve(one, x_scale, y_scale, left))])


def histogram(bars: Sequence[Point], *, label: str) -> Markup:
    """Draw a bar over each whole number as one SVG; ``bars`` are (number, height from 0 up), ascending. Return an empty
    text if there are none."""
    if not bars:
        return Markup()
    xs = [x for x, _ in bars]
    y_ticks = ticks(0, max(y for _, y in bars) or 1)
    x_ticks = xs if len(xs) <= MOST_NUMBERS else [x for x in ticks(xs[0], xs[-1]) if xs[0] <= x <= xs[-1]]
    left, x_scale, y_scale, axes = _axes((xs[0] - 0.5, xs[-1] + 0.5), x_ticks, (0, y_ticks[-1]), y_ticks)
    parts, width = [axes], BAR_SHARE * (WIDTH - RIGHT - left) / (xs[-1] - xs[0] + 1)
    bar = Markup('<rect class="bar s0" x="{}" y="{}" width="{}" height="{}"><title>{}: {}</title></rect>')
    for x, y in bars:
        top = y_scale(y)
        corner, height = round(x_scale(x) - width / 2, 1), round(HEIGHT - BOTTOM - top, 1)
        parts.append(bar.format(corner, top, round(width, 1), height, short(x), short(y)))
    return _svg(label, parts)


def _svg(label: str, parts: Sequence[Markup]) -> Markup:
    frame = Markup('<svg viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>')
    return frame.format(WIDTH, HEIGHT, label, Markup("").join(parts))


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Return at most ``most + 1`` round numbers (1, 2 or 5 times a power of ten apart) around ``low`` and ``high``."""
    if high - low <= 1e-9 * max(abs(low), abs(high)):  # rounding noise at most
        high, low = high + (abs(high) or 1) / 2, low - (abs(low) or 1) / 2
    rough = (high - low) / (most - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    digits = 2 - math.floor(math.log10(step))
    return [round(number * step, digits) for number in range(first, last + 1)]


def thin(points: Sequence[Point], most: int = MAX_POINTS) -> list[Point]:
    """Return at most ``most`` points: means over equal runs of neighbours."""
    return [(sum(x for x, _ in run) / len(run), sum(y for _, y in run) / len(run)) for run in _runs(points, most)]


def extremes(points: Sequence[Point], most: int = MAX_POINTS) -> list[Point]:
    """Return at most ``most`` points: the lowest and the highest of equal runs of neighbours, so no peak is lost."""
    if len(points) <= most:
        return list(points)
    height = itemgetter(1)
    return [point for run in _runs(points, most // 2) for point in sorted({f(run, key=height) for f in (min, max)})]


def running_mean(points: Sequence[Point], window: int) -> list[Point]:
    """Average each value with its neighbours, ``window`` in all (fewer at the ends)."""
    half = window // 2
    means = []
    for i, (x, _) in enumerate(points):
        near = points[max(0, i - half) : i + half + 1]
        means.append((x, sum(y for _, y in near) / len(near)))
    return means


def _runs(points: Sequence[Point], most: int) -> list[Sequence[Point]]:
    """Cut the points into at most ``most`` runs of neighbours of equal lengths."""
    number = min(most, len(points))
    edges = [round(i * len(points) / number) for i in range(number + 1)] if number else []
    return [points[a:b] for a, b in itertools.pairwise(edges)]


def _scaled(low: float, high: float, start: float, end: float) -> Scale:
    factor, shift = ((end - start) / (high - low), 0.0) if high > low else (0.0, (end - start) / 2)
    return lambda value: round(start + shift + (value - low) * factor, 1)


def _axes(
    x_range: tuple[float, float], x_ticks: Sequence[float], y_range: tuple[float, float], y_ticks: Sequence[float]
) -> tuple[int, Scale, Scale, Markup]:
    """Return the left edge of the drawing, which leaves room for the y axis' labels, both scales, and the axes."""
    labels = _tick_labels(y_ticks)
    left = max(MIN_LEFT, 8 + round(CHARACTER * max(map(len, labels))))
    x_scale, y_scale = _scaled(*x_range, left, WIDTH - RIGHT), _scaled(*y_range, HEIGHT - BOTTOM, TOP)
    parts = []
    for value, label in zip(y_ticks, labels, strict=True):
        y = y_scale(value)
        parts.append(Markup('<line class="grid" x1="{}" x2="{}" y1="{}" y2="{}"/>').format(left, WIDTH - RIGHT, y, y))
        parts.append(Markup('<text x="{}" y="{}" text-anchor="end">{}</text>').format(left - 6, y + 4, label))
    for value in x_ticks:
        x = x_scale(value)
        parts.append(Markup('<text x="{}" y="{}" text-anchor="middle">{}</text>').format(x, HEIGHT - 8, short(value)))
    return left, x_scale, y_scale, Markup("").join(parts)


def _tick_labels(values: Sequence[float]) -> list[str]:
    """Format ticks with enough digits to tell neighbours apart: 0.999 and 1.000, not 1 and 1."""
    labels = [short(value) for value in values]
    if len(set(labels)) == len(labels):
        return labels
    digits = max(0, -math.floor(math.log10(values[1] - values[0])))
    return [f"{value:.{digits}f}" for value in values]


def colour(index: int) -> str:
    """Return the CSS classes of a series' colour."""
    return f"s{index % NUM_COLOURS}" + (" again" if index >= NUM_COLOURS else "")


def _curve(one: Series, x_scale: Scale, y_scale: Scale, left: float) -> list[Markup]:
    own = colour(one.index)
    last = short(one.points[-1][1])
    title = Markup("<title>{}: {} at step {}</title>").format(one.name, last, short(one.points[-1][0]))
    points = thin(one.points) if one.is_noisy else extremes(one.points)
    parts = []
    if one.goal is not None:
        y = y_scale(one.goal)
        goal_title = Markup("<title>teacher of {}: {}</title>").format(one.name, short(one.goal))
        line = Markup('<line class="goal {}" x1="{}" x2="{}" y1="{}" y2="{}">{}</line>')
        parts.append(line.format(own, left, WIDTH - RIGHT, y, y, goal_title))
    if one.has_marks or len(points) < 8:
        parts.append(_path(points, x_scale, y_scale, f"curve {own}", title))
        for x, y in points:
            dot = '<circle class="dot {}" cx="{}" cy="{}" r="3"><title>{}: {} at step {}</title></circle>'
            parts.append(Markup(dot).format(own, x_scale(x), y_scale(y), one.name, short(y), short(x)))
        return parts
    if one.is_noisy:
        parts.append(_path(points, x_scale, y_scale, f"faint {own}", title))
        points = running_mean(points, max(3, len(points) // 20))
    return [*parts, _path(points, x_scale, y_scale, f"curve {own}", title)]


def _path(points: Sequence[Point], x_scale: Scale, y_scale: Scale, classes: str, title: Markup) -> Markup:
    joined = " ".join(f"{x_scale(x)},{y_scale(y)}" for x, y in points)
    return Markup('<polyline class="{}" points="{}">{}</polyline>').format(classes, joined, escape(title))


def short(value: float) -> str:
    """Write a number in few characters: ``0.05``, ``1.2k``, ``3e-06``."""
    size = abs(value)
    if value == 0:
        return "0"
    if size < 1e-3:
        return f"{value:.3g}"
    for limit, unit, suffix in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if size >= limit:
            return f"{value / unit:.3g}{suffix}"
    return f"{value:.4g}" if size >= 100 else f"{value:.3g}"


def cell(value: float | None, form: str | Callable[[float], str]) -> str:
    """Format a number for a table, ``–`` where there is none."""
    if value is None:
        return "–"
    return form.format(value) if isinstance(form, str) else form(value)
