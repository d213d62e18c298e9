"""Runs side by side: as text, as JSON, as a page."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from mopd.cli.main import main
from mopd.config.load import dump, load_recipe
from mopd.report.compare import LAST, _weakest, print_comparison, read_runs
from mopd.report.terminal import Terminal
from tests.fixtures.runs import DOMAINS, STEPS, make_run, step_record


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("runs")
    return [make_run(root / f"run_{i}", lr=f"{i + 1}e-6", speed=1 + i) for i in range(4)]


def test_numbers_and_differences(runs: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(runs[0]), str(runs[2]), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert list(told["runs"]) == ["run_0", "run_2"]
    assert told["recipe_differences"] == {"student.optimizer.lr": {"run_0": 1e-6, "run_2": 3e-6}}
    first, second = told["runs"].values()
    assert (first["steps"], first["planned_steps"], first["best_step"]) == (STEPS, STEPS, STEPS)
    domain = first["domains"][DOMAINS[0]]
    assert (domain["before"], domain["after"], domain["last"], domain["teacher"]) == (0.25, 0.625, 0.625, 0.75)
    assert domain["headroom_recovery"] == pytest.approx(0.75)
    last = [step_record(step)["loss"] for step in range(STEPS - LAST + 1, STEPS + 1)]
    assert first["loss"] == pytest.approx(sum(last) / LAST)
    assert second["loss"] < first["loss"] and second["domains"]["own"]["kl"] < first["domains"]["own"]["kl"]
    assert first["step_s"] == 2.25


def test_a_difference_within_noise_is_called_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first two differ in 1 prompt of 100; the third misses 20 more; the fourth was asked other prompts."""
    runs = []
    for name, right, asked in (("a", 80, "x"), ("b", 79, "x"), ("c", 60, "x"), ("d", 79, "y")):
        runs.append(make_run(tmp_path / name))
        lines = (runs[-1] / "validation.jsonl").read_text().splitlines()
        last = json.loads(lines[-1]) | {"rewards": {"own": right / 100}, "prompts": {"own": asked}}
        last["scores"] = {"own": [1.0] * right + [0.0] * (100 - right)}
        (runs[-1] / "validation.jsonl").write_text("\n".join((*lines[:-1], json.dumps(last))) + "\n")
    assert main(["compare", *map(str, runs), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["behind_best"]
    assert told["mean"] == told["domains"]["own"]
    a, b, c, d = told["domains"]["own"].values()
    assert a == {"value": 0.0, "interval": None}
    assert b["value"] == d["value"] == pytest.approx(-0.01)
    assert -0.035 < b["interval"][0] < -0.02 and b["interval"][1] == 0.0  # prompt by prompt
    assert d["interval"][0] < -0.09 and d["interval"][1] > 0.07  # other prompts: twice the spread of one run
    assert c["interval"][1] < -0.1
    out = io.StringIO()
    print_comparison(read_runs(runs), Terminal(file=out, width=200))
    text = " ".join(out.getvalue().split())
    assert "domain with the least recovered │ 110% own │" in text
    assert "best │ -0.010 [-0.03, +0.00] within noise │ -0.200 [-0.28, -0.12] │" in text


def test_the_domain_that_recovered_least_is_named(tmp_path: Path) -> None:
    """Not the one of the lowest reward: its teacher is poor too. One that its teacher does not lead has none."""
    path = make_run(tmp_path / "run")
    lines = [json.loads(line) for line in (path / "validation.jsonl").read_text().splitlines()]
    lines[-1]["rewards"] = dict(zip(DOMAINS, (0.5, 0.6, 0.9), strict=True))
    (path / "validation.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    teachers = dict(zip(DOMAINS, (0.55, 0.95, 0.1), strict=True))
    (path / "headroom.json").write_text(json.dumps({name: {"teacher": reward} for name, reward in teachers.items()}))
    (run, _) = read_runs([path, make_run(tmp_path / "other")])
    assert _weakest(run) == f"50% {DOMAINS[1]}"


def test_the_table_fits_80_columns_however_many_runs(runs: list[Path]) -> None:
    out = io.StringIO()
    print_comparison(read_runs(runs), Terminal(file=out, width=80))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 80 and "…" not in out.getvalue()
    for text in ("run_0", "run_3", "400 of 400", "75%", "student.optimizer.lr", "1e-06", "4e-06", "0.625"):
        assert text in out.getvalue()


def test_runs_of_one_name_are_told_by_their_paths(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [str(make_run(tmp_path / side / "run")) for side in ("a", "b")]
    assert main(["compare", *paths, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert list(told["runs"]) == paths and told["recipe_differences"] == {}


def test_a_run_that_has_only_just_begun_has_no_numbers(runs: list[Path], tmp_path: Path) -> None:
    begun = make_run(tmp_path / "begun")
    for name in ("metrics.jsonl", "validation.jsonl", "headroom.json"):
        (begun / name).unlink()
    page = tmp_path / "page.html"
    assert main(["compare", str(runs[0]), str(begun), "--html", str(page)]) == 0
    assert "0 of 400" in page.read_text() and "–" in page.read_text()


@pytest.mark.parametrize(
    ("names", "line"),
    [
        (["run_0"], "compare: 1 runs: name 2 to 16"),
        (["run_0", "../{}/run_0"], "is named twice: name different runs"),
        (["run_0", "absent"], "holds no run"),
    ],
)
def test_what_cannot_be_compared_is_one_line(
    runs: list[Path], names: list[str], line: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    root = runs[0].parent
    page = tmp_path / "page.html"
    paths = [str(root / name.format(root.name)) for name in names]
    assert main(["compare", *paths, "--html", str(page)]) == 2
    told = capsys.readouterr()
    assert told.out == "" and line in told.err and told.err.count("\n") == 1
    assert not page.exists()


def as_run(path: Path, *settings: str, rewards: dict[int, float], step_s: float, first: int | None = None) -> str:
    """A run of other settings, with these rewards in every domain at these steps, of steps that long. With ``first``
    its scores are kept, of 100 prompts: those from this one on are right."""
    run = make_run(path)
    given = path.parent / f"{path.name}.yaml"
    (run / "recipe.yaml").write_text(dump(load_recipe(given, settings)))
    steps = [step_record(step) | {"timing/step_s": step_s} for step in range(1, STEPS + 1)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in steps))
    validations = [{"step": step, "rewards": dict.fromkeys(DOMAINS, value)} for step, value in rewards.items()]
    for record, value in zip(validations, rewards.values(), strict=True):
        if first is not None:
            scores = [float(first <= i < first + round(100 * value)) for i in range(100)]
            record |= {"scores": dict.fromkeys(DOMAINS, scores), "prompts": dict.fromkeys(DOMAINS, "asked")}
    (run / "validation.jsonl").write_text("".join(json.dumps(record) + "\n" for record in validations))
    return str(run)


SFT = ("objective=sft_on_teacher",)
WARM_UP = ("schedule.warm_up={objective: off_policy_scores, steps: 150}",)


def test_recovery_at_equal_prompts_and_at_equal_seconds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Head-room from 0.25 to 0.75. The slow run is better by prompts: half of its prompts are all of the small steps'
    run; the fast one by seconds. A model that nobody trained stands beside them, whatever the budget."""
    slow = as_run(tmp_path / "slow", rewards={0: 0.25, 200: 0.65, 400: 0.7}, step_s=4.0)
    fast = as_run(tmp_path / "fast", *SFT, rewards={0: 0.25, 100: 0.35, 200: 0.5, 400: 0.6}, step_s=1.0)
    small = as_run(
        tmp_path / "small", *WARM_UP, "schedule.prompts_per_step=48", rewards={0: 0.25, 100: 0.3, 400: 0.45}, step_s=2.0
    )
    merged = tmp_path / "merged.json"
    merged.write_text(json.dumps({"rewards": dict.fromkeys(DOMAINS, 0.4), "num_samples": dict.fromkeys(DOMAINS, 9)}))
    page = tmp_path / "page.html"
    assert main(["compare", slow, fast, small, str(merged), "--json", "--html", str(page)]) == 0
    told = json.loads(capsys.readouterr().out)
    prompts, seconds = told["recovery_at_equal"]["prompts"], told["recovery_at_equal"]["seconds"]
    assert (prompts["amount"], seconds["amount"]) == (400 * 48, 400.0)
    assert prompts["mean"] == pytest.approx({"slow": 0.8, "fast": 0.5, "small": 0.4, "merged": 0.3})
    assert seconds["mean"] == pytest.approx({"slow": None, "fast": 0.7, "small": 0.1, "merged": 0.3})
    assert prompts["domains"]["fast"] == pytest.approx(dict.fromkeys(DOMAINS, 0.5))
    headline = (
        "At equal prompts slow (on-policy) recovered most: 80%, the next 50%; at equal seconds fast (SFT on the "
        "teachers' answers) recovered most: 70%, the next 30%"
    )
    assert told["headline"] == headline and f"<h1>{headline.replace(chr(39), '&#39;')}</h1>" in page.read_text()
    # A section that one run has shows by its keys that are set.
    assert [key for key in told["recipe_differences"] if key.startswith("schedule.warm_up")] == [
        "schedule.warm_up.objective",
        "schedule.warm_up.steps",
    ]
    assert [run["objective"] for run in told["runs"].values()] == [
        "on-policy",
        "SFT on the teachers' answers",
        "on-policy after 150 steps of the teachers' answers, with their scores",
        "untrained",
    ]
    assert told["runs"]["small"]["warm_up"] == (
        "warm-up: the teachers' answers, with their scores up to step 150; rewards at step 100: "
        "google-research-datasets/mbpp-sanitized 0.300, openai/gsm8k 0.300, own 0.300"
    )
    assert told["runs"]["merged"]["mean_headroom_recovery"] == pytest.approx(0.3)


def test_the_headline_says_which_runs_are_within_noise_and_which_of_them_is_cheaper(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Head-room from 0.25 to 0.75. The first two differ in nine prompts, of which each has about half; the third is
    far behind. At equal seconds the first has no validation yet, and the others differ."""
    slow = as_run(tmp_path / "slow", rewards={0: 0.25, 400: 0.7}, step_s=4.0, first=0)
    fast = as_run(tmp_path / "fast", *SFT, rewards={0: 0.25, 400: 0.69}, step_s=1.0, first=5)
    poor = as_run(tmp_path / "poor", rewards={0: 0.25, 400: 0.5}, step_s=1.0, first=0)
    page = tmp_path / "page.html"
    assert main(["compare", poor, fast, slow, "--json", "--html", str(page)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["headline"] == (
        "At equal prompts slow (on-policy, 90%) and fast (SFT on the teachers' answers, 88%) are within noise, and "
        "fast is cheaper in seconds: 400, the next 1,600; at equal seconds fast (SFT on the teachers' answers) "
        "recovered most: 88%, the next 50%"
    )
    assert [told["recovery_at_equal"][name]["within_noise"] for name in ("prompts", "seconds")] == [["fast"], []]
    assert "slow (on-policy, 90%) and fast" in page.read_text()


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ("[]", "mopd eval RECIPE --model FOLDER --json > FILE"),
        ('{"rewards": {}}', "holds no rewards by domain: write it with `mopd eval"),
        ('{"rewards": {"own": "1"}}', "holds no rewards by domain: write it with `mopd eval"),
        (None, "compare: no run, files of `mopd eval --json` alone: name a run too"),
    ],
)
def test_files_that_are_no_results_of_an_evaluation(
    runs: list[Path], content: str | None, line: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    files = [tmp_path / "one.json", tmp_path / "two.json"]
    for file in files:
        file.write_text(content or '{"rewards": {"own": 0.5}}')
    assert main(["compare", str(files[0]), str(runs[0] if content else files[1])]) == 2
    told = capsys.readouterr()
    assert told.out == "" and line in told.err and told.err.count("\n") == 1


def test_comparing_needs_no_torch(runs: list[Path]) -> None:
    code = f"import sys\nfrom mopd.cli.main import main\nmain(['compare', *{list(map(str, runs))!r}])\n"
    code += "print('torch' in sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert done.stderr == "False\n"
