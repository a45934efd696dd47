"""The runs of durable agents: for their holders, and for those who look at them or wake them."""

from __future__ import annotations

from covenant.exchange.exchange import Exchange
from covenant.model import command as c
from covenant.model import query as q
from covenant.model.peer import Caller
from covenant.model.run import EntryPage, Resumed, RunPage, Signaled
from covenant.serve import wire as w
from covenant.serve.verbs.dialog import moved_to


async def commit_run(x: Exchange, caller: Caller, r: w.CommitRun) -> w.StandingReply:
    return w.StandingReply(standing=await x.run(caller, x.commit_run(caller, r.lease_id, r.commit, r.incarnation)))


async def load_run(x: Exchange, caller: Caller, r: w.LoadRun) -> w.RunLoadedReply:
    return w.RunLoadedReply(loaded=await x.ask(caller, q.LoadRun(x.by(caller), r.lease_id, r.after)))


async def look_around(x: Exchange, caller: Caller, r: w.LookAround) -> w.StandingReply:
    return w.StandingReply(standing=await x.ask(caller, q.LookAround(x.by(caller), r.lease_id, r.wait, r.every)))


async def find_entry(x: Exchange, caller: Caller, r: w.FindEntry) -> w.EntryReply:
    return w.EntryReply(entry=await x.ask(caller, q.FindEntry(x.by(caller), r.lease_id, r.key)))


async def list_runs(x: Exchange, caller: Caller, r: w.ListRuns) -> w.Runs:
    page: RunPage = await x.ask(caller, q.ListRuns(x.by(caller), r.limit, r.status, r.cursor))
    return w.Runs(runs=list(page.runs), cursor=page.cursor)


async def get_run(x: Exchange, caller: Caller, r: w.GetRun) -> w.RunReply:
    return w.RunReply(run=await x.ask(caller, q.GetRun(x.by(caller), r.task_id)))


async def run_entries(x: Exchange, caller: Caller, r: w.RunEntries) -> w.Entries:
    query = q.ListEntries(x.by(caller), r.task_id, r.limit, r.leaf, r.before, r.every)
    page: EntryPage = await x.ask(caller, query)
    return w.Entries(entries=list(page.entries), before=page.before)


async def signal_run(x: Exchange, caller: Caller, r: w.SignalRun) -> w.SignaledReply:
    command = c.SignalRun(x.by(caller), r.task_id, r.name, r.value, r.key, r.start)
    done: Signaled = await x.run(caller, command)
    return w.SignaledReply(
        task_id=done.task_id,
        signal_id=done.signal_id,
        generation=done.generation,
        duplicate=done.duplicate,
        started=done.started,
    )


async def wake_run(x: Exchange, caller: Caller, r: w.WakeRun) -> w.MovedReply:
    return moved_to(await x.run(caller, c.WakeRun(x.by(caller), r.task_id)))


async def resume_run(x: Exchange, caller: Caller, r: w.ResumeRun) -> w.ResumedReply:
    command = c.ResumeRun(x.by(caller), r.task_id, r.incarnation, r.dead, r.evidence, r.reason)
    done: Resumed = await x.run(caller, command)
    return w.ResumedReply(
        task=done.task,
        attempt=done.attempt,
        generation=done.generation,
        lease_id=done.lease_id or None,
        requeued=list(done.requeued),
    )


async def judge_effect(x: Exchange, caller: Caller, r: w.JudgeEffect) -> w.MovedReply:
    command = c.JudgeEffect(x.by(caller), r.task_id, r.effect, r.verdict, r.reason, r.value)
    return moved_to(await x.run(caller, command))
