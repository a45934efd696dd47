"""What somebody without a token can do to a daemon by connecting to it: nothing that others would notice."""

from __future__ import annotations

import asyncio
import json
import resource
import select
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, Final

import pytest
from msgspec import structs

from covenant import Limits, Mailbox
from covenant.exchange.bounds import Bounds
from covenant.model.error import TooManyConnections
from covenant.serve.daemon import Daemon
from tests.daemons import OPERATOR_TOKEN, start_daemon, url_of
from tests.docs.support import names_in, page, rows
from tests.until import until

PATIENCE_S: Final = 20
FILES: Final = 256
SOON: Final = Bounds(head_ms_max=60, body_ms_max=60)
HEAD: Final = f"HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {OPERATOR_TOKEN}\r\n".encode()
WHOAMI: Final = b"GET /whoami " + HEAD + b"\r\n"


class Wire:
    """One connection, byte by byte."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def ask(self, data: bytes) -> tuple[int, dict[str, Any]]:
        self.writer.write(data)
        return await self.answer()

    async def answer(self) -> tuple[int, dict[str, Any]]:
        async with asyncio.timeout(PATIENCE_S):
            head = await self.reader.readuntil(b"\r\n\r\n")
            size = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
            return int(head.split()[1]), json.loads(await self.reader.readexactly(size))

    async def frame(self, data: bytes = b"") -> dict[str, Any]:
        self.writer.write(data)
        async with asyncio.timeout(PATIENCE_S):
            (size,) = struct.unpack(">I", await self.reader.readexactly(4))
            frame: dict[str, Any] = json.loads(await self.reader.readexactly(size))
        return frame

    async def is_closed(self) -> bool:
        try:
            async with asyncio.timeout(PATIENCE_S):
                return await self.reader.read(1) == b""
        except ConnectionError:
            return True


class House:
    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        self.wires: list[Wire] = []

    async def http(self) -> Wire:
        assert self.daemon.address is not None
        return self._keep(Wire(*await asyncio.open_connection(*self.daemon.address)))

    async def ipc(self) -> Wire:
        return self._keep(Wire(*await asyncio.open_unix_connection(str(self.daemon.settings.ipc))))

    def _keep(self, wire: Wire) -> Wire:
        self.wires.append(wire)
        return wire


@asynccontextmanager
async def served(bounds: Bounds) -> AsyncIterator[House]:
    house = House(await start_daemon("memory:", Limits(), bounds=bounds))
    yield house
    for wire in house.wires:
        wire.writer.close()
    await house.daemon.stop()


def frame_of(**members: Any) -> bytes:
    data = json.dumps(members).encode()
    return struct.pack(">I", len(data)) + data


# --- a head that is too large ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "said",
    [
        b"GET /" + b"a" * 5000 + b" " + HEAD + b"\r\n",
        b"GET /whoami " + HEAD + b"X-A: " + b"a" * 5000 + b"\r\n\r\n",
        b"GET /whoami " + HEAD + b"X-A: a\r\n" * 1000 + b"\r\n",
    ],
    ids=["path", "value", "many"],
)
async def test_a_head_over_the_bound_is_refused(said: bytes) -> None:
    """Contract 32."""
    async with served(Bounds(head_bytes_max=4000)) as house:
        wire = await house.http()
        status, answer = await wire.ask(said)
        assert (status, answer["code"], answer["limit"]) == (431, "head_too_large", 4000)
        assert await wire.is_closed()


async def test_a_head_that_never_ends_is_cut_off_at_the_bound() -> None:
    async with served(Bounds()) as house:
        wire = await house.http()
        wire.writer.write(b"GET /whoami HTTP/1.1\r\nX-A: ")
        said = 0
        try:
            while not wire.reader.at_eof() and said < 64 * 2**20:
                wire.writer.write(b"a" * 2**16)
                said += 2**16
                await wire.writer.drain()
                await asyncio.sleep(0)
        except ConnectionError:
            pass
        assert said < 16 * 2**20


async def test_a_head_within_the_bound_is_read_however_it_comes() -> None:
    async with served(Bounds(head_bytes_max=4000)) as house:
        wire = await house.http()
        body = b" " * 100_000
        sent = b"POST /a2a/compact " + HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body
        for byte in (sent + b"GET /whoami " + HEAD + b"X-A: " + b"a" * 3000).splitlines(keepends=True):
            wire.writer.write(byte)
            await wire.writer.drain()
        assert (await wire.answer())[0] == 400
        assert (await wire.ask(b"\r\n\r\n"))[0] == 200


# --- somebody slow -----------------------------------------------------------------------------------------


async def test_who_connects_and_says_nothing_is_hung_up_on() -> None:
    async with served(SOON) as house:
        assert await (await house.http()).is_closed()


@pytest.mark.parametrize(
    "said",
    [b"G", b"GET /whoami HTTP/1.1\r\nHost: x\r\n", b"POST /a2a/tasks " + HEAD + b"Content-Length: 9\r\n\r\n{"],
    ids=["one byte", "half a head", "half a body"],
)
async def test_a_request_that_does_not_come_to_its_end_is_given_up(said: bytes) -> None:
    """Contract 32."""
    async with served(SOON) as house:
        wire = await house.http()
        status, answer = await wire.ask(said)
        assert (status, answer["code"]) == (408, "too_slow")
        assert await wire.is_closed()
        assert (await (await house.http()).ask(WHOAMI))[0] == 200


async def test_a_second_request_has_as_much_time_as_the_first() -> None:
    async with served(SOON) as house:
        wire = await house.http()
        assert (await wire.ask(WHOAMI))[0] == 200
        assert (await wire.ask(b"GET /who"))[0] == 408


async def test_who_was_refused_early_has_not_for_ever_to_say_the_rest() -> None:
    async with served(SOON) as house:
        wire = await house.http()
        assert (await wire.ask(b"POST /a2a/tasks HTTP/1.1\r\nHost: x\r\nContent-Length: 99999\r\n\r\n{"))[0] == 401
        assert await wire.is_closed()


async def test_who_waits_for_an_answer_or_between_requests_is_not_slow() -> None:
    async with served(SOON) as house:
        wire, idle = await house.http(), await house.http()
        assert (await idle.ask(WHOAMI))[0] == 200
        assert (await wire.ask(b"GET /a2a/results/next?wait_ms=400 " + HEAD + b"\r\n"))[1]["result"] is None
        for quiet in (wire, idle):
            assert (await quiet.ask(WHOAMI))[0] == 200


async def test_no_token_in_time_on_the_socket_is_the_end() -> None:
    async with served(SOON) as house:
        wire = await house.ipc()
        assert (await wire.frame())["code"] == "unauthenticated"
        assert await wire.is_closed()


async def test_a_frame_that_does_not_come_to_its_end_is_given_up() -> None:
    async with served(SOON) as house:
        wire = await house.ipc()
        assert (await wire.frame(frame_of(kind="authenticate", token=OPERATOR_TOKEN)))["kind"] == "authenticated"
        waiting = await wire.frame(frame_of(kind="try_recv_a2a_result", wait_ms=400))
        assert waiting["kind"] == "a2a_result_opt"
        assert (await wire.frame(frame_of(kind="whoami")[:-1]))["code"] == "too_slow"
        assert await wire.is_closed()


async def test_a_first_frame_is_as_small_as_a_token() -> None:
    async with served(Bounds(head_bytes_max=4000)) as house:
        wire = await house.ipc()
        assert (await wire.frame(struct.pack(">I", 4001)))["code"] == "too_large"
        assert await wire.is_closed()


# --- too many ----------------------------------------------------------------------------------------------


async def test_http_and_the_socket_share_the_room_there_is() -> None:
    async with served(Bounds(connections_total_max=3)) as house:
        known = [await house.http(), await house.http(), await house.ipc()]
        for wire in known[:2]:
            assert (await wire.ask(WHOAMI))[0] == 200
        assert (await known[2].frame(frame_of(kind="authenticate", token=OPERATOR_TOKEN)))["kind"] == "authenticated"
        late = await house.http()
        head = await asyncio.wait_for(late.reader.readuntil(b"\r\n\r\n"), PATIENCE_S)
        assert head.startswith(b"HTTP/1.1 503 ")
        assert b"\r\nretry-after: 1\r\n" in head and b"\r\nconnection: close\r\n" in head
        refused = await house.ipc()
        assert (await refused.frame())["code"] == "too_many_connections"
        assert await refused.is_closed()
        with pytest.raises(TooManyConnections):
            async with Mailbox.open(url_of(house.daemon, "unix"), token=OPERATOR_TOKEN) as box:
                await box.recent_tasks()
        known[1].writer.close()
        async with asyncio.timeout(PATIENCE_S):
            await until(lambda: len(house.daemon.connections) < 3)
        assert (await (await house.http()).ask(WHOAMI))[0] == 200


@pytest.fixture
def confined() -> Iterator[tuple[str, str]]:
    """A daemon in a process of its own that may have few files open: its address and its token."""
    with tempfile.TemporaryDirectory(prefix="cov-") as home:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.serve.run_daemon", home],
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=_few_files,
        )
        assert process.stdout is not None
        yield process.stdout.readline().strip().removeprefix("http://"), (Path(home) / "operator.token").read_text()
        process.kill()
        process.wait()
        process.stdout.close()


def _few_files() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (FILES // 2, FILES))


def test_a_crowd_of_strangers_leaves_the_daemon_files_to_work_with(confined: tuple[str, str]) -> None:
    address, token = confined
    host, _, port = address.partition(":")
    known = HTTPConnection(host, int(port), timeout=PATIENCE_S)

    def ask(method: str, path: str) -> int:
        known.request(method, path, headers={"Authorization": f"Bearer {token.strip()}"})
        with known.getresponse() as response:
            response.read()
            return response.status

    with ExitStack() as stack:
        stack.callback(known.close)
        assert ask("GET", "/whoami") == 200
        strangers = [stack.enter_context(socket.create_connection((host, int(port)))) for _ in range(FILES // 2)]
        poll = select.poll()  # takes descriptors of any number
        for stranger in strangers:
            poll.register(stranger, select.POLLIN)
        told = {number for number, _ in poll.poll(PATIENCE_S * 1000)}
        first = next(stranger for stranger in strangers if stranger.fileno() in told)
        assert first.recv(1000).startswith(b"HTTP/1.1 503 ")
        assert (ask("GET", "/audit"), ask("POST", "/a2a/compact")) == (200, 200)


def test_every_bound_that_the_page_names_is_one() -> None:
    told = {name: row[1] for row in rows(page("http.md")) for name in names_in(row[0]) if name.endswith(("_max", "_s"))}
    there = structs.asdict(Bounds())
    assert {"head_bytes_max", "head_ms_max", "body_ms_max", "connections_total_max"} <= told.keys() <= there.keys()
