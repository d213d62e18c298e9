"""A session of an OpenEnv server, by its protocol over a WebSocket: JSON messages, one answer to each.

::

    ──> {"type": "reset", "data": {"seed": 5}}           ──> {"type": "step", "data": {ACTION: "…"}}
    <── {"type": "observation", "data": {"observation": {…}, "reward": 0.5, "done": false}}
    <── {"type": "error", "data": {"message": "…", "code": "…"}}

Source: ``openenv-core`` 0.3.0, ``openenv/core/env_server/http_server.py``.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import Any

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

CLOSE_S = 1.0
"""Seconds that the end of a session may take."""
MAX_MESSAGE_BYTES = 2**23
"""Longest message of a server: beyond 1 Mi characters no observation is taken."""


class OpenEnvError(Exception):
    """An answer of the server that is an error, or none."""


class OpenEnv:
    """The environment of one response."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """``settings`` are those of ``OpenEnvConfig``."""
        self._cfg = settings
        self._session: ClientConnection | None = None

    async def reset(self, row: Mapping[str, Any], seed: int) -> list[dict[str, str]] | None:
        """Open a session, and return the server's first observation as a user's message where that is the prompt."""
        url = "ws" + self._cfg["url"].rstrip("/").removeprefix("http") + "/ws"
        wait_s = self._cfg["turn_timeout_s"]
        self._session = await connect(url, max_size=MAX_MESSAGE_BYTES, open_timeout=wait_s, close_timeout=CLOSE_S)
        answer = await self._ask("reset", {"seed": seed % 2**31})  # numpy's generators take 32 bits
        return None if self._cfg["begins_with"] == "row" else [{"role": "user", "content": self._text(answer)}]

    async def step(self, text: str) -> tuple[str | None, float]:
        """Return what the server says to a turn, ``None`` when it is done, and its reward; 0 where it gives none."""
        answer = await self._ask("step", {self._cfg["action"]: text})
        reward = answer.get("reward")
        return None if answer.get("done") else self._text(answer), float(reward or 0)

    async def close(self) -> None:
        """End the session, which frees its place at the server."""
        if self._session is not None:
            await self._session.close()

    async def _ask(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        assert self._session is not None, "reset comes first"
        try:
            with contextlib.suppress(ConnectionClosed):  # what a server that is full says before it closes is read next
                await self._session.send(json.dumps({"type": kind, "data": data}))
            answer = json.loads(await self._session.recv())
            found = answer.get("data") if isinstance(answer, dict) else None
            if not isinstance(found, dict) or answer.get("type") != "observation":
                raise OpenEnvError(f"the server answered {json.dumps(answer):.300}")
        except BaseException:  # a deadline's too: nobody closes a response that has failed
            await self.close()
            raise
        return found

    def _text(self, answer: Mapping[str, Any]) -> str:
        seen, name = answer.get("observation"), self._cfg["observation"]
        if name is None:
            return json.dumps(seen, ensure_ascii=False)
        text = seen.get(name) if isinstance(seen, dict) else None
        if not isinstance(text, str):
            raise OpenEnvError(
                f"observation.{name} is {json.dumps(text):.60}, no text: set rollout.environment.observation"
            )
        return text
