"""A daemon reached over its Unix socket: one connection for each peer, any number of requests on it at once."""

from __future__ import annotations

import asyncio
import os
import struct
from typing import Any, Final, cast

import msgspec

from covenant.client.reply import UNREADABLE, encode, read_refusal, read_reply
from covenant.client.socketpath import within_reach
from covenant.model.error import CovenantError, StoreClosed, TooLarge, Unreachable
from covenant.serve import wire as w

_LENGTH: Final = struct.Struct(">I")
_LAST_WORDS_MAX: Final = 64 * 1024
_ANSWER_S: Final = 60.0  # the longest wait that a request asks for is much shorter


class _Numbered(msgspec.Struct):
    """Of a reply, the number of its request; without one it concerns the connection."""

    id: int = 0


class _Refusal(msgspec.Struct):
    code: str = ""
    size: int = 0


_id_decoder: Final = msgspec.json.Decoder(_Numbered)
_refusal_decoder: Final = msgspec.json.Decoder(_Refusal)


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
            making.add_done_callback(_noticed)
            self._connections[token] = making
        if not making.done():
            await asyncio.wait([making])
        if making.cancelled():
            raise StoreClosed("the mailbox was closed")
        return making.result()

    def again(self) -> UnixTransport:
        return UnixTransport(self._path)

    async def close(self) -> None:
        self._is_closed = True
        connections = list(self._connections.values())
        self._connections.clear()
        for making in connections:
            making.cancel()  # a connection that is there already is not
            await asyncio.wait([making])
            if not making.cancelled() and making.exception() is None:
                making.result().close()


def _noticed(making: asyncio.Task[_Connection]) -> None:
    """Also when all who wanted it have gone away meanwhile."""
    if not making.cancelled():
        making.exception()


def _is_lost(making: asyncio.Task[_Connection]) -> bool:
    return making.cancelled() or making.exception() is not None or making.result().is_lost


async def _connect(path: str, token: str) -> _Connection:
    loop = asyncio.get_running_loop()
    try:
        with within_reach(path) as reached:
            _, connection = await loop.create_unix_connection(_Connection, reached)
    except (OSError, ValueError) as failed:
        why = getattr(failed, "strerror", None) or failed
        raise Unreachable(f"no daemon at {path}: {why}", outcome="not_sent") from failed
    try:
        await connection.call(w.Authenticate(token=token), w.Authenticated)
    except BaseException:
        connection.close()
        raise
    return connection


class _Asked(msgspec.Struct):
    answer: asyncio.Future[bytes]
    size: int


class _Connection(asyncio.Protocol):
    def __init__(self) -> None:
        self.is_lost = False
        self._is_closed = False
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._waiting: dict[int, _Asked] = {}
        self._number = 0
        self._why: bytes | None = None  # what the daemon said before it hung up
        self._can_write = asyncio.Event()
        self._can_write.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but its class

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is not None and not self._is_closed:
            self._read_last_words()
        self.is_lost = True
        self._can_write.set()
        too_large = None if self._why is None else _size_refused(self._why)
        for asked in self._waiting.values():
            if not asked.answer.done():
                if self._why is not None and too_large in (None, asked.size):
                    asked.answer.set_result(self._why)
                else:
                    asked.answer.set_exception(self._end())
                    asked.answer.exception()
        self._waiting.clear()

    def _end(self, outcome: str = "unknown") -> CovenantError:
        if self._is_closed:
            return StoreClosed("the mailbox was closed")
        if self._why is not None and _size_refused(self._why) is None:
            return read_refusal(self._why)
        return Unreachable("the daemon hung up", outcome=outcome)

    def _read_last_words(self) -> None:
        """Read the refusal of a daemon that closed the connection.

        If a write failed before anything was read, the refusal is still in the buffer of the socket.
        """
        assert self._transport is not None
        try:
            said = os.read(self._transport.get_extra_info("socket").fileno(), _LAST_WORDS_MAX)
        except OSError:  # nothing was said
            return
        self.data_received(said)

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
        try:
            number = _id_decoder.decode(frame).id
        except UNREADABLE:  # this is no daemon
            assert self._transport is not None
            self._transport.abort()
            return
        asked = self._waiting.pop(number, None)
        if asked is not None and not asked.answer.done():
            asked.answer.set_result(frame)
        elif number == 0:
            self._why = frame

    async def call(self, request: w.Request, reply: type[Any]) -> Any:
        self._number += 1
        number = self._number
        data = b'{"id":%d,%b' % (number, encode(request)[1:])
        if not self._can_write.is_set():
            await self._wait_to_write()
        if self._transport is None or self.is_lost:
            raise self._end("not_sent")
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[bytes] = loop.create_future()
        self._waiting[number] = _Asked(answer, len(data))
        self._transport.write(_LENGTH.pack(len(data)) + data)
        patience = loop.call_later(_ANSWER_S, _give_up, answer)
        try:
            frame = await answer
        finally:
            patience.cancel()
            self._waiting.pop(number, None)
        return read_reply(frame, reply)

    async def _wait_to_write(self) -> None:
        try:
            async with asyncio.timeout(_ANSWER_S):
                await self._can_write.wait()
        except TimeoutError:
            raise Unreachable("the daemon does not listen", outcome="not_sent") from None

    def close(self) -> None:
        """At once: nobody waits for what is still to be written."""
        self._is_closed = True
        if self._transport is not None:
            self._transport.abort()


def _give_up(answer: asyncio.Future[bytes]) -> None:
    if not answer.done():
        answer.set_exception(Unreachable("the daemon does not answer", outcome="unknown"))


def _size_refused(why: bytes) -> int | None:
    """The size of the one request that was too large, if that is why the daemon hung up."""
    refusal = _refusal_decoder.decode(why)
    return refusal.size if refusal.code == TooLarge.code else None
