"""Posts to URLs that somebody else has named, without becoming that somebody's arm into this machine's network.

The address is checked where the socket is made, so it is the very one that is connected to, however its name was
written or resolved and whatever it resolves to a moment later. Redirects are not followed, no proxy is asked, nothing
that a receiver sends back is kept. Turns are bounded in number, of all receivers and of each, and names are looked up
in threads of their own: a receiver that is slow holds up itself.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from covenant.rules.address import is_public
from covenant.version import VERSION

if TYPE_CHECKING:
    import aiohttp

TIMEOUT_S: Final = 10.0
POSTS_MAX: Final = 128  # at the same time
POSTS_PER_HOST_MAX: Final = 8
BAD_URL: Final = "bad_url"
_LOOKUPS_MAX: Final = 16
_READ_BYTES: Final = 4096  # of an answer, before its sender has to wait
_HEAD_BYTES_MAX: Final = 8192


class AddressRefused(OSError):
    """It leads to this machine, or into its network."""


class Outbound:
    def __init__(self, private: bool = False, timeout_s: float = TIMEOUT_S) -> None:
        self._private = private
        self._timeout_s = timeout_s
        self._turns = Turns(POSTS_MAX, POSTS_PER_HOST_MAX)
        self._session: aiohttp.ClientSession | None = None
        self._lookups: ThreadPoolExecutor | None = None

    def turn(self, url: str) -> AbstractAsyncContextManager[None]:
        """To post there, for a while."""
        return self._turns.one(urlsplit(url).hostname or "")

    async def post(self, url: str, body: bytes, headers: Mapping[str, str]) -> str | None:
        """Why it was not taken, in a word; None when it was."""
        import aiohttp

        session = self._open()
        try:
            async with session.post(url, data=body, headers=headers, allow_redirects=False) as response:
                status = response.status
        except TimeoutError:
            return "timeout"
        except aiohttp.InvalidURL:
            return BAD_URL
        except aiohttp.ClientSSLError:
            return "tls_failed"
        except (aiohttp.ClientError, OSError, ValueError) as failed:
            is_refused = isinstance(getattr(failed, "os_error", None), AddressRefused)
            return "address_refused" if is_refused else "unreachable"
        if 200 <= status < 300:
            return None
        return "redirected" if 300 <= status < 400 else f"status_{status}"

    def _open(self) -> aiohttp.ClientSession:
        """When it is first needed: most have no webhooks."""
        if self._session is not None:
            return self._session
        import aiohttp

        self._lookups = ThreadPoolExecutor(_LOOKUPS_MAX, "covenant-lookup")
        connector = aiohttp.TCPConnector(
            limit=0,  # turns are waited for before the time of a post begins
            resolver=_resolver(self._lookups),
            socket_factory=self._socket,
        )
        self._session = aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=self._timeout_s),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"User-Agent": f"covenant/{VERSION}"},
            skip_auto_headers=("Accept-Encoding",),
            auto_decompress=False,
            read_bufsize=_READ_BYTES,
            max_line_size=_HEAD_BYTES_MAX,
            max_field_size=_HEAD_BYTES_MAX,
        )
        return self._session

    def _socket(self, found: Any) -> socket.socket:
        family, kind, proto, _, address = found
        if not self._private and not is_public(address[0]):
            raise AddressRefused("the address is not public")
        return socket.socket(family, kind, proto)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None
        if self._lookups is not None:
            self._lookups.shutdown(wait=False, cancel_futures=True)
            self._lookups = None


def _resolver(threads: ThreadPoolExecutor) -> Any:
    from aiohttp.abc import AbstractResolver, ResolveResult

    class Resolver(AbstractResolver):
        """The system's, in these threads. Those of the loop are the disk's, and no receiver's to keep busy."""

        async def resolve(
            self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
        ) -> list[ResolveResult]:
            loop = asyncio.get_running_loop()
            kind = socket.SOCK_STREAM
            found = await loop.run_in_executor(threads, lambda: socket.getaddrinfo(host, port, family, kind))
            return [
                ResolveResult(
                    hostname=host,
                    host=str(address[0]),
                    port=port,
                    family=of,
                    proto=proto,
                    flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
                )
                for of, _, proto, _, address in found
            ]

        async def close(self) -> None:
            """The threads are closed by who made them."""

    return Resolver()


class Turns:
    """Who may go on: so many at once, and so many of one name. Who waits for its name keeps no others waiting."""

    def __init__(self, total: int, each: int) -> None:
        self._total = asyncio.Semaphore(total)
        self._each = each
        self._gates: dict[str, tuple[asyncio.Semaphore, list[None]]] = {}  # with a mark for each who is in or waits

    @asynccontextmanager
    async def one(self, name: str) -> AsyncIterator[None]:
        gate, marks = self._gates.setdefault(name, (asyncio.Semaphore(self._each), []))
        marks.append(None)
        try:
            async with gate, self._total:
                yield
        finally:
            marks.pop()
            if not marks:
                del self._gates[name]
