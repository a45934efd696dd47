"""The socket as a program in any language sees it: frames of four bytes of length and JSON."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from covenant import AgentId, CovenantError, Limits, Mailbox, Task
from covenant.exchange.exchange import Exchange
from covenant.exchange.realm import Realm
from covenant.serve import ipc
from covenant.serve.daemon import Daemon, Settings
from tests.daemons import OPERATOR_TOKEN, Realmful, start_daemon
from tests.until import until

BOB = AgentId.named("bob@lab")
ABSENT = "00000000-0000-4000-8000-000000000000"


class Line:
    """One connection, frame by frame."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, message: Any) -> None:
        self.send_raw(json.dumps(message).encode())

    def send_raw(self, data: bytes) -> None:
        self.writer.write(struct.pack(">I", len(data)) + data)

    async def read(self) -> dict[str, Any]:
        (size,) = struct.unpack(">I", await asyncio.wait_for(self.reader.readexactly(4), 20))
        frame: dict[str, Any] = json.loads(await self.reader.readexactly(size))
        return frame

    async def ask(self, message: Any) -> dict[str, Any]:
        self.send(message)
        return await self.read()

    async def is_closed(self) -> bool:
        return await asyncio.wait_for(self.reader.read(1), 20) == b""


class Office:
    def __init__(self, daemon: Daemon, tokens: dict[str, str]) -> None:
        self.daemon = daemon
        self.tokens = {**tokens, "operator": OPERATOR_TOKEN}
        self.lines: list[Line] = []

    async def line(self, who: str | None = None) -> Line:
        line = Line(*await asyncio.open_unix_connection(str(self.daemon.settings.ipc)))
        self.lines.append(line)
        if who is not None:
            answer = await line.ask({"kind": "authenticate", "token": self.tokens.get(who, who)})
            assert answer["kind"] == "authenticated", answer
        return line


@pytest.fixture
async def office() -> AsyncIterator[Office]:
    daemon = await start_daemon("memory:", Limits())
    realm = Realmful()
    await realm.enroll(daemon)
    office = Office(daemon, realm.tokens)
    yield office
    for line in office.lines:
        line.writer.close()
    await daemon.stop()


def send(**more: Any) -> dict[str, Any]:
    recipient = {"display": BOB.display, "pubkey": BOB.pubkey}
    return {"kind": "send_a2a_task", "task": {"recipient": recipient, "intent_text": "do the thing"}, **more}


async def test_a_task_goes_round_under_the_names_of_the_seed(office: Office) -> None:
    """Contract 29: to the letter."""
    alice, bob = await office.line("alice@lab"), await office.line("bob@lab")
    sent = await alice.ask(send())
    assert sent["kind"] == "a2a_task_queued"
    taken = await bob.ask({"kind": "try_recv_a2a_task"})
    assert (taken["kind"], taken["task"]["id"]) == ("a2a_task_opt", sent["task_id"])
    result = {"task_id": sent["task_id"], "status": "ok", "content": [], "lease_id": taken["lease_id"]}
    assert (await bob.ask({"kind": "post_a2a_result", "result": result}))["kind"] == "a2a_result_posted"
    assert (await alice.ask({"kind": "a2a_queue"}))["kind"] == "a2a_queue"
    assert (await alice.ask({"kind": "recent_a2a_tasks"}))["tasks"][0]["id"] == sent["task_id"]
    drained = await alice.ask({"kind": "try_recv_a2a_result"})
    assert (drained["kind"], drained["result"]["task_id"]) == ("a2a_result_opt", sent["task_id"])
    assert (await alice.ask({"kind": "recent_a2a_results"}))["kind"] == "a2a_results"


async def test_the_socket_is_for_its_owner_alone(office: Office) -> None:
    assert office.daemon.settings.ipc is not None
    assert stat.S_IMODE(os.stat(office.daemon.settings.ipc).st_mode) == 0o600


@pytest.mark.parametrize(
    "first",
    [{"kind": "authenticate", "token": "cov_wrong"}, {"kind": "a2a_queue"}, {"kind": "nonsense"}, [], "text"],
    ids=["wrong token", "another verb", "no verb", "a list", "a text"],
)
async def test_a_connection_without_a_token_is_closed(office: Office, first: Any) -> None:
    line = await office.line()
    answer = await line.ask(first)
    assert (answer["kind"], answer["code"]) == ("error", "unauthenticated")
    assert await line.is_closed()


async def test_a_frame_that_does_not_read_is_refused_and_the_next_one_answered(office: Office) -> None:
    line = await office.line("alice@lab")
    for raw in (b"", b"{", b"\xff", b"[" * 10_000, b'{"kind":"unheard_of"}', b'{"kind":"send_a2a_task","task":5}'):
        line.send_raw(raw)
        assert (await line.read())["code"] == "malformed"
    line.send({"kind": "get_a2a_task", "id": 7, "task_id": 5})
    answer = await line.read()
    assert (answer["id"], answer["code"]) == (7, "malformed")
    assert (await line.ask({"kind": "whoami"}))["agent"]["display"] == "alice@lab"


async def test_a_frame_over_the_limit_closes_the_connection(office: Office) -> None:
    line = await office.line("alice@lab")
    line.writer.write(struct.pack(">I", 8 * 1024 * 1024 + 1))
    refused = await line.read()
    assert refused["code"] == "too_large" and "at most 8388608" in refused["message"]
    assert await line.is_closed()


async def test_requests_with_an_id_run_side_by_side(office: Office) -> None:
    alice, bob = await office.line("alice@lab"), await office.line("bob@lab")
    bob.send({"kind": "try_recv_a2a_task", "id": "slow", "wait_ms": 20_000})
    assert (await bob.ask({"kind": "whoami", "id": "quick"}))["id"] == "quick"
    await alice.ask(send())
    answer = await bob.read()
    assert (answer["id"], answer["kind"]) == ("slow", "a2a_task_opt")


async def test_requests_without_an_id_are_answered_in_their_order(office: Office) -> None:
    line = await office.line("alice@lab")
    for number in range(50):
        line.send(send() if number % 2 else {"kind": "whoami"})
    kinds = [(await line.read())["kind"] for _ in range(50)]
    assert kinds == ["whoami", "a2a_task_queued"] * 25


async def test_who_waited_longest_on_a_connection_is_served_first(office: Office) -> None:
    alice, bob = await office.line("alice@lab"), await office.line("bob@lab")
    for number in range(4):
        bob.send({"kind": "try_recv_a2a_task", "id": number, "wait_ms": 20_000})
    assert (await bob.ask({"kind": "whoami", "id": 9}))["id"] == 9
    for number in range(4):
        await alice.ask(send())
        assert (await bob.read())["id"] == number


async def test_who_hangs_up_is_noticed_also_where_it_has_asked_for_as_much_as_it_may(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not read from any more by then; what comes next would be leased to nobody."""
    monkeypatch.setattr(ipc, "_AT_ONCE_MAX", 4)
    waits, bob = office.daemon.exchange.waits, await office.line("bob@lab")
    for number in range(8):
        bob.send({"kind": "try_recv_a2a_task", "id": number, "wait_ms": 20_000})
    await until(lambda: waits.total == 4)
    bob.writer.close()
    async with asyncio.timeout(10):
        await until(lambda: waits.total == 0)
    sent = await (await office.line("alice@lab")).ask(send())
    taken = await (await office.line("bob@lab")).ask({"kind": "try_recv_a2a_task"})
    assert taken["task"]["id"] == sent["task_id"]


async def test_a_revoked_token_closes_its_connections(office: Office) -> None:
    operator, alice, bob = [await office.line(who) for who in ("operator", "alice@lab", "bob@lab")]
    assert (await operator.ask({"kind": "revoke_peer", "peer": "bob@lab"}))["kind"] == "peer_revoked"
    assert (await bob.read())["code"] == "unauthenticated"
    assert await bob.is_closed()
    assert (await alice.ask({"kind": "whoami"}))["kind"] == "whoami"


async def test_a_rotated_token_closes_the_connections_of_the_old_one(office: Office) -> None:
    bob, other = await office.line("bob@lab"), await office.line("bob@lab")
    rotated = await bob.ask({"kind": "rotate_token"})
    assert (rotated["kind"], rotated["display"]) == ("peer_token_rotated", "bob@lab")
    for line in (bob, other):
        assert (await line.read())["code"] == "unauthenticated"
        assert await line.is_closed()
    assert (await (await office.line(rotated["token"])).ask({"kind": "whoami"}))["agent"]["display"] == "bob@lab"


@pytest.mark.parametrize("code", ["unauthenticated", "too_slow"])
async def test_what_is_under_way_when_the_daemon_hangs_up_is_not_said_to_be_refused(
    office: Office, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    """The daemon says why it hangs up; of a call that it had begun, that says nothing."""
    daemon, token = office.daemon, office.tokens["alice@lab"]
    run, is_stored = daemon.store.run, asyncio.Event()

    async def run_and_hang(command: Any) -> None:
        await run(command)
        is_stored.set()
        await asyncio.Event().wait()

    async with Mailbox.open(f"unix:{daemon.settings.ipc}", token=token) as alice:
        with monkeypatch.context() as slow:
            slow.setattr(daemon.store, "run", run_and_hang)
            sending = asyncio.ensure_future(alice.send_task(Task(id=ABSENT, recipient=BOB, intent_text="do")))
            await asyncio.wait_for(is_stored.wait(), 20)
        if code == "unauthenticated":
            await daemon.exchange.trust.rotate(daemon.exchange.authenticate(token), None)
        else:
            assert daemon._ipc is not None
            for connection in list(daemon._ipc.connections):
                connection.too_slow()
        with pytest.raises(CovenantError) as told:
            await asyncio.wait_for(sending, 20)
    assert (told.value.code, told.value.details.get("outcome")) == (code, "unknown")
    taken = await (await office.line("bob@lab")).ask({"kind": "try_recv_a2a_task"})
    assert taken["task"]["id"] == ABSENT


async def test_a_reader_that_does_not_read_costs_the_daemon_a_bounded_amount(office: Office) -> None:
    """It is read from no further until it has taken what it was told; others do not notice."""
    lazy, other = await office.line("alice@lab"), await office.line("bob@lab")
    flood = json.dumps({"kind": "a2a_queue", "limit": 100}).encode()
    frame = struct.pack(">I", len(flood)) + flood
    for _ in range(20):
        await other.ask(send())
    for _ in range(5_000):
        lazy.writer.write(frame)
    for _ in range(20):
        assert (await other.ask({"kind": "whoami"}))["kind"] == "whoami"
    unsent = sum(
        connection._transport.get_write_buffer_size()
        for ipc in [office.daemon._ipc]
        if ipc is not None
        for connection in ipc.connections
        if connection._transport is not None
    )
    assert unsent < 64 * 1024 * 1024


async def test_a_socket_may_lie_deep_in_a_tree(tmp_path: Path) -> None:
    """The system takes some hundred bytes; a home may be deeper."""
    deep = tmp_path / ("d" * 60) / ("e" * 60)
    deep.mkdir(parents=True)
    settings = Settings(store="memory:", http=None, ipc=deep / "sock")
    daemon = Daemon(settings, Realm.throwaway(), OPERATOR_TOKEN)
    await daemon.start()
    async with Mailbox.open(f"unix:{deep}/sock", token=OPERATOR_TOKEN) as box:
        assert await box.recent_tasks() == []
    await daemon.stop()
    assert not (deep / "sock").exists()


async def test_a_receive_that_is_given_back_while_it_waits_is_answered_with_nothing(office: Office) -> None:
    bob = await office.line("bob@lab")
    bob.send({"kind": "try_recv_a2a_task", "id": 1, "wait_ms": 20_000, "receipt": "r"})
    bob.send({"kind": "give_back", "id": 2, "receipt": "r"})
    answers = {answer["id"]: answer for answer in (await bob.read(), await bob.read())}
    assert (answers[1]["kind"], answers[1]["task"], answers[2]["kind"]) == ("a2a_task_opt", None, "given_back")


class Counted:
    """A transport that tells how often it was written to."""

    def __init__(self, transport: Any) -> None:
        self.writes = 0
        self._transport = transport

    def write(self, data: bytes) -> None:
        self.writes += 1
        self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


async def test_replies_that_are_ready_together_go_out_together(office: Office) -> None:
    line = await office.line("alice@lab")
    assert office.daemon._ipc is not None
    (connection,) = office.daemon._ipc.connections
    counted: Any = Counted(connection._transport)
    connection._transport = counted
    frame = json.dumps({"kind": "whoami", "id": 1}).encode()
    line.writer.write((struct.pack(">I", len(frame)) + frame) * 32)
    assert [(await line.read())["kind"] for _ in range(32)] == ["whoami"] * 32
    assert counted.writes < 4


async def test_of_two_daemons_that_begin_at_the_same_moment_one_has_the_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither finds the other listening yet: a store takes its time to open."""
    opened = Exchange.open

    async def slow(exchange: Exchange, token: Any) -> None:
        await asyncio.sleep(0)  # the other one is as far
        await opened(exchange, token)

    monkeypatch.setattr(Exchange, "open", slow)
    settings = Settings(store="memory:", http=None, ipc=tmp_path / "sock")
    daemons = [Daemon(settings, Realm.throwaway(), OPERATOR_TOKEN) for _ in range(2)]
    begun = await asyncio.gather(*(daemon.start() for daemon in daemons), return_exceptions=True)
    refused = [failed for failed in begun if failed is not None]
    assert [getattr(failed, "code", failed) for failed in refused] == ["bad_setting"]
    first = daemons[begun.index(None)]
    async with Mailbox.open(f"unix:{tmp_path}/sock", token=OPERATOR_TOKEN) as box:
        assert await box.recent_tasks(1) == []
    await first.stop()
    after = Daemon(settings, Realm.throwaway(), OPERATOR_TOKEN)
    await after.start()
    await after.stop()
