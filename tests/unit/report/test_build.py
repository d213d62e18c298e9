"""``report.json``: what is measured, from records of a run folder."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from mopd.base.types import UserError
from mopd.cli.main import main
from mopd.report.build import build_report, headroom_recovery, print_summary
from mopd.report.terminal import Terminal
from tests.unit.report.conftest import write_lines


def test_the_best_validation_is_after_and_step_zero_is_before(run_dir: Path) -> None:
    build_report(run_dir)
    stored = json.loads((run_dir / "report.json").read_text())
    code, maths = stored["domains"]["code"], stored["domains"]["open/maths"]
    assert code["recovery_interval"] is code["num_prompts"] is None  # of a run that kept no scores
    assert (code["before"], code["after"], code["teacher"]) == (0.2, 0.6, 0.7)
    assert code["headroom_recovery"] == pytest.approx(0.8)
    assert maths["headroom_recovery"] == pytest.approx(5 / 6)
    assert stored["best_step"] == 20
    assert stored["mean_headroom_recovery"] == pytest.approx((0.8 + 5 / 6) / 2)
    assert (stored["steps"], stored["planned_steps"]) == (40, 40)
    assert stored["wall_s"] == pytest.approx(40 * 2 + 3 * 5)
    assert stored["train_tokens_per_s"] == pytest.approx(150)


def test_the_shares_of_tower_and_bubble_are_means_over_the_steps_that_have_them(run_dir: Path) -> None:
    tower, bubble = "rate/vision_tower_share", "rate/pipeline_bubble_share"
    records = [{"step": 1, tower: 0.5, bubble: 0.25}, {"step": 2, tower: 0.25, bubble: 0.15}, {"step": 3}]
    records = [{**record, "timing/step_s": 1.0, "timing/forward_backward_s": 0.5} for record in records]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    report = build_report(run_dir)
    assert (report.vision_tower_share, report.pipeline_bubble_share) == pytest.approx((0.375, 0.2))
    shown = io.StringIO()
    print_summary(report, Terminal(file=shown, width=100))
    told = " ".join(shown.getvalue().split())
    assert "vision tower: 37.5% of the first pipeline stage's passes; bubble 20.0%" in told
    page = " ".join((run_dir / "report.html").read_text().split())
    assert "The vision tower takes 38% of the first pipeline stage’s passes; in 20% of" in page


@pytest.mark.parametrize(
    ("before", "after", "teacher", "expected"),
    [
        (0.25, 0.5, 0.75, 0.5),
        (0.5, 0.25, 0.75, -1.0),
        (0.5, 0.6, 0.5, None),
        (0.5, None, 0.75, None),
        (None, 0.5, 0.75, None),
        (0.5, 0.6, None, None),
        (0.0, 0.0, 0.5, 0.0),
    ],
)
def test_headroom_recovery(
    before: float | None, after: float | None, teacher: float | None, expected: float | None
) -> None:
    assert headroom_recovery(before, after, teacher) == expected


def test_scores_give_intervals_and_a_watched_domain_a_line(run_dir: Path) -> None:
    """100 prompts each: code goes from 20 right answers to 60 of the teacher's 70; law, which nobody teaches, from 90
    to 70."""

    def right(number: int) -> list[float]:
        return [1.0] * number + [0.0] * (100 - number)

    lines = [json.loads(line) for line in (run_dir / "validation.jsonl").read_text().splitlines()]
    for line, taught, watched in zip(lines, (20, 60, 50), (90, 70, 60), strict=True):
        line |= {"rewards": {"code": taught / 100}, "watched": {"law": watched / 100}, "pass_at_k": {"code": 0.875}}
        line["scores"] = {"code": right(taught), "law": right(watched)}
    write_lines(run_dir / "validation.jsonl", lines)
    (run_dir / "headroom.json").write_text(json.dumps({"code": {"teacher": 0.7, "scores": right(70)}}))
    report = build_report(run_dir)
    code, law = report.domains["code"], report.domains["law"]
    assert (report.best_step, code.num_prompts, code.pass_at_k) == (20, 100, 0.875)
    assert code.after_interval == pytest.approx((0.502, 0.691), abs=0.001)
    assert code.recovery_interval is not None and code.recovery_interval == report.mean_recovery_interval
    assert 0.6 < code.recovery_interval[0] < 0.8 < code.recovery_interval[1] < 0.95
    assert law.is_watched and law.headroom_recovery is None and not code.is_watched
    assert law.change_interval is not None and -0.3 < law.change_interval[0] < -0.2 < law.change_interval[1] < -0.1
    console = Terminal(file=io.StringIO(), width=100)
    print_summary(report, console)
    told, page = console.file.getvalue(), (run_dir / "report.html").read_text()  # type: ignore[attr-defined]
    for text in ("over 100 prompts a domain", "pass@k, the best of each prompt's", "law -0.200 [-0.2", ": forgotten"):
        assert text in told and text.replace("'", "&#39;") in page
    assert "[0.50, 0.69]" in told and "law (watched)" in page and "Mean\n over" not in page


def test_a_run_that_has_only_just_begun(run_dir: Path) -> None:
    for name in ("metrics.jsonl", "validation.jsonl", "headroom.json"):
        (run_dir / name).unlink()
    report = build_report(run_dir)
    assert (report.steps, report.wall_s, report.train_tokens_per_s, report.best_step) == (0, 0, None, None)
    assert report.domains == {} and report.mean_headroom_recovery is None
    assert "No step has finished yet" in (run_dir / "report.html").read_text()


def test_a_run_that_is_writing_its_next_line(run_dir: Path) -> None:
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 41, "lo')
    assert build_report(run_dir).steps == 40


def test_before_the_second_validation_there_is_no_after(run_dir: Path) -> None:
    first = (run_dir / "validation.jsonl").read_text().splitlines(keepends=True)[0]
    (run_dir / "validation.jsonl").write_text(first)
    result = build_report(run_dir).domains["code"]
    assert (result.before, result.after, result.headroom_recovery) == (0.2, None, None)


def test_a_damaged_line_is_named_and_nothing_is_written(run_dir: Path) -> None:
    (run_dir / "validation.jsonl").write_text('{"step": 0}\n')
    with pytest.raises(UserError, match=r"validation\.jsonl"):
        build_report(run_dir)
    assert not (run_dir / "report.json").exists()


def test_report_command_prints_table_or_json(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run_dir)]) == 0
    shown = capsys.readouterr().out
    for text in ("open/maths", "0.400", "0.900", "1.000", "83%", "80%", "82%", "after (step 20)", "150 tokens/s"):
        assert text in shown
    assert shown.rstrip().endswith("report.html")
    assert main(["report", str(run_dir), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["domains"]["code"]["after"] == 0.6
