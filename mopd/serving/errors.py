"""Refusals as HTTP answers: a status, a short JSON body, and what the client should make of it.

==== ======================= ====================================================
400  bad_request             malformed, or asks for what the engine cannot do
401  unauthorized            token missing or wrong
403  forbidden               the weights of a teacher are fixed; a web page asked a server without a token
408  head_timeout            the head of the request came too slowly
408  body_timeout            the body came too slowly
411  length_required         no Content-Length, or a Transfer-Encoding
409  stale_weights           another weight version is served, or an update runs
413  too_large               body or request above the server's limit
428  unknown_images          image files are not here; the body names them
429  busy                    queue full; Retry-After says when to come back
431  too_large               the head of the request is too long
499  client_gone             for the statistics only: no client is there to read it
500  internal_error          a fault of the server; its log has the traceback
503  draining, dead, asleep  the server is about to end, or gave its memory to others
504  deadline                the client's deadline has passed
==== ======================= ====================================================
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fastapi.responses import JSONResponse

from mopd.base.text import one_line


class Refusal(Exception):
    """Refusal of a request, answered with ``status``; ``details`` stand beside ``type`` and ``message`` in the JSON
    body. The message may repeat what a client sent: it becomes one line without control characters."""

    def __init__(self, status: int, kind: str, message: str, **details: Any) -> None:
        super().__init__(one_line(message))
        self.status, self.kind, self.details = status, kind, details

    def response(self) -> JSONResponse:
        """Return the HTTP answer."""
        headers: Mapping[str, str] | None = None
        if "retry_after_s" in self.details:
            headers = {"retry-after": str(math.ceil(self.details["retry_after_s"]))}
        elif self.status == 401:
            headers = {"www-authenticate": "Bearer"}
        error = {"type": self.kind, "message": str(self), **self.details}
        return JSONResponse({"error": error}, status_code=self.status, headers=headers)


def bad_request(message: str) -> Refusal:
    """Return a refusal with status 400."""
    return Refusal(400, "bad_request", message)


def too_large(message: str) -> Refusal:
    """Return a refusal with status 413."""
    return Refusal(413, "too_large", message)


def stale_weights(message: str) -> Refusal:
    """Return a refusal with status 409."""
    return Refusal(409, "stale_weights", message)


def busy(message: str, *, retry_after_s: float) -> Refusal:
    """Return a refusal with status 429; ``retry_after_s`` is the pause in seconds."""
    return Refusal(429, "busy", message, retry_after_s=round(retry_after_s, 3))
