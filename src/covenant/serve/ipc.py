"""The IPC surface: a Unix socket, frames of four bytes of length and JSON.

A connection belongs to one peer, from its first frame on: `authenticate` with a token. Requests that carry an `id` run
side by side, and their replies name it; those without are answered in their order. A revoked token closes its
connections.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from typing import Any, Final, cast

import msgspec

from covenant.client.socketpath import within_reach
from covenant.exchange.exchange import Exchange
from covenant.exchange.outcome import UNKNOWN
from covenant.model.error import (
    BadSetting,
    CovenantError,
    Internal,
    Malformed,
    TooLarge,
    TooManyConnections,
    TooSlow,
    Unauthenticated,
)
from covenant.model.peer import Caller
from covenant.serve import wire
from covenant.serve.connections import NEVER, Connections
from covenant.serve.http import GONE, OnRequest, too_large
from covenant.serve.listener import stop_accepting
from covenant.serve.lock import SocketLock
from covenant.serve.routes import decode
from covenant.serve.status import HTTP_STATUS
from covenant.serve.verbs.table import handled

_LENGTH: Final = struct.Struct(">I")
_UNSENT_MAX: Final = 1024 * 1024  # a reader that is slower than this is waited for
_AT_ONCE_MAX: Final = 1024

_encoder: Final = msgspec.json.Encoder()
_decoder: Final = msgspec.json.Decoder(wire.AnyRequest)
_id_decoder: Final = msgspec.json.Decoder(dict[str, Any])

log = logging.getLogger("covenant.ipc")


class Ipc:
    def __init__(self, exchange: Exchange, path: Path, crowd: Connections) -> None:
        self.exchange = exchange
        self.path = path
        self.crowd = crowd
        self.connections: set[_Connection] = set()
        self.on_request: OnRequest | None = None  # told of each verb when it ends
        self._server: asyncio.Server | None = None
        self._lock = SocketLock(path)
        self._noting: set[asyncio.Task[None]] = set()
        exchange.trust.watch(self._close_of)

    def claim(self) -> None:
        """Before the store is opened: nothing of a daemon that runs here may be touched."""
        if not self._lock.take() or (self.path.is_socket() and _is_answered(self.path)):
            why = "a daemon does already; each needs a --home of its own"
            raise BadSetting(f"cannot listen on {self.path}: {why}", name="--ipc")

    async def start(self) -> None:
        _clear_stale(self.path)
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(
            lambda: _Connection(self), sock=_bound(self.path), backlog=self.crowd.backlog
        )

    async def stop(self) -> None:
        """Take no more connections, let what is under way be answered, then close."""
        if self._server is not None:
            await stop_accepting(self._server)
            self._server.close()
            for connection in list(self.connections):
                await connection.finish()
            self.path.unlink(missing_ok=True)
        self._lock.release()

    def note_stranger(self) -> None:
        """Written down behind the back of the connection, which is closed by then."""
        noting = asyncio.get_running_loop().create_task(self.exchange.note_stranger("ipc"))
        self._noting.add(noting)
        noting.add_done_callback(self._noted)
        if self.on_request is not None:
            self.on_request(wire.Authenticate, HTTP_STATUS[Unauthenticated.code], 0.0)

    def _noted(self, noting: asyncio.Task[None]) -> None:
        self._noting.discard(noting)
        if not noting.cancelled() and (failed := noting.exception()) is not None:
            log.warning("a stranger could not be written down: %s", failed)

    def _close_of(self, pubkey: str) -> None:
        for connection in list(self.connections):
            if connection.caller is not None and connection.caller.agent.pubkey == pubkey:
                connection.part(Unauthenticated("the token is not valid any more"))


def _bound(path: Path) -> socket.socket:
    """For its owner alone, from the first moment."""
    bound = socket.socket(socket.AF_UNIX)
    before = os.umask(0o177)
    try:
        with within_reach(path) as reached:
            bound.bind(reached)
    except OSError as failed:
        bound.close()
        raise BadSetting(f"cannot listen on {path}: {failed.strerror or failed}", name="--ipc") from failed
    finally:
        os.umask(before)
    return bound


def _is_answered(path: Path) -> bool:
    """Whether somebody listens there; one who cannot keep up with it does, too."""
    with socket.socket(socket.AF_UNIX) as trying:
        trying.setblocking(False)
        try:
            with within_reach(path) as reached:
                trying.connect(reached)
        except BlockingIOError:
            return True
        except OSError:
            return False
    return True


def _clear_stale(path: Path) -> None:
    """Nobody listens there, so what a daemon that was killed has left is in nobody's use."""
    if not path.exists():
        return
    if not path.is_socket():
        raise BadSetting(f"{path} is there and is no socket", name="--ipc")
    path.unlink()


class _Connection(asyncio.Protocol):
    def __init__(self, ipc: Ipc) -> None:
        self.caller: Caller | None = None
        self.due = NEVER
        self._ipc = ipc
        self._exchange = ipc.exchange
        self._bounds = ipc.exchange.bounds
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._running: set[asyncio.Task[None]] = set()
        self._last: asyncio.Task[None] | None = None  # of the requests without an id
        self._is_paused = False
        self._unsent: list[bytes] = []

    # --- the transport's ----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but its class
        self._transport.set_write_buffer_limits(high=_UNSENT_MAX)
        self._ipc.connections.add(self)
        self.due = self._loop.time() + self._bounds.head_ms_max / 1000
        try:
            self._ipc.crowd.enter(self)
        except TooManyConnections as full:
            self.part(full)

    def connection_lost(self, exc: Exception | None) -> None:
        self._ipc.connections.discard(self)
        self._ipc.crowd.leave(self)
        if self._transport is not None:
            self._ipc.crowd.hang_ups.forget(self._transport)
        for task in self._running:
            task.cancel()
        if self.caller is not None:
            self._exchange.connections.leave(self.caller.agent.pubkey)
        self._transport = None

    def too_slow(self) -> None:
        if self._transport is None:
            return
        if self._transport.is_closing():
            self._transport.abort()  # it does not even take what it was told
        elif self._is_full():
            self.due = self._loop.time() + self._bounds.body_ms_max / 1000  # it is we who do not listen
        elif self.caller is None:
            self.part(Unauthenticated("no token came in time"))
        else:
            self.part(TooSlow("the frame did not come to its end in time"))

    def pause_writing(self) -> None:
        """The reader is slow: take nothing more from it until it has caught up."""
        self._is_paused = True
        self._look_at_flow()

    def resume_writing(self) -> None:
        self._is_paused = False
        self._look_at_flow()

    def _is_full(self) -> bool:
        """It has asked for as much as it may before it takes what it gets."""
        return self._is_paused or len(self._running) >= _AT_ONCE_MAX

    def _look_at_flow(self) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        if self._is_full():
            self._stop_reading(self._transport)
        else:
            self._ipc.crowd.hang_ups.forget(self._transport)
            self._transport.resume_reading()
            self._read_frames()

    def _stop_reading(self, transport: asyncio.Transport) -> None:
        transport.pause_reading()
        self._ipc.crowd.hang_ups.watch(transport)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        self._read_frames()

    # --- frames -------------------------------------------------------------------------------------------

    def _read_frames(self) -> None:
        buffer, place = self._buffer, 0
        while len(buffer) - place >= 4 and self._transport is not None and not self._transport.is_closing():
            (size,) = _LENGTH.unpack_from(buffer, place)
            limit = self._bounds.head_bytes_max if self.caller is None else self._bounds.body_bytes_max
            if size > limit:
                self.part(too_large("frame", size, limit))
                return
            if len(buffer) - place - 4 < size:
                break
            frame = bytes(buffer[place + 4 : place + 4 + size])
            place += 4 + size
            self._on_frame(frame)
            if self._is_full():
                self._stop_reading(self._transport)
                break
        if place:
            del buffer[:place]
        if self.caller is not None:
            self._mind_the_rest(is_new=place > 0)

    def _mind_the_rest(self, is_new: bool) -> None:
        """A frame that has begun has so long to come to its end; between two of them there is no hurry."""
        if not self._buffer:
            self.due = NEVER
        elif is_new or self.due == NEVER:
            self.due = self._loop.time() + self._bounds.body_ms_max / 1000

    def _on_frame(self, frame: bytes) -> None:
        try:
            request = decode(_decoder, frame)
        except Malformed as wrong:
            if self.caller is None:
                self.part(Unauthenticated("the first frame is `authenticate` with a token"))
            else:
                self._refuse(_id_of(frame), wrong)
            return
        if self.caller is None:
            self._greet(request)
        elif isinstance(request, wire.Authenticate):
            self._refuse(request.id, Malformed("this connection has its peer", field="kind"))
        else:
            self._start(request)

    def _greet(self, request: wire.AnyRequest) -> None:
        if not isinstance(request, wire.Authenticate):
            self.part(Unauthenticated("the first frame is `authenticate` with a token"))
            return
        if self._exchange.store.is_shared:
            self._begin(self._recognise(request))
        else:
            self._admit(request)

    async def _recognise(self, request: wire.Authenticate) -> None:
        with suppress(CovenantError):  # it is told when it is not admitted
            await self._exchange.recognise(request.token)
        self._admit(request)

    def _admit(self, request: wire.Authenticate) -> None:
        try:
            caller = self._exchange.authenticate(request.token)
            self._exchange.connections.enter(caller.agent.pubkey)
        except Unauthenticated as stranger:
            self._ipc.note_stranger()
            self.part(stranger)
            return
        except CovenantError as refusal:
            self.part(refusal)
            return
        self.caller = caller
        agent = caller.agent
        self._reply(
            request.id,
            _encoder.encode(wire.Authenticated(display=agent.display, pubkey=agent.pubkey, role=caller.role)),
        )

    def _start(self, request: wire.AnyRequest) -> None:
        if request.id is None:
            self._last = self._begin(self._answer(request, self._last))
        else:
            self._begin(self._answer(request, None))

    def _begin(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = self._loop.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if len(self._running) == _AT_ONCE_MAX - 1:
            self._look_at_flow()

    async def _answer(self, request: wire.AnyRequest, before: asyncio.Task[None] | None) -> None:
        if before is not None and not before.done():
            await asyncio.wait([before])
        caller = self.caller
        assert caller is not None
        started = perf_counter()
        status = 200
        try:
            self._exchange.meter(caller)
            reply = await handled(self._exchange, caller, request)
            self._reply(request.id, _encoder.encode(reply))
        except CovenantError as refusal:
            status = self._refuse(request.id, refusal)
        except asyncio.CancelledError:
            status = GONE
            raise
        except Exception:
            log.exception("a request failed: %s", type(request).__name__)
            status = self._refuse(request.id, Internal("something went wrong inside; it is in the daemon's log"))
        finally:
            if self._ipc.on_request is not None:
                self._ipc.on_request(type(request), status, perf_counter() - started)

    # --- replies ------------------------------------------------------------------------------------------

    def _refuse(self, request_id: int | str | None, refusal: CovenantError) -> int:
        """Its status."""
        self._reply(request_id, _encoder.encode(refusal.to_wire()))
        return HTTP_STATUS[refusal.code]

    def _reply(self, request_id: int | str | None, data: bytes) -> None:
        if self._transport is None:
            return
        if request_id is not None:
            data = b'{"id":%b,%b' % (_encoder.encode(request_id), data[1:])
        if not self._unsent:
            self._loop.call_soon(self._flush)
        self._unsent += (_LENGTH.pack(len(data)), data)

    def _flush(self) -> None:
        """What was replied in one turn of the loop goes out in one write: they are durable together."""
        unsent, self._unsent = self._unsent, []
        if unsent and self._transport is not None:
            self._transport.write(b"".join(unsent))

    def part(self, why: CovenantError) -> None:
        """Say why, and close. What is under way then gets no other answer, and may be done: so it is told that, too."""
        if self._transport is None or self._transport.is_closing():
            return
        is_of_all = self.caller is not None and not isinstance(why, TooLarge)  # that is one frame's, which is not begun
        self._refuse(None, why.saying(outcome=UNKNOWN) if is_of_all and self._running else why)
        for task in list(self._running):
            task.cancel()
        self._flush()
        self._transport.close()
        self.due = self._loop.time() + self._bounds.head_ms_max / 1000

    async def finish(self) -> None:
        if self._running:
            await asyncio.wait(self._running, timeout=5)
        self._flush()
        if self._transport is not None:
            self._transport.close()


def _id_of(frame: bytes) -> int | str | None:
    """The id of a request that does not read, if that much can be told."""
    try:
        found = _id_decoder.decode(frame).get("id")
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return found if isinstance(found, (int, str)) and not isinstance(found, bool) else None
