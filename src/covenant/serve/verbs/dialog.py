"""What sender and holder say to each other while a task is open."""

from __future__ import annotations

from covenant.exchange.exchange import Exchange
from covenant.model import command as c
from covenant.model.error import Malformed
from covenant.model.message import Message, Part, Role
from covenant.model.peer import Caller
from covenant.model.view import Moved
from covenant.serve import wire as w
from covenant.serve.verbs.received import wait_of


async def add_message(x: Exchange, caller: Caller, r: w.AddMessage) -> w.MovedReply:
    message = _message(x, r.message, r.text, "ROLE_USER")
    return moved_to(await x.run(caller, c.AddMessage(x.by(caller), r.task_id, message, r.if_generation)))


async def update(x: Exchange, caller: Caller, r: w.Update) -> w.MovedReply:
    message = _message(x, r.message, r.text)
    return moved_to(await x.run(caller, c.UpdateTask(x.by(caller), r.lease_id, message, receipt=r.receipt)))


async def ask(x: Exchange, caller: Caller, r: w.Ask) -> w.MovedReply:
    message = None if r.message is None and r.text is None else _message(x, r.message, r.text)
    return moved_to(await x.run(caller, c.UpdateTask(x.by(caller), r.lease_id, message, r.asks, r.after, r.receipt)))


async def add_artifact(x: Exchange, caller: Caller, r: w.AddArtifact) -> w.MovedReply:
    command = c.AddArtifact(x.by(caller), r.lease_id, r.artifact, r.append, r.last, r.receipt)
    return moved_to(await x.run(caller, command))


async def reject(x: Exchange, caller: Caller, r: w.Reject) -> w.MovedReply:
    return moved_to(await x.run(caller, c.RejectTask(x.by(caller), r.lease_id, _message(x, r.message, r.text))))


async def reply_directly(x: Exchange, caller: Caller, r: w.ReplyDirectly) -> w.MovedReply:
    return moved_to(await x.run(caller, c.ReplyDirectly(x.by(caller), r.lease_id, _message(x, r.message, r.text))))


def _message(x: Exchange, message: Message | None, text: str | None, role: Role = "ROLE_AGENT") -> Message:
    if (message is None) == (text is None):
        raise Malformed("one of message and text is needed", field="message")
    if message is not None:
        return message
    return Message(message_id=x.store.context.ids.lease(), role=role, parts=(Part(text=text),))


def moved_to(moved: Moved) -> w.MovedReply:
    return w.MovedReply(task_id=moved.task_id, generation=moved.generation)


async def list_inputs(x: Exchange, caller: Caller, r: w.ListInputs) -> w.InputsReply:
    heard = await x.listen(caller, r.lease_id, r.after, wait_of(r.wait_ms), r.cancel_known)
    return w.InputsReply(
        task_id=heard.task_id,
        generation=heard.generation,
        inputs=heard.inputs,
        cancel_requested=heard.cancel_requested,
        cancel_reason=heard.cancel_reason,
    )
