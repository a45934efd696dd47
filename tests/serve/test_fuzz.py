"""Nothing that a client can say brings the daemon down, or gets an answer that is not described."""

from __future__ import annotations

import asyncio
import logging
import random
import struct
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
import pytest
import requests
import schemathesis
import uvloop
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import Case, GenerationMode

from covenant import AgentId, Limits
from covenant.exchange.bounds import Bounds
from covenant.serve.daemon import Daemon
from covenant.serve.places import PLACES
from covenant.serve.status import HTTP_STATUS
from tests.daemons import OPERATOR_TOKEN, Realmful, start_daemon
from tests.serve.test_openapi import DOCUMENT, NOWHERE, Described, idempotent, task_for

T = TypeVar("T")

QUICK_CASES: Final = 3  # of each operation and kind of data: said by each caller, about 600 in all
SOAK_CASES: Final = 74  # about 15,000
REQUESTS: Final = 2000  # broken ones
FRAMES_OF_A_CONNECTION: Final = 400
SEED: Final = 20240229
PATIENCE_S: Final = 30
CALLERS: Final = ("operator", "alice@lab")
HALVES: Final = (0, 1)  # of the operations


class House:
    """A daemon and tokens that are good, whatever was done to them."""

    def __init__(self, folder: Path) -> None:
        self.daemon: Daemon
        self.realm = Realmful()
        self._store = f"file:{folder / 'data'}"

    async def open(self) -> None:
        bounds = Bounds(wait_ms_max=5, requests_per_s=10**6, burst=10**6)
        self.daemon = await start_daemon(self._store, Limits(), bounds=bounds)
        await self.realm.enroll(self.daemon)
        self.realm.tokens["operator"] = OPERATOR_TOKEN

    async def token(self, who: str) -> str:
        x = self.daemon.exchange
        try:
            x.authenticate(self.realm.tokens[who])
        except Exception:
            await self._let_in_again(who)
        return self.realm.tokens[who]

    async def _let_in_again(self, who: str) -> None:
        operator = self.daemon.exchange.realm.operator.pubkey
        peer: Any = self.daemon.store.state.records[f"peer:{operator}"]  # type: ignore[attr-defined]
        caller = self.daemon.store.caller_of(peer.token)
        assert caller is not None
        if who != "operator" and self.daemon.store.agent_of(who) is None:
            _, token = await self.daemon.exchange.enroll(caller, who, AgentId.named(who).pubkey, ["a2a.*"])
        else:
            _, token = await self.daemon.exchange.trust.rotate(caller, None if who == "operator" else who)
        self.realm.tokens[who] = token


# --- HTTP --------------------------------------------------------------------------------------------------


class Running:
    """A house on a loop of its own, for clients that block."""

    def __init__(self, folder: Path) -> None:
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.house = self.call(self._open(folder))

    async def _open(self, folder: Path) -> House:
        house = House(folder)
        await house.open()
        return house

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE_S)

    def close(self) -> None:
        self.call(self.house.daemon.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    started = Running(tmp_path)
    yield started
    started.close()


@pytest.fixture
def no_errors(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """The daemon has nothing to be sorry for."""
    caplog.set_level(logging.ERROR)
    yield
    assert [record.getMessage() for record in caplog.get_records("call")] == []


class Salt:
    """Puts what exists in the place of what was made up, now and then: behind an unknown id there is nothing."""

    def __init__(self) -> None:
        self._known: dict[str, deque[Any]] = {}
        self._chance = random.Random(SEED)
        for name in ("alice@lab", "bob@lab"):
            agent = AgentId.named(name)
            self.learn({"display": agent.display, "pubkey": agent.pubkey})

    def learn(self, answer: Any) -> None:
        if isinstance(answer, dict):
            for name, value in answer.items():
                if isinstance(value, str) and (name.endswith("id") or name == "cursor"):
                    self._known.setdefault(name, deque(maxlen=50)).append(value)
                self.learn(value)
            if {"display", "pubkey"} <= answer.keys():
                self._known.setdefault("recipient", deque(maxlen=50)).append(answer)
        elif isinstance(answer, list):
            for value in answer:
                self.learn(value)

    def into(self, members: Any) -> None:
        if isinstance(members, list):
            for value in members:
                self.into(value)
        elif isinstance(members, dict):
            for name, value in members.items():
                known = self._known.get("id" if name == "grant_id" else name)
                if known and self._chance.random() < 0.7:
                    members[name] = self._chance.choice(known)
                else:
                    self.into(value)


class Fuzz:
    """Schemathesis makes the cases and says them; what comes back is compared with the description."""

    def __init__(self, running: Running) -> None:
        self.count = 0
        self.statuses: set[int] = set()
        self._running = running
        self._url = str(running.house.daemon.url)
        self._described = Described(DOCUMENT)
        self._salt = Salt()
        self._session = requests.Session()

    def say(self, who: str, case: Case[Any]) -> None:
        for members in (case.path_parameters, case.query, case.body):
            self._salt.into(members)
        token = self._running.call(self._running.house.token(who))
        headers = {"Authorization": f"Bearer {token}"}
        response = case.call(base_url=self._url, headers=headers, session=self._session, timeout=PATIENCE_S)
        self.count += 1
        self.statuses.add(response.status_code)
        said = f"{case.as_curl_command()}\n{response.status_code} {response.text}"
        assert response.status_code < 500 or response.status_code in (503, 507), said
        if "application/json" in response.headers["content-type"]:
            answer = response.json()
            self._described.check(case.method, case.operation.path, response.status_code, answer)
            self._salt.learn(answer)

    def run(self, half: int, cases: int, is_same_every_time: bool) -> None:
        rules = settings(
            max_examples=cases,
            derandomize=is_same_every_time,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        for operation in operations()[half::2]:
            takes_something = (
                bool(operation.definition.raw.get("parameters")) or "requestBody" in operation.definition.raw
            )
            for mode in (
                (GenerationMode.POSITIVE, GenerationMode.NEGATIVE) if takes_something else (GenerationMode.POSITIVE,)
            ):

                @rules
                @given(operation.as_strategy(generation_mode=mode))
                def one(case: Case[Any]) -> None:
                    for who in CALLERS:
                        self.say(who, case)

                one()


def operations() -> list[Any]:
    """All but the stream, which does not end."""
    schema = schemathesis.openapi.from_dict(DOCUMENT)
    found: list[Any] = [operation.ok() for operation in schema.get_all_operations()]  # type: ignore[union-attr]
    return [operation for operation in found if operation.path != "/a2a/events"]


@pytest.mark.usefixtures("no_errors")
@pytest.mark.parametrize("half", HALVES)
def test_no_answer_lies_outside_the_description(running: Running, half: int) -> None:
    fuzz = Fuzz(running)
    fuzz.run(half, QUICK_CASES, is_same_every_time=True)
    assert fuzz.count >= 250
    assert {200, 400, 404} <= fuzz.statuses


@pytest.mark.soak
@pytest.mark.usefixtures("no_errors")
@pytest.mark.parametrize("half", HALVES)
def test_no_answer_lies_outside_the_description_in_a_long_run(running: Running, half: int) -> None:
    fuzz = Fuzz(running)
    fuzz.run(half, SOAK_CASES, is_same_every_time=False)
    assert fuzz.count >= 5000
    assert {200, 400, 404, 409} <= fuzz.statuses


# --- HTTP, byte by byte ------------------------------------------------------------------------------------


HEAD: Final = b"%b HTTP/1.1\r\nHost: here\r\nAuthorization: Bearer %b\r\n"
SOUND: Final = (
    (b"GET /a2a/queue?limit=3&state=queued", b""),
    (b"GET /a2a/tasks/00000000-0000-0000-0000-000000000000/why", b""),
    (b"GET /audit?before=9&limit=1", b""),
    (b"POST /a2a/compact", b'{"older_than_ms": 5}'),
    (b"POST /a2a/tasks", msgspec.json.encode(task_for("bob@lab"))),
)


async def spoken(house: House, data: bytes) -> bytes:
    """What the daemon says to somebody who says this and no more."""
    assert house.daemon.address is not None
    reader, writer = await asyncio.open_connection(*house.daemon.address)
    writer.write(data)
    writer.write_eof()
    async with asyncio.timeout(PATIENCE_S):
        answer = await reader.read()
    writer.close()
    return answer


async def misspoken_to(folder: Path) -> None:
    house = House(folder)
    await house.open()
    chance = random.Random(SEED)
    for _ in range(REQUESTS):
        line, body = chance.choice(SOUND)
        head = HEAD % (line, (await house.token("alice@lab")).encode())
        data = bytearray(head + b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
        for _ in range(chance.randrange(5)):
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        end = chance.choice((len(data), chance.randrange(len(data))))
        answer = await spoken(house, bytes(data[:end]))
        assert not answer.startswith(b"HTTP/1.1 5"), (data, answer)
    await lives(house)
    await house.daemon.stop()


@pytest.mark.usefixtures("no_errors")
def test_bytes_that_are_not_quite_http_do_no_harm(tmp_path: Path) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(misspoken_to(tmp_path))


async def interrupted(folder: Path) -> None:
    house = House(folder)
    await house.open()
    token = await house.token("alice@lab")
    head = HEAD % (b"POST /peers/rotate", token.encode()) + b"Content-Length: 20\r\n\r\n"
    for said in (b"", b'{"peer"'):
        assert await spoken(house, head + said) == b""
        assert house.daemon.exchange.authenticate(token)
    await house.daemon.stop()


@pytest.mark.usefixtures("no_errors")
def test_who_hangs_up_in_the_middle_of_a_request_has_asked_for_nothing(tmp_path: Path) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(interrupted(tmp_path))


# --- IPC ---------------------------------------------------------------------------------------------------


LENGTH: Final = struct.Struct(">I")
LEFT_OUT: Final = ("rotate_token", "revoke_peer")  # they end the connection, as they should
AGENT: Final = {"display": "bob@lab", "pubkey": AgentId.named("bob@lab").pubkey}
MEMBERS: Final[dict[str, Any]] = {
    "task": task_for("bob@lab", content=[{"type": "json", "value": {"a": [1, 2.5, None]}}]),
    "tasks": [task_for("bob@lab"), task_for("bob@lab", idempotency=idempotent("k"))],
    "result": {"task_id": NOWHERE, "status": "ok", "content": [{"type": "text", "text": "é"}]},
    "request": {"task_id": NOWHERE, "command": {"action": "force_error", "message": "no"}, "reason": "gone"},
    "message": {"messageId": "m", "role": "ROLE_USER", "parts": [{"text": "é"}, {"data": [1, 2.5, None]}]},
    "artifact": {"artifactId": "a", "parts": [{"url": "https://x.test/"}], "name": "x"},
    "card": {"name": "dan", "capabilities": {"extensions": [{"uri": "urn:x"}]}},
    "name": "bob@lab",
    "asks": "auth",
    "append": True,
    "lastChunk": True,
    "after": 0,
    "policy": {"min_lease_age_ms": 0},
    "scope": {"max_uses": 1},
    "grants": ["a2a.send.*"],
    "display": "dan@lab",
    "subject": "bob@lab",
    "counterparty": "bob@lab",
    "action": "a2a.send.bob@lab",
    "state": "queued",
    "duplicate_risk": "idempotent",
    "task_id": NOWHERE,
    "lease_id": NOWHERE,
    "grant_id": NOWHERE,
    "entry_id": "slot:x",
    "reason": "because",
    "receipt": "r",
    "limit": 3,
    "wait_ms": 1,
    "before": 9,
}


def frames_that_read() -> list[dict[str, Any]]:
    """One of each verb, with all of its members that are not left to chance."""
    frames = []
    for place in PLACES:
        kind = str(place.request.__struct_config__.tag)
        names = [field.encode_name for field in msgspec.structs.fields(place.request)]
        if kind not in LEFT_OUT:
            frames.append({"kind": kind, **{name: MEMBERS[name] for name in names if name in MEMBERS}})
    return frames


class Mutations:
    """What goes wrong on a wire, and what somebody might do on purpose."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self._frames = frames_that_read()
        self._kinds = [frame["kind"] for frame in self._frames]
        self._number = 0
        self._within: dict[Callable[[dict[str, Any]], bytes], int] = {
            self._as_it_is: 1,
            self._flipped: 6,
            self._cut: 3,
            self._of_another_kind: 2,
            self._nested: 2,
            self._huge: 2,
            self._not_text: 4,
            self._with_an_odd_id: 1,
            self._noise: 2,
        }

    def payload(self) -> bytes:
        """One frame without its length."""
        self._number += 1
        frame = {"id": self._number, **self.chance.choice(self._frames)}
        (mutate,) = self.chance.choices(list(self._within), list(self._within.values()))
        return mutate(frame)

    def broken(self) -> bytes:
        """A frame whose length lies, or that does not end."""
        data = self.payload()
        size = self.chance.choice((0, 1, len(data) - 1, len(data) + 1, 2**31, 2**32 - 1, self.chance.randrange(2**32)))
        return LENGTH.pack(max(0, size)) + data[: self.chance.randrange(len(data) + 1)]

    def _as_it_is(self, frame: dict[str, Any]) -> bytes:
        return msgspec.json.encode(frame)

    def _flipped(self, frame: dict[str, Any]) -> bytes:
        data = bytearray(msgspec.json.encode(frame))
        for _ in range(self.chance.randrange(1, 5)):
            data[self.chance.randrange(len(data))] ^= 1 << self.chance.randrange(8)
        return bytes(data)

    def _cut(self, frame: dict[str, Any]) -> bytes:
        data = msgspec.json.encode(frame)
        return data[: self.chance.randrange(len(data))]

    def _of_another_kind(self, frame: dict[str, Any]) -> bytes:
        kinds = [*self._kinds, "", "authenticate", "error", 7, None, ["a2a_queue"]]
        return msgspec.json.encode({**frame, "kind": self.chance.choice(kinds)})

    def _nested(self, frame: dict[str, Any]) -> bytes:
        name = self.chance.choice([name for name in frame if name != "id"])
        depth = self.chance.choice((10, 65, 2000))
        opened, closed = self.chance.choice((("[", "]"), ('{"a":', "}")))
        marked = msgspec.json.encode({**frame, name: "HERE"})
        return marked.replace(b'"HERE"', (opened * depth + "1" + closed * depth).encode())

    def _huge(self, frame: dict[str, Any]) -> bytes:
        names = [name for name, value in frame.items() if isinstance(value, int)]
        name = self.chance.choice([*names, "limit", "wait_ms", "not_before_ms", "expires_ms", "older_than_ms"])
        numbers = ("-1", "0", "1e3", "1.5", "1e999", "-0", str(2**31), str(2**53), str(2**63), str(-(2**70)), "9" * 400)
        marked = msgspec.json.encode({**frame, name: "HERE"})
        return marked.replace(b'"HERE"', self.chance.choice(numbers).encode())

    def _not_text(self, frame: dict[str, Any]) -> bytes:
        data = msgspec.json.encode(frame)
        at = self.chance.randrange(len(data))
        wrong = (b"\xff", b"\xc3", b"\xed\xa0\x80", b"\x00", b"\\ud800", b"\\u0000", b"\xf4\x90\x80\x80")
        return data[:at] + self.chance.choice(wrong) + data[at:]

    def _with_an_odd_id(self, frame: dict[str, Any]) -> bytes:
        ids: list[Any] = [1, 1, "1", "", "é" * 100, 2**64, -1, None, 1.5, True, [1], {"a": 1}]
        return msgspec.json.encode({**frame, "id": self.chance.choice(ids)})

    def _noise(self, frame: dict[str, Any]) -> bytes:
        return self.chance.randbytes(self.chance.randrange(100))


class Line:
    """One connection of a client that has read what it should do."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, house: House) -> Line:
        return cls(*await asyncio.open_unix_connection(str(house.daemon.settings.ipc)))

    def say(self, data: bytes) -> None:
        self._writer.write(data)

    async def hear(self) -> dict[str, Any] | None:
        """One answer; None at the end of the connection."""
        try:
            (size,) = LENGTH.unpack(await self._reader.readexactly(4))
            answer: dict[str, Any] = msgspec.json.decode(await self._reader.readexactly(size))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        assert isinstance(answer["kind"], str)
        assert answer["kind"] != "error" or HTTP_STATUS[answer["code"]] < 500, answer
        return answer

    async def ask(self, **frame: Any) -> dict[str, Any] | None:
        data = msgspec.json.encode(frame)
        self.say(LENGTH.pack(len(data)) + data)
        return await self.hear()

    async def close(self) -> None:
        self._writer.close()


async def greeted(house: House, who: str) -> Line:
    line = await Line.open(house)
    answer = await line.ask(kind="authenticate", token=await house.token(who))
    assert answer is not None and answer["kind"] == "authenticated"
    return line


async def lives(house: House) -> None:
    line = await greeted(house, "alice@lab")
    answer = await line.ask(kind="whoami", id="still there?")
    assert answer is not None and (answer["kind"], answer["id"]) == ("whoami", "still there?")
    await line.close()


async def every_frame_is_answered(house: House, mutations: Mutations) -> int:
    line = await greeted(house, mutations.chance.choice(CALLERS))
    frames = [mutations.payload() for _ in range(FRAMES_OF_A_CONNECTION)]
    line.say(b"".join(LENGTH.pack(len(frame)) + frame for frame in frames))
    for number in range(len(frames)):
        assert await line.hear() is not None, f"{number} answers of {len(frames)}"
    await line.close()
    return len(frames)


async def lies_about_lengths_are_survived(house: House, mutations: Mutations) -> int:
    line = await greeted(house, mutations.chance.choice(CALLERS))
    count = mutations.chance.randrange(1, 20)
    line.say(b"".join(mutations.broken() for _ in range(count)))
    line._writer.write_eof()
    while await line.hear() is not None:
        pass
    await line.close()
    return count


async def strangers_are_shown_the_door(house: House, mutations: Mutations) -> int:
    line = await Line.open(house)
    frames = [mutations.payload() for _ in range(mutations.chance.randrange(1, 10))]
    line.say(b"".join(LENGTH.pack(len(frame)) + frame for frame in frames))
    answer = await line.hear()
    assert answer is not None and answer["code"] == "unauthenticated"
    assert await line.hear() is None
    await line.close()
    return len(frames)


async def attacked(folder: Path, frames: int) -> None:
    house = House(folder)
    await house.open()
    mutations = Mutations(SEED)
    attacks = (every_frame_is_answered, lies_about_lengths_are_survived, strangers_are_shown_the_door)
    count = 0
    while count < frames:
        for attack in attacks:
            async with asyncio.timeout(PATIENCE_S):
                count += await attack(house, mutations)
        await lives(house)
    await house.daemon.stop()


@pytest.mark.usefixtures("no_errors")
@pytest.mark.parametrize(
    "frames", [pytest.param(20_000, id="some"), pytest.param(100_000, id="many", marks=pytest.mark.soak)]
)
def test_whatever_comes_over_the_socket_the_daemon_lives(tmp_path: Path, frames: int) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(attacked(tmp_path, frames))
