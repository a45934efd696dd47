"""Which daemon a URL means, and whose token opens it."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

from covenant.model.agent import AgentId
from covenant.model.error import Unauthenticated, UnknownStore

if TYPE_CHECKING:
    from covenant.client.engine import RemoteEngine

Tokens: TypeAlias = Mapping[str, str] | Callable[[AgentId], Awaitable[str]]

REMOTE: Final = ("http://", "https://", "unix:")
TOKEN_VARIABLE: Final = "COVENANT_TOKEN"
OPERATOR_TOKEN: Final = "operator.token"


def remote_engine(url: str, token: str | None, tokens: Tokens | None) -> RemoteEngine:
    """Imported late: whoever keeps a mailbox in a file needs none of it."""
    from covenant.client.engine import RemoteEngine
    from covenant.client.transport import Transport

    transport: Transport
    if url.startswith("unix:"):
        from covenant.client.unix import UnixTransport

        path = url.removeprefix("unix:").removeprefix("//")
        if not path:
            raise UnknownStore("a socket needs a path: unix:~/.covenant/sock", url=url)
        path = os.path.expanduser(path)
        transport = UnixTransport(path)
        return RemoteEngine(transport, token or _found_token(Path(path).parent), tokens)
    from covenant.client.http import HttpTransport

    transport = HttpTransport(url)
    return RemoteEngine(transport, token or _found_token(None), tokens)


def _found_token(home: Path | None) -> str:
    """From the environment, or, beside the socket of one's own daemon, the operator's."""
    token = os.environ.get(TOKEN_VARIABLE)
    if token:
        return token
    file = None if home is None else home / OPERATOR_TOKEN
    if file is not None and file.is_file():
        return file.read_text().strip()
    raise Unauthenticated(f"a daemon wants a token: pass token=… or set {TOKEN_VARIABLE}")
