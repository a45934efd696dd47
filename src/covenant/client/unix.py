"""A daemon reached over its Unix socket: one connection for each peer, any number of requests on it at once."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from typing import Any, Final, cast

import msgspec

from covenant.client.reply import encode, read_reply
from covenant.client.socketpath import within_reach
from covenant.model.error import CovenantError, StoreClosed, Unreachable
from covenant.serve import wire as w

_LENGTH: Final = struct.Struct(">I")


class _Numbered(msgspec.Struct):
    """Of a reply, the number of its request; without one it concerns the connection."""

    id: int = 0


_id_decoder: Final = msgspec.json.Decoder(_Numbered)


class UnixTransport:
    def __init__(self, path: str) -> None:
        self._path = path
        self._connections: dict[str, asyncio.Task[_Connection]] = {}
        self._is_closed = False

    async def call(self, token: str, request: w.Request, reply: type[Any]) -> Any:
        connection = await self._connection(token)
        return await connection.call(request, reply)

    async def _connection(self, token: str) -> _Connection:
        """Shared by all who come while it is being made; made anew when it was lost."""
        if self._is_closed:
            raise StoreClosed("the mailbox was closed")
        making = self._connections.get(token)
        if making is None or (making.done() and _is_lost(making)):
            making = asyncio.ensure_future(_connect(self._path, token))
            self._connections[token] = making
        return await asyncio.shield(making)

    def again(self) -> UnixTransport:
        return UnixTransport(self._path)

    async def close(self) -> None:
        self._is_closed = True
        for making in self._connections.values():
            with contextlib.suppress(CovenantError, asyncio.CancelledError):
                (await making).close()
        self._connections.clear()


def _is_lost(making: asyncio.Task[_Connection]) -> bool:
    return making.cancelled() or making.exception() is not None or making.result().is_lost


async def _connect(path: str, token: str) -> _Connection:
    loop = asyncio.get_running_loop()
    try:
        with within_reach(path) as reached:
            _, connection = await loop.create_unix_connection(_Connection, reached)
    except OSError as failed:
        raise Unreachable(f"no daemon at {path}: {failed.strerror or failed}", outcome="not_sent") from failed
    try:
        await connection.call(w.Authenticate(token=token), w.Authenticated)
    except BaseException:
        connection.close()
        raise
    return connection


class _Connection(asyncio.Protocol):
    def __init__(self) -> None:
        self.is_lost = False
        self._is_closed = False
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self._number = 0
        self._why: bytes | None = None  # what the daemon said before it hung up
        self._can_write = asyncio.Event()
        self._can_write.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but its class

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost = True
        self._can_write.set()
        for future in self._waiting.values():
            if not future.done():
                if self._why is not None:
                    future.set_result(self._why)
                else:
                    future.set_exception(self._end())
                    future.exception()
        self._waiting.clear()

    def _end(self) -> CovenantError:
        if self._is_closed:
            return StoreClosed("the mailbox was closed")
        return Unreachable("the daemon hung up", outcome="unknown")

    def pause_writing(self) -> None:
        self._can_write.clear()

    def resume_writing(self) -> None:
        self._can_write.set()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        buffer, place = self._buffer, 0
        while len(buffer) - place >= 4:
            (size,) = _LENGTH.unpack_from(buffer, place)
            if len(buffer) - place - 4 < size:
                break
            self._on_frame(bytes(buffer[place + 4 : place + 4 + size]))
            place += 4 + size
        del buffer[:place]

    def _on_frame(self, frame: bytes) -> None:
        number = _id_decoder.decode(frame).id
        future = self._waiting.pop(number, None)
        if future is not None and not future.done():
            future.set_result(frame)
        elif number == 0:
            self._why = frame

    async def call(self, request: w.Request, reply: type[Any]) -> Any:
        if self._transport is None or self.is_lost:
            raise self._end()
        await self._can_write.wait()
        self._number += 1
        number = self._number
        self._send(request, number)
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        try:
            frame = await future
        finally:
            self._waiting.pop(number, None)
        return read_reply(frame, reply)

    def _send(self, request: w.Request, number: int) -> None:
        data = b'{"id":%d,%b' % (number, encode(request)[1:])
        assert self._transport is not None
        if not self.is_lost:
            self._transport.write(_LENGTH.pack(len(data)) + data)

    def close(self) -> None:
        self._is_closed = True
        if self._transport is not None:
            self._transport.close()
