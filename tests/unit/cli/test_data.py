"""``mopd data`` of a small recipe: what it prints and its JSON are what a run reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mopd.cli.main import main
from tests.fixtures.tiny_models import make_hf_model, make_tokenizer

RECIPE = """\
run_dir: {folder}/run
student: {{model: {folder}}}
teachers:
  one: {{model: {folder}, domains: [math]}}
  two: {{model: {folder}, domains: [code], view: {{prompt: "{{prompt}} = {{ground_truth}}"}}}}
data:
  train: [{folder}/train.jsonl]
  validation: [{folder}/train.jsonl]
  max_prompt_length: 40
  overlong_prompts: filter
  domain_weights: {{math: 1, code: 3}}
  prompt_suffix: {{math: "?"}}
rewards: {{default: {{type: exact_match}}}}
validation: {{}}
schedule: {{steps: 1, prompts_per_step: 4}}
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    make_hf_model(folder)
    make_tokenizer(folder)
    rows = [
        {
            "prompt": [{"role": "user", "content": "a" * length + "<eos>" * (length == 1)}],
            "data_source": domain,
            "reward_model": {"ground_truth": "7"},
        }
        for domain, lengths in (("math", (1, 2, 9, 24, 25, 60)), ("code", (3, 21, 22, 80)))
        for length in lengths
    ]
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    path = folder / "recipe.yaml"
    path.write_text(RECIPE.format(folder=folder))
    return path


def test_json_has_rows_lengths_reasons_and_prompts(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", str(recipe), "--json"]) == 0
    found = {(one["split"], one["domain"]): one for one in json.loads(capsys.readouterr().out)}
    assert list(found) == [("train", "code"), ("train", "math"), ("validation", "code"), ("validation", "math")]
    math, code = found["train", "math"], found["train", "code"]
    # "user:" + text + "?" + line end + "assistant:" are 17 tokens more than the text; the view has 4 more than that
    assert (math["rows"], math["too_long"], math["long_views"], math["share"]) == (3, 3, 0, 0.25)
    assert (code["rows"], code["too_long"], code["long_views"], code["share"]) == (1, 0, 3, 0.75)
    assert found["validation", "math"]["share"] is None and math["teachers"] == ["one"] and code["teachers"] == ["two"]
    assert math["tokens"] == {"mean": pytest.approx((19 + 19 + 26) / 3), "median": 19, "p90": 26, "max": 26}
    assert sum(number for _, number in math["histogram"]) == 3 and math["histogram"][-1] == [26, 1]
    assert math["texts"] == {"example": "user:a<eos>?\nassistant:"}
    assert code["texts"] == {"example": "user:aaa\nassistant:", "views.two": "user:aaa = 7\nassistant:"}
    assert [piece["text"] for piece in math["example"]["pieces"] if piece["is_special"]] == ["<eos>"]


def test_the_table_says_what_is_dropped_and_why(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", str(recipe)]) == 0
    shown = capsys.readouterr().out
    assert "train: math: 3 rows are dropped: the prompt is longer than data.max_prompt_length 40" in shown
    assert "train: code: 3 rows are dropped: a teacher's view is longer than its max_prompt_length" in shown
    assert "user:a<eos>?\n" in shown and "as teachers.two reads it" in shown


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("data.overlong_prompts=error", "the prompt has 41 tokens, data.max_prompt_length is 40"),
        ("data.prompt_suffix.mtah=what", "data.prompt_suffix names domain 'mtah', and the data has 'code', 'math'"),
        ("rollout.stop_token_ids=[1000000]", "rollout.stop_token_ids names 1000000, which is no token"),
        ("data.domain_weights.law=1", "name every domain or none"),
    ],
)
def test_what_a_run_would_refuse_is_one_line(
    recipe: Path, capsys: pytest.CaptureFixture[str], override: str, line: str
) -> None:
    assert main(["data", str(recipe), override]) == 2
    (error,) = [text for text in capsys.readouterr().err.splitlines() if text.startswith("mopd: error: ")]
    assert line in error
