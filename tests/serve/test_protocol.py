"""Two ways to an answer, the short one for plain requests and uvicorn's through ASGI: nobody can tell them apart."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator
from typing import Any, Final

import msgspec
import pytest

from covenant import AgentId, Limits
from covenant.exchange.bounds import Bounds
from covenant.model import command as c
from covenant.serve.daemon import Daemon
from covenant.serve.head import Head, known
from covenant.serve.http import Asked, Http, Response
from covenant.serve.listener import listen
from covenant.serve.protocol import HttpProtocol
from covenant.serve.server import Server, config_for
from tests.daemons import OPERATOR_TOKEN, Realmful, start_daemon
from tests.until import until

PATIENCE_S: Final = 20
ABSENT: Final = "00000000-0000-4000-8000-000000000000"
SENT: Final = "00000000-0000-4000-8000-000000000001"
BOB: Final = AgentId.named("bob@lab")
TASK: Final = {"id": SENT, "recipient": {"display": BOB.display, "pubkey": BOB.pubkey}, "intent_text": "do"}
LAST: Final = b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


def request(line: str, body: Any = None, *more: str, who: str = "{alice}") -> bytes:
    data = b"" if body is None else body if isinstance(body, bytes) else msgspec.json.encode(body)
    head = [f"{line} HTTP/1.1", "Host: x", f"Authorization: Bearer {who}", *more]
    if body is not None and not any(header.startswith("Transfer") for header in more):
        head.append(f"Content-Length: {len(data)}")
    return "\r\n".join([*head, "", ""]).encode() + data


SAID: Final = {
    "send again": request("POST /a2a/tasks", TASK),
    "send, id taken": request("POST /a2a/tasks", {**TASK, "intent_text": "other"}),
    "send, queue full": request("POST /a2a/tasks", {**TASK, "id": ABSENT}),
    "send, no grant": request("POST /a2a/tasks", TASK, who="{carol}"),
    "send, bad token": request("POST /a2a/tasks", TASK, who="cov_wrong"),
    "send, no token": b"POST /a2a/tasks HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}",
    "send, two tokens": request("POST /a2a/tasks", TASK, "Authorization: Bearer cov_wrong"),
    "send, another scheme": request("POST /a2a/tasks", TASK, "Authorization: Basic abc"),
    "send, no JSON": request("POST /a2a/tasks", b"{"),
    "send, nothing": request("POST /a2a/tasks"),
    "send, wrong type": request("POST /a2a/tasks", {**TASK, "intent_text": 5}),
    "send, not UTF-8": request("POST /a2a/tasks", b'{"intent_text":"\xff"}'),
    "send, large": request("POST /a2a/tasks", {**TASK, "content": [{"type": "text", "text": "x" * 100_000}]}),
    "send, too large": request("POST /a2a/tasks", b"x" * (9 * 1024 * 1024)),
    "send, in chunks": request("POST /a2a/tasks", b"2\r\n{}\r\n0\r\n\r\n", "Transfer-Encoding: chunked"),
    "send, asks first": request("POST /a2a/tasks", TASK, "Expect: 100-continue"),
    "next under a receipt": request("GET /a2a/tasks/next?receipt=r", who="{bob}"),
    "next under a receipt, by POST": request("POST /a2a/tasks/next?receipt=r", b"ignored", who="{bob}"),
    "next, waits": request("GET /a2a/tasks/next?wait_ms=1"),
    "next, nothing": request("POST /a2a/tasks/next"),
    "next, bad query": request("GET /a2a/tasks/next?wait_ms=x"),
    "next, given twice": request("GET /a2a/tasks/next?receipt=a&receipt=b"),
    "next, escaped": request("GET /a2a/tasks/next?receipt=%72&wait%5Fms=1"),
    "result, unknown task": request("POST /a2a/results", {"task_id": ABSENT, "status": "ok"}),
    "result, not leased": request("POST /a2a/results", {"task_id": SENT, "status": "ok"}),
    "results, nothing": request("GET /a2a/results/next"),
    "one task": request(f"GET /a2a/tasks/{SENT}"),
    "whoami": request("GET /whoami"),
    "unknown": request("GET /nothing/here"),
    "wrong method": request("DELETE /a2a/tasks"),
    "wrong method of a page": request("POST /healthz", b""),
    "head": request("HEAD /whoami"),
    "escaped path": request("GET /%77hoami"),
    "absolute": request("GET http://x/whoami"),
    "fragment": request("GET /whoami#here"),
    "two slashes": request("GET //whoami"),
    "odd query": request("GET /whoami?a=[b]'"),
    "the last": request("GET /whoami", None, "Connection: close"),
    "old": request("GET /whoami").replace(b"HTTP/1.1", b"HTTP/1.0"),
    "upgrade": request("GET /whoami", None, "Connection: upgrade, close", "Upgrade: h2c"),
}


class Site:
    """One daemon, reached by both ways."""

    def __init__(self, daemon: Daemon, tokens: dict[str, str], asgi: tuple[str, int]) -> None:
        assert daemon.address is not None
        self.daemon = daemon
        self.ways = (daemon.address, asgi)
        self._tokens = {name.partition("@")[0]: token for name, token in tokens.items()}

    def fill(self, said: bytes) -> bytes:
        for name, token in self._tokens.items():
            said = said.replace(b"{%b}" % name.encode(), token.encode())
        return said

    async def told(self, said: bytes, address: tuple[str, int] | None = None) -> bytes:
        reader, writer = await asyncio.open_connection(*(address or self.ways[0]))
        writer.write(self.fill(said))
        async with asyncio.timeout(PATIENCE_S):
            answer = await reader.read()
        writer.close()
        return answer


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    daemon = await start_daemon("memory:", Limits(queue_depth_max=1))
    realm = Realmful()
    await realm.enroll(daemon)
    operator = daemon.exchange.authenticate(OPERATOR_TOKEN)
    _, carol = await daemon.exchange.enroll(operator, "bare@lab", None, [])
    listening = listen("127.0.0.1", 0, 16)
    server = Server(config_for(daemon.http, 16))
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    await server.is_up.wait()
    site = Site(daemon, {**realm.tokens, "carol@lab": carol}, listening.getsockname()[:2])
    await site.told(request("POST /a2a/tasks", TASK) + LAST)
    yield site
    server.is_over.set()
    await serving
    await daemon.stop()


@pytest.mark.parametrize("name", SAID)
async def test_both_ways_say_the_same_to_the_byte(site: Site, name: str) -> None:
    short, long = [await site.told(SAID[name] + LAST, way) for way in site.ways]
    assert short == long
    assert short.startswith(b"HTTP/1.1 ")


@pytest.mark.parametrize(
    "said",
    [
        b"HELLO\r\n\r\n",
        b"GET /whoami HTTP/1.1\r\nHost x\r\n\r\n",
        b"\x16\x03\x01\x02\x00",
        request("POST /a2a/tasks", b"zz\r\n{}", "Transfer-Encoding: chunked"),
    ],
    ids=["no request", "no header", "TLS", "no chunk"],
)
async def test_what_is_no_http_is_refused_like_everything_else(site: Site, said: bytes) -> None:
    head, _, body = (await site.told(said)).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ") and b"connection: close" in head
    assert msgspec.json.decode(body)["code"] == "malformed"


async def test_what_is_no_http_is_not_the_answer_to_what_came_before_it(site: Site) -> None:
    """Which still waits."""
    assert await site.told(request("GET /a2a/tasks/next?wait_ms=5000") + b"HELLO\r\n\r\n") == b""


async def test_a_task_that_was_leased_by_one_way_is_answered_the_same_by_the_other(site: Site) -> None:
    leased = [await site.told(SAID["next under a receipt"] + LAST, way) for way in site.ways]
    assert leased[0] == leased[1] and SENT.encode() in leased[0]
    result = {"task_id": SENT, "status": "ok", "content": [{"type": "text", "text": "é"}]}
    post = request("POST /a2a/results", result, who="{bob}")
    first, short, long = [await site.told(post + LAST, way) for way in (site.ways[1], *site.ways)]
    assert b'"duplicate"' not in first and b'"duplicate":true' in short
    assert short == long
    drained = [await site.told(request("GET /a2a/results/next?receipt=d") + LAST, way) for way in site.ways]
    assert drained[0] == drained[1] and "é".encode() in drained[0]


async def test_plain_requests_do_not_go_through_asgi(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = await asyncio.open_connection(*site.ways[0])
    monkeypatch.setattr(Http, "__call__", None)
    for name in ("send again", "send, bad token", "next under a receipt", "next, waits", "results, nothing", "whoami"):
        writer.write(site.fill(SAID[name]))
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE_S)
        size = int(head.partition(b"content-length: ")[2].split(b"\r\n")[0])
        assert b'"code":"internal"' not in await reader.readexactly(size)
    writer.close()


class Line:
    """One connection, on which each request waits for the answer to the one before."""

    def __init__(self, site: Site, way: int = 0) -> None:
        self._site = site
        self._address = site.ways[way]

    async def __aenter__(self) -> Line:
        self._reader, self._writer = await asyncio.open_connection(*self._address)
        return self

    async def __aexit__(self, *failed: object) -> None:
        self._writer.close()

    def say(self, said: bytes) -> None:
        self._writer.write(self._site.fill(said))

    async def told(self, said: bytes) -> bytes:
        self.say(said)
        async with asyncio.timeout(PATIENCE_S):
            head = await self._reader.readuntil(b"\r\n\r\n")
            size = int(head.partition(b"content-length: ")[2].split(b"\r\n")[0])
            return head + await self._reader.readexactly(size)


def sends(*texts: str) -> list[bytes]:
    return [request("POST /a2a/tasks", {**TASK, "intent_text": text}) for text in texts]


async def test_what_is_said_again_is_answered_as_it_was_parsed(site: Site) -> None:
    said = [
        *sends("do", "do", "", "another one", "x" * 2000),
        *(SAID[name] for name in ("send, no JSON", "send, wrong type", "send, bad token", "send, no grant")),
        *[request("GET /whoami"), request("GET /version"), request("GET /whoami")] * 3,
        *sends("do", "x" * 100_000, "do"),
        SAID["send, in chunks"],
        *sends("do", "do"),
    ]
    answers = []
    for way in (0, 1):
        async with Line(site, way) as line:
            answers.append([await line.told(each) for each in said])
    assert answers[0] == answers[1]


async def test_a_head_that_is_said_again_is_not_parsed_again(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed = 0
    begin = HttpProtocol.on_message_begin

    def count(self: HttpProtocol) -> None:
        nonlocal parsed
        parsed += 1
        begin(self)

    monkeypatch.setattr(HttpProtocol, "on_message_begin", count)
    async with Line(site) as line:
        for said in sends("do", "do", "a longer one", "do"):
            assert (await line.told(said)).startswith(b"HTTP/1.1 ")
        assert parsed == 1
        for _ in range(3):
            await line.told(request("GET /whoami"))
        assert parsed == 2


async def test_who_says_something_else_each_time_is_parsed_each_time(site: Site) -> None:
    async with Line(site) as line:
        for number in range(40):
            answer = await line.told(request("GET /whoami", None, f"Traceparent: {number}"))
            assert answer.startswith(b"HTTP/1.1 200 ")


async def test_a_token_that_is_taken_away_is_no_longer_good_under_the_same_head(site: Site) -> None:
    exchange = site.daemon.exchange
    operator = exchange.authenticate(OPERATOR_TOKEN)
    async with Line(site) as line:
        for _ in range(2):
            assert b" 200 " in await line.told(request("GET /whoami", who="{carol}"))
        await exchange.run(operator, c.RevokePeer(None, exchange.agent("bare@lab").pubkey, "left"))
        assert b" 401 " in await line.told(request("GET /whoami", who="{carol}"))


async def test_a_known_head_may_come_byte_by_byte_or_before_the_answer(site: Site) -> None:
    said = sends("do", "do")
    async with Line(site) as line:
        first = await line.told(said[0])
        for byte in site.fill(said[1])[:-1]:
            line._writer.write(bytes([byte]))
            await line._writer.drain()
            await asyncio.sleep(0)
        assert await line.told(said[1][-1:]) == first
        assert await line.told(said[0] + said[1]) == first
        assert await line.told(b"") == first


async def test_what_comes_under_a_known_head_before_the_answer_is_answered_in_its_order(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go, begun = asyncio.Event(), asyncio.Event()

    async def answer(asked: Asked) -> Response:
        body = await asked.body(100)
        if body == b"slow":
            begun.set()
            await may_go.wait()
        return Response(200, body)

    monkeypatch.setattr(site.daemon.http, "answer", answer)
    async with Line(site) as line:
        assert (await line.told(request("POST /a", b"once"))).endswith(b"once")
        line.say(request("POST /a", b"slow"))
        await asyncio.wait_for(begun.wait(), PATIENCE_S)
        for soon in (b"fast", b"last"):
            line.say(request("POST /a", soon))
            await site.told(LAST)  # by then it has come, too
        may_go.set()
        assert [(await line.told(b""))[-4:] for _ in range(3)] == [b"slow", b"fast", b"last"]


HEAD: Final = b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nX: y\r\n\r\n"


@pytest.mark.parametrize(
    ("data", "body"),
    [
        (HEAD + b"{}", b"{}"),
        (HEAD.replace(b" 2", b" 5") + b"12345", b"12345"),
        (HEAD.replace(b" 2", b" 0"), b""),
        (HEAD + b"{", None),
        (HEAD + b"{}G", None),
        (HEAD, None),
        (HEAD.replace(b" 2", b" +2") + b"{}", None),
        (HEAD.replace(b" 2", b" ") + b"{}", None),
        (HEAD.replace(b" 2", b" 2 ") + b"{}", None),
        (HEAD.replace(b" 2", b" 0" * 9 + b"2") + b"{}", None),
        (HEAD.replace(b"X: y", b"X: z") + b"{}", None),
        (HEAD.replace(b"/a", b"/b") + b"{}", None),
        (HEAD.replace(b"\r\nX: y", b"") + b"{}", None),
        (HEAD.lower() + b"{}", None),
        (b"", None),
        (HEAD[:40], None),
    ],
)
def test_a_head_is_known_by_all_of_its_bytes(data: bytes, body: bytes | None) -> None:
    kept = known(Head("POST", "/a", b"", []), HEAD + b"{}", 2, 1000)
    assert kept is not None
    assert kept.body_of(data) == body


@pytest.mark.parametrize(
    ("data", "size"),
    [
        (HEAD + b"{}G", 2),
        (HEAD.replace(b"X: y", b"X: content-length: 2") + b"{}", 2),
        (HEAD.replace(b": 2", b":\t2") + b"{}", 2),
        (HEAD.replace(b"X: y", b"X: " + b"y" * 3000) + b"{}", 2),
        (b"GET / HTTP/1.1\r\nHost: x\r\n", 0),
    ],
)
def test_a_head_is_kept_only_where_its_length_is_beyond_doubt(data: bytes, size: int) -> None:
    assert known(Head("POST", "/a", b"", []), data, size, 100_000) is None


def test_a_head_is_not_kept_beyond_what_a_head_may_have() -> None:
    assert known(Head("POST", "/a", b"", []), HEAD + b"{}", 2, len(HEAD)) is None


def test_a_head_without_a_body_is_known_where_it_comes_alone() -> None:
    said = b"GET /a HTTP/1.1\r\nHost: x\r\n\r\n"
    kept = known(Head("GET", "/a", b"", []), said, 0, 1000)
    assert kept is not None
    assert kept.body_of(said) == b""
    for other in (said + said, said + b"x", said[:-1], said.lower(), b""):
        assert kept.body_of(other) is None


async def test_what_is_said_before_the_answer_came_is_answered_in_its_order(site: Site) -> None:
    paths = ["/whoami", f"/a2a/tasks/{SENT}", "/healthz", "/a2a/tasks/next?wait_ms=50", "/nothing", "/version"]
    said = b"".join(request(f"GET {path}") for path in paths)
    said += request("POST /a2a/tasks", TASK) + request("GET /whoami")
    short, long = [await site.told(said + LAST, way) for way in site.ways]
    assert short == long
    assert short.count(b"HTTP/1.1 ") == 9


async def test_a_request_may_come_byte_by_byte(site: Site) -> None:
    whole = await site.told(SAID["send again"] + LAST)
    reader, writer = await asyncio.open_connection(*site.ways[0])
    for byte in site.fill(SAID["send again"]):
        writer.write(bytes([byte]))
        await writer.drain()
        await asyncio.sleep(0)
    answer = await asyncio.wait_for(reader.readuntil(b"}"), PATIENCE_S)
    assert whole.startswith(answer)
    writer.close()


async def test_who_waits_when_the_daemon_ends_is_answered_first() -> None:
    daemon = await start_daemon("memory:", Limits())
    assert daemon.address is not None
    reader, writer = await asyncio.open_connection(*daemon.address)
    writer.write(request("GET /a2a/results/next?wait_ms=20000", who=OPERATOR_TOKEN))
    async with asyncio.timeout(PATIENCE_S):
        await until(lambda: daemon.exchange.waits.total > 0)
        await daemon.stop()
        answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 200 ") and answer.endswith(b'{"kind":"a2a_result_opt","result":null}')
    writer.close()


async def test_one_task_answers_all_that_a_connection_asks_and_ends_with_it(site: Site) -> None:
    """In between, the end of the daemon does not wait for it."""
    assert site.daemon._server is not None
    busy, before = site.daemon._server.server_state.tasks, asyncio.all_tasks()
    async with Line(site) as line:
        await line.told(SAID["whoami"])
        (answering,) = asyncio.all_tasks() - before
        assert not busy
        await line.told(SAID["next, waits"])
        assert asyncio.all_tasks() - before == {answering} and not busy
    async with asyncio.timeout(PATIENCE_S):
        await answering


async def test_what_was_said_is_let_go_while_nothing_is_asked(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer may be large, and there may be many connections that rest."""

    class Large(bytearray):
        """One can see whether it is still there."""

    said: list[weakref.ref[Large]] = []

    async def answer(asked: Asked) -> Response:
        data = Large(b"much")
        said.append(weakref.ref(data))
        return Response(200, data)  # type: ignore[arg-type]  # as good as bytes

    monkeypatch.setattr(site.daemon.http, "answer", answer)
    async with Line(site) as line:
        assert (await line.told(request("GET /a"))).endswith(b"much")
        await until(lambda: said[0]() is None)


async def test_both_ways_refuse_a_call_that_is_too_large_in_the_same_words(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(site.daemon.exchange, "bounds", Bounds(body_bytes_max=100))
    call = {"jsonrpc": "2.0", "id": 7, "method": "ListTasks", "params": {"contextId": "x" * 100}}
    said = request("POST /", call, "Content-Type: application/json", "A2A-Version: 1.0")
    short, long = [await site.told(said + LAST, way) for way in site.ways]
    assert short == long
    assert short.startswith(b"HTTP/1.1 413 ") and b"at most 100 are allowed" in short


SAID_MORE: Final = {  # the last three are more than is taken in while it waits
    "one": request("GET /whoami"),
    "three": request("GET /whoami") * 3,
    "four": request("GET /whoami") * 4,
    "forty": request("GET /whoami") * 40,
    "large": request("POST /a2a/tasks", b"x" * 100_000),
}


@pytest.mark.parametrize("more", SAID_MORE)
async def test_who_hangs_up_while_it_waits_is_noticed_also_where_it_has_said_more(site: Site, more: str) -> None:
    """Else what comes next would be leased to nobody."""
    waits = site.daemon.exchange.waits
    async with Line(site) as line:
        line.say(request("GET /a2a/tasks/next?wait_ms=25000"))
        await until(lambda: waits.total == 1)
        line.say(SAID_MORE[more])
        await site.told(LAST)  # by then it has come, too
    async with asyncio.timeout(10):
        await until(lambda: waits.total == 0)


CHUNKED: Final = ("Transfer-Encoding: chunked",)
WAITS_BY_ASGI: Final = {
    "in chunks": request("POST /a2a/tasks/next?wait_ms=25000", b"0\r\n\r\n", *CHUNKED, who="{carol}"),
    "escaped": request("GET /a2a/tasks/%6eext?wait_ms=25000", who="{carol}"),
    "a stream": request("GET /a2a/events", who="{carol}"),
    "behind another": request("GET /whoami") + request("GET /a2a/tasks/next?wait_ms=25000", who="{carol}"),
}


@pytest.mark.parametrize("name", WAITS_BY_ASGI)
@pytest.mark.parametrize("more", SAID_MORE)
async def test_who_hangs_up_while_it_waits_by_way_of_asgi_is_noticed_also_where_it_has_said_more(
    site: Site, name: str, more: str
) -> None:
    waits = site.daemon.exchange.waits
    async with Line(site) as line:
        line.say(WAITS_BY_ASGI[name])
        await until(lambda: waits.total == 1)
        line.say(SAID_MORE[more])
        await site.told(LAST)  # by then it has come, too
    async with asyncio.timeout(10):
        await until(lambda: waits.total == 0)


async def test_who_has_said_too_much_is_answered_all_the_same(site: Site) -> None:
    """That it is not read from for a while is no hang-up."""
    waits = site.daemon.exchange.waits
    reader, writer = await asyncio.open_connection(*site.ways[0])
    writer.write(site.fill(request("GET /a2a/tasks/next?wait_ms=25000")))
    await until(lambda: waits.total == 1)
    writer.write(site.fill(request("GET /whoami") * 40 + request("POST /a2a/tasks", b"x" * 100_000) + LAST))
    await site.told(LAST)
    site.daemon.exchange.waits.end()
    async with asyncio.timeout(PATIENCE_S):
        answer = await reader.read()
    assert answer.count(b'"kind":"whoami"') == 40 and answer.endswith(b'{"kind":"healthy"}')
    assert not site.daemon.connections.hang_ups._fds
    writer.close()


@pytest.mark.parametrize("name", ["in chunks", "escaped", "behind another"])
async def test_what_is_sent_after_a_client_hung_up_is_leased_to_somebody_who_is_there(site: Site, name: str) -> None:
    waits = site.daemon.exchange.waits
    said = WAITS_BY_ASGI[name].replace(b"{carol}", b"{bob}")
    await site.told(SAID["next under a receipt"] + LAST)  # what was there
    async with Line(site) as line:
        line.say(said + request("GET /whoami"))
        await until(lambda: waits.total == 1)
    async with asyncio.timeout(10):
        await until(lambda: waits.total == 0)
    await site.told(request("POST /a2a/tasks", {**TASK, "id": ABSENT}) + LAST)
    taken = await site.told(request("GET /a2a/tasks/next", who="{bob}") + LAST)
    assert ABSENT.encode() in taken
