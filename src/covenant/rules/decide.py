"""The decider: one command in, one commit or refusal out. The table says where each rule lives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec import structs

from covenant.model import command as c
from covenant.model.record import TaskRecord
from covenant.model.repair import RepairOutcome
from covenant.model.view import Canceled
from covenant.rules import (
    audit,
    cache,
    cancel,
    card,
    dialog,
    door,
    expiry,
    grant,
    lease,
    peer,
    push,
    repair,
    result,
    retention,
    send,
    undo,
)
from covenant.rules.context import Commit, Context, View
from covenant.rules.evolve import evolve
from covenant.rules.run import commit as run_commit
from covenant.rules.run import effect, resume, signal, sweep, wake

DECIDE: dict[type, Callable[[Any, View, Context], Commit]] = {
    c.SendTask: send.send,
    c.ShowTask: dialog.show,
    c.AddMessage: dialog.add_message,
    c.UpdateTask: dialog.update,
    c.AddArtifact: dialog.add_artifact,
    c.RejectTask: dialog.reject,
    c.ReplyDirectly: dialog.reply,
    c.LeaseTasks: lease.lease,
    c.BeatLease: lease.heartbeat,
    c.ReleaseLease: lease.release,
    c.PostResult: result.post,
    c.DrainResults: result.drain,
    c.GiveBack: undo.give_back,
    c.CancelTask: cancel.cancel,
    c.CancelChildren: cancel.cancel_children,
    c.Expire: expiry.expire,
    c.RepairTask: repair.repair,
    c.RetryStale: repair.retry_stale,
    c.SettleSlot: cache.settle,
    c.ForgetCached: cache.forget,
    c.CompactHistory: retention.compact,
    c.CommitRun: run_commit.commit,
    c.ResumeRun: resume.resume,
    c.WakeRun: wake.wake,
    c.SignalRun: signal.signal,
    c.JudgeEffect: effect.judge,
    c.SweepRun: sweep.sweep,
    c.EnrollPeer: peer.enroll,
    c.RotateToken: peer.rotate,
    c.RevokePeer: peer.revoke,
    c.GrantCapability: grant.grant,
    c.RevokeCapability: grant.revoke,
    c.EndGrants: grant.end_grants,
    c.SetPush: push.set_push,
    c.DropPush: push.drop_push,
    c.NotePush: push.note_push,
    c.PublishCard: card.publish,
    c.WithdrawCard: card.withdraw,
    c.UseRight: door.use_right,
    c.SignHead: audit.sign_head,
    c.NoteRefusal: audit.note_refusal,
}


def decide(command: c.Command | c.Call, view: View, ctx: Context) -> Commit:
    if type(command) is c.Call:
        return door.admit(command, view, ctx, decide)
    commit = DECIDE[type(command)](command, view, ctx)
    for event in commit.events:
        if type(event) in wake.ENDING:  # most commits end nothing
            wake.follow(commit, view)
            if isinstance(commit.reply, Canceled | RepairOutcome):
                commit.reply = _as_folded(commit.reply, commit, view, ctx)
            break
    return commit


def _as_folded(reply: Canceled | RepairOutcome, commit: Commit, view: View, ctx: Context) -> Canceled | RepairOutcome:
    """Return the reply with the task's state and generation after all events of the commit, also those for its run."""
    record = view.get(reply.task_id)
    for event in commit.events:
        if event.key == reply.task_id:
            record = evolve(record, event, 0, ctx.now)
    assert isinstance(record, TaskRecord)
    return structs.replace(reply, state=record.state, generation=record.generation)
