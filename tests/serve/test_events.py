"""Whoever follows the log misses nothing of its tasks, sees nothing twice, and nothing that is not its business."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final

import aiohttp
import msgspec
import pytest

from covenant import AgentId, Artifact, Idempotency, Json, Limits, Mailbox, OpenMailbox, Part, Result, Task, Text
from covenant.model import event as e
from covenant.model.event import Event
from covenant.serve.daemon import Daemon
from covenant.serve.events import TOLD
from tests.daemons import OPERATOR_TOKEN, Realmful, start_daemon
from tests.until import until

PATIENCE_S: Final = 10
MANY: Final = 9000  # events: less than the log of a store in memory holds
BOB: Final = AgentId.named("bob@lab")


class Stream:
    """One reader, as far as it has read."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self.marks: list[int] = []  # what it was told besides events: where to go on from
        self.last: int | None = None
        self.text = bytearray()

    async def next(self) -> dict[str, Any] | None:
        """The next message; None at the end."""
        async with asyncio.timeout(PATIENCE_S):
            while (block := await self._block()) is not None:
                told = dict(line.split(": ", 1) for line in block if not line.startswith(":"))
                self.last = int(told["id"])
                if "data" not in told:
                    self.marks.append(self.last)
                    continue
                data: dict[str, Any] = json.loads(told["data"])
                assert told["event"] == data.get("type", "gap")
                assert data.get("seq", self.last) == self.last
                return data
        return None

    async def _block(self) -> list[str] | None:
        lines: list[str] = []
        while line := await self._response.content.readline():
            self.text += line
            if line == b"\n":
                return lines
            lines.append(line.decode().rstrip("\n"))
        assert not lines, "cut off in the middle"
        return None

    async def types(self, count: int) -> list[str]:
        return [(await self.next() or {})["type"] for _ in range(count)]


class House:
    """A daemon, its peers, and streams that end with the test."""

    def __init__(self, store: str, limits: Limits) -> None:
        self.daemon: Daemon
        self.box: OpenMailbox
        self.realm = Realmful()
        self._store = store
        self._limits = limits
        self._stack = AsyncExitStack()
        self._session: aiohttp.ClientSession

    async def open(self) -> None:
        self.daemon = await start_daemon(self._store, self._limits)
        await self.realm.enroll(self.daemon)
        self.box = await self._stack.enter_async_context(self.realm.open(self.daemon, "unix"))
        self._session = await self._stack.enter_async_context(aiohttp.ClientSession())

    async def close(self) -> None:
        await self._stack.aclose()
        await self.daemon.stop()

    async def response(self, who: str, query: str = "", **headers: str) -> aiohttp.ClientResponse:
        token = self.realm.tokens.get(who, OPERATOR_TOKEN if who == "operator" else "cov_wrong")
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        asked = self._session.get(
            f"{self.daemon.url}/a2a/events{query}", headers={"Authorization": f"Bearer {token}", **headers}
        )
        return await self._stack.enter_async_context(asked)

    async def follow(self, who: str, after: int | None = None) -> Stream:
        """A reader that is being told from now on, or from behind this event."""
        headers = {} if after is None else {"Last_Event_ID": str(after)}
        response = await self.response(who, **headers)
        assert (response.status, response.content_type) == (200, "text/event-stream")
        return Stream(response)

    @property
    def alice(self) -> Mailbox:
        return self.box.of("alice@lab")

    @property
    def bob(self) -> Mailbox:
        return self.box.of("bob@lab")

    async def run_task(self, intent: str = "look", **members: Any) -> str:
        """Sent, leased, answered and drained."""
        sent = await self.alice.send_task(Task(recipient=BOB, intent_text=intent, **members))
        await self.bob.send_result(Result.ok(await self.bob.recv_task(), [Text("seen")]))
        await self.alice.recv_result()
        return sent.task_id


LIFE: Final = ["sent", "leased", "answered", "drained"]


@pytest.fixture
def limits() -> Limits:
    return Limits()


@pytest.fixture(params=["memory", "journal"])
async def house(request: pytest.FixtureRequest, tmp_path: Path, limits: Limits) -> AsyncIterator[House]:
    opened = House("memory:" if request.param == "memory" else f"file:{tmp_path / 'data'}", limits)
    await opened.open()
    yield opened
    await opened.close()


@pytest.fixture
async def journal(tmp_path: Path, limits: Limits) -> AsyncIterator[House]:
    opened = House(f"file:{tmp_path / 'data'}", limits)
    await opened.open()
    yield opened
    await opened.close()


# --- what is told ------------------------------------------------------------------------------------------


async def test_sender_and_recipient_and_operator_are_told_in_order(house: House) -> None:
    streams = [await house.follow(who) for who in ("alice@lab", "bob@lab", "operator")]
    task_id = await house.run_task()
    for stream in streams:
        told = [await stream.next() or {} for _ in LIFE]
        assert [event["type"] for event in told] == LIFE
        assert {event["task_id"] for event in told} == {task_id}
        assert [event["actor"] for event in told] == ["alice@lab", "bob@lab", "bob@lab", "alice@lab"]
        numbers = [event["seq"] for event in told]
        assert numbers == sorted(set(numbers))


async def test_others_are_told_nothing(house: House) -> None:
    carol = await house.follow("carol@lab")
    await house.run_task()
    carols = house.box.of("carol@lab")
    mine = await carols.send_task(Task(recipient=BOB, intent_text="mine"))
    told = await carol.next()
    assert told is not None and told["task_id"] == mine.task_id


@pytest.mark.parametrize("limits", [Limits(retention_ms=0, dedup_ms=0)])
async def test_an_id_that_is_used_anew_tells_nobody_of_the_others_task(house: House) -> None:
    """Neither the new parties of what was before, nor those who had the id of what comes after."""
    task_id = "77777777-7777-4777-8777-777777777777"
    operator = await house.follow("operator", after=0)
    await house.run_task(id=task_id)
    told = [event async for event in _until(operator, "drained")]
    sent = next(event["seq"] for event in told if event["type"] == "sent")
    carols = house.box.of("carol@lab")
    await until(lambda: house.daemon.exchange.now_ms() > told[-1]["at_ms"])
    await carols.send_task(Task(id=task_id, recipient=carols.agent, intent_text="mine"))
    carol, alice = await house.follow("carol@lab", after=sent), await house.follow("alice@lab", after=sent)
    await carols.recv_task()
    await house.alice.send_task(Task(recipient=BOB, intent_text="the next"))
    await carols.send_task(Task(recipient=BOB, intent_text="the next"))
    first = await carol.next() or {}
    assert (first["type"], first["sender"]) == ("sent", "carol@lab")
    seen = [event async for event in _until(alice, "sent")]
    assert seen[-1]["sender"] == "alice@lab"
    assert all(event["actor"] != "carol@lab" for event in seen)


async def _until(stream: Stream, last: str) -> AsyncIterator[dict[str, Any]]:
    while event := await stream.next():
        yield event
        if event["type"] == last:
            return


async def test_a_task_that_was_sent_before_is_told_to_those_it_concerns(house: House) -> None:
    await house.alice.send_task(Task(recipient=BOB, intent_text="look"))
    alice, carol = await house.follow("alice@lab"), await house.follow("carol@lab")
    delivery = await house.bob.recv_task()
    told = await alice.next()
    assert told is not None and (told["type"], told["lease_id"]) == ("leased", delivery.lease_id)
    await house.box.of("carol@lab").send_task(Task(recipient=BOB, intent_text="mine"))
    assert (await carol.next() or {})["type"] == "sent"


async def test_what_a_task_carries_is_not_told(house: House) -> None:
    stream = await house.follow("operator")
    secret = Json({"key": "sesame"})
    await house.alice.send_task(Task(recipient=BOB, intent_text="sesame", task_kind="sesame", content=[secret]))
    delivery = await house.bob.recv_task()
    await house.bob.send_result(Result.partial(delivery, [secret]))
    await house.bob.send_result(Result.error(delivery, "sesame", [secret]))
    await house.alice.recv_results(10)
    assert await stream.types(7) == ["sent", "leased", "progressed", "parted", "answered", "drained", "drained"]
    assert b"sesame" not in stream.text


async def test_signs_of_life_and_slots_are_not_told(house: House) -> None:
    stream = await house.follow("operator")
    once = Idempotency("idempotent", "k")
    await house.alice.send_task(Task(recipient=BOB, intent_text="look", idempotency=once))
    delivery = await house.bob.recv_task()
    await house.bob.heartbeat(delivery)
    await house.bob.release(delivery, reason="later")
    assert await stream.types(2) == ["sent", "leased"]
    told = await stream.next() or {}
    assert (told["type"], told["cause"], told["reason"]) == ("requeued", "released", "later")


async def test_a_dialog_is_told_without_its_words(house: House) -> None:
    stream = await house.follow("operator")
    task_id = (await house.alice.send_task(Task(recipient=BOB, intent_text="look"))).task_id
    delivery = await house.bob.recv_task()
    await house.bob.update(delivery, "sesame")
    await house.bob.artifact(delivery, Artifact(artifact_id="sesame", parts=(Part(text="sesame"),)))
    await house.bob.ask(delivery, "sesame?", receipt="sesame")
    await house.alice.add_message(task_id, "sesame")
    await house.bob.reject(delivery, "sesame")
    assert await stream.types(4) == ["sent", "leased", "updated", "chunked"]
    asked = await stream.next() or {}
    assert (asked["type"], asked["asks"], asked["actor"]) == ("asked", "input", "bob@lab")
    assert await stream.types(2) == ["messaged", "ended"]
    assert b"sesame" not in stream.text


def test_every_kind_of_event_is_told_or_left_out_on_purpose() -> None:
    silent = {e.Heartbeat, e.SlotOpened, e.SlotLed, e.SlotCached, e.SlotClosed, e.Compacted, e.HeadSigned}
    silent |= {e.Said, e.ChunkKept, e.Shown}  # what they carry, or nobody's business
    silent |= {e.PushSet, e.PushDropped, e.PushDelivered, e.CardPublished, e.CardWithdrawn}  # of no state of a task
    silent |= {e.RunBegun, e.Stepped, e.RunWaits, e.TaskAwaited, e.RunResumed, e.RunClosed, e.RunSwept}  # the run's own
    silent |= {e.StepKept, e.StepDropped, e.EntryKept, e.Marked, e.Signaled, e.SignalTaken}
    silent.add(e.KeyTaken)
    of_trust = {
        e.Enrolled,
        e.ActionHeld,
        e.TokenRotated,
        e.PeerRevoked,
        e.Granted,
        e.GrantUsed,
        e.GrantRevoked,
        e.GrantExpired,
    }
    assert set(TOLD) | silent | of_trust == set(Event.__args__)
    assert not set(TOLD) & (silent | of_trust)
    for kind, members in TOLD.items():
        assert set(members) <= {field.name for field in msgspec.structs.fields(kind)}


# --- where it begins ---------------------------------------------------------------------------------------


async def test_without_a_cursor_it_begins_now(house: House) -> None:
    await house.run_task()
    stream = await house.follow("alice@lab")
    task_id = await house.run_task()
    assert (await stream.next() or {})["task_id"] == task_id
    assert stream.marks != []


async def test_what_was_missed_comes_first_and_once(house: House) -> None:
    first = await house.follow("alice@lab", after=0)
    await house.run_task()
    assert await first.types(2) == LIFE[:2]
    await house.run_task()
    again = await house.follow("alice@lab", after=first.last)
    third = asyncio.create_task(house.run_task())
    assert await again.types(10) == LIFE[2:] + LIFE + LIFE
    await third


async def test_a_long_past_is_told_whole(house: House) -> None:
    tasks = [Task(recipient=BOB, intent_text=f"look {number}") for number in range(300)]
    await house.alice.send_tasks(tasks)
    stream = await house.follow("bob@lab", after=0)
    numbers = [(await stream.next() or {})["seq"] for _ in tasks]
    assert numbers == list(range(numbers[0], numbers[0] + 300))


async def test_a_cursor_in_the_middle_of_a_commit_is_kept(house: House) -> None:
    await house.alice.send_task(Task(recipient=BOB, intent_text="look"))
    delivery = await house.bob.recv_task()
    await house.bob.send_result(Result.partial(delivery, [Text("half")]))  # two events in one commit
    whole = await house.follow("alice@lab", after=0)
    told = [await whole.next() or {} for _ in range(4)]
    rest = await house.follow("alice@lab", after=told[2]["seq"])
    assert await rest.next() == told[3]


async def test_the_header_counts_more_than_the_url(house: House) -> None:
    await house.run_task()
    stream = await house.follow("alice@lab", after=0)
    seen = [await stream.next() or {} for _ in LIFE]
    response = await house.response("alice@lab", "?after=0", Last_Event_ID=str(seen[2]["seq"]))
    assert await Stream(response).next() == seen[3]


async def test_a_mark_is_a_place_to_go_on_from(house: House) -> None:
    """A reader that comes back before anything happened has missed what happened meanwhile, and gets it."""
    stream = await house.follow("alice@lab")
    reading = asyncio.create_task(stream.next())
    await until(lambda: bool(stream.marks))
    reading.cancel()
    await house.run_task()
    again = await house.follow("alice@lab", after=stream.marks[0])
    assert await again.types(4) == LIFE


async def test_it_goes_on_after_a_restart(journal: House) -> None:
    stream = await journal.follow("alice@lab", after=0)
    await journal.run_task()
    assert await stream.types(3) == LIFE[:3]
    await journal.close()
    await journal.open()
    again = await journal.follow("alice@lab", after=stream.last)
    assert await again.types(1) == LIFE[3:]


@pytest.mark.parametrize("cursor", ["x", "-1", "1.5", "9" * 30])
async def test_a_cursor_that_is_none_is_refused(house: House, cursor: str) -> None:
    for response in (
        await house.response("alice@lab", f"?after={cursor}"),
        await house.response("alice@lab", Last_Event_ID=cursor),
    ):
        assert response.status == 400
        assert (await response.json())["code"] == "bad_cursor"


@pytest.mark.parametrize("query", ["?aftr=5", "?after=1&after=2", "?after=", "?task_id=x&after=0", "?after=%ff"])
async def test_a_query_that_the_page_does_not_have_is_refused(house: House, query: str) -> None:
    """Else a reader that means to go on somewhere is told what happens from now on."""
    for headers in ({}, {"Last_Event_ID": "1"}):
        response = await house.response("alice@lab", query, **headers)
        assert response.status == 400
        assert (await response.json())["code"] in ("malformed", "bad_cursor")


async def test_a_stranger_is_told_nothing(house: House) -> None:
    response = await house.response("mallory@lab")
    assert response.status == 401


# --- gaps --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limits", [Limits(log_tail_max=3)])
async def test_what_the_log_does_not_hold_any_more_is_said(limits: Limits) -> None:
    house = House("memory:", limits)
    await house.open()
    await house.run_task()
    stream = await house.follow("alice@lab", after=1)
    gap = await stream.next() or {}
    first = await stream.next() or {}
    assert gap["after"] == 1 and 2 < gap["next"] <= first["seq"]
    assert stream.last == first["seq"]
    await house.close()


@pytest.mark.parametrize("limits", [Limits(segment_bytes=2000, retention_ms=0, dedup_ms=0)])
async def test_segments_that_were_dropped_leave_a_gap(journal: House, limits: Limits) -> None:
    for _ in range(10):
        await journal.run_task()
    done = await journal.box.compact(older_than_ms=0)
    assert done.segments_dropped > 0
    stream = await journal.follow("alice@lab", after=0)
    gap = await stream.next() or {}
    assert gap["after"] == 0 and gap["next"] > 1
    task_id = await journal.run_task()
    seen: list[int] = []
    while (told := await stream.next() or {})["task_id"] != task_id:
        seen.append(told["seq"])
    assert all(gap["next"] <= seq < told["seq"] for seq in seen)


async def test_a_cursor_ahead_of_the_log_is_set_back_and_said(house: House) -> None:
    await house.run_task()
    stream = await house.follow("alice@lab", after=10**9)
    gap = await stream.next() or {}
    assert gap["after"] == 10**9
    task_id = await house.run_task()
    told = await stream.next() or {}
    assert told["task_id"] == task_id and told["seq"] >= gap["next"]


# --- how it ends -------------------------------------------------------------------------------------------


async def test_it_ends_when_the_daemon_ends(house: House) -> None:
    stream = await house.follow("alice@lab")
    ending = asyncio.create_task(house.daemon.stop())
    assert await stream.next() is None
    await asyncio.wait_for(ending, PATIENCE_S)


async def revoke(house: House) -> None:
    operator = house.daemon.exchange.authenticate(OPERATOR_TOKEN)
    await house.daemon.exchange.trust.revoke_peer(operator, "alice@lab", "left")


async def rotate(house: House) -> None:
    operator = house.daemon.exchange.authenticate(OPERATOR_TOKEN)
    await house.daemon.exchange.trust.rotate(operator, "alice@lab")


@pytest.mark.parametrize("take_away", [revoke, rotate])
async def test_it_ends_when_the_token_is_worth_nothing(
    house: House, take_away: Callable[[House], Awaitable[None]]
) -> None:
    alice, bob = await house.follow("alice@lab"), await house.follow("bob@lab")
    await take_away(house)
    assert await alice.next() is None
    await house.box.of("carol@lab").send_task(Task(recipient=BOB, intent_text="look"))
    assert (await bob.next() or {})["type"] == "sent"


async def test_nothing_is_left_of_a_reader_that_has_gone(house: House) -> None:
    stream = await house.follow("alice@lab")
    assert house.daemon._events.count == 1
    stream._response.close()
    await until(lambda: house.daemon._events.count == house.daemon.exchange.waits.total == 0)


async def test_a_reader_is_kept_awake(house: House) -> None:
    house.daemon._events._keep_awake_s = 0.02
    stream = await house.follow("alice@lab")
    reading = asyncio.create_task(stream.next())
    await until(lambda: len(stream.marks) >= 4)
    await house.run_task()
    assert (await reading or {})["type"] == "sent"
    assert stream.text.count(b":\nid: ") >= 4


# --- what it must not cost ---------------------------------------------------------------------------------


async def test_only_what_is_durable_is_told(journal: House, monkeypatch: pytest.MonkeyPatch) -> None:
    store: Any = journal.daemon.store
    stream = await journal.follow("alice@lab")
    may_write = threading.Event()
    write = store._writer.write

    def wait_and_write(batch: Any) -> None:
        may_write.wait()
        write(batch)

    monkeypatch.setattr(store._writer, "write", wait_and_write)
    monkeypatch.setattr(store._writer, "sync_us", 1e9)  # as if the disk were slow: a thread waits for it
    sending = asyncio.create_task(journal.alice.send_task(Task(recipient=BOB, intent_text="look")))
    reading = asyncio.create_task(stream.next())
    await asyncio.wait([sending, reading], timeout=0.2)
    assert not sending.done() and not reading.done()
    may_write.set()
    told = await reading
    assert told is not None and told["task_id"] == (await sending).task_id


@asynccontextmanager
async def held_up(house: House) -> AsyncIterator[tuple[socket.socket, Any]]:
    """A reader that does not read, the daemon's end of its connection, and more events than fit in between."""
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(house.daemon.address or ("", 0))
        slow.sendall(b"GET /a2a/events?after=0 HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer ")
        slow.sendall(house.realm.tokens["alice@lab"].encode() + b"\r\n\r\n")
        await until(lambda: house.daemon._events.count == 1)
        assert house.daemon._server is not None
        (connection,) = house.daemon._server.server_state.connections
        transport: Any = connection.transport
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        for _ in range(MANY // 1000):
            await house.alice.send_tasks([Task(recipient=BOB, intent_text="look") for _ in range(1000)])
        yield slow, transport


async def test_a_reader_that_reads_nothing_costs_nothing(house: House) -> None:
    async with held_up(house) as (slow, transport):
        quick = await house.follow("bob@lab", after=0)
        for _ in range(MANY):
            assert await quick.next() is not None
        assert 0 < transport.get_write_buffer_size() < 256 * 1024, "it is held up, and waited for"
        assert await asyncio.to_thread(_count_events, slow) == MANY


@pytest.mark.usefixtures("short_waits")
async def test_a_reader_that_reads_nothing_holds_up_nobodys_end(house: House) -> None:
    async with held_up(house) as (_, transport):
        await until(lambda: bool(transport.get_write_buffer_size()))
        await revoke(house)
        await until(lambda: house.daemon._events.count == 0)
        assert transport.is_closing()


def _count_events(reader: socket.socket) -> int:
    """What it finds when it wakes up."""
    reader.settimeout(PATIENCE_S)
    count, rest = 0, b""
    while count < MANY:
        *whole, rest = (rest + reader.recv(1 << 16)).split(b"event: sent\n")
        count += len(whole)
    return count


async def test_readers_at_the_same_place_share_one_look(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    streams = [await house.follow("alice@lab") for _ in range(50)]
    looks = 0
    log = house.daemon.store.log

    async def counted(after: int, limit: int) -> Any:
        nonlocal looks
        looks += 1
        return await log(after, limit)

    monkeypatch.setattr(house.daemon.store, "log", counted)
    await house.alice.send_task(Task(recipient=BOB, intent_text="look"))
    for stream in streams:
        assert await stream.types(1) == ["sent"]
    assert looks < len(streams)
