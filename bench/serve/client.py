"""The load's end of a connection: bare protocols that cost less than what they measure.

A request is bytes that were laid out beforehand; of a reply only what the next request needs is looked at. Both
surfaces do the same cycle: a peer sends to itself, receives, answers, and drains the answer.
"""

from __future__ import annotations

import asyncio
import struct
from abc import abstractmethod
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Final, TypeVar, cast

import msgspec
from msgspec import Struct

from bench.serve.seats import Seat
from bench.work import INTENT, REPLY, Tally
from covenant import Result, Task, Text
from covenant.serve import wire as w

VERBS: Final = ("send", "next", "result", "drain")
SEND_PATH: Final = "/a2a/tasks"
NEXT_PATH: Final = "/a2a/tasks/next"
RESULT_PATH: Final = "/a2a/results"
DRAIN_PATH: Final = "/a2a/results/next"

_LENGTH: Final = struct.Struct(">I")
_TASK_MARK: Final = "t" * 36  # where a task's id will stand, and a lease's: all ids have this length
_LEASE_MARK: Final = "l" * 36
_TASK_ID: Final = b'"id":"'
_LEASE_ID: Final = b'"lease_id":"'
_RESULT: Final = b'"result":{'
_encode: Final = msgspec.json.Encoder().encode

P = TypeVar("P", bound=asyncio.Protocol)


def itself(protocol: P) -> Callable[[], P]:
    """For a connection whose protocol is there already."""
    return lambda: protocol


class UnexpectedReply(Exception):
    """The server said something else than the cycle needs."""


# --- what is asked -----------------------------------------------------------------------------------------


class Requests(Struct, frozen=True):
    """The four requests of a cycle, as bytes; the answer in three pieces, around the two ids."""

    send: bytes
    next: bytes
    drain: bytes
    result: tuple[bytes, bytes, bytes]

    def answer(self, task_id: bytes, lease_id: bytes) -> bytes:
        before, between, after = self.result
        return b"".join((before, task_id, between, lease_id, after))


def over_http(seat: Seat) -> Requests:
    return Requests(
        http_request("POST", SEND_PATH, seat.token, _encode(_task(seat))),
        http_request("GET", NEXT_PATH, seat.token),
        http_request("GET", DRAIN_PATH, seat.token),
        _around(http_request("POST", RESULT_PATH, seat.token, _encode(_result()))),
    )


def http_request(method: str, path: str, token: str, body: bytes | None = None) -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {token}\r\n"
    if body is None:
        return f"{head}\r\n".encode()
    return f"{head}content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


def over_ipc(seat: Seat, number: int) -> Requests:
    """All under one id: a client has one request under way."""
    return Requests(
        frame(w.SendTask(id=number, task=_task(seat))),
        frame(w.RecvTask(id=number)),
        frame(w.RecvResult(id=number)),
        _around(frame(w.PostResult(id=number, result=_result()))),
    )


def frame(request: w.Request) -> bytes:
    data = _encode(request)
    return _LENGTH.pack(len(data)) + data


def _task(seat: Seat) -> Task:
    return Task(recipient=seat.agent, intent_text=INTENT)


def _result() -> Result:
    return Result(_TASK_MARK, "ok", (Text(REPLY),), None, _LEASE_MARK)


def _around(request: bytes) -> tuple[bytes, bytes, bytes]:
    before, _, rest = request.partition(_TASK_MARK.encode())
    between, _, after = rest.partition(_LEASE_MARK.encode())
    return before, between, after


# --- the cycle ---------------------------------------------------------------------------------------------


class Cycle:
    """One client's way through its cycles: each reply is noted and brings the next request."""

    def __init__(self, requests: Requests, tallies: Sequence[Tally]) -> None:
        self._requests = requests
        self._tallies = tallies
        self._at = 0
        self._start = 0.0

    def begin(self) -> bytes:
        self._start = perf_counter()
        return self._requests.send

    def go_on(self, reply: bytes) -> bytes | None:
        """None when a cycle has ended after the window."""
        now = perf_counter()
        at = self._at
        tally = self._tallies[at]
        tally.note(self._start, now)
        self._start = now
        self._at = (at + 1) & 3
        if at == 0:
            return self._requests.next
        if at == 1:
            return self._answer(reply)
        if at == 2:
            return self._requests.drain
        if _RESULT not in reply:
            raise UnexpectedReply(reply[:300])
        return self._requests.send if now < tally.window.end else None

    def _answer(self, reply: bytes) -> bytes:
        task, lease = reply.find(_TASK_ID), reply.rfind(_LEASE_ID)
        if task < 0 or lease < 0:
            raise UnexpectedReply(reply[:300])
        task += len(_TASK_ID)
        lease += len(_LEASE_ID)
        return self._requests.answer(reply[task : task + 36], reply[lease : lease + 36])


# --- connections -------------------------------------------------------------------------------------------


class _Connection(asyncio.Protocol):
    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._rest = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but its class

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self.fail(exc or UnexpectedReply("the server hung up"))

    def data_received(self, data: bytes) -> None:
        try:
            self._take(self._rest + data if self._rest else data)
        except Exception as wrong:
            self.fail(wrong)

    @abstractmethod
    def _take(self, data: bytes) -> None:
        """Everything that has come and was not looked at yet."""

    @abstractmethod
    def fail(self, wrong: Exception) -> None:
        """Tell whoever waits for something from here."""

    def write(self, data: bytes) -> None:
        if self._transport is None:
            raise UnexpectedReply("the server hung up")
        self._transport.write(data)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


class Load(_Connection):
    """Clients in their cycles. `done` is done when all of them have ended, or when something went wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def begin(self) -> None:
        self.done = asyncio.get_running_loop().create_future()
        self._begin()

    @abstractmethod
    def _begin(self) -> None: ...

    def end(self) -> None:
        if not self.done.done():
            self.done.set_result(None)

    def fail(self, wrong: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(wrong)


class HttpConnection(_Connection):
    """One request at a time. The parser knows the one shape that the server's replies have."""

    def _take(self, data: bytes) -> None:
        self._rest = data
        head = data.find(b"\r\n\r\n")
        if head < 0:
            return
        at = data.find(b"content-length: ", 0, head) + 16
        end = head + 4 + int(data[at : data.find(b"\r\n", at)])
        if len(data) < end:
            return
        self._rest = b""
        if not data.startswith(b"HTTP/1.1 200 "):
            raise UnexpectedReply(data[:600])
        self.replied(data[head + 4 : end])

    @abstractmethod
    def replied(self, body: bytes) -> None: ...


class HttpLoad(Load, HttpConnection):
    def __init__(self, cycle: Cycle) -> None:
        super().__init__()
        self._cycle = cycle

    def _begin(self) -> None:
        self.write(self._cycle.begin())

    def replied(self, body: bytes) -> None:
        request = self._cycle.go_on(body)
        if request is None:
            self.end()
        else:
            self.write(request)


class HttpCaller(HttpConnection):
    """Asks and waits for the reply."""

    def __init__(self) -> None:
        super().__init__()
        self._reply: asyncio.Future[bytes] | None = None

    def ask(self, request: bytes) -> asyncio.Future[bytes]:
        reply = self._reply = asyncio.get_running_loop().create_future()
        self.write(request)
        return reply

    def replied(self, body: bytes) -> None:
        assert self._reply is not None
        self._reply.set_result(body)

    def fail(self, wrong: Exception) -> None:
        if self._reply is not None and not self._reply.done():
            self._reply.set_exception(wrong)


class IpcLoad(Load):
    """Several clients on one connection; what a read brings to ask goes out in one write."""

    def __init__(self, token: str, cycles: Sequence[Cycle]) -> None:
        super().__init__()
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._cycles = cycles
        self._token = token
        self._under_way = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.write(frame(w.Authenticate(token=self._token)))

    def _begin(self) -> None:
        self._under_way = len(self._cycles)
        self.write(b"".join([cycle.begin() for cycle in self._cycles]))

    def _take(self, data: bytes) -> None:
        asked: list[bytes] = []
        place, size = 0, len(data)
        while size - place >= 4:
            end = place + 4 + int.from_bytes(data[place : place + 4], "big")
            if size < end:
                break
            self._on_frame(data[place + 4 : end], asked)
            place = end
        self._rest = data[place:]
        if asked:
            self.write(b"".join(asked))
        elif self._under_way == 0:
            self.end()

    def _on_frame(self, reply: bytes, asked: list[bytes]) -> None:
        if not reply.startswith(b'{"id":'):
            self._greeted(reply)
            return
        request = self._cycles[int(reply[6 : reply.index(b",")])].go_on(reply)
        if request is None:
            self._under_way -= 1
        else:
            asked.append(request)

    def _greeted(self, reply: bytes) -> None:
        if b'"kind":"authenticated"' not in reply:
            raise UnexpectedReply(reply[:300])
        self.ready.set_result(None)

    def fail(self, wrong: Exception) -> None:
        if not self.ready.done():
            self.ready.set_exception(wrong)
        super().fail(wrong)
