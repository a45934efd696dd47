"""A daemon reached over HTTP."""

from __future__ import annotations

import errno
import os
import ssl
from io import BytesIO
from typing import Any, Final
from urllib.parse import quote

import aiohttp
import msgspec

from covenant.client.reply import encode, read_reply
from covenant.model.error import Malformed, StoreClosed, Unreachable
from covenant.serve import wire as w
from covenant.serve.places import PLACE_OF

_CONNECT_S: Final = 10.0
_ANSWER_S: Final = 60.0
_AT_ONCE_BYTES: Final = 1024 * 1024


class HttpTransport:
    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        self._session: aiohttp.ClientSession | None = None
        self._is_closed = False

    async def call(self, token: str, request: w.Request, reply: type[Any]) -> Any:
        place = PLACE_OF[type(request)]
        whole = {place.body} if place.body not in (None, "*") else set()
        members = {
            field.encode_name: value
            for field in msgspec.structs.fields(request)
            if field.encode_name not in whole and (value := getattr(request, field.name)) is not field.default
        }
        path = place.path
        if place.parameter is not None:
            path = path.replace(f"{{{place.parameter}}}", quote(str(members.pop(place.parameter)), safe=""))
        body = None
        if place.body == "*":
            body, members = encode(members), {}
        elif place.body is not None:
            body = encode(getattr(request, place.body))
        return read_reply(await self._send(place.method, path, token, members, body), reply)

    async def _send(self, method: str, path: str, token: str, query: dict[str, Any], body: bytes | None) -> bytes:
        if self._is_closed:
            raise StoreClosed("the mailbox was closed")
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=_ANSWER_S),
                auto_decompress=False,
            )
        headers = {"Authorization": f"Bearer {token}"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        params = {name: _text(value) for name, value in query.items() if value is not None}
        try:
            async with self._session.request(
                method, self._url + path, params=params, data=_payload(body), headers=headers
            ) as response:
                return await response.read()
        except aiohttp.ClientConnectorError as failed:
            raise Unreachable(f"no daemon at {self._url}: {_why(failed.os_error)}", outcome="not_sent") from failed
        except (aiohttp.ClientError, TimeoutError, OSError) as failed:
            if self._is_closed:
                raise StoreClosed("the mailbox was closed") from None
            raise Unreachable(f"{self._url} does not answer: {failed}", outcome="unknown") from failed
        except ValueError as wrong:  # a header or an address that cannot be
            raise Malformed(f"this does not go over the wire: {wrong}", field="request") from None

    def again(self) -> HttpTransport:
        return HttpTransport(self._url)

    async def close(self) -> None:
        session, self._session = self._session, None
        self._is_closed = True
        if session is not None:
            await session.close()


def _why(failed: OSError) -> str:
    if isinstance(failed, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted here: {failed.verify_message}"
    if isinstance(failed, ssl.SSLError):
        return "it speaks no TLS" if failed.reason == "WRONG_VERSION_NUMBER" else f"TLS fails: {failed.reason}"
    number = failed.errno or 0  # asyncio puts the address into the text
    return os.strerror(number) if number in errno.errorcode else str(failed.strerror)


def _payload(body: bytes | None) -> Any:
    """A large body as a file, which is sent in pieces."""
    return BytesIO(body) if body is not None and len(body) > _AT_ONCE_BYTES else body


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
