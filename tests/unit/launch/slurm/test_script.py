"""The job's script: what it says stays what was read, and a shell finds nothing wrong with it.

``allocation.sh`` is kept whole, of every other script what it has instead of lines of that one, behind their numbers.
``MOPD_SNAPSHOTS=write`` writes them anew; the difference is then read before it is committed.
"""

from __future__ import annotations

import difflib
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from mopd.config.load import Loaded, load_recipe
from mopd.launch.slurm.submitting import prepare_job
from mopd.run.stopping import is_users_stop, stop_requested

ROOT = Path(__file__).parents[4]
SHELLCHECK = Path(sys.executable).with_name("shellcheck")
KEPT = Path(__file__).parent / "scripts"
MODELS = """\
student: {model: models/student, parallel: {tensor_model_parallel_size: 4, data_parallel_size: 4}}
data: {train: [train.jsonl]}
schedule: {steps: 3, prompts_per_step: 4}
"""
RECIPES = {
    "allocation": f"""\
run_dir: runs/one
{MODELS}
teachers:
  math: {{model: models/math, domains: [math], engine: {{type: vllm, tensor_parallel_size: 4}}, replicas: 2,
         placement: {{type: registered, min_replicas: 2}}}}
rollout: {{engine: {{type: vllm}}, placement: {{type: registered}}, replicas: 4}}
slurm: {{gpus_per_node: 8, student_nodes: 4, spare_nodes: 2, partition: h100, account: lab, time: "1-00",
         setup: [module load cuda]}}
""",
    "heterogeneous": f"""\
run_dir: runs/one
{MODELS}
teachers:
  math: {{model: models/math, domains: [math], engine: {{type: vllm, tensor_parallel_size: 2}}, replicas: 2,
         placement: {{type: registered}}}}
rollout: {{engine: {{type: vllm}}, placement: {{type: registered}}, replicas: 2}}
slurm:
  form: heterogeneous
  gpus_per_node: 8
  cpus_per_node: 64
  partition: h100
  components: {{teachers.math: {{partition: a100, gpus_per_node: 4}}}}
  interface: ib0
  container: {{type: apptainer, image: /images/mopd.sif, mounts: ["/models:/models:ro"]}}
""",
    "ray": f"""\
run_dir: runs/one
{MODELS}
teachers:
  math: {{model: models/math, domains: [math], engine: {{type: vllm, tensor_parallel_size: 4}}, replicas: 2,
         placement: {{type: ray, num_gpus: 4}}}}
rollout: {{engine: {{type: vllm}}, placement: {{type: ray, num_gpus: 1}}, replicas: 4}}
slurm: {{form: ray, gpus_per_node: 8, student_nodes: 4}}
""",
    "wide": f"""\
run_dir: runs/one
{MODELS}
teachers:
  large: {{model: models/large, domains: [math], placement: {{type: registered}},
          engine: {{type: vllm, tensor_parallel_size: 8, pipeline_parallel_size: 2}}}}
  small: {{model: models/small, domains: [code], engine: {{type: vllm}}, placement: {{type: registered}}}}
rollout: {{engine: {{type: vllm}}, placement: {{type: registered}}}}
slurm: {{gpus_per_node: 8, student_nodes: 2, spare_nodes: 1}}
""",
    "awkward": f"""\
run_dir: "runs/it's 100 % $HOME"
{MODELS}
teachers:
  "it's; $(touch gone) \\"a.b\\"": {{model: m, default: true, engine: {{type: vllm}}, placement: {{type: registered}}}}
slurm:
  gpus_per_node: 16
  options: ["--comment=it's # $HOME"]
  interface: "$(it)'s"
  container: {{type: pyxis, image: "nvcr.io#nvidia/pytorch:25.06-py3", mounts: ["/my models:/models"]}}
  seeds: [3, 17]
""",
}


def recipe(folder: Path, text: str) -> Loaded:
    path = folder / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    return load_recipe("recipe.yaml")


@pytest.fixture(params=[*RECIPES, "quickstart_slurm"])
def script(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """Name and text."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", "/environment/bin/python")
    if request.param == "quickstart_slurm":
        loaded = load_recipe(os.path.relpath(ROOT / "recipes" / "quickstart_slurm.yaml", tmp_path))
    else:
        loaded = recipe(tmp_path, RECIPES[request.param])
    return request.param, prepare_job(loaded).text


def test_it_is_the_one_that_was_read(script: tuple[str, str], tmp_path: Path) -> None:
    name, text = script
    text = text.replace(os.path.relpath(ROOT, tmp_path), "..").replace(str(tmp_path), "/home/me")
    kept = KEPT / f"{name}.sh"
    if name != "allocation":
        whole = (KEPT / "allocation.sh").read_text(encoding="utf-8")
        _, _, *changes = difflib.unified_diff(whole.splitlines(True), text.splitlines(True), n=0)
        kept, text = kept.with_suffix(".diff"), "".join(line for line in changes if not line.startswith("-"))
    if os.environ.get("MOPD_SNAPSHOTS") == "write":
        kept.write_text(text, encoding="utf-8")
    assert text == kept.read_text(encoding="utf-8")


def test_shellcheck_finds_nothing(script: tuple[str, str]) -> None:
    # SC2016: a name with a dollar stands in single quotes
    command = [str(SHELLCHECK), *(["--exclude=SC2016"] if script[0] == "awkward" else []), "-"]
    done = subprocess.run(command, input=script[1], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


def test_names_are_words_of_the_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a recipe says reaches mopd as it is, and nothing of it is run."""
    monkeypatch.chdir(tmp_path)
    text = prepare_job(recipe(tmp_path, RECIPES["awkward"])).text
    (line,) = [line for line in text.splitlines() if line.startswith("serve ") and "--teacher=" in line]
    words = shlex.split(line.removesuffix("&"))
    assert '--teacher=it\'s; $(touch gone) "a.b"' in words
    lines = "; ".join(line for line in text.splitlines() if line.startswith(("run=", "interface=")))
    command = ["bash", "-c", f'seed=3; {lines}; printf "%s %s" "$run" "$interface"']
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout == "runs/it's 100 % $HOME/seed_3 $(it)'s"


@pytest.mark.parametrize(
    ("number", "state", "why"),
    [
        ("USR1", "RUNNING", "whose time is up"),
        ("TERM", "COMPLETING", "which was cancelled"),
        ("TERM", "RUNNING", "which is preempted"),
        ("TERM", "", "which got SIGTERM, and squeue does not say why"),
    ],
)
def test_the_stop_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: str, state: str, why: str) -> None:
    """The script's own lines, with a Slurm that says what the job's state is; a signal that follows changes nothing."""
    monkeypatch.chdir(tmp_path)
    text = prepare_job(recipe(tmp_path, RECIPES["allocation"])).text
    lines = text[text.index("\nrequest()") : text.index("\nawait()")]
    before = f"run=r; SLURM_JOB_ID=7; squeue() {{ echo {state}; }}"
    done = subprocess.run(
        ["bash", "-c", f"{before}\n{lines}\nkill -{number} $$; kill -TERM $$"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.stdout, done.stderr) == ("", "")
    assert stop_requested(tmp_path / "r") == f"job 7, {why}" and not is_users_stop(tmp_path / "r")
    assert [path.name for path in (tmp_path / "r").iterdir()] == ["stop"]


FAILING = """
run=run recipe=r own=() mopd=(mopd) step=(srun) nodes_0=(n0 n1 n2 n3)
address_of() { :; }
request() { echo stop >>record; touch run/metrics.jsonl; }
sleep() { echo "$1" >>record; }
sinfo() { case $2 in --nodes=lost) echo 'down*' ;; *) echo mixed ;; esac; }
srun() {
  echo "${3#--nodelist=}" >>record
  SECONDS=$((SECONDS + life))
  local code
  code=$(head -n 1 codes)
  sed -i 1d codes
  return "$code"
}
"""


@pytest.mark.parametrize(
    ("codes", "node", "life", "has_begun", "record"),
    [
        ("0", "n0", 9, False, "n0"),
        ("2", "n0", 9, False, "n0 stop 5"),
        ("1 2 137 1 0", "n0", 9, True, "n0 5 n0 10 n2 20 n3"),
        ("137 0", "lost", 9, False, "lost 5 n2"),
        ("0 0", "lost", 9, False, "lost 5 n2"),
        ("1 1 1 1 1 0", "n0", 4000, True, "n0 5 n0 5 n0 5 n0 5 n0 5 n0"),
    ],
)
def test_a_replica_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codes: str, node: str, life: int, has_begun: bool, record: str
) -> None:
    """The script's own lines, with an ``srun`` that takes ``life`` seconds and has these exit codes in turn. Not after
    an end in order; before the first step an error of the recipe ends the run; at most three times in a row, on a spare
    node where Slurm has lost its own, or it has died there twice."""
    monkeypatch.chdir(tmp_path)
    text = prepare_job(recipe(tmp_path, RECIPES["allocation"])).text
    lines = text[text.index("\nis_lost()") : text.index('\nserve "')]
    Path("codes").write_text("\n".join([*codes.split(), ""]))
    Path("run").mkdir()
    if has_begun:
        Path("run", "metrics.jsonl").touch()
    command = ["bash", "-c", f"{FAILING}\n{lines}\nlife={life}\nserve {node} role 0 --rollout >told"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.stderr, Path("record").read_text().split()) == ("", record.split())
    assert ("4 of 4 in a row" in Path("told").read_text()) == ("20" in record)


@pytest.mark.parametrize(
    ("squeue", "told"),
    [
        ("echo RUNNING", ["job 7: exit code 1: back into the queue", "requeue 7"]),
        ("echo COMPLETING", []),
        ("false", ["job 7: exit code 1: not back into the queue, as squeue does not say whether it was cancelled"]),
    ],
)
def test_the_end_of_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, squeue: str, told: list[str]) -> None:
    monkeypatch.chdir(tmp_path)
    text = prepare_job(recipe(tmp_path, RECIPES["allocation"])).text
    lines = text[text.index("\nfinish()") : text.index("\n# Do the nodes go together?")]
    before = f'SLURM_JOB_ID=7; stopping=; squeue() {{ {squeue}; }}; scontrol() {{ echo "$@"; }}'
    done = subprocess.run(["bash", "-c", f"{before}\n{lines}\nfinish 1"], capture_output=True, text=True, timeout=60)
    assert (done.stdout.splitlines(), done.returncode) == (told, 1)
