"""Trouble of one daemon, connection or command, and what the others notice of it: little, and not for long."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import pytest

from covenant import AgentId, CovenantError, Limits, Mailbox, Result
from covenant.exchange.realm import Realm
from covenant.model import command as c
from covenant.model import event as e
from covenant.model.error import StoreUnavailable
from covenant.model.peer import Caller, Role
from covenant.serve.daemon import Daemon, Settings
from covenant.store.clock import ManualClock
from covenant.store.postgres import batch as trying
from covenant.store.postgres import entry as entries
from covenant.store.postgres import housekeeping, rounds
from covenant.store.postgres import lane as lanes
from covenant.store.postgres import pulse as pulses
from covenant.store.postgres import reader as readers
from covenant.store.postgres.connection import IDLE_S, PROBE_S, PROBES, UNHEARD_MS, Where, connect
from covenant.store.postgres.engine import Postgres
from covenant.store.postgres.lane import Lane, Tried
from covenant.store.postgres.verify import StoreReport, verify
from tests.conformance.support import DAY_MS, DONE, drain, plain, soon, take, uid
from tests.daemons import OPERATOR_TOKEN
from tests.postgres import started_server, store_url
from tests.postgres.servers import forget, socket_of
from tests.postgres.support import WAITING, engine_of, sql, until

pytestmark = pytest.mark.usefixtures("short_waits")

ALICE, BOB = AgentId.named("alice@lab"), AgentId.named("bob@lab")


# --- a connection that says nothing -----------------------------------------------------------------------------


class Line:
    """A way to a server on which those who speak now can be silenced: as when a machine goes without a word."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._heard: list[asyncio.Event] = []
        self._piping: set[asyncio.Task[None]] = set()

    async def connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_unix_connection(self._path)
        speaks = asyncio.Event()
        speaks.set()
        self._heard.append(speaks)
        for source, target in ((reader, back), (there, writer)):
            piping = asyncio.create_task(self._pipe(source, target, speaks))
            self._piping.add(piping)
            piping.add_done_callback(self._piping.discard)

    async def _pipe(self, source: asyncio.StreamReader, target: asyncio.StreamWriter, speaks: asyncio.Event) -> None:
        try:
            while block := await source.read(1 << 16):
                await speaks.wait()
                target.write(block)
        except OSError:
            pass
        finally:
            target.close()

    def silence(self) -> None:
        for speaks in self._heard:
            speaks.clear()

    async def close(self) -> None:
        for piping in [*self._piping]:
            piping.cancel()
        await asyncio.gather(*self._piping, return_exceptions=True)


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    """One for all of these tests, with a store for each: only the way to it is silenced."""
    started = started_server()
    yield started
    forget(started)


@asynccontextmanager
async def over_a_line(server: Any) -> AsyncIterator[tuple[Line, int]]:
    line = Line(str(socket_of(server) / ".s.PGSQL.5432"))
    listening = await asyncio.start_server(line.connect, "127.0.0.1", 0)
    try:
        yield line, listening.sockets[0].getsockname()[1]
    finally:
        listening.close()
        await line.close()


async def test_a_connection_that_says_nothing_is_taken_for_lost(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connect, "__defaults__", (0.3,))
    async with over_a_line(server) as (line, port):
        url = f"postgresql://postgres@127.0.0.1:{port}/postgres?sslmode=disable&schema=silent1&lanes=1"
        async with Mailbox.open(url) as box:
            alice, bob = box.of(ALICE), box.of(BOB)
            await alice.send_task(plain(bob, id=uid(1)))
            line.silence()
            assert (await soon(alice.send_task(plain(bob, id=uid(2))))).task_id == uid(2)
            assert (await soon(alice.get_task(uid(2)))).task.id == uid(2)
            assert [delivery.task.id for delivery in await soon(bob.recv_tasks(5, wait_ms=0))] == [uid(1), uid(2)]


async def test_a_store_over_a_connection_that_says_nothing_is_closed_in_time(
    server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One limit of time for the last word, and one for all lanes together: each could wait for its own."""
    async with over_a_line(server) as (line, port):
        url = f"postgresql://postgres@127.0.0.1:{port}/postgres?sslmode=disable&schema=silent2&lanes=20"
        box = await Mailbox.open(url)
        alice, bob = box.of(ALICE), box.of(BOB)
        await asyncio.gather(*(alice.send_task(plain(bob)) for _ in range(100)))
        line.silence()
        async with asyncio.timeout(5):
            await box.close()


async def test_a_line_is_probed_from_both_ends(server: Any) -> None:
    async with over_a_line(server) as (_, port):
        url = f"postgresql://postgres@127.0.0.1:{port}/postgres?sslmode=disable&schema=silent3&lanes=1"
        async with Mailbox.open(url) as box:
            engine = engine_of(box)
            for connection in (engine._lanes[0]._connection, engine._reader._connection, engine._pulse._ears):
                assert connection is not None
                # What is in effect is shown as 0 on a socket of the same machine, to which the line leads here.
                rows = await connection.fetch("select name, reset_val from pg_settings where name like 'tcp_%'")
                assert {row["name"]: int(row["reset_val"]) for row in rows} == {
                    "tcp_keepalives_idle": IDLE_S,
                    "tcp_keepalives_interval": PROBE_S,
                    "tcp_keepalives_count": PROBES,
                    "tcp_user_timeout": UNHEARD_MS,
                }
                here = connection._transport.get_extra_info("socket")
                assert here.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
                tcp = socket.IPPROTO_TCP
                assert here.getsockopt(tcp, socket.TCP_KEEPIDLE) == IDLE_S
                assert here.getsockopt(tcp, socket.TCP_KEEPINTVL) == PROBE_S
                assert here.getsockopt(tcp, socket.TCP_KEEPCNT) == PROBES
                assert here.getsockopt(tcp, socket.TCP_USER_TIMEOUT) == UNHEARD_MS


async def test_a_bell_on_a_connection_that_says_nothing_rings_on_another(
    server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connect, "__defaults__", (0.3,))
    monkeypatch.setattr(rounds, "POLL_S", 600.0)
    async with over_a_line(server) as (line, port):
        ours = "schema=silent4&lanes=1"
        url = f"postgresql://postgres@127.0.0.1:{port}/postgres?sslmode=disable&{ours}"
        async with Mailbox.open(url) as here, Mailbox.open(f"{server.get_uri()}&{ours}") as there:
            await until(lambda: engine_of(here).companions() > 1)
            waiting = [asyncio.create_task(there.of(BOB).recv_task()) for _ in range(2)]
            await here.of(ALICE).send_task(plain(there.of(BOB), id=uid(1)))
            assert (await soon(waiting[0])).task.id == uid(1)
            bell = engine_of(here)._bell
            say, hands = bell._say, []

            async def noted(payload: str) -> None:
                hands.append(bell._hand)
                await say(payload)

            monkeypatch.setattr(bell, "_say", noted)
            line.silence()
            await soon(here.of(ALICE).send_task(plain(there.of(BOB), id=uid(2))))
            assert (await soon(waiting[1])).task.id == uid(2)
            assert hands[0] is not None and hands[1] is None  # made anew, and not waited for once more


async def test_a_compaction_that_was_decided_and_finds_no_connection_is_not_said_to_be_not_stored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is in the store from then on, and housekeeping goes by it."""

    async def fail(*where: object, **settings: object) -> None:
        raise ConnectionRefusedError("nobody is there")

    async with Mailbox.open(store_url()) as box:
        monkeypatch.setattr(housekeeping, "connect", fail)
        with pytest.raises(StoreUnavailable) as refused:
            await box.compact(older_than_ms=0)
        assert refused.value.details["outcome"] == "unknown"
        (logged,) = await engine_of(box).log_back(None, 1)
        assert [type(event) for event in logged.events] == [e.Compacted]


async def test_housekeeping_on_a_connection_that_says_nothing_comes_to_an_end(
    server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(housekeeping, "COMMAND_S", 0.3)
    async with over_a_line(server) as (line, port):
        url = f"postgresql://postgres@127.0.0.1:{port}/postgres?sslmode=disable&schema=silent5&lanes=1"
        async with Mailbox.open(url) as box:
            housekeeper = engine_of(box).housekeeper
            step = housekeeper._step

            async def cut(connection: Any, work: Any) -> int:
                line.silence()
                return await step(connection, work)

            monkeypatch.setattr(housekeeper, "_step", cut)
            with pytest.raises(StoreUnavailable):
                await soon(housekeeper.tidy())
            monkeypatch.setattr(housekeeper, "_step", step)
            assert await soon(housekeeper.tidy()) == (0, 0)


async def test_who_led_over_a_connection_that_says_nothing_leads_again(
    server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server knows nothing of its end, and keeps its lock."""
    monkeypatch.setattr(pulses, "BEAT_S", 0.1)
    async with over_a_line(server) as (line, port):
        url = f"postgresql://postgres@127.0.0.1:{port}/postgres?sslmode=disable&schema=silent6&lanes=1"
        async with Mailbox.open(url) as box:
            engine = engine_of(box)
            engine.join("key", lambda pubkey: None)
            await until(engine.leads)
            pulse, close, led = engine._pulse, engine._pulse.close, asyncio.Queue[bool]()

            def give_up() -> None:
                close()
                led.put_nowait(engine.leads())  # noted here: it may lead again before a poll would see this

            monkeypatch.setattr(pulse, "close", give_up)
            line.silence()
            assert not await asyncio.wait_for(led.get(), 30)
            async with asyncio.timeout(10):
                await until(engine.leads)


async def test_a_question_waits_for_a_database_that_is_away_as_long_as_it_would_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with Mailbox.open(f"{store_url()}&lanes=1") as box:
        sent = await box.of(ALICE).send_task(plain(box.of(BOB)))
        reader, is_away = engine_of(box)._reader, True
        connected = reader.connected

        async def away() -> asyncpg.Connection[Any]:
            if is_away:
                raise OSError("nobody is there")
            return await connected()

        monkeypatch.setattr(reader, "connected", away)
        monkeypatch.setattr(readers, "PATIENCE_S", 0.0)
        hasty = asyncio.ensure_future(box.of(ALICE).get_task(sent.task_id))
        await asyncio.sleep(0)  # it has asked
        monkeypatch.setattr(readers, "PATIENCE_S", 30.0)
        patient = asyncio.ensure_future(box.of(ALICE).get_task(sent.task_id))
        with pytest.raises(StoreUnavailable) as refused:
            await soon(hasty)
        assert refused.value.details["outcome"] == "not_stored" and not patient.done()
        is_away = False
        assert (await soon(patient)).task.id == sent.task_id


# --- a daemon that was taken for dead ---------------------------------------------------------------------------


async def test_the_sessions_of_one_that_is_taken_for_dead_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be frozen with locks that others wait for."""
    monkeypatch.setattr(pulses, "BEAT_S", 0.05)
    url = f"{store_url()}&lanes=1"
    async with Mailbox.open(url) as here, Mailbox.open(url) as there, sql(url) as owner:
        frozen = engine_of(there)
        lane: Any = frozen._lanes[0]
        pids = [lane._connection.get_server_pid(), frozen._reader._connection.get_server_pid()]  # type: ignore[union-attr]
        monkeypatch.setattr(frozen._pulse, "_beat", lambda ears: asyncio.sleep(0))  # it gives no sign of life
        await owner.execute("update daemon set seen = seen - interval '1 minute' where id = $1", frozen.member.id)
        async with asyncio.timeout(10):
            while await owner.fetchval("select exists (select from pg_stat_activity where pid = any($1))", pids):
                pass
        assert not engine_of(here).is_closing
        sent = await soon(there.of(ALICE).send_task(plain(there.of(BOB))))  # it lives after all
        assert (await take(here.of(BOB))).task.id == sent.task_id


async def verified(url: str) -> StoreReport:
    where = Where.of(url)
    connection = await connect(where)
    try:
        return await verify(connection, where.schema)
    finally:
        await connection.close()


async def test_a_signature_stands_in_the_chain_that_it_is_about_or_nowhere() -> None:
    """The lane was closed by others just before: the chain that takes its place has another head."""
    url = f"{store_url()}&lanes=1"
    daemon = Daemon(Settings(store=url, http=None, ipc=None, limits=Limits()), Realm.throwaway(), OPERATOR_TOKEN)
    await daemon.exchange.open(OPERATOR_TOKEN)
    assert isinstance(daemon.store, Postgres)
    for _ in range(2):
        await daemon.exchange.note_stranger("http")
        before = daemon.store._lanes[0].id
        async with sql(url) as owner:
            await owner.execute("update daemon set ended = clock_timestamp(), proof = 'silent' where ended is null")
            await owner.execute("update lane set closed = true")
        await soon(daemon.exchange.heads.sign())
        await daemon.exchange.note_stranger("http")
        assert daemon.store._lanes[0].id != before
        assert (await verified(url)).damage == []
    await daemon.exchange.heads.sign()
    await daemon.exchange.close()
    report = await verified(url)
    assert report.damage == [] and report.lanes[-1].signed_until > 0


# --- a command that finds what it wants in the hands of others --------------------------------------------------


async def test_a_command_that_wants_what_somebody_holds_keeps_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a few tries of the whole batch each of its commands stands for itself."""
    monkeypatch.setattr(lanes, "LOCK_TIMEOUT", "5ms")
    monkeypatch.setattr(entries, "PATIENCE_S", 1.0)
    url = f"{store_url()}&lanes=1"
    async with Mailbox.open(url) as box, sql(url) as owner:
        alice, bob = box.of(ALICE), box.of(BOB)
        await alice.send_task(plain(bob, id=uid(1)))
        delivery = await take(bob)
        async with owner.transaction():
            await owner.execute("select from record where key = $1 for update", uid(1))
            sends = [alice.send_task(plain(bob, id=uid(number))) for number in range(2, 12)]
            post, *sent = await soon(
                asyncio.gather(bob.send_result(Result.ok(delivery, DONE)), *sends, return_exceptions=True)
            )
        assert isinstance(post, StoreUnavailable) and post.details["outcome"] == "not_stored"
        assert [getattr(one, "task_id", one) for one in sent] == [uid(number) for number in range(2, 12)]
        await soon(bob.send_result(Result.ok(delivery, DONE)))
        assert (await drain(alice)).task_id == uid(1)


async def test_steps_of_a_cascade_that_want_what_somebody_holds_keep_nobody_else() -> None:
    """However many of them there are, and however often they are begun anew."""
    url = store_url()
    async with Mailbox.open(url) as box, sql(url) as owner:
        alice, bob, engine = box.of(ALICE), box.of(BOB), engine_of(box)
        for number in (1, 3, 5):
            await alice.send_task(plain(bob, id=uid(number)))
            await alice.send_task(plain(bob, id=uid(number + 1), parent=uid(number)))
        async with owner.transaction():
            await owner.execute("select from record where key = any($1) for update", [uid(2), uid(4), uid(6)])
            cancels = [
                asyncio.create_task(alice.cancel_task(uid(number), reason="x", cascade=True)) for number in (1, 3, 5)
            ]
            async with asyncio.timeout(10):
                while not await owner.fetchval(WAITING, engine.member.session):
                    pass
            going_on = asyncio.create_task(engine._rounds.go_on())
            async with asyncio.timeout(4):
                for _ in range(50):
                    await alice.send_task(plain(bob))
            assert not any(cancel.done() for cancel in cancels)
        await soon(asyncio.gather(*cancels, going_on))
        assert [(await alice.get_task(uid(number))).outcome for number in (2, 4, 6)] == ["canceled"] * 3


async def test_commands_that_want_the_same_that_somebody_holds_keep_nobody_else() -> None:
    """It is waited for once, and not by each of them in its turn."""
    url = f"{store_url()}&lanes=1"
    async with Mailbox.open(url) as box, sql(url) as owner:
        alice, bob, engine = box.of(ALICE), box.of(BOB), engine_of(box)
        await alice.send_task(plain(bob, id=uid(1)))
        async with owner.transaction():
            await owner.execute("select from record where key = $1 for update", uid(1))
            cancels = [asyncio.create_task(alice.cancel_task(uid(1))) for _ in range(16)]
            async with asyncio.timeout(10):
                while not await owner.fetchval(WAITING, engine.member.session):
                    pass
            async with asyncio.timeout(3):
                await alice.send_task(plain(bob))
            assert not any(cancel.done() for cancel in cancels)
        ended = await soon(asyncio.gather(*cancels, return_exceptions=True))
        assert not [told for told in ended if isinstance(told, StoreUnavailable)]
        assert (await alice.get_task(uid(1))).outcome == "canceled"


async def test_commands_that_come_one_by_one_for_what_somebody_holds_keep_nobody_else() -> None:
    """A daemon that is frozen may hold many records, and each of them is wanted by somebody else."""
    url = f"{store_url()}&lanes=1"
    async with Mailbox.open(url) as box, sql(url) as owner:
        alice, bob, engine = box.of(ALICE), box.of(BOB), engine_of(box)
        tasks = [uid(number) for number in range(12)]
        await alice.send_tasks([plain(bob, id=task_id) for task_id in tasks])
        cancels = []
        async with owner.transaction():
            await owner.execute("select from record where key = any($1) for update", tasks)
            async with asyncio.timeout(4):
                for task_id in tasks:
                    cancels.append(asyncio.create_task(alice.cancel_task(task_id)))
                    await alice.send_task(plain(bob))
            assert not any(cancel.done() for cancel in cancels)
        await soon(asyncio.gather(*cancels))
        assert [(await alice.get_task(task_id)).outcome for task_id in tasks] == ["canceled"] * 12
        assert not engine.queue


async def test_what_is_due_and_somebody_holds_keeps_nobody_else() -> None:
    clock = ManualClock()
    url = store_url()
    async with Mailbox.open(url, clock=clock) as box, sql(url) as owner:
        alice, bob = box.of(ALICE), box.of(BOB)
        await alice.send_task(plain(bob, id=uid(1), deadline_ms=clock.now_ms() + 1000))
        async with owner.transaction():
            await owner.execute("select from record where key = $1 for update", uid(1))
            clock.advance(2000)
            async with asyncio.timeout(5):
                for _ in range(5):
                    await alice.send_task(plain(bob))
        await soon(alice.send_task(plain(bob)))
        assert (await drain(alice)).task_id == uid(1)


async def test_what_somebody_holds_for_long_is_waited_for_as_long_as_a_database_that_is_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lanes, "LOCK_TIMEOUT", "5ms")
    monkeypatch.setattr(trying, "HELD_S", 0.0)
    monkeypatch.setattr(entries, "PATIENCE_S", 0.0)
    url = f"{store_url()}&lanes=1"
    async with Mailbox.open(url) as box, sql(url) as owner:
        alice, bob = box.of(ALICE), box.of(BOB)
        await alice.send_task(plain(bob, id=uid(1)))
        delivery = await take(bob)
        transact, batches = Lane.transact, []

        async def noted(lane: Lane, batch: list[Any], tried: Tried) -> int:
            batches.append(len(batch))
            return await transact(lane, batch, tried)

        monkeypatch.setattr(Lane, "transact", noted)
        async with owner.transaction():
            await owner.execute("select from record where key = $1 for update", uid(1))
            post = bob.send_result(Result.ok(delivery, DONE))
            posted, sent = await soon(asyncio.gather(post, alice.send_task(plain(bob)), return_exceptions=True))
        assert isinstance(posted, StoreUnavailable) and posted.details["outcome"] == "not_stored"
        assert not isinstance(sent, Exception)
        assert batches == [2, 1, 1]


async def test_what_is_open_is_not_locked_by_who_looks_for_what_is_past_its_time() -> None:
    clock = ManualClock()
    url = f"{store_url()}&lanes=1"
    async with Mailbox.open(url, clock=clock) as box, sql(url) as owner, sql(url) as other:
        alice, bob, engine = box.of(ALICE), box.of(BOB), engine_of(box)
        await alice.send_task(plain(bob, id=uid(1)))
        await bob.send_result(Result.ok(await take(bob), DONE))
        await drain(alice)
        await alice.send_task(plain(bob, id=uid(2)))
        clock.advance(8 * DAY_MS)
        ctx = engine.context
        ctx.now = engine.now()
        async with owner.transaction():
            assert await engine.housekeeper._bury(owner, ctx) == 1
            await other.execute("select from record where key = $1 for update nowait", uid(2))
            with pytest.raises(asyncpg.LockNotAvailableError):
                await other.execute("select from record where key = $1 for update nowait", uid(1))


# --- a ring that nobody heard, and trust ------------------------------------------------------------------------


async def test_who_watches_a_task_misses_nothing_though_no_ring_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "POLL_S", 0.05)
    url = f"{store_url()}&lanes=1"
    async with Mailbox.open(url) as here, Mailbox.open(url) as there:
        deaf = engine_of(there)
        monkeypatch.setattr(deaf, "rung", lambda *rung: None)
        sent = await here.of(ALICE).send_task(plain(here.of(BOB)))
        watching = asyncio.create_task(there.of(ALICE).wait_generation(sent.task_id, after=1))
        await until(lambda: bool(deaf.waking.changes.count))
        await take(here.of(BOB))
        assert (await soon(watching)).generation == 2


@pytest.mark.parametrize("kinds", [None, ["saw"], ["saw", "dig"]], ids=["all", "one", "two"])
async def test_who_waits_for_work_finds_it_though_no_ring_is_heard(
    monkeypatch: pytest.MonkeyPatch, kinds: list[str] | None
) -> None:
    monkeypatch.setattr(rounds, "POLL_S", 0.05)
    url = f"{store_url()}&lanes=1"
    async with Mailbox.open(url) as here, Mailbox.open(url) as there:
        deaf = engine_of(there)
        monkeypatch.setattr(deaf, "rung", lambda *rung: None)
        waiting = asyncio.create_task(there.of(BOB).recv_tasks(1, kinds=kinds))
        await until(lambda: bool(deaf.waking.ready.count))
        await here.of(ALICE).send_task(plain(here.of(BOB), task_kind="saw"))
        assert len(await soon(waiting)) == 1


async def test_trust_is_learnt_once_though_a_commit_that_could_have_changed_it_did_not() -> None:
    """A refusal of such a command is a commit with a row and no peer."""
    async with Mailbox.open(f"{store_url()}&lanes=1") as box:
        engine = engine_of(box)
        await engine.run(c.EnrollPeer(None, ALICE, Role.PEER, "token"))
        await engine.refresh()
        learnt = engine.known.learnt
        denied = c.Call(Caller(ALICE, Role.PEER, "token"), c.RevokePeer(ALICE, BOB.pubkey, "no right to"))
        with pytest.raises(CovenantError):
            await engine.run(denied)
        learn, count = engine.known.learn, 0

        async def counted(connection: asyncpg.Connection[Any]) -> None:
            nonlocal count
            count += 1
            await learn(connection)

        engine.known.learn = counted  # type: ignore[method-assign]
        for _ in range(10):
            await box.of(ALICE).send_task(plain(box.of(BOB)))
        assert count == 1 and engine.known.learnt > learnt
