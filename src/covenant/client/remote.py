"""Which daemon a URL means, and whose token opens it."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias
from urllib.parse import urlsplit

from covenant.model.agent import AgentId
from covenant.model.error import Malformed, Unauthenticated, UnknownStore
from covenant.rules.secret import without_passwords

if TYPE_CHECKING:
    from covenant.client.engine import RemoteEngine

Tokens: TypeAlias = Mapping[str, str] | Callable[[AgentId], Awaitable[str]]

REMOTE: Final = ("http://", "https://", "unix:")
ADDRESS: Final = "http://HOST:PORT or unix:PATH"  # for people
TOKEN_VARIABLE: Final = "COVENANT_TOKEN"
OPERATOR_TOKEN: Final = "operator.token"


def remote_engine(url: str, token: str | None, tokens: Tokens | None) -> RemoteEngine:
    """Imported late: whoever keeps a mailbox in a file needs none of it."""
    from covenant.client.engine import RemoteEngine
    from covenant.client.transport import Transport

    if token is not None:
        token = without_ends(token)
        if not token:  # another in its place would be somebody else's
            raise Malformed("the token is empty", field="token")
    transport: Transport
    if url.startswith("unix:"):
        from covenant.client.unix import UnixTransport

        path = url.removeprefix("unix:").removeprefix("//")
        if not path:
            raise UnknownStore("a socket needs a path: unix:~/.covenant/sock", url=url)
        path = os.path.expanduser(path)
        transport = UnixTransport(path)
        return RemoteEngine(transport, token or _found_token(Path(path).parent), tokens)
    if not has_host(url):
        shown = without_passwords(url)
        raise UnknownStore(f"{shown!r} is no address of a daemon: {ADDRESS}", url=shown)
    from covenant.client.http import HttpTransport

    transport = HttpTransport(url)
    return RemoteEngine(transport, token or _found_token(None), tokens)


def has_host(url: str) -> bool:
    """Whether something could be there."""
    try:
        parts = urlsplit(url)
        return bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def without_ends(token: object) -> str:
    """A token as it is sent: who read it from a file has the end of its line, too."""
    if not isinstance(token, str):
        raise Malformed("a token is text", field="token")
    return token.strip()


def _found_token(home: Path | None) -> str:
    """From the environment, or, beside the socket of one's own daemon, the operator's."""
    token = without_ends(os.environ.get(TOKEN_VARIABLE, ""))
    if token:
        return token
    file = None if home is None else home / OPERATOR_TOKEN
    if file is not None and file.is_file():
        return file.read_text().strip()
    raise Unauthenticated(f"a daemon wants a token: pass token=… or set {TOKEN_VARIABLE}")
