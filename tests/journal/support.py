"""A file layer that remembers, loses and fails; and one busy run that exercises everything the journal does."""

from __future__ import annotations

import errno
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from covenant import (
    CovenantError,
    ForceError,
    Idempotency,
    Limits,
    Mailbox,
    OpenMailbox,
    RepairRequest,
    Requeue,
    Result,
    Task,
    Text,
)
from covenant.mailbox import OpenMailbox as _OpenMailbox
from covenant.model import command as c
from covenant.model.message import Artifact, Message, Part
from covenant.model.peer import Role
from covenant.model.push import PushConfig
from covenant.model.record import Asks
from covenant.store.clock import CountingIds, ManualClock
from covenant.store.journal.archive import opened
from covenant.store.journal.engine import Journal
from covenant.store.journal.files import AppendFile, Files
from covenant.store.state import State

SMALL = Limits(
    segment_bytes=6_000,
    snapshot_every_bytes=9_000,
    finished_tail_max=3,
    archive_batch=3,
    error_ttl_ms=60_000,
)


def open_journal(
    folder: Path, *, limits: Limits = SMALL, clock: ManualClock | None = None, files: Files | None = None
) -> OpenMailbox:
    ids = CountingIds()
    return _OpenMailbox(Journal(folder, limits, clock or ManualClock(), ids, files), ids.lease())


def journal_of(box: Mailbox) -> Journal:
    engine = box._engine
    assert isinstance(engine, Journal)
    return engine


async def state_in(folder: Path) -> dict[str, bytes]:
    async with open_journal(folder, clock=ManualClock(0)) as box:
        return dump(box)


def refused(code: str, call: Callable[[], object]) -> CovenantError:
    with pytest.raises(CovenantError) as refusal:
        call()
    assert refusal.value.code == code
    return refusal.value


async def tidy(box: Mailbox) -> None:
    """Until housekeeping has nothing more to do."""
    keeper = journal_of(box)._keeper
    assert keeper is not None
    await keeper.finish()


def dump(box: Mailbox) -> dict[str, bytes]:
    """Every record, field by field, wherever it lies."""
    state = journal_of(box).state
    return dump_state(state)


def dump_state(state: State) -> dict[str, bytes]:
    found: dict[str, Any] = {}
    archive: Any = state.base
    for key, _, body in archive._reader.execute("select key, kind, body from rest"):
        if key not in state.gone:
            found[key] = msgspec.json.decode(opened(body))
    for key, record in state.records.items():
        found[key] = msgspec.json.decode(msgspec.json.encode(record))
    return {key: msgspec.json.encode(value, order="sorted") for key, value in sorted(found.items())}


class Step:
    """One thing that the busy run does, and what it must leave behind when it was acknowledged."""

    def __init__(self, box: OpenMailbox, after: Callable[[], Awaitable[None]] | None) -> None:
        self._box = box
        self._after = after

    async def __call__(self, work: Awaitable[Any]) -> Any:
        try:
            return await work
        finally:
            if self._after is not None:
                await self._after()


async def busy_run(
    box: OpenMailbox, clock: ManualClock, rounds: int = 12, after: Callable[[], Awaitable[None]] | None = None
) -> None:
    """Everything that leaves a trace: sends, leases, results of all sorts, followers, repairs, cancels, deadlines."""
    step = Step(box, after)
    ann, bob, cal = box.of("ann@lab"), box.of("bob@lab"), box.of("cal@lab")
    for turn in range(rounds):
        keyed = Idempotency("idempotent", key=f"key-{turn % 5}")
        await step(ann.send_task(Task(recipient=bob.agent, intent_text=f"plain {turn}")))
        await step(ann.send_task(Task(recipient=bob.agent, intent_text="keyed", task_kind="k", idempotency=keyed)))
        await step(cal.send_task(Task(recipient=bob.agent, intent_text="soon", deadline_ms=clock.now_ms() + 500)))
        await step(ann.send_task(Task(recipient=bob.agent, intent_text="keyed", task_kind="k", idempotency=keyed)))
        first = await step(bob.try_recv_task_for())
        if first is not None:
            await step(bob.send_result(Result.partial(first, [Text("half")])))
            await step(bob.send_result(Result.ok(first, [Text("whole")])))
        second = await step(bob.try_recv_task_for())
        if second is not None:
            await step(bob.heartbeat(second))
            await step(_second(box, bob, second, turn))
        clock.advance(700)
        for peer in (ann, cal):
            while await step(peer.try_recv_result_for()) is not None:
                pass


async def talkative_run(
    box: OpenMailbox, clock: ManualClock, rounds: int = 4, after: Callable[[], Awaitable[None]] | None = None
) -> None:
    step = Step(box, after)
    for turn in range(rounds):
        await talk(box, step, turn)
        clock.advance(700)


async def talk(box: OpenMailbox, step: Step, turn: int) -> None:
    """What an A2A client and its agent leave behind: messages, pieces, webhooks, a card, and each sort of end."""
    engine = journal_of(box)
    ann, dan = box.of("ann@lab").agent, box.of("dan@lab").agent

    async def do(command: c.Command) -> Any:
        return await step(engine.run(command))

    if engine.agent_of(dan.display) is None:
        await do(c.EnrollPeer(None, dan, Role.PEER, "digest of a token"))
    await do(c.PublishCard(None, dan, {"name": f"dan, {turn}"}))
    message = Message(message_id=f"m-{turn}", role="ROLE_USER", parts=(Part(text="more"),), metadata={"turn": turn})
    task = Task(recipient=dan, intent_text="talk", message=message, context_id=f"context {turn}")
    task_id = (await do(c.SendTask(ann, task, protocol=True, key=f"{turn}"))).task_id
    await do(c.SetPush(ann, task_id, PushConfig(id="hook", url="http://hook", token="secret")))
    await do(c.AddMessage(ann, task_id, message, 1, key="more"))
    lease_id = (await do(c.LeaseTasks(dan, dan, "one")))[0].lease_id
    if turn % 4 == 0:
        await do(c.UpdateTask(dan, lease_id, message, Asks.INPUT))
        await do(c.ReleaseLease(dan, lease_id))
        await do(c.CancelTask(ann, task_id, "why"))
        return
    for number in range(3):
        piece = Artifact(artifact_id="draft", parts=(Part(text=f"{number}"),))
        await do(c.AddArtifact(dan, lease_id, piece, append=True, last=number == 2))
    for hook in engine.state.pushes(task_id):
        await do(c.NotePush(None, task_id, "hook", hook.since, 3))
    await do(c.UpdateTask(dan, lease_id, message))
    if turn % 4 == 1:
        await do(c.PostResult(dan, Result(task_id, "partial", [Text("half")], None, lease_id), "one"))
        await do(c.PostResult(dan, Result(task_id, "ok", [Text("whole")], None, lease_id, None, message), "one"))
        await do(c.DropPush(ann, task_id, "hook"))
    elif turn % 4 == 2:
        await do(c.RejectTask(dan, lease_id, message))
        await do(c.WithdrawCard(None, dan))
    else:
        await do(c.ReplyDirectly(dan, lease_id, message))
        other = (await do(c.SendTask(ann, task, protocol=True))).task_id
        await do(c.ShowTask(ann, other) if turn % 8 == 3 else c.AddMessage(ann, other, message))
        await do(c.ReplyDirectly(dan, (await do(c.LeaseTasks(dan, dan, "one")))[0].lease_id, message))


async def _second(box: OpenMailbox, bob: Mailbox, delivery: Any, turn: int) -> None:
    if turn % 4 == 0:
        await bob.release(delivery, reason="not now")
    elif turn % 4 == 1:
        await box.repair_task(RepairRequest(delivery.task.id, Requeue("operator_accepted"), "stuck"))
        try:
            await bob.send_result(Result.ok(delivery, [Text("late")]))
        except CovenantError as refusal:
            assert refusal.code == "lease_superseded"
    elif turn % 4 == 2:
        await box.repair_task(RepairRequest(delivery.task.id, ForceError("given up"), "stuck"))
    else:
        await bob.send_result(Result.error(delivery, "could not"))


# --- a file layer that remembers ---------------------------------------------------------------------------


class Inode:
    def __init__(self, content: bytes = b"") -> None:
        self.start = content  # what was there, durably, before


class Op:
    """One operation; `sync` names what makes it durable: an inode, or the folder."""

    def __init__(self, kind: str, inode: Inode | None, **facts: Any) -> None:
        self.kind = kind
        self.inode = inode
        self.facts = facts
        self.durable_at: int | None = None


class RecordingFiles(Files):
    """Does everything for real, and keeps the list of it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.ops: list[Op] = []
        self.inodes: dict[str, Inode] = {}
        self.on_op: Callable[[], None] = lambda: None

    def note(self, op: Op) -> None:
        self.ops.append(op)
        self.on_op()

    def create(self, name: str) -> AppendFile:
        file = super().create(name)
        inode = self.inodes[name] = Inode()
        self.note(Op("link", inode, name=name))
        return RecordingFile(self, inode, file)

    def append_to(self, name: str) -> AppendFile:
        file = super().append_to(name)
        inode = self.inodes.get(name)
        if inode is None:
            inode = self.inodes[name] = Inode((self.folder / name).read_bytes())
        return RecordingFile(self, inode, file)

    def rename(self, old: str, new: str) -> None:
        super().rename(old, new)
        inode = self.inodes.pop(old)
        self.inodes[new] = inode
        self.note(Op("rename", inode, old=old, new=new))

    def remove(self, name: str) -> None:
        there = (self.folder / name).exists()
        super().remove(name)
        if there and name in self.inodes:
            self.note(Op("unlink", self.inodes.pop(name), name=name))

    def sync_folder(self) -> None:
        super().sync_folder()
        for op in self.ops:
            if op.kind in ("link", "rename", "unlink") and op.durable_at is None:
                op.durable_at = len(self.ops)
        self.note(Op("sync_folder", None))


class RecordingFile(AppendFile):
    def __init__(self, files: RecordingFiles, inode: Inode, real: AppendFile) -> None:
        super().__init__(real.path, real._fd, real.size)
        self._files = files
        self._inode = inode

    def write(self, data: bytes) -> None:
        offset = self.size
        super().write(data)
        self._files.note(Op("write", self._inode, offset=offset, data=bytes(data)))

    def sync(self) -> None:
        super().sync()
        for op in self._files.ops:
            if op.kind == "write" and op.inode is self._inode and op.durable_at is None:
                op.durable_at = len(self._files.ops)
        self._files.note(Op("sync", self._inode))


def image(ops: list[Op], kept: set[int], folder: Path) -> None:
    """The folder as it would be if only these operations had reached the disk."""
    names: dict[str, Inode] = {}
    contents: dict[int, bytearray] = {}
    for at, op in enumerate(ops):
        if at not in kept or op.inode is None:
            continue
        if op.kind == "link":
            names[op.facts["name"]] = op.inode
        elif op.kind == "rename":
            names.pop(op.facts["old"], None)
            names[op.facts["new"]] = op.inode
        elif op.kind == "unlink":
            names.pop(op.facts["name"], None)
        elif op.kind == "write":
            content = contents.setdefault(id(op.inode), bytearray(op.inode.start))
            end = op.facts["offset"] + len(op.facts["data"])
            content.extend(b"\0" * (end - len(content)))
            content[op.facts["offset"] : end] = op.facts["data"]
    folder.mkdir(parents=True)
    for name, inode in names.items():
        (folder / name).write_bytes(bytes(contents.get(id(inode), inode.start)))


# --- a file layer that fails -------------------------------------------------------------------------------


class FailingFiles(Files):
    """Fails the n-th call that changes anything; a failing write has put half of its bytes there."""

    def __init__(self, folder: Path, fail_at: int, error: int) -> None:
        super().__init__(folder)
        self.calls = 0
        self.fail_at = fail_at
        self.error = error
        self.failed: str | None = None

    def tick(self, what: str) -> None:
        self.calls += 1
        if self.calls == self.fail_at:
            self.failed = what
            raise OSError(self.error, os.strerror(self.error))

    def create(self, name: str) -> AppendFile:
        self.tick("create")
        return FailingFile(self, super().create(name))

    def append_to(self, name: str) -> AppendFile:
        self.tick("open")
        return FailingFile(self, super().append_to(name))

    def truncate(self, name: str, size: int) -> None:
        self.tick("truncate")
        super().truncate(name, size)

    def rename(self, old: str, new: str) -> None:
        self.tick("rename")
        super().rename(old, new)

    def remove(self, name: str) -> None:
        self.tick("remove")
        super().remove(name)

    def sync_folder(self) -> None:
        self.tick("sync_folder")
        super().sync_folder()


class FailingFile(AppendFile):
    def __init__(self, files: FailingFiles, real: AppendFile) -> None:
        super().__init__(real.path, real._fd, real.size)
        self._files = files

    def write(self, data: bytes) -> None:
        try:
            self._files.tick("write")
        except (OSError, Killed):
            super().write(data[: len(data) // 2])
            raise
        super().write(data)

    def sync(self) -> None:
        self._files.tick("sync")
        super().sync()


class Killed(BaseException):
    """The process ends here: nothing is tidied up."""


class FailingDisk(FailingFiles):
    """Several folders: the n-th call that changes anything in any of them fails, or is where the process ends."""

    def __init__(self, folder: Path, fail_at: int, *, kills: bool = False, disk: FailingDisk | None = None) -> None:
        super().__init__(folder, fail_at, errno.EIO)
        self.kills = kills
        self.disk = disk or self

    def tick(self, what: str) -> None:
        if self.disk is not self:
            self.disk.tick(what)
            return
        try:
            super().tick(what)
        except OSError:
            if self.kills:
                raise Killed from None
            raise

    def make_folder(self) -> None:
        self.tick("make_folder")
        super().make_folder()

    def reach(self, folder: Path) -> Files:
        return self if folder == self.folder else FailingDisk(folder, 0, disk=self.disk)
