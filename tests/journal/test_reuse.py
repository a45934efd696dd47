"""An id that is used anew, and the archive: whatever the journal comes back from, it tells of the new life alone, and
of all of it. (Contract 9.)"""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from covenant import CovenantError, Limits, OpenMailbox, RepairRequest, Requeue, Result, Task, Text
from covenant.model import command as c
from covenant.model.message import Artifact, Message, Part
from covenant.model.push import PushConfig
from covenant.model.run import EntryDraft, EntryRole, Memo, RunCommit
from covenant.store.clock import ManualClock

from .support import dump, journal_of, open_journal, tidy

ID = "11111111-0000-4000-8000-000000000000"
IN_MEMORY = Limits()
ARCHIVED = Limits(finished_tail_max=0, archive_batch=1, segment_bytes=3_000, snapshot_every_bytes=10**9)
SNAPPED = Limits(finished_tail_max=0, archive_batch=1, segment_bytes=3_000, snapshot_every_bytes=2_000)


def message(text: str) -> Message:
    return Message(message_id=text, role="ROLE_USER", parts=(Part(text=text),))


async def live(box: OpenMailbox, word: str, times: int, ends: bool = True) -> None:
    """A task with everything that can belong to one, so many times."""
    ann, bob = box.of("ann@lab"), box.of("bob@lab")
    engine = journal_of(box)
    hook = PushConfig(id=word, url="https://example.org/hook")
    task = Task(id=ID, recipient=bob.agent, intent_text=word)
    sent = await engine.run(c.SendTask(ann.agent, task, protocol=True, push=hook, key=f"{word} first"))
    assert (sent.generation, sent.duplicate) == (1, False)
    for number in range(times):
        slow = await bob.recv_task()
        await box.repair_task(RepairRequest(ID, Requeue("operator_accepted"), "stuck"))
        with pytest.raises(CovenantError, match="lease"):
            await bob.send_result(Result.ok(slow, [Text(word)]))
        await engine.run(c.AddMessage(ann.agent, ID, message(f"{word} {number}"), key=f"{number}"))
    held = await bob.recv_task()
    for number in range(times):
        name = f"{word} {number}"
        await bob.artifact(held, Artifact(artifact_id=word, parts=(Part(text=name),)), append=number > 0)
        await bob.send_result(Result.partial(held, [Text(name)]))
        draft = EntryDraft(id=name, role=EntryRole.ASSISTANT, parent=number, key=name)
        step = RunCommit(number=number + 1, entries=[draft], memos=[Memo(name)], leaf=number + 1)
        await bob.commit_run(held, step)
        await ann.signal_run(ID, "go", key=name)
    if ends:
        await bob.commit_run(held, RunCommit(number=times + 1, result=Result(ID, "ok", [Text(word)])))


async def others(box: OpenMailbox, count: int = 12) -> None:
    """Work beside it, that keeps the archive busy."""
    ann = box.of("ann@lab")
    for _ in range(count):
        await ann.send_task(Task(recipient=ann.agent, intent_text="beside"))
        await ann.send_result(Result.ok(await ann.recv_task(), [Text("done")]))
        await ann.recv_result()
    await tidy(box)


def told(box: OpenMailbox) -> dict[str, bytes]:
    """What there is under the id. (Send keys do not name it.)"""
    return {key: body for key, body in dump(box).items() if ID in key}


def kinds(found: dict[str, Any]) -> Counter[str]:
    return Counter(key.partition(":")[0] if ":" in key else "task" for key in found)


def of_a_life(times: int, is_open: bool) -> Counter[str]:
    """Messages are signals to the run, too; steps and signals are forgotten when it is over."""
    found = dict.fromkeys(("said", "chunk", "part", "late", "entry", "mark"), times) | {"task": 1, "run": 1, "push": 1}
    return Counter(found | {"step": times, "signal": 2 * times} if is_open else found)


@pytest.mark.parametrize("limits", [IN_MEMORY, ARCHIVED, SNAPPED], ids=["memory", "archived", "snapped"])
@pytest.mark.parametrize("ends", [False, True], ids=["open", "ended"])
@pytest.mark.parametrize("saved", ["never", "before", "between"])
async def test_only_the_new_life_of_an_id_comes_back(tmp_path: Path, limits: Limits, ends: bool, saved: str) -> None:
    """After a crash, an orderly end, and the loss of the archive; before and after a compaction."""
    clock = ManualClock()
    folder, crashed = tmp_path / "data", tmp_path / "crashed"
    async with open_journal(folder, limits=limits, clock=clock) as box:
        if saved == "before":
            await others(box)
            await box.compact()  # nothing is past its time: a snapshot, and no more
        await live(box, "former", 3)
        await others(box)
        if saved == "between":
            await box.compact()
        clock.advance(limits.dedup_ms + 1)
        await live(box, "later", 2, ends)
        await others(box)
        expected = told(box)
        assert kinds(expected) == of_a_life(2, not ends)
        assert b"former" not in b"".join(expected.values())
        shutil.copytree(folder, crashed)
    for path in (folder, crashed):
        for _ in range(2):
            async with open_journal(path, limits=limits, clock=clock) as box:
                assert told(box) == expected
                await box.compact()
                assert told(box) == expected
                await others(box)
            for lost in (*path.glob("archive*"), *path.glob("snapshot-*")):
                lost.unlink()
        async with open_journal(path, limits=limits, clock=clock) as box:
            assert told(box) == expected


async def test_what_was_given_back_is_not_taken_for_what_the_archive_says_of_it(tmp_path: Path) -> None:
    """Its answer never reached anybody: it is open again, and keeps what belongs to it."""
    clock = ManualClock()
    async with open_journal(tmp_path / "data", limits=ARCHIVED, clock=clock) as box:
        ann, bob = box.of("ann@lab"), box.of("bob@lab")
        await ann.send_task(Task(id=ID, recipient=bob.agent, intent_text="work"))
        await ann.add_message(ID, "more")
        await bob.send_result(Result.ok(await bob.recv_task(), [Text("done")]))
        await ann.recv_result()
        await others(box)
        await journal_of(box).run(c.GiveBack(ann.agent, (), ((ID, 0),)))
        expected = told(box)
        assert kinds(expected) == Counter(task=1, said=1)
        clock.advance(ARCHIVED.retention_ms + 1)
        await box.compact()
        assert told(box) == expected
    async with open_journal(tmp_path / "data", limits=ARCHIVED, clock=clock) as box:
        assert told(box) == expected


async def test_what_happened_late_in_a_former_life_is_passed_over_after_a_crash(tmp_path: Path) -> None:
    """The lines behind the snapshot tell of it, and the archive has let go of it since."""
    clock = ManualClock()
    folder, crashed = tmp_path / "data", tmp_path / "crashed"
    async with open_journal(folder, limits=ARCHIVED, clock=clock) as box:
        ann, bob = box.of("ann@lab"), box.of("bob@lab")
        await ann.send_task(Task(id=ID, recipient=bob.agent, intent_text="former"))
        await bob.send_result(Result.ok(await bob.recv_task(), [Text("done")]))
        await ann.recv_result()
        await others(box)
        await box.compact()
        await journal_of(box).run(c.GiveBack(ann.agent, (), ((ID, 0),)))
        await ann.recv_result()
        await others(box)
        clock.advance(ARCHIVED.dedup_ms + 1)
        await ann.send_task(Task(id=ID, recipient=bob.agent, intent_text="later"))
        await others(box)
        expected = told(box)
        shutil.copytree(folder, crashed)
    async with open_journal(crashed, limits=ARCHIVED, clock=clock) as box:
        assert told(box) == expected
        assert (await box.of("bob@lab").recv_task()).task.intent_text == "later"
