"""Replicas in this process, in child processes and at URLs: the same scores, started together, gone together."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import venv
from pathlib import Path

import psutil
import pytest
import torch

from mopd.base.types import UserError
from mopd.config.groups import TorchEngineConfig
from mopd.engines.interface import ToDraw, ToScore
from mopd.engines.torch.engine import TorchEngine
from mopd.orchestrator.weights import sync as syncing
from mopd.placement.groups import Groups
from mopd.placement.interface import ROLLOUT
from tests.fixtures import warm
from tests.fixtures.ports import free_port
from tests.fixtures.servers import engine_file, running_server, serve_process, wait_until
from tests.integration.groups import (
    LEFT,
    LOCAL,
    RIGHT,
    ROUTING,
    SAMPLING,
    Student,
    assert_same_scores,
    is_alive,
    make_recipe,
    make_samples,
    pid_of,
    run,
    score_here,
    started,
    until,
)
from tests.integration.world import REPOSITORY, World, environment

pytestmark = [pytest.mark.slow, pytest.mark.multirank]

TOP_K = 8
PARENT = Path(__file__).with_name("parent.py")


def test_every_placement_scores_like_transformers(models: World, tmp_path: Path) -> None:
    """``left`` runs in child processes, ``right`` in this one, a third behind somebody else's server."""
    token = tmp_path / "token"
    token.write_text("a-secret-of-many-characters\n")
    file = tmp_path / "engine.json"
    engine_file(models.student, max_logprobs=TOP_K).write(file)
    tokens, starts = make_samples(24)
    with serve_process(file, "--token-file", token) as server:
        url = server.wait_ready()["url"]
        recipe = make_recipe(
            models,
            tmp_path,
            teachers={
                "left": {"model": str(models.teachers["left"]), "domains": ["left"], "placement": LOCAL, "replicas": 2},
                "right": {"model": str(models.teachers["right"]), "domains": ["right"], "replicas": 2},
                "far": {
                    "model": str(models.student),
                    "domains": ["far"],
                    "placement": {"type": "external", "urls": [url], "token_file": str(token)},
                },
            },
            rollout={"max_response_length": 4, "placement": LOCAL},
        )

        async def work() -> None:
            student = Student(models.student)
            async with started(recipe, tmp_path / "logs", None, student) as (groups, routers):
                folders = {
                    LEFT: models.teachers["left"],
                    RIGHT: models.teachers["right"],
                    "teachers.far": models.student,
                }
                for key, folder in folders.items():
                    given = await routers[key].score(ToScore(tokens, starts, top_k=TOP_K, temperature=1.0))
                    assert_same_scores(given, score_here(folder, tokens, starts, top_k=TOP_K))
                assert {n.name: n.num_samples > 0 for n in routers[LEFT].take_numbers().replicas} == {
                    "left.0": True,
                    "left.1": True,
                }
                await student.publish(7)
                (drawn,) = await routers[ROLLOUT].generate(ToDraw([[3, 4, 5]], SAMPLING, [11]))
                sequence = torch.cat([torch.tensor([3, 4, 5]), drawn.tokens])
                expected = score_here(models.student, [sequence], [3], top_k=TOP_K)[0].token_logprobs
                torch.testing.assert_close(drawn.logprobs, expected, atol=1e-4, rtol=0)
                pids = [pid_of(groups, LEFT, 0), pid_of(groups, LEFT, 1), pid_of(groups, ROLLOUT, 0)]
                assert all(is_alive(pid) for pid in pids)
            assert not any(is_alive(pid) for pid in pids)
            assert server.process.poll() is None  # not ours to end

        run(work())
    assert {path.name for path in (tmp_path / "logs").iterdir()} == {
        "teachers.left.0.log",
        "teachers.left.1.log",
        "rollout.0.log",
    }


def test_a_server_that_cannot_load_its_model(models: World, tmp_path: Path) -> None:
    """One line with the cause; the replica that could start is not left behind."""
    broken = tmp_path / "broken"
    broken.mkdir()
    for path in models.teachers["left"].iterdir():
        content = path.read_bytes()
        (broken / path.name).write_bytes(content[:-200] if path.suffix == ".safetensors" else content)
    recipe = make_recipe(
        models,
        tmp_path,
        teacher_defaults={"placement": LOCAL},
        teachers__left={"model": str(broken), "domains": ["left"]},
    )
    groups = recipe_groups(recipe, LEFT, RIGHT, log_dir=tmp_path / "logs")
    before = children()
    message = start_error(groups)
    assert message.startswith(f"{LEFT}: left.0 ended with exit code 2 at its start")
    assert "broken" in message and "teachers.left.0.log" in message and "\n" not in message
    assert children() <= before


@pytest.mark.long
def test_servers_of_another_interpreter(models: World, tmp_path: Path) -> None:
    """An environment of its own has its own packages and none of ours; only mopd itself comes from here."""
    other = tmp_path / "other"
    venv.create(other, symlinks=True)
    python = str(other / "bin" / "python")
    recipe = make_recipe(models, tmp_path, teachers__left__placement={**LOCAL, "python": python})
    message = start_error(recipe_groups(recipe, LEFT))
    assert "left.0 ended with exit code 1 at its start: ModuleNotFoundError: No module named " in message
    (site,) = (other / "lib").glob("python*/site-packages")
    ours = [f"import site; site.addsitedir({path!r})" for path in sys.path if path.endswith("site-packages")]
    (site / "packages.pth").write_text("\n".join(ours))
    tokens, starts = make_samples(4)

    async def work() -> None:
        async with started(recipe, None, [LEFT]) as (groups, routers):
            given = await routers[LEFT].score(ToScore(tokens, starts, top_k=TOP_K, temperature=1.0))
            assert_same_scores(given, score_here(models.teachers["left"], tokens, starts, top_k=TOP_K))
            assert_is_of(python, pid_of(groups, LEFT, 0))

    run(work())
    registered = {"type": "registered", "python": python}
    file = models.write_recipe(tmp_path / "run", teachers__left__placement=registered)
    options = ("--replica", "1", "--register", tmp_path / "run" / "replicas", "--host", "127.0.0.1")
    with serve_process(file, "--teacher", "left", *options) as serving:
        assert serving.wait_ready()["pid"] == serving.process.pid
        assert_is_of(python, serving.process.pid)
        wait_until(lambda: len(list((tmp_path / "run" / "replicas").glob("teachers.left.*.json"))) == 1)
        serving.process.terminate()
        assert serving.end() == (0, "")


def assert_is_of(python: str, pid: int) -> None:
    """The server is the other interpreter's, and sees mopd alone of ours."""
    server = psutil.Process(pid)
    assert server.cmdline()[0] == python
    (place,) = server.environ()["PYTHONPATH"].split(os.pathsep)
    assert [path.name for path in Path(place).iterdir()] == ["mopd"]


def test_a_server_that_is_not_ready_in_time(models: World, tmp_path: Path) -> None:
    recipe = make_recipe(models, tmp_path, teacher_defaults={"placement": {**LOCAL, "startup_timeout_s": 0.02}})
    before = children()
    with warm.cold():  # a fork could be ready by then
        message = start_error(recipe_groups(recipe, LEFT))
    assert "left.0 was not ready within 0.02 s: raise placement.startup_timeout_s" in message
    assert children() <= before


def test_an_external_server_that_is_not_there(models: World, tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    placement = {"type": "external", "urls": [url], "startup_timeout_s": 1.0}
    recipe = make_recipe(models, tmp_path, teacher_defaults={"placement": placement})
    message = start_error(recipe_groups(recipe, LEFT))
    assert message.startswith(f"{LEFT}.placement.urls: {url} is not healthy after 1 s")


def test_an_external_rollout_server_that_stays_away_is_given_up_by_name(
    models: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It lacks the student's weights, and nothing here starts it again: the run says that it goes on without it."""
    monkeypatch.setattr(syncing, "AWAY_PAUSE_S", 0.05)
    ports = [free_port(), free_port()]
    placement = {"type": "external", "urls": [f"http://127.0.0.1:{port}" for port in ports]}
    routing = {**ROUTING, "request_timeout_s": 1.0}
    rollout = {"max_response_length": 4, "placement": placement, "routing": routing}
    recipe = make_recipe(models, tmp_path, rollout=rollout)

    def serving(port: int) -> contextlib.AbstractContextManager[object]:
        engine = TorchEngine.from_pretrained(models.student, TorchEngineConfig(dtype="float32"))
        return running_server(engine, ROLLOUT, port=port)

    async def work() -> None:
        student, away = Student(models.student), contextlib.ExitStack()
        away.enter_context(serving(ports[1]))
        with serving(ports[0]), away:
            async with started(recipe, None, [ROLLOUT], student) as (_, routers):
                away.close()
                await student.publish(1)
                await until(lambda: len(routers[ROLLOUT].replicas) == 1)
                (told,) = (line for line in caplog.messages if "given up" in line)
                assert told.startswith("rollout.1 is given up: rollout.1: ") and told.endswith(", for 1 s")
                assert len(await routers[ROLLOUT].generate(ToDraw([[3, 4, 5]], SAMPLING, [11]))) == 1

    run(work())


@pytest.mark.parametrize("moment", ["while starting", "while ready"])
def test_servers_die_with_their_parent(models: World, tmp_path: Path, moment: str) -> None:
    make_recipe(models, tmp_path, teacher_defaults={"placement": LOCAL, "replicas": 2})
    (tmp_path / "tmp").mkdir()
    parent = subprocess.Popen(
        [sys.executable, PARENT, tmp_path / "recipe.yaml", moment],
        cwd=REPOSITORY,
        env={**environment(), "TMPDIR": str(tmp_path / "tmp")},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    assert parent.stdout.readline()
    wait_until(lambda: len(servers_below(parent.pid)) == 2, timeout_s=120.0)
    family = descendants(parent.pid)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    wait_until(lambda: not any(is_alive(pid) for pid in family))
    assert not list((tmp_path / "tmp").glob("mopd-servers-*"))


def recipe_groups(recipe: object, *only: str, log_dir: Path | None = None) -> Groups:
    return Groups(recipe, log_dir=log_dir, device=torch.device("cpu"), only=only)  # type: ignore[arg-type]


def start_error(groups: Groups) -> str:
    with pytest.raises(UserError) as failure:
        run(groups.start())
    return str(failure.value)


def children() -> set[int]:
    return {pid for pid in descendants(os.getpid()) if is_alive(pid)} - warm.template_pids()


def descendants(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # it has ended
            for child in map(int, task.read_text(encoding="ascii").split()):
                found += [child, *descendants(child)]
    return found


def servers_below(pid: int) -> list[int]:
    """Processes that run ``mopd serve``, reapers left out."""
    found = []
    for child in descendants(pid):
        with contextlib.suppress(OSError):  # it has ended
            words = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
            if b"serve" in words and not any(b"reaper" in word for word in words):
                found.append(child)
    return found
