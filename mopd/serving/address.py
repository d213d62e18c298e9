"""Where a server listens, and its access token. Light to import: a taken port is reported before anything is loaded."""

from __future__ import annotations

import ipaddress
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mopd.base.files.reading import read_text, shown_path
from mopd.base.files.writing import write_json
from mopd.base.types import UserError

BACKLOG = 2048
LAST_PORT = 65535
MIN_TOKEN_CHARACTERS = 16
MAX_TOKEN_BYTES = 65_536


@dataclass(frozen=True, kw_only=True, slots=True)
class Address:
    """Host, port and access of a server."""

    host: str = "127.0.0.1"
    port: int = 0
    """TCP port; 0 takes any free one."""
    token_file: Path | None = None
    """File with the access token; required unless ``host`` is the loopback interface."""
    ready_file: Path | None = None
    """File written when the server answers: ``{url, pid}`` as JSON, which is also printed on one line."""

    def read_token(self) -> str | None:
        """Return the secret; None for an open server on the loopback interface, ``UserError`` for one elsewhere."""
        if self.token_file is not None:
            return read_token_file(self.token_file)
        if not _is_loopback(self.host):
            raise UserError(
                f"--host {self.host} is not the loopback interface, and anyone who reaches it could use the engine: "
                "set --token-file to a file with a secret"
            )
        return None

    @contextmanager
    def listen(self) -> Iterator[socket.socket]:
        """Listen inside the context; clients wait until the engine is ready. ``UserError`` if the port is taken."""
        if not 0 <= self.port <= LAST_PORT:
            raise UserError(f"--port {self.port} is no port: set 0 (any free one) to {LAST_PORT}")
        try:
            family, *_, sockaddr = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)[0]
            listener = socket.create_server(sockaddr[:2], family=family, backlog=BACKLOG)
        except UnicodeError as error:  # the name cannot even be encoded for a name server
            raise UserError(f"--host {self.host!r:.80} is no host name: set an address of this machine") from error
        except OSError as error:
            reason = (os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)).lower()
            raise UserError(
                f"cannot listen on {self.host}:{self.port}: {reason}: set another --port or --host"
            ) from error
        with listener:
            listener.setblocking(False)
            yield listener

    def announce(self, listener: socket.socket) -> str:
        """Announce that the server answers, in the file first and then on standard output. Returns its URL."""
        host, port = listener.getsockname()[:2]
        if is_any_address(listener):
            host = socket.gethostname()
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        ready = {"url": url, "pid": os.getpid()}
        if self.ready_file is not None:
            write_json(self.ready_file, ready)
        print(json.dumps(ready), flush=True)
        return url


def is_any_address(listener: socket.socket) -> bool:
    """Return whether it listens on every address of the machine, so that its address names no host."""
    return ipaddress.ip_address(listener.getsockname()[0]).is_unspecified


def read_token_file(path: Path) -> str:
    """Return the secret in a file, stripped; ``UserError`` if it is missing, short or not printable."""
    try:
        text = read_text(path, cure="write the secret there", max_bytes=MAX_TOKEN_BYTES)
    except UserError as error:
        problem = str(error).removeprefix(f"{shown_path(path)}: ")
        raise UserError(f"token file '{shown_path(path)}' cannot be read: {problem}") from error
    return check_token(text, path)


def check_token(text: str, path: Path) -> str:
    """Return the secret in a file's text; ``UserError`` if it is short or not printable."""
    token = text.strip()
    if len(token) < MIN_TOKEN_CHARACTERS or not token.isascii() or not token.isprintable() or " " in token:
        raise UserError(
            f"token file '{shown_path(path)}' must hold one word of {MIN_TOKEN_CHARACTERS} or more ASCII characters: "
            "write one, for example with `openssl rand -hex 32`"
        )
    return token


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name: it may mean any interface
        return False
