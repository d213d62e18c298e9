"""Environments of the ``verifiers`` library, turn by turn: its loop, in which the student's text is the model's answer.

The library's loop (``MultiTurnEnv.rollout``) asks a model and appends what it says; here a turn that the student has
drawn stands in that place. All else is the environment's own: its rows, ``setup_state``, ``env_response``, its stop
conditions, and at the end its rubric. Source: ``verifiers`` 0.2.1 to 0.3.1, ``envs/multiturn_env.py``.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from typing import Any

import verifiers as vf

from mopd.environments.python_tool import OPEN, BadCall, read_calls

if not hasattr(vf, "MultiTurnEnv"):
    raise ImportError(
        f"verifiers {version('verifiers')} has no MultiTurnEnv: its environments start programs that ask the model "
        "themselves; install 'verifiers>=0.2.1,<0.4'"
    )

from verifiers.types import AssistantMessage, Response, ResponseMessage, ToolCall
from verifiers.utils.message_utils import maybe_normalize_messages

MODEL = "student"
REWARD_FAILED = "Error calling"
"""How the library's log begins to tell of a function of a rubric that raised."""


class Unplayable(Exception):
    """What an environment does has no place in a response that only grows."""


class _NoModel(vf.Client):
    """The model of an environment, whose turns come from elsewhere."""

    async def get_response(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse to answer."""
        raise Unplayable("the environment asks the model itself")

    setup_client = to_native_tool = to_native_prompt = get_native_response = get_response
    raise_from_native_response = from_native_response = close = get_response


class _RewardErrors(logging.Handler):
    """Raises where the library only writes into its log, and goes on with a reward of 0."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage().startswith(REWARD_FAILED):
            raise Unplayable(record.getMessage())


class Rollout:
    """One response in an environment that all share."""

    def __init__(self, env: Any, rows: Any, places: Mapping[int, int], settings: Mapping[str, Any]) -> None:
        """``rows`` is the environment's dataset, ``places`` that of each ``example_id`` in it; ``settings`` are those
        of ``VerifiersConfig``."""
        self._env, self._rows, self._places, self._role = env, rows, places, settings["observation_role"]
        self._state: Any = None
        self._messages: list[Any] = []
        """All that stands before the next turn."""

    async def reset(self, row: Mapping[str, Any], seed: int) -> list[dict[str, str]]:
        """Return the messages of the example that the row names."""
        number = row["extra_info"]
        if not isinstance(number, int) or number not in self._places:
            raise Unplayable(f"extra_info of the row is {number!r}, the example_id of none of its dataset's rows")
        client = _NoModel(None)
        example = dict(self._rows[self._places[number]])
        self._state = state = await self._env.init_state(example, client, MODEL)
        self._state = await self._env.setup_state(state) or state
        messages = await self._next()
        if messages is None:
            raise Unplayable(f"example {number} ended before its first turn: {self._state.get('stop_condition')}")
        self._messages = messages
        return [{"role": one.role, "content": _text(one)} for one in messages]

    async def step(self, text: str) -> tuple[str | None, float]:
        """Return what the environment answers to a turn; at its end ``None`` and the reward of its rubric."""
        message = ResponseMessage(
            **_said(text, len(self._state["trajectory"])), finish_reason="stop", is_truncated=False
        )
        answer = Response(id=self._state["trajectory_id"], created=0, model=MODEL, message=message)
        await self._env.add_model_response(self._state, self._messages, answer)
        said = self._state["trajectory"][-1]["completion"]
        before = [one.model_copy(deep=True) for one in (*self._messages, *said)]  # an environment may write into them
        messages = await self._next()
        if messages is None:
            return None, await self._scored()
        if messages[: len(before)] != before:
            raise Unplayable("the environment rewrites messages that the student has seen or written")
        self._messages, given = messages, messages[len(before) :]
        if (roles := {one.role for one in given}) != {self._role}:
            raise Unplayable(
                f"the environment answers in the roles {sorted(roles)}, and observation_role is {self._role!r}: set it"
            )
        return "\n".join(map(_text, given)), 0.0

    async def close(self) -> None:
        """Release what a response holds that was cut before its end."""
        if self._state is not None:
            await self._env.cleanup(self._state)
            await self._env.rubric.cleanup(self._state)

    async def _next(self) -> list[Any] | None:
        """Return all messages before the next turn, ``None`` at the end."""
        while not await self._env.is_completed(self._state):
            messages = maybe_normalize_messages(await self._env.get_prompt_messages(self._state))
            if self._state.get("final_env_response") is None:
                return list(messages)
        if self._state.get("error") is not None:
            raise Unplayable(f"the environment ended with {self._state['error']!r}")
        return None

    async def _scored(self) -> float:
        state, self._state = self._state, None
        await self._env.cleanup(state)
        await self._env.rubric.score_rollout(state)
        await self._env.rubric.cleanup(state)
        return float(state["reward"])


def load(settings: Mapping[str, Any]) -> Callable[[], Rollout]:
    """Return what makes the environment of one response; ``Unplayable`` for one that cannot be played turn by turn."""
    logging.getLogger("verifiers").addHandler(_RewardErrors())
    env = vf.load_environment(settings["id"], **settings["args"])
    kind = type(env)
    if not isinstance(env, vf.MultiTurnEnv):
        raise Unplayable(f"{kind.__name__} is no MultiTurnEnv, ToolEnv or SingleTurnEnv")
    for own, base in (("rollout", vf.MultiTurnEnv), ("get_model_response", vf.Environment)):
        if getattr(kind, own) is not getattr(base, own):
            raise Unplayable(f"{kind.__name__} has a {own} of its own: it asks the model itself")
    if env.requires_group_rollouts:
        raise Unplayable(f"the rubric of {kind.__name__} scores responses of one prompt together, here each alone")
    if env.timeout_seconds is not None:
        raise Unplayable(f"timeout_seconds is {env.timeout_seconds:g}: leave it out, and set turn_timeout_s")
    rows = env.get_dataset()
    places = {number: place for place, number in enumerate(rows["example_id"])}
    return lambda: Rollout(env, rows, places, settings)


def _said(text: str, turn: int) -> dict[str, Any]:
    """Return content and tool calls of a turn. One with a call that cannot be read is text, as it is for a server."""
    try:
        calls = [
            {"name": call["name"], "arguments": json.dumps(call.get("arguments", call.get("parameters")))}
            for call in read_calls(text)
        ]
        made = [ToolCall(id=f"call_{turn}_{number}", **call) for number, call in enumerate(calls)]
    except (BadCall, KeyError, TypeError, ValueError):
        made = []
    if not made:
        return {"content": text}
    return {"content": text.partition(OPEN)[0].strip() if OPEN in text else "", "tool_calls": made}


def _text(message: Any) -> str:
    """Return the text of a message; ``Unplayable`` for images and for tool calls, which a prompt here cannot hold."""
    parts: Any = message.content
    if isinstance(parts, Sequence) and not isinstance(parts, str):
        kinds = [one["type"] if isinstance(one, Mapping) else one.type for one in parts]
        if set(kinds) == {"text"}:
            parts = "".join(one["text"] if isinstance(one, Mapping) else one.text for one in parts)
    if not isinstance(parts, str) or (isinstance(message, AssistantMessage) and message.tool_calls):
        raise Unplayable(f"a message of the role {message.role!r} holds more than text")
    return parts
