"""The verbs of runs over the wire. A commit may be said again until it is heard: under its lease and its number it is
done once. So may a signal that has a key, and a resume by the same incarnation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from covenant.client.verbs.dialog import moved
from covenant.model import command as c
from covenant.model import query as q
from covenant.model.run import EntryFound, EntryPage, Resumed, RunLoaded, RunPage, RunSeen, Signaled, Standing
from covenant.model.view import Moved
from covenant.rules.envelope import check_id
from covenant.serve import wire as w

if TYPE_CHECKING:
    from covenant.client.engine import RemoteEngine


async def commit_run(x: RemoteEngine, command: c.CommitRun) -> Standing:
    lease_id = check_id(command.lease_id, "lease_id")
    request = w.CommitRun(lease_id=lease_id, commit=command.commit, incarnation=command.incarnation)
    done: w.StandingReply = await x.call(request, w.StandingReply, command.by)
    return done.standing


async def signal_run(x: RemoteEngine, command: c.SignalRun) -> Signaled:
    request = w.SignalRun(
        task_id=check_id(command.task_id, "task_id"),
        name=command.name,
        value=command.value,
        key=command.key,
        start=command.start,
    )
    done: w.SignaledReply = await x.call(request, w.SignaledReply, command.by)
    return Signaled(done.task_id, done.signal_id, done.generation, done.duplicate, done.started)


async def wake_run(x: RemoteEngine, command: c.WakeRun) -> Moved:
    task_id = check_id(command.task_id, "task_id")
    return moved(await x.call(w.WakeRun(task_id=task_id), w.MovedReply, command.by))


async def resume_run(x: RemoteEngine, command: c.ResumeRun) -> Resumed:
    request = w.ResumeRun(
        task_id=check_id(command.task_id, "task_id"),
        dead=command.dead,
        reason=command.reason,
        evidence=command.evidence,
        incarnation=command.incarnation,
    )
    done: w.ResumedReply = await x.call(request, w.ResumedReply, command.by)
    return Resumed(done.task, done.lease_id or "", done.attempt, done.generation, done.requeued)


async def judge_effect(x: RemoteEngine, command: c.JudgeEffect) -> Moved:
    request = w.JudgeEffect(
        task_id=check_id(command.task_id, "task_id"),
        effect=command.effect,
        verdict=command.verdict,
        reason=command.reason,
        value=command.value,
    )
    return moved(await x.call(request, w.MovedReply, command.by))


async def load_run(x: RemoteEngine, query: q.LoadRun) -> RunLoaded:
    request = w.LoadRun(lease_id=check_id(query.lease_id, "lease_id"), after=query.after)
    reply: w.RunLoadedReply = await x.call(request, w.RunLoadedReply, query.by)
    return reply.loaded


async def look_around(x: RemoteEngine, query: q.LookAround) -> Standing:
    request = w.LookAround(lease_id=check_id(query.lease_id, "lease_id"), wait=query.wait, every=query.every)
    reply: w.StandingReply = await x.call(request, w.StandingReply, query.by)
    return reply.standing


async def find_entry(x: RemoteEngine, query: q.FindEntry) -> EntryFound | None:
    request = w.FindEntry(lease_id=check_id(query.lease_id, "lease_id"), key=query.key)
    reply: w.EntryReply = await x.call(request, w.EntryReply, query.by)
    return reply.entry


async def get_run(x: RemoteEngine, query: q.GetRun) -> RunSeen:
    reply: w.RunReply = await x.call(w.GetRun(task_id=check_id(query.task_id, "task_id")), w.RunReply, query.by)
    return reply.run


async def list_runs(x: RemoteEngine, query: q.ListRuns) -> RunPage:
    request = w.ListRuns(limit=x.page(query.limit), status=query.status, cursor=x.cursor(query.cursor))
    page: w.Runs = await x.call(request, w.Runs, query.by)
    return RunPage(page.runs, page.cursor)


async def list_entries(x: RemoteEngine, query: q.ListEntries) -> EntryPage:
    request = w.RunEntries(
        task_id=check_id(query.task_id, "task_id"),
        limit=x.page(query.limit),
        leaf=query.leaf,
        before=query.before,
        every=query.every,
    )
    page: w.Entries = await x.call(request, w.Entries, query.by)
    return EntryPage(page.entries, page.before)
