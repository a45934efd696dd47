"""What a program gets from a client when something is wrong: an error with a code, whatever has happened below."""

from __future__ import annotations

import asyncio
import gc
import threading
import warnings
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from covenant import CovenantError, Limits, Mailbox, OpenMailbox, Result, Text
from covenant.client import http, unix
from covenant.client.engine import RemoteEngine
from covenant.exchange.bounds import Bounds
from covenant.model.command import BeatLease
from covenant.serve.daemon import Daemon
from covenant.store.clock import ManualClock
from tests.client.proxy import Proxy
from tests.conformance.support import DONE, plain, refused, soon, take, turn, uid
from tests.daemons import OPERATOR_TOKEN, Realmful, start_daemon, url_of
from tests.test_worker import serving

MIB = 1024 * 1024


def in_another_thread(work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """Run on an event loop of its own, and returned or raised here."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(asyncio.run(work()))
        except BaseException as failed:
            outcome.append(failed)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(timeout=10)
    assert outcome, "it hangs"
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return outcome[0]


# --- a daemon that goes and comes --------------------------------------------------------------------------


async def test_a_client_outlives_a_restart_between_its_calls(folder: Path, clock: ManualClock, scheme: str) -> None:
    async with serving(folder, clock) as site:
        assert site.daemon is not None
        async with site.realm.open(site.daemon, scheme) as box:
            alice, bob = box.of("alice@lab"), box.of("bob@lab")
            for number in range(3):
                await alice.send_task(plain(bob, id=uid(number)))
                await site.stop()
                with refused("unreachable"):
                    await bob.try_recv_task_for()
                await site.start()
                assert (await take(bob)).task.id == uid(number)


async def test_calls_that_are_open_when_the_daemon_dies_are_told_so(proxy: Proxy, far: OpenMailbox) -> None:
    proxy.may_answer.clear()
    calls = [asyncio.create_task(far.recent_tasks()) for _ in range(20)]
    await turn()
    proxy.is_down = True
    proxy.hang_up()
    await soon(asyncio.wait(calls))
    assert {getattr(call.exception(), "code", call.exception()) for call in calls} == {"unreachable"}


async def test_a_daemon_that_never_answers_is_not_waited_for_for_ever(
    proxy: Proxy, far: OpenMailbox, realm: Realmful, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (http, unix):
        monkeypatch.setattr(module, "_ANSWER_S", 0.05)
    proxy.may_answer.clear()
    with refused("unreachable"):
        async with Mailbox.open(proxy.url, token=realm.tokens["bob@lab"]):
            pass


class Stranger:
    """Something that listens where a daemon should, and is none."""

    def __init__(self, says: bytes) -> None:
        self.says = says

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(10)
        writer.write(self.says)
        if writer.can_write_eof():
            writer.write_eof()  # and still listens
        await reader.read()
        writer.close()


@pytest.mark.parametrize(
    "says",
    [
        b"",
        b"\x00",
        b"\x00\x00\x00\x04nope",
        b"\x00\x00\x00\x02[]",
        b"\x00\x00\x00\x1e" + b"[" * 30,
        b"\x00\x00\x00\x08{\"id\":1}",
        b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhalf",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}",
        b"HTTP/1.1 502 Bad Gateway\r\ncontent-length: 4\r\n\r\noops",
        b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n{}",
        b"HTTP/1.1 302 Found\r\nlocation: ftp://there\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 20000\r\n\r\n" + b"[" * 20000,
    ],
)  # fmt: skip
async def test_what_is_no_daemon_is_unreachable(says: bytes, scheme: str, tmp_path: Path) -> None:
    if scheme == "http":
        server = await asyncio.start_server(Stranger(says), "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    else:
        server = await asyncio.start_unix_server(Stranger(says), tmp_path / "s")
        url = f"unix:{tmp_path}/s"
    async with server:
        with refused("unreachable"):
            await soon(Mailbox.open(url, token="t").__aenter__())
        server.close()


@pytest.mark.parametrize(
    "url",
    ["http://127.0.0.1:1", "http://127.0.0.1:99999", "http://", "http://:80", "http://[::", "http://nowhere.invalid",
     "unix:/nowhere/sock", "unix:/etc/passwd", "unix:/\0", "unix:" + "x" * 5000],
)  # fmt: skip
async def test_a_place_without_a_daemon_is_refused_with_a_code(url: str) -> None:
    with pytest.raises(CovenantError) as caught:
        await soon(Mailbox.open(url, token="t").__aenter__())
    assert caught.value.code in ("unreachable", "unknown_store")


@pytest.mark.parametrize("url", ["http://", "http://:80", "http://127.0.0.1:99999", "http://[::"])
def test_an_address_that_cannot_be_one_is_told_before_anybody_is_called(url: str) -> None:
    with pytest.raises(CovenantError, match="is no address of a daemon: http://HOST:PORT") as caught:
        Mailbox.open(url, token="t")
    assert caught.value.code == "unknown_store"


@pytest.mark.parametrize("url", ["localhost:8421", "127.0.0.1:8421", "HTTP://127.0.0.1:8421", "http:127.0.0.1", "data"])
def test_who_means_a_daemon_is_told_how_it_is_named(url: str) -> None:
    for token in (None, "t"):
        with pytest.raises(CovenantError, match="http://HOST:PORT or unix:PATH") as caught:
            Mailbox.open(url, token=token)
        assert caught.value.code in ("unknown_store", "malformed")


@pytest.mark.parametrize("wrong", [{"url": None}, {"url": Path("data")}, {"url": "memory:", "limits": {"page_max": 3}}])
def test_what_opens_a_mailbox_has_the_right_type(wrong: dict[str, Any]) -> None:
    with refused("malformed"):
        Mailbox.open(**wrong)


async def test_a_token_may_have_the_end_of_its_line_with_it(daemon: Daemon, realm: Realmful, scheme: str) -> None:
    """As whoever reads it from a file has it."""
    url, tokens = url_of(daemon, scheme), {name: f"{token}\n" for name, token in realm.tokens.items()}
    async with Mailbox.open(url, token=tokens["bob@lab"]) as far:
        assert far.agent.display == "bob@lab"
    async with Mailbox.open(url, token=f" {OPERATOR_TOKEN}\r\n", tokens=tokens) as box:
        assert await box.of("alice@lab").recent_tasks() == []


@pytest.mark.parametrize("blank", ["", " \n"])
def test_a_token_that_is_empty_is_not_that_of_the_operator(
    blank: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose file was empty would have opened the whole box."""
    (tmp_path / "operator.token").write_text(OPERATOR_TOKEN)
    monkeypatch.setenv("COVENANT_TOKEN", OPERATOR_TOKEN)
    for url in (f"unix:{tmp_path}/sock", "http://127.0.0.1:8421"):
        with refused("malformed"):
            Mailbox.open(url, token=blank)


async def test_a_token_is_text(daemon: Daemon, scheme: str) -> None:
    wrong: Any = 4711
    with refused("malformed"):
        Mailbox.open(url_of(daemon, scheme), token=wrong)


@pytest.mark.parametrize("token", ["", "x", "x\ny", "x\0", "é", "\ud800", "日本"])
async def test_a_token_that_is_none_is_refused_with_a_code(daemon: Daemon, scheme: str, token: str) -> None:
    with pytest.raises(CovenantError) as caught:
        await soon(Mailbox.open(url_of(daemon, scheme), token=token).__aenter__())
    assert caught.value.code in ("unauthenticated", "malformed")


# --- much at once ------------------------------------------------------------------------------------------


async def test_an_answer_may_be_larger_than_a_request(far: OpenMailbox) -> None:
    """The first page of a queue: tasks up to what an answer carries, and as much again of results."""
    block = Text("x" * (4 * MIB - 1000))
    for number in range(4):
        await far.send_task(plain(far, id=uid(number), content=[block]))
    for delivery in await far.recv_tasks(2, wait_ms=1000):
        await far.send_result(Result.ok(delivery, [block]))
    page = await far.task_queue(10)
    assert [entry.task.content for entry in page.tasks] == [(block,)] * 2
    assert [answer.content for answer in page.results] == [(block,)] * 2


async def test_a_request_that_is_too_large_is_refused_and_the_others_are_not(clock: ManualClock, scheme: str) -> None:
    """They share a connection, which the daemon closes."""
    daemon = await start_daemon("memory:", Limits(content_bytes_max=8 * MIB), clock, bounds=Bounds(body_bytes_max=MIB))
    realm = Realmful()
    await realm.enroll(daemon)
    async with realm.open(daemon, scheme) as box:
        alice, bob = box.of("alice@lab"), box.of("bob@lab")
        await alice.recent_tasks()
        waiting = asyncio.create_task(alice.recv_result())
        await turn()
        with refused("too_large"):
            await alice.send_task(plain(bob, content=[Text("x" * 2 * MIB)]))
        sent = await alice.send_task(plain(bob))
        await bob.send_result(Result.ok(await take(bob), DONE))
        assert (await soon(waiting)).task_id == sent.task_id
    await daemon.stop()


async def test_many_calls_share_a_client(box: OpenMailbox, far: OpenMailbox) -> None:
    await box.of("alice@lab").send_task(plain(far, id=uid(1), content=[Text("x" * 2000)]))
    entries = await asyncio.gather(*(far.get_task(uid(1)) for _ in range(1100)))  # more than are taken at once
    assert {entry.task.id for entry in entries} == {uid(1)}


async def test_a_call_that_waits_to_write_hears_that_the_line_is_lost(
    proxy: Proxy, box: OpenMailbox, far: OpenMailbox
) -> None:
    """So much is on its way that the next call waits for its turn."""
    proxy.may_read.clear()
    task = plain(far, content=[Text("x" * 3 * MIB)])
    calls = [asyncio.create_task(far.send_task(task)) for _ in range(5)]
    await turn()
    proxy.is_down = True
    proxy.hang_up()
    proxy.may_read.set()
    await soon(asyncio.wait(calls))
    assert {getattr(call.exception(), "code", call.exception()) for call in calls} == {"unreachable"}


async def test_a_call_that_is_cancelled_leaves_the_others_alone(
    proxy: Proxy, box: OpenMailbox, far: OpenMailbox
) -> None:
    await box.of("alice@lab").send_task(plain(far, id=uid(1)))
    proxy.may_answer.clear()
    calls = [asyncio.create_task(far.get_task(uid(1))) for _ in range(20)]
    await turn()
    for call in calls[::2]:
        call.cancel()
    proxy.may_answer.set()
    await soon(asyncio.wait(calls))
    assert all(call.cancelled() for call in calls[::2])
    assert [call.result().task.id for call in calls[1::2]] == [uid(1)] * 10


# --- the end of a client -----------------------------------------------------------------------------------


async def test_a_closed_client_says_so_to_those_who_still_wait(proxy: Proxy, realm: Realmful) -> None:
    far = await Mailbox.open(proxy.url, token=realm.tokens["bob@lab"])
    calls: list[asyncio.Task[Any]] = [asyncio.create_task(far.recv_task()) for _ in range(5)]
    await turn()
    await soon(asyncio.gather(far.close(), far.close()))
    await soon(asyncio.wait(calls))
    assert {getattr(call.exception(), "code", call.exception()) for call in calls} == {"store_closed"}


@pytest.mark.usefixtures("short_waits")
async def test_a_client_can_be_closed_while_its_daemon_does_not_answer(proxy: Proxy, realm: Realmful) -> None:
    far = await Mailbox.open(proxy.url, token=realm.tokens["bob@lab"])
    proxy.may_answer.clear()
    proxy.hang_up()
    await turn()
    calls: list[asyncio.Task[Any]] = [asyncio.create_task(far.recv_task()), asyncio.create_task(far.recent_tasks())]
    await turn()
    await soon(far.close())
    await soon(asyncio.wait(calls))
    assert {getattr(call.exception(), "code", call.exception()) for call in calls} == {"store_closed"}


async def test_a_client_is_not_used_after_its_close(daemon: Daemon, realm: Realmful, scheme: str) -> None:
    box = await realm.open(daemon, scheme)
    await box.close()
    await box.close()
    for call in (box.recent_tasks(), box.of("bob@lab").recv_task(), box.of("bob@lab").try_recv_task_for()):
        with refused("store_closed"):
            await soon(call)
    with refused("store_closed"):
        await soon(box.__aenter__())


async def test_a_client_belongs_to_the_loop_that_it_was_opened_on(far: OpenMailbox) -> None:
    for call in (far.recent_tasks, far.recv_task, far.try_recv_task_for, far.close):
        with refused("malformed"):
            in_another_thread(call)
    assert await far.recent_tasks() == []


async def test_a_second_connection_works_on_a_loop_of_its_own(
    daemon: Daemon, box: OpenMailbox, far: OpenMailbox
) -> None:
    """As the heartbeats of a worker need it."""
    await box.of("alice@lab").send_task(plain(far, id=uid(1)))
    delivery = await take(far)
    engine = far._engine
    assert isinstance(engine, RemoteEngine)
    again = await engine.again(far.agent)

    async def beat() -> Any:
        try:
            return await again.run(BeatLease(far.agent, delivery.lease_id))
        finally:
            await again.close()

    assert (await asyncio.to_thread(in_another_thread, beat)).lease_id == delivery.lease_id


async def test_nothing_is_left_open(daemon: Daemon, realm: Realmful, scheme: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        async with realm.open(daemon, scheme) as box:
            await box.of("bob@lab").recent_tasks()
        with refused("unauthenticated"):
            await Mailbox.open(url_of(daemon, scheme), token="cov_nobody")
        gc.collect()
    await asyncio.sleep(0)
    assert daemon.exchange.connections.total == 0
