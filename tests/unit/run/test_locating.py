"""Names of a recipe become local paths for the run, and stay names where the recipe is shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from mopd.base.types import UserError
from mopd.cli.main import main
from mopd.config.load import Loaded, dump, load_recipe
from mopd.launch.preparing import prepare
from mopd.run.folder import check_same_run
from mopd.run.locating import Located, apply, locate
from mopd.run.manifests import check_commits, write_manifests
from tests.fixtures.hub import hub_of_this_process

COMMIT = "0123456789abcdef0123456789abcdef01234567"
RECIPE = """\
run_dir: runs/one
student: {model: org/student}
teachers:
  a.b: {model: org/teacher@v1, domains: [math]}
data:
  train: [own.jsonl, {path: 'org/set:main/train', columns: gsm8k, domain: math}]
schedule: {steps: 3, prompts_per_step: 4}
checkpoint: {keep_best: false}
preflight: {require_better_teacher: false}
"""
FILES = {"config.json": b"{}", "model.safetensors": b"1"}


@pytest.fixture
def loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Loaded:
    monkeypatch.chdir(tmp_path)
    Path("recipe.yaml").write_text(RECIPE)
    return load_recipe("recipe.yaml")


def test_paths_for_the_run_and_names_for_the_reader(loaded: Loaded) -> None:
    paths = {"org/student": ["/s"], "org/teacher@v1": ["/t"], "org/set:main/train": ["/d/0", "/d/1"]}
    run = apply(loaded, Located(paths=paths, commits={}))
    assert run.recipe.student.model == "/s" and run.recipe.teachers["a.b"].model == "/t"
    files = run.recipe.data.files(run.recipe.data.train)
    assert [(file.path, file.domain) for file in files] == [("own.jsonl", None), ("/d/0", "math"), ("/d/1", "math")]
    assert dump(run) == dump(loaded) and "org/set:main/train" in dump(run)


def test_one_commit_for_all_that_is_named(loaded: Loaded, tmp_path: Path) -> None:
    with hub_of_this_process(tmp_path / "home") as hub:
        student = hub.add("models/org/student", FILES)
        teacher = hub.add("models/org/teacher", FILES, branch="v1")
        data = hub.add("datasets/org/set", {"main/train-0.parquet": b"a", "main/train-1.parquet": b"b"})
        run = prepare(loaded)
        assert run.commits == {
            "student.model": f"org/student@{student}",
            'teachers."a.b".model': f"org/teacher@{teacher}",
            "data.train[1]": f"org/set@{data}:main/train",
        }
        assert len(run.recipe.data.train) == 3
        hub.requests.clear()
        assert set(prepare(loaded, only="student.model").commits) == {"student.model"}
        assert not any("teacher" in request or "set" in request for request in hub.requests)
        with pytest.raises(
            UserError, match=r"recipe.yaml:4: teachers.\"a.b\".model: 'org/teacher@v1' is no folder here"
        ):
            del hub.repositories["models/org/teacher"]
            prepare(loaded)


@pytest.mark.parametrize("further", [{}, {"--model": "org/other"}])
def test_a_folder_on_node_0_that_is_a_name_here(loaded: Loaded, further: dict[str, str]) -> None:
    """Node 0 has a commit of each name; of its folders it has none."""
    names = ("student.model", 'teachers."a.b".model', "data.train[1]") if further else ()
    commits = dict.fromkeys(names, f"org/it@{COMMIT}:main")
    where = "--model: 'org/other'" if further else "recipe.yaml:2: student.model: 'org/student'"
    with pytest.raises(
        UserError, match=f"^{where} is a folder on node 0 and none on this node, .*: let all nodes see it"
    ):
        locate(loaded, further, commits=commits)


def test_config_prints_names_and_fetches_nothing(loaded: Loaded, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", loaded.path]) == 0
    assert "model: org/student" in capsys.readouterr().out


def test_a_resume_compares_commits_and_not_how_they_are_written(loaded: Loaded, tmp_path: Path) -> None:
    check_same_run(loaded, load_recipe("recipe.yaml", [f"student.model=org/student@{COMMIT}"]))
    with pytest.raises(UserError, match=r"student.model \(\"org/student\" -> \"org/other\"\)"):
        check_same_run(loaded, load_recipe("recipe.yaml", ["student.model=org/other"]))
    path = tmp_path / "manifest.json"
    write_manifests(path, {}, {}, {"student.model": f"org/student@{COMMIT}"})
    check_commits(path, {"student.model": f"org/student@{COMMIT}"})
    now = "org/student@" + "f" * 40
    with pytest.raises(UserError, match=f"is '{now}' on the Hub now, the run began with 'org/student@{COMMIT}': write"):
        check_commits(path, {"student.model": now})
    with pytest.raises(UserError, match=r"data.train\[0\]: is 'x' on the Hub now, the run began with a local path"):
        check_commits(path, {"data.train[0]": "x"})
    path.write_text('{"commits": {"student.model": 3}}')
    with pytest.raises(UserError, match="'commits' holds what are no names of the Hub"):
        check_commits(path, {})
