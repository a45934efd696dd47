"""What carries requests to a daemon: over HTTP, or over a Unix socket."""

from __future__ import annotations

from typing import Any, Protocol

from covenant.serve import wire as w


class Transport(Protocol):
    """One way to reach a daemon, for any number of peers."""

    async def call(self, token: str, request: w.Request, reply: type[Any]) -> Any:
        """The reply, or the refusal raised. A call that is cancelled takes nothing."""

    def again(self) -> Transport:
        """Another way to the same daemon, which shares nothing with this one: it may live on another event loop."""

    async def close(self) -> None: ...
