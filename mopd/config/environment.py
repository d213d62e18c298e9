"""The ``rollout.environment`` section: what answers the student between the turns of a response."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from mopd.config.values import MAX_TOKENS, Checked, Lines, Seconds, at_least, check_server_url

MAX_TURNS = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnsConfig(Checked):
    """Limits of every environment."""

    max_turns: Annotated[int, at_least(1, MAX_TURNS)] = 8
    """Most turns of one response."""
    max_tokens_per_turn: Annotated[int, at_least(1, MAX_TOKENS)] | None = None
    """Longest turn in tokens; a longer one ends the response."""
    max_tokens_per_observation: Annotated[int, at_least(1, MAX_TOKENS)] = 512
    """Longest given text in tokens; a longer one is cut."""
    turn_timeout_s: Seconds = 30.0
    """Deadline for the environment's answer to one turn."""
    observation_role: Literal["tool", "user"] = "tool"
    """Role of what the environment answers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PythonToolConfig(TurnsConfig):
    """Two confined tools, ``calculator`` and ``python`` (docs/environments.md#python_tool)."""

    type: Literal["python_tool"]
    """Environment type."""
    on_malformed_call: Literal["answer", "end"] = "answer"
    """After a call that cannot be read: tell the student what is wrong, or end the response."""
    max_memory_gib: Annotated[float, at_least(0.125, 64.0)] = 1.0
    """Memory of one program, in GiB."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CustomEnvironmentConfig(TurnsConfig):
    """A Python class of yours (docs/environments.md#custom)."""

    type: Literal["custom"]
    """Environment type."""
    module: str
    """Python file that holds the class."""
    class_name: str
    """Name of the class in that file."""
    on_error: Literal["stop", "end"] = "stop"
    """After a failure: end the run, or end that response with what was drawn."""
    max_memory_gib: Annotated[float, at_least(0.25, 1024.0)] = 8.0
    """Memory of the process that holds all objects of the class, in GiB."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenEnvConfig(TurnsConfig):
    """A server of OpenEnv (docs/environments.md#openenv)."""

    type: Literal["openenv"]
    """Environment type."""
    url: str
    """Address of the server, ``http(s)://HOST:PORT``."""
    action: Lines
    """Field of the server's action that takes the text of a turn."""
    observation: Lines | None = None
    """Text field of its observation that the student is given; absent: all fields, as JSON."""
    begins_with: Literal["row", "reset"] = "row"
    """A response's prompt: the row's, or the server's first observation."""
    on_error: Literal["stop", "end"] = "stop"
    """As for ``type: custom``."""

    def check(self) -> None:
        try:
            check_server_url(self.url)
        except ValueError as error:
            raise ValueError(f"url has {error}") from error


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifiersConfig(TurnsConfig):
    """An environment of the verifiers library (docs/environments.md#verifiers). Needs mopd's extra ``verifiers``."""

    type: Literal["verifiers"]
    """Environment type."""
    id: str
    """Name of the environment, as ``verifiers.load_environment`` takes it; its package must be installed."""
    args: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of its ``load_environment``."""
    python: str | None = None
    """Python interpreter that has the library and the environment, with packages of its own; absent: mopd's."""
    on_error: Literal["stop", "end"] = "stop"
    """As for ``type: custom``."""
    max_memory_gib: Annotated[float, at_least(0.25, 1024.0)] = 8.0
    """Memory of the process that plays all responses, in GiB."""


EnvironmentConfig = PythonToolConfig | CustomEnvironmentConfig | OpenEnvConfig | VerifiersConfig
