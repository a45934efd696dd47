"""What is said on a task while it is done."""

from __future__ import annotations

from typing import TYPE_CHECKING

from covenant.model import command as c
from covenant.model.view import (
    Moved,
)
from covenant.rules.envelope import check_flag, check_id, seal_artifact, seal_message
from covenant.serve import wire as w

if TYPE_CHECKING:
    from covenant.client.engine import RemoteEngine


def moved(done: w.MovedReply) -> Moved:
    return Moved(done.task_id, done.generation)


async def add_message(x: RemoteEngine, command: c.AddMessage) -> Moved:
    request = w.AddMessage(
        task_id=check_id(command.task_id, "task_id"),
        message=seal_message(command.message, x.limits),
        if_generation=command.if_generation,
    )
    return moved(await x.call(request, w.MovedReply, command.by))


async def update(x: RemoteEngine, command: c.UpdateTask) -> Moved:
    lease_id = check_id(command.lease_id, "lease_id")
    message = None if command.message is None else seal_message(command.message, x.limits)
    request: w.Request
    if command.asks is None:
        request = w.Update(lease_id=lease_id, message=message, receipt=command.receipt)
    else:
        request = w.Ask(
            lease_id=lease_id, asks=command.asks, message=message, after=command.after, receipt=command.receipt
        )
    return moved(await x.call(request, w.MovedReply, command.by))


async def add_artifact(x: RemoteEngine, command: c.AddArtifact) -> Moved:
    check_flag(command.append, "append")
    check_flag(command.last, "last")
    request = w.AddArtifact(
        lease_id=check_id(command.lease_id, "lease_id"),
        artifact=seal_artifact(command.artifact, x.limits),
        append=command.append,
        last=command.last,
        receipt=command.receipt,
    )
    return moved(await x.call(request, w.MovedReply, command.by))


async def reject(x: RemoteEngine, command: c.RejectTask) -> Moved:
    lease_id, message = check_id(command.lease_id, "lease_id"), seal_message(command.message, x.limits)
    return moved(await x.call(w.Reject(lease_id=lease_id, message=message), w.MovedReply, command.by))


async def reply_directly(x: RemoteEngine, command: c.ReplyDirectly) -> Moved:
    lease_id, message = check_id(command.lease_id, "lease_id"), seal_message(command.message, x.limits)
    return moved(await x.call(w.ReplyDirectly(lease_id=lease_id, message=message), w.MovedReply, command.by))
