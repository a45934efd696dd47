"""The result cache, and the slots behind it. (Contract 11.)

A slot is one idempotency key. While its leader works, later sends under the key follow; when the leader is answered,
the result is cached and the followers get it; when the leader ends without an answer, the oldest follower leads.
"""

from __future__ import annotations

from msgspec import structs

from covenant.model import event as e
from covenant.model.agent import AgentId
from covenant.model.audit import AuditRow
from covenant.model.command import Command, ForgetCached, SettleSlot
from covenant.model.error import NotPermitted, UnknownTask
from covenant.model.record import Key, Slot, TaskRecord
from covenant.model.task import Result
from covenant.model.view import CachedResult
from covenant.rules.context import Commit, Context, View
from covenant.rules.envelope import check_asked, check_text
from covenant.rules.sight import lent


def is_stale(key: Key, slot: Slot, view: View, ctx: Context) -> bool:
    """A cached error whose time is over, and that nobody waits for any more."""
    return slot.due_ms is not None and slot.due_ms <= ctx.now and not view.followers(key, 1)


def answer_from(slot: Slot, task_id: str) -> e.Answered:
    """The cached result, as the answer to another task."""
    assert slot.result is not None
    cached = slot.result
    answer = Result(task_id, cached.status, cached.content, cached.error_message, message=cached.message)
    return e.Answered(task_id, answer)


def keep_answer(record: TaskRecord, final: Result, view: View, ctx: Context) -> tuple[list[e.Event], list[Command]]:
    """A leader was answered: `ok` is kept for good, an error for a while. What follows is to settle the followers."""
    slot = record.slot
    if slot is None:
        return [], []
    view.get(slot)  # a key that a commit names is read first: on a shared store, that is what locks it
    expires_ms = None if final.status == "ok" else ctx.now + ctx.limits.error_ttl_ms
    message = final.message
    if message is not None:  # what was said to one is said to all: it belongs to no task
        message = structs.replace(message, task_id=None, context_id=None)
    kept = Result(final.task_id, final.status, final.content, final.error_message, message=message)
    then: list[Command] = [SettleSlot(None, slot)] if view.followers(slot, 1) else []
    return [e.SlotCached(slot, final.task_id, kept, expires_ms)], then


def settle(command: SettleSlot, view: View, ctx: Context) -> Commit:
    """One step: the next followers are answered."""
    slot = view.get(command.slot)
    if not isinstance(slot, Slot) or slot.result is None:
        return Commit(())
    limit = ctx.limits.step_records_max
    followers = view.followers(command.slot, limit)
    then = (command,) if len(followers) == limit else ()
    return Commit(tuple(answer_from(slot, follower.task.id) for follower in followers), then=then)


def forget(command: ForgetCached, view: View, ctx: Context) -> Commit:
    check_text(command.reason, "reason", ctx.limits.text_bytes_max)
    slot = visible_slot(command.slot, command.by, view, ctx)
    if command.by is not None and ctx.granted is None:
        raise NotPermitted("only the operator forgets cached results", entry_id=command.slot)
    if view.followers(command.slot, 1):
        raise NotPermitted("its followers are still being answered", entry_id=command.slot)
    row = AuditRow("cache", "forget", task_id=slot.source, reason=command.reason)
    return Commit((e.SlotClosed(command.slot),), True, (row,))


def visible_slot(key: Key, by: AgentId | None, view: View, ctx: Context) -> Slot:
    """The cached result, or the one refusal that does not tell absent from hidden."""
    check_asked(key, "entry_id", ctx.limits.text_bytes_max)
    slot = view.get(key)
    if (
        isinstance(slot, Slot) and slot.result is not None
    ):  # inlined: a call only for slots that exist would show in the time
        parties = (slot.cache_key.sender, slot.cache_key.recipient)
        if by is None or by.pubkey in parties:
            return slot
    raise UnknownTask(f"no cached result {key}", entry_id=key)


def cached(key: Key, slot: Slot) -> CachedResult:
    assert slot.result is not None and slot.source is not None
    return CachedResult(key, slot.cache_key, lent(slot.result), slot.source, slot.cached_ms, slot.due_ms)


def succession(record: TaskRecord, view: View) -> list[e.Event]:
    """A leader has ended without an answer: its oldest follower takes over the work."""
    slot = None if record.slot is None else view.get(record.slot)
    if not isinstance(slot, Slot) or slot.leader != record.task.id:
        return []  # it led nothing: a follower is only detached
    assert record.slot is not None
    followers = view.followers(record.slot, 1)
    if not followers:
        return [e.SlotClosed(record.slot)]
    heir = followers[0].task.id
    return [e.SlotLed(record.slot, heir), e.Promoted(heir)]


def expire_slot(key: Key, slot: Slot, view: View, ctx: Context) -> list[e.Event]:
    """The time of a cached error is over. Who still waits for it gets it; the slot closes when nobody does."""
    followers = view.followers(key, ctx.limits.step_records_max)
    if followers:
        return [answer_from(slot, follower.task.id) for follower in followers]
    return [e.SlotClosed(key)]
