"""``report.html``: complete, self-contained, and safe to open whatever the model wrote."""

from __future__ import annotations

import base64
import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mopd.base.types import UserError
from mopd.report.build import build_report
from mopd.report.thumbnails import thumbnail
from tests.unit.report.conftest import DOMAINS, step_record, write_lines

VOID = {"meta", "br", "img", "link", "input", "hr"}


class Page(HTMLParser):
    """Checks that tags nest, and collects them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(self.texts).split())


def page_of(run_dir: Path) -> Page:
    build_report(run_dir)
    return Page((run_dir / "report.html").read_text())


def test_the_page_shows_results_curves_generations_and_recipe(run_dir: Path) -> None:
    page = page_of(run_dir)
    for text in ("recovered 82% of its teachers", "before 0.400", "after 0.900", "teacher 1.000", "answer at 0"):
        assert text in page.text
    assert "answer at 20" in page.text and "answer at 40" not in page.text
    assert "prompts_per_step: 8 # " in page.text
    labels = {attributes["aria-label"] for tag, attributes in page.tags if tag == "svg"}
    assert {"Validation reward over steps", "KL(student ‖ teacher) over steps", "Loss over steps"} <= labels
    assert {"Top-k overlap over steps", "Gradient norm over steps", "Time: whole step over steps"} <= labels


def test_nothing_is_fetched_from_anywhere(run_dir: Path) -> None:
    page = page_of(run_dir)
    assert not {"script", "link", "img", "iframe", "object"} & {tag for tag, _ in page.tags}
    names = {name for _, attributes in page.tags for name in attributes}
    assert not {"src", "href", "srcset", "data", "xlink:href"} & names
    assert not re.search(r"https?://|url\(|@import", (run_dir / "report.html").read_text())


def test_bars_are_placed_in_percent_of_the_reward_range(run_dir: Path) -> None:
    styles = [a["style"] for tag, a in page_of(run_dir).tags if tag == "i" and a["style"] is not None]
    assert [" ".join(style.split()) for style in styles[:3]] == [
        "width: 20.0%",
        "left: 20.0%; width: 40.0%;",
        "left: 70.0%",
    ]


def test_rewards_outside_zero_and_one_stay_on_the_track(run_dir: Path) -> None:
    lines = [{"step": s, "rewards": {"code": r}, "wall_s": 1.0} for s, r in ((0, -10.0), (20, 30.0))]
    (run_dir / "validation.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    html = _html(run_dir)
    positions = [float(number) for number in re.findall(r"(?:left|width): (-?[\d.]+)%", html)]
    assert positions and all(0 <= position <= 100 for position in positions)


def test_a_prompt_that_stands_in_the_data_twice_is_shown_twice(run_dir: Path) -> None:
    example = {"prompt": [{"role": "user", "content": "twice?"}], "response": "a", "ground_truth": None, "reward": 0.0}
    line = {"step": 0, "rewards": {"code": 0.5}, "examples": {"code": [example, example]}, "wall_s": 1.0}
    (run_dir / "validation.jsonl").write_text(json.dumps(line) + "\n")
    assert page_of(run_dir).text.count("twice?") == 2


def test_what_a_teacher_read_stands_beside_the_students_prompt(run_dir: Path) -> None:
    row = {"prompt": "<b>2+2</b>", "response": "4", "ground_truth": "4 & four", "reward": 1.0, "view": "2+2 <4>"}
    headroom = {"code": {"teacher": 0.7, "examples": [row]}, "open/maths": {"teacher": 1.0}}
    (run_dir / "headroom.json").write_text(json.dumps(headroom))
    html = _html(run_dir)
    assert (
        '<pre>&lt;b&gt;2+2&lt;/b&gt;</pre><span class="soft">the teacher reads</span><pre>2+2 &lt;4&gt;</pre>' in html
    )
    assert html.count("the teacher reads") == 1
    (run_dir / "headroom.json").write_text(json.dumps({"code": {"teacher": 0.7, "examples": [row | {"view": 4}]}}))
    with pytest.raises(UserError, match=r"headroom.json"):
        page_of(run_dir)


def _run_with_images(run_dir: Path, images: object) -> None:
    row = {"prompt": "<image>read", "response": "a", "ground_truth": "ab", "reward": 0.0}
    lines = [
        {"step": 0, "rewards": {"code": 0.5}, "examples": {"code": [row | {"images": images}, row]}, "wall_s": 1.0},
        {"step": 20, "rewards": {"code": 0.9}, "examples": {"code": [row, row]}, "wall_s": 1.0},
    ]
    (run_dir / "validation.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_images_stand_beside_their_prompt_in_the_one_file(run_dir: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (300, 400, 3), dtype=np.uint8)
    small = thumbnail(Image.fromarray(noise))
    _run_with_images(run_dir, [small, small])
    html = _html(run_dir)
    sources = [attributes["src"] for tag, attributes in Page(html).tags if tag == "img"]
    assert sources == [small, small]  # once, whatever step's answers stand beside it
    assert html.count("&lt;image&gt;read") == 2
    shown = Image.open(io.BytesIO(base64.b64decode(small.partition(",")[2])))
    assert (shown.format, shown.size) == ("JPEG", (160, 120))
    assert thumbnail(Image.fromarray(noise[:20, :30])).startswith("data:image/jpeg;base64,")


@pytest.mark.parametrize(
    "images",
    [
        "data:image/jpeg;base64,AAAA",
        ["https://example.org/a.jpg"],
        ["data:image/svg+xml;base64,AAAA"],
        ['data:image/jpeg;base64,AA" onload="alert(1)'],
        ["data:image/jpeg;base64,AAAA"] * 5,
        ["data:image/jpeg;base64," + "A" * 65536],
        [7],
    ],
)
def test_what_is_no_thumbnail_is_refused(run_dir: Path, images: object) -> None:
    _run_with_images(run_dir, images)
    with pytest.raises(UserError, match=r"validation.jsonl: step 0 has examples of 'code' without"):
        build_report(run_dir)


@pytest.mark.parametrize("steps", [1, 2000])
def test_size_does_not_grow_with_the_number_of_steps(run_dir: Path, steps: int) -> None:
    records = [{"step": s, "loss": 1 / s, "loss/code": 1 / s, "timing/step_s": 0.1} for s in range(1, steps + 1)]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert len(_html(run_dir)) < 100_000


def test_shares_stand_beside_their_targets_and_pairs_in_a_chart_of_their_own(run_dir: Path) -> None:
    one, other = DOMAINS
    records = [
        step_record(step)
        | {
            f"prompts_share/{one}": 0.2,
            f"tokens_share/{one}": 0.01,
            f"loss_weight_share/{one}": 0.29 + 0.02 * step / 41,
        }
        | {f"prompts_share/{other}": 0.8, f"tokens_share/{other}": 0.99, f"loss_weight_share_target/{one}": 0.3}
        | {f"gradient_cosine/{one}|{other}": -0.1 * step}
        for step in range(1, 41)
    ]
    write_lines(run_dir / "metrics.jsonl", records)
    html = _html(run_dir)
    section = html.split("<h2>Who gets how much</h2>")[1].split("</section>")[0]
    rows = [
        re.findall(r">([^<>]+)</t[dh]>", row) for row in section.split("<tbody>")[1].split("</tbody>")[0].split("<tr>")
    ]
    assert rows[1:] == [[one, "20%", "1%", "30% (30%)", "–", "–"], [other, "80%", "99%", "–", "–", "–"]]
    assert f"{one} and {other}" in section and f"{one} and {other}" not in html.split("Who gets how much")[0]
    write_lines(run_dir / "metrics.jsonl", [step_record(1)])
    assert "Who gets how much" not in _html(run_dir)


def _html(run_dir: Path) -> str:
    build_report(run_dir)
    return (run_dir / "report.html").read_text()


SEGMENTS = [{"text": "<b>sure", "is_given": False, "kl": 0.02}, {"text": "odd", "is_given": False, "kl": 2.5}]


def test_tokens_darken_where_the_teacher_disagrees(run_dir: Path) -> None:
    given = {"text": "tool: 4", "is_given": True, "kl": None}
    traces = {"code": [{"prompt": "2+2?", "segments": [*SEGMENTS, given]}]}
    (run_dir / "traces.json").write_text(json.dumps({"step": 20, "domains": traces}))
    page_of(run_dir)
    page = (run_dir / "report.html").read_text()
    assert '<span class="heat heat0" title="0.02 nats">&lt;b&gt;sure</span>' in page
    assert '<span class="heat heat3" title="2.50 nats">odd</span><span class="given">tool: 4</span>' in page
    (run_dir / "traces.json").write_text(json.dumps({"step": 20, "domains": {}}))
    assert "Where the teachers disagree" in page
    page_of(run_dir)
    assert "Where the teachers disagree" not in (run_dir / "report.html").read_text()


@pytest.mark.parametrize("kl", [None, "1.0", True])
def test_a_drawn_token_without_a_number_is_refused(run_dir: Path, kl: object) -> None:
    traces = {"code": [{"prompt": "2+2?", "segments": [{"text": "4", "is_given": False, "kl": kl}]}]}
    (run_dir / "traces.json").write_text(json.dumps({"step": 20, "domains": traces}))
    with pytest.raises(UserError, match=r"traces\.json: holds what are no traces"):
        page_of(run_dir)
