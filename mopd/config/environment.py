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
    """Most turns of a response."""
    max_tokens_per_turn: Annotated[int, at_least(1, MAX_TOKENS)] | None = None
    """Longest turn; a longer one ends the response."""
    max_tokens_per_observation: Annotated[int, at_least(1, MAX_TOKENS)] = 512
    """Longest given text; a longer one is cut."""
    turn_timeout_s: Seconds = 30.0
    """Deadline for one answer."""
    observation_role: Literal["tool", "user"] = "tool"
    """Role of the answers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PythonToolConfig(TurnsConfig):
    """Confined tools ``calculator`` and ``python`` (docs/environments.md#python_tool)."""

    type: Literal["python_tool"]
    """Environment type."""
    on_malformed_call: Literal["answer", "end"] = "answer"
    """Explain an unreadable call to the student, or end the response."""
    max_memory_gib: Annotated[float, at_least(0.125, 64.0)] = 1.0
    """Memory of one program."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CustomEnvironmentConfig(TurnsConfig):
    """A class of yours (docs/environments.md#custom)."""

    type: Literal["custom"]
    """Environment type."""
    module: str
    """Python file."""
    class_name: str
    """Class in it."""
    on_error: Literal["stop", "end"] = "stop"
    """After a failure: stop the run, or end the response."""
    max_memory_gib: Annotated[float, at_least(0.25, 1024.0)] = 8.0
    """Memory of its process."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenEnvConfig(TurnsConfig):
    """An OpenEnv server (docs/environments.md#openenv)."""

    type: Literal["openenv"]
    """Environment type."""
    url: str
    """The server, ``http(s)://HOST:PORT``."""
    action: Lines
    """Field for the turn's text."""
    observation: Lines | None = None
    """Field that the student reads; absent: all, as JSON."""
    begins_with: Literal["row", "reset"] = "row"
    """First prompt: the row's, or the server's observation."""
    on_error: Literal["stop", "end"] = "stop"
    """After a failure: stop the run, or end the response."""

    def check(self) -> None:
        try:
            check_server_url(self.url)
        except ValueError as error:
            raise ValueError(f"url has {error}") from error


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifiersConfig(TurnsConfig):
    """An environment of verifiers, mopd's extra ``verifiers`` (docs/environments.md#verifiers)."""

    type: Literal["verifiers"]
    """Environment type."""
    id: str
    """Its name for ``verifiers.load_environment``."""
    args: Mapping[str, Any] = field(default_factory=dict)
    """Arguments beside it."""
    python: str | None = None
    """Python with these packages; absent: mopd's."""
    on_error: Literal["stop", "end"] = "stop"
    """After a failure: stop the run, or end the response."""
    max_memory_gib: Annotated[float, at_least(0.25, 1024.0)] = 8.0
    """Memory of its process."""


EnvironmentConfig = PythonToolConfig | CustomEnvironmentConfig | OpenEnvConfig | VerifiersConfig
