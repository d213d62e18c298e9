"""Addresses of servers in recipes: what is accepted, and how they are shown. A password is neither."""

from __future__ import annotations

import ipaddress
import re
from urllib.parse import urlsplit

from mopd.text import visible

MAX_URL_CHARACTERS = 2048
MAX_HOST_CHARACTERS = 253
_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")
"""One part of a host name, as DNS and container networks allow it."""


def check_server_url(url: str) -> None:
    """``http(s)://host[:port][/path]`` in plain ASCII, and nothing else.

    A user name, a password or a query is refused, since every log would show it: tokens go into ``token_file``.

    Raises:
        ValueError: what is wrong, with the URL as ``shown_url`` shows it.
    """
    problem = _problem(url)
    if problem:
        raise ValueError(f"{shown_url(url)!r}: {problem}")


def shown_url(url: str) -> str:
    """The URL without what may be secret in it (anything before an @, a query, a fragment), fit for a terminal."""
    scheme, separator, rest = url.partition("//")
    if "@" in url:
        scheme = scheme if separator and "@" not in scheme else ""
        rest = f"…@{url.rpartition('@')[2]}"
        separator = "//" if scheme else ""
    kept = re.split(r"[?#]", rest, maxsplit=1)
    text = visible(f"{scheme}{separator}{kept[0]}{'?…' if len(kept) > 1 else ''}")
    return text if len(text) <= 300 else f"{text[:300]}…"


def _problem(url: str) -> str:
    """Why it is refused; empty for a good one."""
    if not url.startswith(("http://", "https://")):
        return "begin it with http:// or https://"
    if len(url) > MAX_URL_CHARACTERS:
        return f"longer than {MAX_URL_CHARACTERS} characters: shorten it"
    if not re.fullmatch(r"[!-~]+", url) or "\\" in url:
        return "has a space, a control character or one outside ASCII: write the host in ASCII (xn--…)"
    if "@" in url:
        return "has a user name or password in it, which logs would show: put a token into a file, named as token_file"
    if "?" in url or "#" in url:
        return "has a query or fragment, which logs would show: remove it"
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        return "its host or port cannot be read: write http://host:port with a port of 1 to 65535"
    if port == 0 or parts.netloc.endswith(":"):
        return "port 0 and an empty port are none: write http://host:port with a port of 1 to 65535"
    return "" if _is_host(host, is_bracketed=parts.netloc.startswith("[")) else "its host is no name and no address"


def _is_host(host: str, *, is_bracketed: bool) -> bool:
    if is_bracketed:
        try:
            return isinstance(ipaddress.ip_address(host), ipaddress.IPv6Address) and "%" not in host
        except ValueError:
            return False
    labels = host.removesuffix(".").split(".")
    return len(host) <= MAX_HOST_CHARACTERS and all(_LABEL.fullmatch(label) for label in labels)
