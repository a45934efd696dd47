"""The same program on every engine: each command has the same answer, everything that can be asked is told alike, and
the logs tell the same story. (DESIGN 2: an engine holds no policy.)

Numbers of events are dense in the embedded engines and have gaps here, so what counts is their order for each record.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

import msgspec
import pytest
from msgspec import structs

from covenant import CovenantError, Limits, Mailbox, OpenMailbox
from covenant.model import command as c
from covenant.model import query as q
from covenant.model.audit import Logged
from covenant.model.event import CardWithdrawn, HeadSigned
from covenant.model.record import TaskRecord, TaskState
from covenant.model.run import Run, RunStatus
from covenant.model.view import Pushed
from covenant.rules.evolve import CREATING
from covenant.store.clock import ManualClock
from covenant.store.postgres import ahead, rounds
from covenant.store.postgres.engine import Postgres
from covenant.store.postgres.entry import Entry
from covenant.store.postgres.stretch import Stretch
from tests.postgres import misplaced, settle, store_for
from tests.postgres.author import AGENTS, IDS, LAST_CURSOR, NOWHERE, Author, Line, Pause

Engine: TypeAlias = Any

LIMITS: Final = Limits(
    retention_ms=20_000,
    dedup_ms=36_000_000,
    error_ttl_ms=1_000,
    step_records_max=3,
    messages_max=6,
    chunks_max=8,
    artifacts_max=2,
    signals_max=6,
    entries_max=30,
    log_tail_max=1_000_000,
)
SHORT: Final = structs.replace(LIMITS, dedup_ms=60_000)  # ids are used anew all the time
_NUMBERS: Final = frozenset(("order", "seq", "since", "cursor"))  # of events, or made of them
# A record that begins is not asked who had its key before, a head is signed, and a card keeps its place.
_TIMELESS: Final = CREATING | {HeadSigned, CardWithdrawn}
_EVERY: Final = 60  # commands, everything is looked at


class Numbered:
    """Ids that tell which command they were drawn for, so that it does not matter when."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._drawn = 0

    def _next(self) -> str:
        self._drawn += 1
        return f"{self._number:08x}{self._drawn:04x}"

    def task(self) -> str:
        return f"00000000-0000-7000-8000-{self._next()}"

    def lease(self) -> str:
        return f"11111111-1111-4111-8111-{self._next()}"


class Side:
    """One engine, with a clock of its own that goes like everybody else's."""

    def __init__(self, url: str, clock: ManualClock, limits: Limits) -> None:
        self.url = url
        self.clock = clock
        self.limits = limits
        self.box: OpenMailbox
        self.count = 0
        self.numbers: dict[int, int] = {}  # of the commands under way, by their identity
        self.cursor: str | None = None
        self.commits: list[Logged] = []

    @property
    def name(self) -> str:
        return self.url.partition(":")[0]

    @property
    def engine(self) -> Engine:
        return self.box._engine

    async def open(self) -> None:
        self.box = await Mailbox.open(self.url, limits=self.limits, clock=self.clock)
        if isinstance(self.engine, Postgres):
            make = self.engine.entry

            def entry(command: Any, by: str | None = None) -> Entry:
                made = make(command, by)
                if id(command) in self.numbers:
                    made.source = Numbered(self.numbers[id(command)])
                return made

            self.engine.entry = entry  # type: ignore[method-assign]

    async def say(self, line: Line) -> list[Any]:
        """The replies, in words that all engines share."""
        try:
            if isinstance(line, Pause):
                return []
            if isinstance(line, tuple):
                return await self._say_all(line)
            command = await self._own(line)
            self._number([command])
            asked = command.command if isinstance(command, c.Call) else command
            if isinstance(asked, c.CompactHistory):
                await self.follow()
                compacted = await self.engine.compact(command)
                return [self.url.startswith("file") or _plain(compacted)]  # the journal drops by itself, too
            reply = await self.engine.run(command)
            if isinstance(asked, c.RetryStale):
                self.cursor = reply.cursor
            return [_plain(reply)]
        except CovenantError as refusal:
            return [_plain(refusal)]
        finally:
            await self.settle()

    async def _say_all(self, line: tuple[c.Command | c.Call, ...]) -> list[Any]:
        """At once, where that makes a difference; else one after the other."""
        if not isinstance(self.engine, Postgres):
            return [reply for command in line for reply in await self.say(command)]
        commands = [await self._own(command) for command in line]
        self._number(commands)
        return [_plain(reply) for reply in await self.engine.run_all(commands)]

    def _number(self, commands: Sequence[c.Command | c.Call]) -> None:
        self.numbers = {}
        for command in commands:
            self.count += 1
            self.numbers[id(command)] = self.count
        self.engine.context.ids = Numbered(self.count)

    async def _own(self, command: c.Command | c.Call) -> c.Command | c.Call:
        """With this engine's own numbers."""
        if isinstance(command, c.Call):
            return structs.replace(command, command=await self._own(command.command))
        if isinstance(command, c.RetryStale) and command.cursor == LAST_CURSOR:
            return structs.replace(command, cursor=self.cursor)
        if isinstance(command, c.NotePush) and command.since:
            try:
                pushed: Pushed = await self.engine.ask(q.GetPushed(None, command.task_id))
            except CovenantError:
                return command
            for push in pushed.pushes:
                if push.config.id == command.config_id:
                    return structs.replace(command, since=push.since)
        return command

    async def settle(self) -> None:
        self.clock.advance(0)
        if isinstance(self.engine, Postgres):
            await settle(self.engine)
        else:
            for _ in range(10):
                await asyncio.sleep(0)

    async def tell(self, queries: Sequence[q.Query]) -> list[Any]:
        async def told(query: q.Query) -> Any:
            try:
                found = await self.engine.ask(query)
                if isinstance(query, q.DeepQueues):
                    found = sorted(found, key=lambda queue: queue.recipient.pubkey)
                return _plain(found)
            except CovenantError as refusal:
                return _plain(refusal)

        return await asyncio.gather(*(told(query) for query in queries))

    async def follow(self) -> None:
        """Read on in the log, before its beginning goes."""
        while more := await self.engine.log(self.commits[-1].last if self.commits else 0, 1000):
            self.commits += more

    async def story(self) -> dict[str, list[Any]]:
        """What happened to each record, in its order; and what the audit says beside it. In a commit's line stands
        which event touched a record before."""
        await self.follow()
        told: dict[str, list[Any]] = {}
        last: dict[str, int] = {}
        for logged in self.commits:
            for number, event in enumerate(logged.events):
                told.setdefault(event.key, []).append((logged.at, logged.by, _plain(event)))
                if type(event) not in _TIMELESS and number < len(logged.prev):
                    assert logged.prev[number] in (0, last.get(event.key, 0)), (self.name, logged)
            for number, event in enumerate(logged.events):
                last[event.key] = logged.seq + number
            rows = [(logged.at, logged.by, _plain(row)) for row in logged.audit]
            told.setdefault("audit", []).extend(rows)
        told["audit"].sort(key=repr)
        return told


def _plain(told: Any) -> Any:
    if isinstance(told, CovenantError):
        return {"refused": told.code, "why": told.message, "details": _plain(told.details)}
    return _without_numbers(msgspec.json.decode(msgspec.json.encode(told)))


def _without_numbers(told: Any) -> Any:
    if isinstance(told, dict):
        if isinstance(told.get("wait"), dict):
            told["wait"].get("tasks", []).sort()  # a set
        return {
            name: (value is not None if name in _NUMBERS else _without_numbers(value)) for name, value in told.items()
        }
    return [_without_numbers(one) for one in told] if isinstance(told, list) else told


def questions(state: Any) -> Iterator[q.Query]:
    """Everything that can be asked of what is there."""
    for by in (None, *AGENTS):
        yield from (q.RecentTasks(by, 1000), q.RecentResults(by, 1000), q.ListQueue(by, 1000), q.ListCached(by, 1000))
        yield from (q.ListQueue(by, 1000, state=kept) for kept in TaskState)
        yield from (q.ListRuns(by, 1000), *(q.ListRuns(by, 1000, status=status) for status in RunStatus))
        yield from (q.GetTree(by, root) for root in (*IDS[:3], NOWHERE))
        yield from (q.ListGrants(by, 1000), q.ListQueue(by, 1000, deadline_within_ms=5000))
        yield q.ListQueue(by, 1000, min_lease_age_ms=1000)
        yield from (q.ListDialogs(by, agent.pubkey, 1000) for agent in AGENTS if by is not None)
    yield from (q.ListPeers(None, 1000), q.ListCards(None, 1000), q.DeepQueues(None, 0), q.DeepQueues(None, 2))
    tasks = [record for record in state.records.values() if isinstance(record, TaskRecord)]
    for record in tasks:
        task_id = record.task.id
        yield from (q.GetTask(None, task_id), q.GetTask(AGENTS[0], task_id), q.GetResult(None, task_id))
        yield from (q.GetDialog(record.task.sender, task_id), q.GetPlace(None, task_id), q.GetPushed(None, task_id))
        if isinstance(state.get(f"run:{task_id}"), Run):
            yield from (q.GetRun(None, task_id), q.ListEntries(None, task_id, 1000, every=True))
        if record.lease is not None:
            yield from (q.ListInputs(None, record.lease.lease_id), q.LoadRun(None, record.lease.lease_id))


class Sides:
    def __init__(self, folder: Path, limits: Limits) -> None:
        self.clocks = [ManualClock() for _ in range(3)]
        self.folder = folder
        self.limits = limits

    async def __aenter__(self) -> Sides:
        folder = str(self.folder)
        urls = ("memory:", f"file:{folder}", await store_for(folder))
        self.memory, self.journal, self.postgres = (
            Side(url, clock, self.limits) for url, clock in zip(urls, self.clocks, strict=True)
        )
        self.all = (self.memory, self.journal, self.postgres)
        for side in self.all:
            await side.open()
        return self

    async def __aexit__(self, *failed: object) -> None:
        for side in self.all:
            await side.box.close()

    async def say(self, line: Line) -> None:
        if isinstance(line, Pause):
            for clock in self.clocks:
                clock.advance(line.by_ms)
        expected, *others = [await side.say(line) for side in self.all]
        for side, got in zip(self.all[1:], others, strict=True):
            if got != [True]:
                assert got == expected, f"{side.name}: {line}\n{got}\n{expected}"

    async def compare(self) -> None:
        asked = list(questions(self.memory.engine.state))
        expected, *others = [await side.tell(asked) for side in self.all]
        for side, told in zip(self.all[1:], others, strict=True):
            for query, one, other in zip(asked, expected, told, strict=True):
                assert other == one, f"{side.name}: {query}\n{other}\n{one}"
        assert await misplaced(self.postgres.engine) == ([], [])

    async def compare_stories(self) -> None:
        expected, *others = [await side.story() for side in self.all]
        for side, story in zip(self.all[1:], others, strict=True):
            for key in expected.keys() | story.keys():
                one, other = expected.get(key), story.get(key)
                assert other == one, f"{side.name}: {key}\n{other}\n{one}"


async def play(folder: Path, seed: int, length: int, limits: Limits = LIMITS) -> None:
    """Every other one goes ahead of the tables of the database as soon as it can."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ahead, "WORTH", 1 if seed % 2 else ahead.WORTH)
        async with Sides(folder, limits) as sides:
            await _play(sides, seed, length)


async def _play(sides: Sides, seed: int, length: int) -> None:
    said: list[Line] = []
    author = Author(seed, sides.memory.engine.state, sides.clocks[0].now_ms)
    count = 0
    while count < length:
        line = author.line()
        said.append(line)
        count += len(line) if isinstance(line, tuple) else 1
        await sides.say(line)
        if len(said) % _EVERY == 0:
            await sides.compare()
    await sides.compare()
    await sides.compare_stories()


@pytest.fixture(autouse=True)
def untidy(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is past its time goes when it is told to, and not when real time has passed."""
    monkeypatch.setattr(rounds, "TIDY_S", float("inf"))


@pytest.fixture(autouse=True)
def told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of ids that were drawn ahead of the tables for a command that is then decided behind them, nobody is told: they
    do not count."""
    take = Stretch.take

    def tried(stretch: Stretch, entry: Entry) -> bool:
        ids: Any = entry.source
        drawn = ids._drawn
        is_taken = take(stretch, entry)
        if not is_taken:
            ids._drawn = drawn
        return is_taken

    monkeypatch.setattr(Stretch, "take", tried)


@pytest.mark.parametrize("seed", range(2))
async def test_every_engine_answers_every_command_alike(tmp_path: Path, seed: int) -> None:
    await play(tmp_path / "data", seed, 1_000)


@pytest.mark.parametrize(("seed", "length"), [(5, 700), (7, 450)])
async def test_every_engine_answers_alike_when_ids_are_used_anew(tmp_path: Path, seed: int, length: int) -> None:
    await play(tmp_path / "data", seed, length, SHORT)


@pytest.mark.soak
async def test_every_engine_answers_a_hundred_thousand_commands_alike(tmp_path: Path) -> None:
    for seed in range(100, 140):
        await play(tmp_path / f"{seed}", seed, 2_500)
