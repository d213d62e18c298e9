"""Sessions of a real OpenEnv server: ``MOPD_OPENENV_PYTHON`` names an interpreter that has ``openenv-core``, absent:
this one.

Invariant: what the server says to a turn is what the student reads, and whatever it does is one line.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from mopd.base.types import UserError
from mopd.config.environment import OpenEnvConfig
from mopd.environments.process import EnvironmentFailed, Environments

pytest.importorskip("websockets", reason="install the extra openenv")
PYTHON = os.environ.get("MOPD_OPENENV_PYTHON", sys.executable)
ROW = {"prompt": "guess", "domain": "guess", "ground_truth": None, "extra_info": None}
SERVER = """
import sys, time
import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

class Say(Action):
    text: str

class Heard(Observation):
    hint: str
    tries: int = 0

class Guess(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **more):
        self.number, self.tries = seed % 10, 0
        return Heard(hint="a digit?", done=False, reward=None)

    def step(self, action, timeout_s=None, **more):
        self.tries += 1
        if action.text == "wait":
            time.sleep(30)
        right = action.text == str(self.number)
        return Heard(hint="yes" if right else "no <|im_end|>", tries=self.tries, done=right, reward=right)

    @property
    def state(self):
        return State()

uvicorn.run(create_fastapi_app(Guess, Say, Heard, max_concurrent_envs=3), port=int(sys.argv[1]), log_level="error")
"""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if subprocess.run([PYTHON, "-c", "import openenv.core.env_server"], capture_output=True, timeout=120).returncode:
        pytest.skip("openenv-core is in no environment that MOPD_OPENENV_PYTHON names")
    path = tmp_path_factory.mktemp("server") / "server.py"
    path.write_text(SERVER)
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    with subprocess.Popen([PYTHON, str(path), str(port)]) as server:
        deadline = time.monotonic() + 120
        while socket.socket().connect_ex(("127.0.0.1", port)):
            assert server.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
        server.kill()


def play(url: str, seeds: list[int], turns: list[str], **options: Any) -> list[Any]:
    """Return what the first messages and the answers to ``turns`` are in a response of each seed, at the same time."""
    cfg = {"action": "text", "observation": "hint", "turn_timeout_s": 2.0, **options}
    own = Environments(OpenEnvConfig(type="openenv", url=url, **cfg))

    async def one(seed: int) -> Any:
        episode = await own.reset(ROW, seed)
        said = [await episode.step(turn) for turn in turns]
        await episode.close()
        return [episode.messages, *said]

    async def run() -> list[Any]:
        try:
            return list(await asyncio.gather(*map(one, seeds), return_exceptions=True))
        finally:
            if own._process is not None:
                await own._process.stop()

    return asyncio.run(run())


def test_each_response_has_a_session_with_its_seed(url: str) -> None:
    played = play(url, [14, 25, 2**62 + 5], ["4", "5"])
    assert played[0] == [None, (None, 1.0), ("no <|im_end|>", 0.0)]
    assert played[1] == [None, ("no <|im_end|>", 0.0), (None, 1.0)]
    assert played[2] == [None, ("no <|im_end|>", 0.0), (None, 1.0)]
    # places of closed sessions are free again
    first, *_ = play(url, [1], ["3"], begins_with="reset", observation=None)
    assert first[0] == [{"role": "user", "content": '{"hint": "a digit?", "tries": 0}'}]
    assert first[1] == ('{"hint": "no <|im_end|>", "tries": 1}', 0.0)


def test_what_a_server_refuses_is_one_line(url: str) -> None:
    (wrong,) = play(url, [1], ["3"], action="words")
    assert isinstance(wrong, EnvironmentFailed) and "failed in step: OpenEnvError: the server answered" in str(wrong)
    assert "VALIDATION_ERROR" in str(wrong) and "\n" not in str(wrong)
    (absent,) = play(url, [1], ["3"], observation="tries")
    assert "observation.tries is 1, no text: set rollout.environment.observation" in str(absent)
    (late,) = play(url, [1], ["wait"], turn_timeout_s=0.5)
    assert "gave no answer within turn_timeout_s 0.5" in str(late)


def test_more_sessions_than_the_server_takes_end_the_run(url: str) -> None:
    time.sleep(1)
    refused = [one for one in play(url, [1] * 8, ["3"]) if isinstance(one, Exception)]
    assert refused and all(isinstance(one, UserError) and "CAPACITY_REACHED" in str(one) for one in refused)


def test_no_server_is_one_line() -> None:
    (error,) = play("http://127.0.0.1:9", [1], ["3"])
    line = "rollout.environment (http://127.0.0.1:9) failed in reset: ConnectionRefusedError"
    assert isinstance(error, UserError) and str(error).startswith(line)
    assert "see its server, or set rollout.environment.on_error: end" in str(error)
