"""Hostile values in every key that reaches the job's script: refused when read, or words and no more.

The scripts run, with ``srun``, ``scontrol``, ``apptainer``, ``ray`` and ``mopd`` replaced by what writes down its
arguments; what a value would run leaves a file named ``CANARY``. sbatch itself says which options it reads.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from mopd.base.types import UserError
from mopd.config.load import load_recipe
from mopd.config.reading.tree import field_types, read_overrides, split_dotted
from mopd.launch.slurm.submitting import PreparedJob, prepare_job
from tests.unit.config.strategies import fields, least_section

NUM_EXAMPLES = max(20, int(os.environ.get("MOPD_FUZZ_MUTATIONS", "0")) // 5)
CONTROLS = "\t\n\v\f\r\x1b\x7f\x85\x9b\u2028\u2029\u202e\u2066"
PIECES = [
    "$(touch CANARY)", "`touch CANARY`", ";touch CANARY;", "& touch CANARY &", "|touch CANARY|", ">CANARY", "<(x)", "'",
    '"', "\\", "\\'", '\\"', "$", "${IFS}", "$HOME", "$'\\n'", "#", " ", "  ", "%", "%j", "%%", "!", "!!", "*", "?",
    "[a", "~", "-", "--", "--wrap=x", "(", ")", "{a,b}", "}}", "{{ 1 }}", "{% x %}", "{#", "hetjob", "PackJob", "=",
    ":", ",", "@", "^", "a b", "null", "- x", "é", "😀", "\u00a0", "\ufeff", "eof", "x",
]  # fmt: skip
LETTERS = st.text(st.characters(codec="utf-8", exclude_characters="/\0"), max_size=2)
"""No slash: the scripts run, and make the folders that they are told."""
TEXTS = st.lists(st.sampled_from(PIECES) | LETTERS, min_size=1, max_size=5).map("".join)
STUBS = {
    "mopd": 'printf "%s\\0" "$@" >"$(mktemp "$RECORDS/mopd.XXXXXX")"',
    "srun": 'options=(); while [[ $1 == --* ]]; do options+=("$1"); shift; done\n'
    'printf "%s\\0" "${options[@]}" >"$(mktemp "$RECORDS/srun.XXXXXX")"\nexec "$@"',
    "apptainer": 'printf "%s\\0" "$@" >"$(mktemp "$RECORDS/apptainer.XXXXXX")"\n'
    'shift 2; while [[ $1 == --bind || $1 == --pwd ]]; do shift 2; done; shift; exec "$@"',
    "scontrol": 'if [[ $2 == hostnames ]]; then printf "node%s\\n" 1 2 3 4; else echo "NodeAddr=127.0.0.1 x"; fi',
    "ray": 'if [[ $1 == status ]]; then printf " 1 node_%s\\n" {1..9}; fi',
    "squeue": ":",
}
SLURM_CONF = """\
ClusterName=nobody
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort=1
AuthType=auth/none
NodeName=node CPUs=1
PartitionName=debug Nodes=node
MessageTimeout=1
"""
PARTS: dict[str, Any] = {
    "data": {"train": ["train.jsonl"]},
    "schedule": {"steps": 3, "prompts_per_step": 4},
    "student": {"model": "m", "parallel": {"tensor_model_parallel_size": 4}},
}
Values = Mapping[str, str]
Form = Callable[[Values], dict[str, Any]]


def teacher(values: Values, **placement: Any) -> dict[str, Any]:
    engine = {"type": "vllm"}
    return {values["teacher"]: {"model": "m", "default": True, "engine": engine, "placement": placement}}


def allocation(values: Values) -> dict[str, Any]:
    return {
        "teachers": teacher(values, type="registered"),
        "slurm": {"gpus_per_node": 4, "options": [f"--comment={values['option']}"], "setup": [values["setup"]]},
    }


def components(values: Values) -> dict[str, Any]:
    mount = f"/{values['mount']}:/m"
    return {
        "teachers": teacher(values, type="registered"),
        "slurm": {
            "form": "heterogeneous",
            "gpus_per_node": 2,
            "student_nodes": 2,
            "options": [f"--comment={values['option']}"],
            "components": {f"teachers.{values['teacher']}": {"partition": "other"}},
            "container": {"type": "apptainer", "image": values["image"], "mounts": [mount]},
        },
    }


def seeds(values: Values) -> dict[str, Any]:
    container = {"type": "pyxis", "image": values["image"], "mounts": [f"/{values['mount']}:/m"]}
    return {
        "teachers": teacher(values, type="registered"),
        "slurm": {"gpus_per_node": 4, "container": container, "seeds": [3, 17]},
    }


def on_ray(values: Values) -> dict[str, Any]:
    return {
        "teachers": teacher(values, type="ray", num_gpus=1),
        "slurm": {"form": "ray", "gpus_per_node": 8, "options": [f"--comment={values['option']}"]},
    }


FORMS: tuple[Form, ...] = (allocation, components, seeds, on_ray)
KEYS = ("run_dir", "teacher", "option", "mount", "image")
"""Keys that take any text."""
PLACES = (*KEYS, "folder", "interpreter", "recipe")
"""And what else of a user's stands in a script."""
HARMLESS = dict.fromkeys(PLACES, "a") | {"setup": ":"}


class Room:
    """Folders for one script, and what it called."""

    def __init__(self, top: Path, patch: pytest.MonkeyPatch) -> None:
        self.top, self._patch = top, patch
        self.records, self.stubs = top / "records", top / "stubs"
        self.records.mkdir()
        self.stubs.mkdir()
        for name, text in STUBS.items():
            (self.stubs / name).write_text(f"#!/bin/bash\n{text}\n")
            (self.stubs / name).chmod(0o755)
        (top / "slurm.conf").write_text(SLURM_CONF)

    def prepare(self, form: Form, values: Values) -> PreparedJob:
        """The job, called for in a folder and by an interpreter with hostile names too.

        Raises:
            UserError: a value is refused.
        """
        folder, home = self.top / f"work{values['folder']}", self.top / f"python{values['interpreter']}"
        for path in (folder, home):
            path.mkdir(parents=True, exist_ok=True)
        for name, stub in (("python", "mopd"), ("ray", "ray")):
            if not (home / name).exists():
                (home / name).symlink_to(self.stubs / stub)
        self._patch.chdir(folder)
        self._patch.setattr(sys, "executable", str(home / "python"))
        recipe = Path(f"recipe{values['recipe']}")
        recipe.write_text(json.dumps({**PARTS, "run_dir": values["run_dir"], **form(values)}))
        return prepare_job(load_recipe(recipe))

    def run(self, job: PreparedJob) -> list[list[str]]:
        """Every call of ``mopd`` and what stood around it, once all that the script started has ended."""
        script = self.top / "job.sh"
        script.write_text(job.text)
        checked = subprocess.run(["bash", "-n", script], capture_output=True, text=True, timeout=60)
        assert (checked.returncode, checked.stderr) == (0, "")
        names = ["SLURM_JOB_NODELIST", *(f"SLURM_JOB_NODELIST_HET_GROUP_{number}" for number in range(3))]
        environment = {
            **dict.fromkeys(names, "node[1-4]"), "SLURM_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "0", "SLURM_PROCID": "0",
            "SLURM_CPUS_ON_NODE": "4", "CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7", "RECORDS": str(self.records),
            "PATH": f"{self.stubs}:/usr/bin:/bin", "HOME": str(self.top),
        }  # fmt: skip
        ended, held = os.pipe()
        with open(ended, "rb") as all_ended:
            done = subprocess.run(
                ["bash", script], env=environment, pass_fds=[held], capture_output=True, text=True, timeout=120
            )
            os.close(held)
            assert all_ended.read() == b""
        assert done.returncode == 0, done.stderr
        return [path.read_bytes().decode().split("\0")[:-1] for path in self.records.iterdir()]

    def canaries(self) -> list[Path]:
        return [path for path in self.top.rglob("*") if path.name == "CANARY"]

    def read_by_sbatch(self, text: str) -> list[str]:
        """Options of a script, as sbatch reads them before it asks a controller (there is none)."""
        done = subprocess.run(
            ["sbatch", "-vvvv", "--test-only"],
            input=text.encode(),
            capture_output=True,
            env={"PATH": os.environ["PATH"], "SLURM_CONF": str(self.top / "slurm.conf")},
            timeout=60,
        )
        said = done.stderr.decode()
        assert "end of defined options" in said, said
        found = "debug2: Found in script, argument "
        return [line.split(found, 1)[1][1:-1] for line in said.split("\n") if found in line]


@pytest.fixture
def rooms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Room]:
    numbers = itertools.count()

    def make() -> Room:
        top = tmp_path / str(next(numbers))
        top.mkdir()
        return Room(top, monkeypatch)

    return make


def expected_options(job: PreparedJob, folder: str) -> list[str]:
    """The first component's options that hold a value."""
    log = os.path.join(folder, job.folder.parent, "logs", "job").replace("%", "%%")
    slurm = job.loaded.recipe.slurm
    assert slurm is not None
    return [f"--chdir={folder}", f"--output={log}/%j.log", *slurm.options]


def held_as_they_are(job: PreparedJob, values: Values, calls: list[list[str]], folder: str) -> None:
    """What the stubs were called with is what the recipe says, word by word."""
    slurm = job.loaded.recipe.slurm
    assert slurm is not None
    words = [word for call in calls for word in call]
    commands = [call[2:] if call[:2] == ["-m", "mopd"] else call for call in calls]
    ours = [call for call in commands if call and call[0] in ("check", "serve", "train", "stop")]
    assert {call[0] for call in ours} >= {"check", "train"}
    assert all(Path(call[1]) == job.folder / "recipe.yaml" and not call[1].startswith("-") for call in ours)
    for call in ours if slurm.seeds else ():
        (override,) = [word for word in call if word.startswith("run_dir=")]
        given = read_overrides([override]).items["run_dir"].value  # type: ignore[union-attr]
        assert Path(str(given)) == job.folder.parent / "seed_3"  # one that begins with a dash has ./ before it
    if slurm.form == "ray":
        keys = [split_dotted(word.rsplit("=", 1)[0]) for word in words if ".placement.address=" in word]
        assert ("teachers", values["teacher"], "placement", "address") in keys
    else:
        assert f"--teacher={values['teacher']}" in words
    if slurm.container is not None and slurm.container.type == "pyxis":
        assert f"--container-image={values['image']}" in words
        assert f"--container-mounts={folder}:{folder},{slurm.container.mounts[0]}" in words
    elif slurm.container is not None:
        head = ["exec", "--nv", "--pwd", folder, "--bind", folder, "--bind", slurm.container.mounts[0], values["image"]]
        inside = [call[: len(head)] for call in calls if call[0] == "exec"]
        assert inside and all(words == head for words in inside)


def test_whatever_a_value_says_it_is_a_word(rooms: Callable[[], Room]) -> None:
    """Each form with other texts in all of its places at once; what one place refuses is tried without that place."""
    counts = dict.fromkeys(("ran", "refused"), 0)

    # no search for a shorter case: each takes a dozen processes
    @settings(max_examples=NUM_EXAMPLES, deadline=None, database=None, phases=[Phase.generate])
    @given(st.sampled_from(FORMS), st.fixed_dictionaries(dict.fromkeys(PLACES, TEXTS)))
    def check(form: Form, values: dict[str, str]) -> None:
        values = {**HARMLESS, **values}
        room = rooms()
        try:
            job = room.prepare(form, values)
        except UserError:
            for place in PLACES:
                try:
                    room.prepare(form, {**HARMLESS, place: values[place]})
                except UserError as error:
                    assert "\n" not in str(error)
                    counts["refused"] += 1
                    values[place] = HARMLESS[place]
            job = room.prepare(form, values)
        calls = room.run(job)
        assert room.canaries() == []
        held_as_they_are(job, values, calls, os.getcwd())
        if shutil.which("sbatch"):
            plain = room.read_by_sbatch(room.prepare(form, {**HARMLESS, "folder": values["folder"]}).text)
            read = room.read_by_sbatch(job.text)
            assert [word.split("=")[0] for word in read] == [word.split("=")[0] for word in plain]
            assert set(expected_options(job, os.getcwd())) <= set(read)
        counts["ran"] += 1

    check()
    print(counts)


@pytest.mark.parametrize("place", [*KEYS, "setup", "folder", "interpreter"])
def test_control_characters_are_refused(place: str, rooms: Callable[[], Room]) -> None:
    """Wherever a value comes from: with them one line of a script becomes two."""
    room = rooms()
    form = components if place in ("mount", "image") else allocation
    for letter in CONTROLS:
        with pytest.raises(UserError) as caught:
            room.prepare(form, {**HARMLESS, place: f"a{letter}touch CANARY{letter}"})
        assert "holds a control character" in str(caught.value)
        assert str(caught.value).isprintable() and letter not in str(caught.value)


@pytest.mark.parametrize("key", ["partition", "account", "qos", "time", "components.rollout.partition"])
def test_names_of_the_cluster_hold_nothing_that_means_something(key: str, rooms: Callable[[], Room]) -> None:
    room = rooms()
    room.prepare(components, HARMLESS)
    for value in (*PIECES, *CONTROLS):
        if not re.fullmatch("[A-Za-z0-9_.,:@+-]+", value):
            with pytest.raises(UserError, match=key.rpartition(".")[2]):
                load_recipe("recipea", [f"slurm.{key}={json.dumps(f'a{value}', ensure_ascii=value in CONTROLS)}"])


@pytest.mark.parametrize(
    "line", [*PIECES, "cat <<EOF", "if true; then", "exit 3 #", "}", "done", "esac", ";;", "((", "[["]
)
def test_a_line_of_setup_changes_no_other(line: str, rooms: Callable[[], Room]) -> None:
    """It is a user's own, and runs; what it leaves open ends with it."""
    room = rooms()
    job = room.prepare(allocation, {**HARMLESS, "setup": line})
    text = job.text.splitlines()
    first, last = text.index("set -e  # a line of slurm.setup that fails ends the job"), text.index("set +e")
    harmless = room.prepare(allocation, HARMLESS).text.splitlines()
    assert text[:first] + text[last:] == harmless[:first] + harmless[harmless.index("set +e") :]
    script = "\n".join(text[first : last + 1]).replace("set -e", "echo() { :; }; set +e", 1)
    done = subprocess.run(
        ["bash", "-c", f"{script}\nprintf %s reached"],
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
    )
    assert "reached" in done.stdout or line.startswith("exit")


def test_several_lines_of_setup_are_one_program(rooms: Callable[[], Room]) -> None:
    rooms().prepare(allocation, HARMLESS)
    lines = ["if true; then", "  value='it'\"'\"'s'", "fi", "false", "echo not reached"]
    text = prepare_job(load_recipe("recipea", [f"slurm.setup={json.dumps(lines)}"])).text
    begun = text[text.index("set -e") : text.index("set +e")]
    done = subprocess.run(
        ["bash", "-c", f"trap 'echo $value' EXIT\n{begun}"], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (1, "it's\n", "")


def test_every_text_that_reaches_the_script_is_tried_here(rooms: Callable[[], Room]) -> None:
    """Each key of the schema that takes text, one after another: those that a script then shows are the ones above."""
    room = rooms()
    room.prepare(allocation, HARMLESS)
    mark, reaching, num_rendered = "Zq7", set(), 0
    for path, cls, name in fields():
        annotation = str(field_types(cls)[name])
        if "str" not in annotation:
            continue
        for value in (mark, f"/{mark}:/m", f"--comment={mark}", f"http://{mark}"):
            tree: dict[str, Any] = {**least_section(cls), name: [value] if "tuple" in annotation else value}
            for part in reversed(path):
                tree = {part: tree}
            Path("other").write_text(json.dumps({"base": "recipea", **tree}))
            try:
                text = prepare_job(load_recipe("other")).text
            except UserError:
                continue
            num_rendered += 1
            if mark in text:
                reaching.add(".".join((*path, name)))
            break
    assert num_rendered > 30
    assert reaching == {
        "run_dir", "slurm.partition", "slurm.account", "slurm.qos", "slurm.options", "slurm.setup",
        "slurm.container.image", "slurm.container.mounts", "slurm.interface",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("form", "values", "says"),
    [
        (allocation, {"run_dir": "a\\b"}, "holds a backslash, which Slurm takes out of the path of a job's log"),
        (allocation, {"folder": "a\\b"}, "holds a backslash"),
        (
            components,
            {"folder": "a:/etc"},
            "a container's mount cannot name a working directory with a colon or a comma",
        ),
        (seeds, {"folder": ",x"}, "a container's mount cannot name"),
        (seeds, {"image": "--export=NONE"}, "image is '--export=NONE', which would be read as an option"),
    ],
)
def test_what_slurm_or_a_container_would_read_otherwise(
    form: Form, values: dict[str, str], says: str, rooms: Callable[[], Room]
) -> None:
    with pytest.raises(UserError, match=says):
        rooms().prepare(form, {**HARMLESS, **values})
