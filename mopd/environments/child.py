"""The process of an environment: ``python -I child.py KIND SETTINGS PARENT_PID LINK_FD MAX_BYTES``.

It holds one object for each response under way. Messages are JSON lines over the socket LINK_FD, in any order::

    <── {"ready": true}
    ──> {"number": 7, "episode": 3, "do": "reset", "row": {…}, "seed": 5}
    <── {"number": 7, "value": [{"role": "user", "content": "…"}, …]}      or null: the row's own prompt stands
    ──> {"number": 8, "episode": 3, "do": "step", "text": "…"}
    <── {"number": 8, "value": ["observation", 0.5]}                       null for no observation: the episode is over
    ──> {"number": 9, "episode": 3, "do": "close"}
    <── {"number": N, "error": "…"}                                        of any of them
"""

from __future__ import annotations

import asyncio
import inspect
import json
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from mopd.environments.python_tool import PythonTool
from mopd.rewards.child import bind, describe, load_named, number_of, plain, shown

del sys.path[0]  # what else lies beside mopd may be for another interpreter; the rest of mopd is found without it

MAX_CHARACTERS = 2**20
"""Characters of an observation, and of the messages of a ``reset`` as JSON."""
MAX_LINE_BYTES = 2**26
"""Longest line from the parent: a row and its prompt, or a turn."""


class Episodes:
    """The objects of the class, by the numbers of their responses."""

    def __init__(self, make: Callable[[], Any], path: str, timeout_s: float) -> None:
        """``make`` returns a new object; errors name lines of ``path``."""
        self._make, self._path, self._timeout_s = make, path, timeout_s
        self._open: dict[int, Any] = {}

    async def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to one request, an error included: whatever the class raises ends one response at most."""
        task, is_late = asyncio.current_task(), False
        assert task is not None

        def expire() -> None:
            nonlocal is_late
            is_late = True
            task.cancel()

        # Not `wait_for`, whose own task would end the loop by a SystemExit of the class.
        timer = asyncio.get_running_loop().call_later(self._timeout_s, expire)
        try:
            return {"number": request["number"], "value": await self._value(request)}
        except BaseException as error:  # also SystemExit and the like, which would end the others' objects
            if is_late:
                problem = f"gave no answer within turn_timeout_s {self._timeout_s:g}"
            elif isinstance(error, _NoAnswer):
                problem = str(error)
            else:
                problem = f"failed in {request['do']}: {describe(error, self._path)}"
            return {"number": request["number"], "error": problem}
        finally:
            timer.cancel()

    async def _value(self, request: dict[str, Any]) -> Any:
        episode = request["episode"]
        if request["do"] == "reset":
            self._open[episode] = made = self._make()
            return _messages(await _awaited(made.reset(request["row"], request["seed"])))
        if request["do"] == "step":
            return _turn(await _awaited(self._open[episode].step(request["text"])))
        made = self._open.pop(episode, None)
        if hasattr(made, "close"):
            await _awaited(made.close())
        return None


class _NoAnswer(Exception):
    """A value of the class that is none, worded to follow its name."""


async def _awaited(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def _messages(value: Any) -> list[dict[str, str]] | None:
    """Return the messages of a ``reset``, checked."""
    if value is None:
        return None
    is_list = isinstance(value, (list, tuple)) and len(value) > 0
    if not is_list or not all(
        isinstance(one, dict) and all(isinstance(one.get(key), str) for key in ("role", "content")) for one in value
    ):
        raise _NoAnswer(f"returned {shown(value)} from reset, no list of messages with role and content, nor None")
    messages = [{key: _text(one[key], "a message of reset") for key in ("role", "content")} for one in value]
    _text("".join(one["content"] for one in messages), "the messages of reset")
    return messages


def _turn(value: Any) -> tuple[str | None, float]:
    """Return observation and reward of a ``step``, checked."""
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise _NoAnswer(f"returned {shown(value)} from step, no pair of observation and reward")
    observation, reward = value
    if observation is not None and not isinstance(observation, str):
        raise _NoAnswer(f"returned the observation {shown(observation)} from step, which is neither text nor None")
    number, problem = number_of(reward)
    if problem:
        raise _NoAnswer(f"returned the reward {shown(reward)} from step, {problem}")
    return None if observation is None else _text(observation, "an observation"), number


def _text(text: str, what: str) -> str:
    if len(text) > MAX_CHARACTERS:
        raise _NoAnswer(f"returned {what} of {len(text)} characters, the limit is {MAX_CHARACTERS}")
    return plain(text, 2 * MAX_CHARACTERS)


async def serve(link_fd: int, episodes: Callable[[], Episodes], path: str) -> None:
    """Answer requests until the link closes."""
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=link_fd), limit=MAX_LINE_BYTES)

    def send(message: dict[str, Any]) -> None:
        writer.write(json.dumps(message).encode() + b"\n")

    try:
        made = episodes()
    except BaseException as error:  # also SystemExit: reported to the caller, then the process ends
        send({"error": f"cannot be loaded: {describe(error, path)}"})
        await writer.drain()
        return
    send({"ready": True})
    tasks: set[asyncio.Task[None]] = set()

    async def answer(request: dict[str, Any]) -> None:
        send(await made.answer(request))

    while line := await reader.readline():
        task = asyncio.create_task(answer(json.loads(line)))
        tasks.add(task)  # asyncio itself holds tasks weakly
        task.add_done_callback(tasks.discard)


def main(kind: str, settings: dict[str, Any], parent_pid: int, link_fd: int, max_bytes: int) -> None:
    """Serve one environment, a built-in one or that of the user's class."""
    bind(parent_pid, max_bytes)
    path, timeout_s = settings.get("path", ""), settings["turn_timeout_s"]

    def episodes() -> Episodes:
        if kind == "python_tool":
            tools = PythonTool(settings)
            return Episodes(lambda: tools, path, timeout_s)
        if kind == "openenv":
            from mopd.environments.openenv import OpenEnv  # its package is an extra

            return Episodes(lambda: OpenEnv(settings), path, timeout_s)
        if kind == "verifiers":
            from mopd.environments.verifiers import load  # its package is an extra

            return Episodes(load(settings), path, timeout_s)
        return Episodes(load_named(path, settings["class_name"]), path, timeout_s)

    asyncio.run(serve(link_fd, episodes, path))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]), *map(int, sys.argv[3:6]))
