"""The decider: one command in, one commit or refusal out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from covenant.model import command as c
from covenant.model.event import Drained, Leased
from covenant.rules import cache, end, lease, repair, result, retention, send
from covenant.rules.context import Commit, Context, View


def decide(command: c.Command, view: View, ctx: Context) -> Commit:
    return DECIDE[type(command)](command, view, ctx)


def undo(commit: Commit) -> list[c.Command]:
    """What gives back the leases and results that a commit handed to a caller who is gone."""
    leases = tuple(event.lease_id for event in commit.events if type(event) is Leased)
    results = tuple(event.key for event in commit.events if type(event) is Drained)
    return [c.GiveBack(None, leases, results)] if leases or results else []


def give_back(command: c.GiveBack, view: View, ctx: Context) -> Commit:
    return Commit((*lease.unlease(command.leases, view), *result.undrain(command.results, view)))


DECIDE: dict[type, Callable[[Any, View, Context], Commit]] = {
    c.SendTask: send.send,
    c.LeaseTasks: lease.lease,
    c.PostResult: result.post,
    c.DrainResults: result.drain,
    c.GiveBack: give_back,
    c.BeatLease: lease.heartbeat,
    c.ReleaseLease: lease.release,
    c.CancelTask: end.cancel,
    c.CancelChildren: end.cancel_children,
    c.Expire: end.expire,
    c.RepairTask: repair.repair,
    c.RetryStale: repair.retry_stale,
    c.SettleSlot: cache.settle,
    c.ForgetCached: cache.forget,
    c.CompactHistory: retention.compact,
}
