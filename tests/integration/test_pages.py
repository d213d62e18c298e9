"""The pages of ``mopd report`` and ``mopd compare`` in a real browser, as people open them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

from mopd.cli.main import main
from mopd.report.build import build_report
from tests.fixtures.browser import NEEDS_CHROMIUM, WIDTHS, look
from tests.fixtures.runs import make_run
from tools.screenshot import browser

pytestmark = NEEDS_CHROMIUM


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as started:
        yield started


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("runs")
    names = ("first", "a-second-one-with-a-long-name-of-its-own", "third", "fourth")
    runs = [make_run(root / name, lr=f"{i + 1}e-6", speed=1 + i / 2) for i, name in enumerate(names)]
    build_report(runs[0])
    unfinished = make_run(root / "unfinished")
    for name in ("metrics.jsonl", "validation.jsonl", "headroom.json", "machine.json"):
        (unfinished / name).unlink()
    build_report(unfinished)
    streams = make_run(root / "streams", streams=True)
    build_report(streams)
    assert main(["compare", *map(str, runs), "--html", str(root / "compare.html")]) == 0
    return {
        "report": runs[0] / "report.html",
        "unfinished": unfinished / "report.html",
        "streams": streams / "report.html",
        "compare": root / "compare.html",
    }


@pytest.mark.parametrize(("width", "scheme"), zip(WIDTHS, ("light", "dark"), strict=True))  # colours move nothing
@pytest.mark.parametrize(("name", "at_least"), [("report", 20), ("compare", 20), ("unfinished", 0), ("streams", 24)])
def test_nothing_is_cut_and_every_chart_is_drawn(
    chromium: Any, pages: dict[str, Path], name: str, at_least: int, width: int, scheme: Literal["light", "dark"]
) -> None:
    problems, num_charts = look(chromium, pages[name].as_uri(), width=width, scheme=scheme)
    assert problems == []
    assert num_charts >= at_least


FAULTS = {
    "a wide table": (
        '<div class="panel" style="overflow-x:auto"><table style="width:2000px"><td>a</table></div>',
        "wider than",
    ),
    "a clipped word": (
        '<p style="width:40px;overflow:hidden;white-space:nowrap">a long line of text</p>',
        "text cut by",
    ),
    "text beside the page": ('<p style="position:absolute;left:-90px;width:200px">some text</p>', "text beyond"),
    "a label beside its drawing": (
        '<figure><svg viewBox="0 0 100 50" width="100" height="50"><text x="90" y="20">12.34</text>'
        '<polyline points="0,0 9,9"/></svg></figure>',
        "text cut by <svg",
    ),
    "a curve of NaN": (
        '<figure><svg viewBox="0 0 9 9"><polyline points="0,0 NaN,NaN"/></svg></figure>',
        "console: Error",
    ),
    "a curve beyond its drawing": (
        '<figure><svg viewBox="0 0 9 9"><polyline points="0,0 50,5"/></svg></figure>',
        "curve not drawn",
    ),
    "an empty chart": ('<figure><svg viewBox="0 0 9 9"></svg></figure>', "chart without a curve"),
    "a chart without a size": (
        '<figure><svg viewBox="0 0 9 9" style="display:none"><polyline points="0,0 9,9"/></svg></figure>',
        "chart without a size",
    ),
    "a script that fails": ("<script>missing()</script>", "script: "),
    "an error on the console": ("<script>console.error('broken')</script>", "console: broken"),
    "something from elsewhere": ('<img src="http://127.0.0.1:9/x.png" alt="">', "asked for http://127.0.0.1:9/x.png"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_page_is_found_out(chromium: Any, tmp_path: Path, fault: str) -> None:
    html, problem = FAULTS[fault]
    page = tmp_path / "page.html"
    page.write_text(f"<!doctype html><meta charset=utf-8><body><main>{html}</main>")
    problems, _ = look(chromium, page.as_uri(), width=390)
    assert any(problem in told for told in problems), problems
