"""Environments of the real verifiers library, in processes of an interpreter that has it (``MOPD_VERIFIERS_PYTHON``;
absent: this one).

Invariant: what the environment says is what the student reads, its rubric judges what the student said, and whatever
does not fit is one line. Not exercised: environments of the Hub, sandboxes, judges.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mopd.base.types import UserError
from mopd.config.environment import VerifiersConfig
from mopd.environments.process import EnvironmentFailed, Environments
from tests.integration.world import build_world, mopd, read_metrics, write_prompts

HAVING_IT = os.environ.get("MOPD_VERIFIERS_PYTHON", sys.executable)
OWN = '''
import verifiers as vf
from datasets import Dataset


def rows(size):
    return Dataset.from_list([{"question": f"from 0 to {4 << i}?", "answer": str(2 << i)} for i in range(size)])


class Guess(vf.MultiTurnEnv):
    async def setup_state(self, state):
        state["tries"] = 0

    async def env_response(self, messages, state, **more):
        state["tries"] += 1
        said = messages[-1].content
        if said == state["answer"]:
            state["final_env_response"] = [{"role": "user", "content": "right"}]
            return state["final_env_response"]
        return [{"role": "user", "content": f"{said} is wrong"}, {"role": "user", "content": f"try {state['tries']}"}]

    @vf.cleanup
    async def write_down(self, state):
        open("ended", "a").write(f"{state['answer']} {state['tries']}\\n")


class Rewriting(Guess):
    async def get_prompt_messages(self, state):
        return (await super().get_prompt_messages(state))[-2:]


class Blanking(Guess):
    async def env_response(self, messages, state, **more):
        messages[-1].content = "…"
        return await super().env_response(messages, state)


class Silent(Guess):
    async def env_response(self, messages, state, **more):
        return []


class Asking(Guess):
    async def env_response(self, messages, state, **more):
        await state["client"].get_response(messages, state["model"], {})


class Asking2(Guess):
    async def get_model_response(self, state, prompt, **more):
        return await super().get_model_response(state, prompt, **more)


class Failing(Guess):
    async def env_response(self, messages, state, **more):
        raise vf.InfraError("no sandbox")


async def few_tries(state):
    return 1 / (1 + state["tries"])


async def last_word(completion, answer):
    return float(completion[-1].content == answer)


async def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def broken(completion):
    raise KeyError("gone")


def together(completions):
    return [0.0 for _ in completions]


def load_environment(kind="Guess", size=3, **more):
    more = {"dataset": rows(size), "rubric": vf.Rubric(funcs=[few_tries], weights=[4.0]), **more}
    if kind == "tools":
        return vf.ToolEnv(tools=[add], **{**more, "rubric": vf.Rubric(funcs=[last_word])})
    if kind == "single":
        return vf.SingleTurnEnv(system_prompt="be brief", **{**more, "rubric": vf.Rubric(funcs=[last_word])})
    if kind == "group":
        return vf.EnvGroup([Guess(**more)])
    if kind in ("broken", "together"):
        return vf.SingleTurnEnv(**{**more, "rubric": vf.Rubric(funcs=[globals()[kind]])})
    return globals()[kind](**more)
'''


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter that finds what ``HAVING_IT`` finds, and a package ``own-words`` with environments."""
    look = "import sysconfig, verifiers; print(sysconfig.get_path('purelib'))"
    found = subprocess.run([HAVING_IT, "-c", look], capture_output=True, text=True, timeout=120)
    if found.returncode:
        pytest.skip("verifiers is in no environment that MOPD_VERIFIERS_PYTHON names (make verifiers)")
    folder = tmp_path_factory.mktemp("verifiers")
    (folder / "own_words.py").write_text(OWN)
    subprocess.run([HAVING_IT, "-m", "venv", "--without-pip", folder / "venv"], check=True, timeout=120)
    (packages,) = (folder / "venv" / "lib").glob("python*/site-packages")
    (packages / "own.pth").write_text(f"{found.stdout.strip()}\n{folder}\n")
    return str(folder / "venv" / "bin" / "python")


def play(python: str, turns: list[list[str]], *, examples: list[Any] | None = None, **options: Any) -> list[Any]:
    """Of a response for each list of turns, at the same time: its first messages and what its turns are answered."""
    args = {key: options.pop(key) for key in ("kind", "max_turns", "timeout_seconds") if key in options}
    cfg = {"id": "own-words", "args": args, "python": python, "observation_role": "user", **options}
    own = Environments(VerifiersConfig(type="verifiers", **cfg))

    async def one(number: Any, texts: list[str]) -> Any:
        row = {"prompt": "?", "domain": "words", "ground_truth": None, "extra_info": number}
        episode = await own.reset(row, 1)
        said = [await episode.step(text) for text in texts]
        await episode.close()
        return [episode.messages, *said]

    async def run() -> list[Any]:
        numbers = range(len(turns)) if examples is None else examples
        try:
            return list(await asyncio.gather(*map(one, numbers, turns), return_exceptions=True))
        finally:
            if own._process is not None:
                await own._process.stop()

    return asyncio.run(run())


def test_a_game_of_several_turns_is_scored_by_its_rubric(python: str) -> None:
    first, second, cut = play(python, [["2"], ["7", "<|im_end|>", "4"], ["1"]])
    assert first == [[{"role": "user", "content": "from 0 to 4?"}], (None, 2.0)]
    assert second[1:] == [("7 is wrong\ntry 1", 0.0), ("<|im_end|> is wrong\ntry 2", 0.0), (None, 1.0)]
    assert cut[1:] == [("1 is wrong\ntry 1", 0.0)]
    # the environment's own limit ends it before it answers
    (short,) = play(python, [["1", "3"]], max_turns=2)
    assert short[1:] == [("1 is wrong\ntry 1", 0.0), (None, 2.0)]


def test_tools_are_called_and_one_turn_is_enough(python: str) -> None:
    call = '<tool_call>{"name": "add", "arguments": %s}</tool_call>'
    turns = [["so " + call % '{"a": 1, "b": 1}', "2"], [call % '{"a": 1}' + call % '{"a": 1, "b": 3}', "4"],
             ['{"name": "add", "parameters": {"a": 2, "b": 2}}', "5"], ["<tool_call>{add</tool_call>"]]  # fmt: skip
    found = play(python, turns, examples=[0, 1, 2, 0], kind="tools", observation_role="tool")
    assert found[0][1:] == [("2", 0.0), (None, 1.0)] and found[2][1:] == [("4", 0.0), (None, 0.0)]
    missing, total = found[1][1][0].split("\n")
    assert "missing 1 required" in missing and total == "4" and found[1][2] == (None, 1.0)
    assert found[3][1:] == [(None, 0.0)]
    right, wrong = play(python, [["2"], ["2"]], kind="single")
    assert right[0][0] == {"role": "system", "content": "be brief"}
    assert right[1:] == [(None, 1.0)] and wrong[1:] == [(None, 0.0)]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"kind": "Rewriting"}, "failed in step: Unplayable: the environment rewrites messages that the student has"),
        ({"kind": "Blanking"}, "the environment rewrites messages that the student has"),
        ({"kind": "Silent"}, "the environment answers in the roles []"),
        ({"kind": "Asking"}, "failed in step: Unplayable: the environment asks the model itself"),
        ({"kind": "Asking2"}, "Asking2 has a get_model_response of its own: it asks the model itself"),
        ({"kind": "Failing"}, "failed in step: InfraError: no sandbox"),
        ({"kind": "group"}, "EnvGroup is no MultiTurnEnv"),
        ({"kind": "broken"}, "Error calling reward function broken: 'gone'"),
        ({"kind": "together"}, "scores responses of one prompt together"),
        ({"timeout_seconds": 5.0}, "timeout_seconds is 5: leave it out"),
        ({"observation_role": "tool"}, "answers in the roles ['user'], and observation_role is 'tool': set it"),
        ({"examples": [3]}, "extra_info of the row is 3, the example_id of none of its dataset's rows"),
        ({"examples": [None]}, "extra_info of the row is None"),
        ({"id": "no-such-words"}, "cannot be loaded: ValueError: Could not import 'no-such-words' environment"),
        ({"kind": "Absent"}, "cannot be loaded: RuntimeError: Failed to load environment 'own-words': 'Absent'"),
    ],
)
def test_what_does_not_fit_is_one_line(options: dict[str, Any], problem: str, python: str) -> None:
    (failed,) = play(python, [["1"]], **options)
    assert isinstance(failed, EnvironmentFailed | UserError) and problem in str(failed), failed
    assert "\n" not in str(failed)


def test_a_run_plays_in_it(python: str, tmp_path: Path) -> None:
    world = build_world(tmp_path / "world")
    write_prompts(world.validation, num_rows=8, start=40)
    args = {"size": 48, "max_turns": 3}
    environment = {"type": "verifiers", "id": "own-words", "args": args, "python": python, "observation_role": "user"}
    recipe = world.write_recipe(
        tmp_path / "run",
        data__columns={"prompt": "prompt", "domain": "data_source", "extra_info": "extra_info.index"},
        data__max_prompt_length=64,
        rollout={"environment": environment, "max_response_length": 96},
        rewards__default={"type": "environment"},
        student__max_tokens_per_micro_batch=512,
        student__parallel__tensor_model_parallel_size=1,
        preflight__require_better_teacher=False,
        student__optimizer={"lr": 1e-4},
        schedule__steps=2,
    )
    done = mopd("train", recipe)
    assert done.returncode == 0, done.stderr
    first, *_ = read_metrics(tmp_path / "run")
    assert 1 < first["turns/left"] <= 3 and 0 < first["given_share/left"] < 1
    (trace,) = json.loads((tmp_path / "run" / "traces.json").read_text())["domains"]["left"]
    assert any("is wrong" in one["text"] for one in trace["segments"] if one["is_given"])


def test_an_interpreter_without_it_is_one_line(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path], check=True, timeout=120)
    (failed,) = play(str(tmp_path / "bin" / "python"), [["1"]])
    assert isinstance(failed, UserError) and "No module named 'verifiers'" in str(failed)
    (absent,) = play(str(tmp_path / "nowhere"), [["1"]])
    assert isinstance(absent, UserError) and "could not be started: [Errno 2]" in str(absent)
