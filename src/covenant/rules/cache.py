"""The result cache: followers get the leader's result, and an operator may forget an entry. (Contract 11.)"""

from __future__ import annotations

from covenant.model import event as e
from covenant.model.agent import AgentId
from covenant.model.audit import AuditRow
from covenant.model.command import ForgetCached, SettleSlot
from covenant.model.error import NotPermitted, UnknownTask
from covenant.model.record import Key, Slot
from covenant.model.view import CachedResult
from covenant.rules.context import Commit, Context, View, actor
from covenant.rules.envelope import check_size, check_text
from covenant.rules.send import answer_from
from covenant.rules.sight import lent


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
    check_size(command.slot, "entry_id", ctx.limits.text_bytes_max)
    slot = view.get(command.slot)
    if not isinstance(slot, Slot) or slot.result is None or not may_see_slot(command.by, slot):
        raise UnknownTask(f"no cached result {command.slot}", id=command.slot)
    if command.by is not None:
        raise NotPermitted("only the operator forgets cached results", id=command.slot)
    if view.followers(command.slot, 1):
        raise NotPermitted("its followers are still being answered", id=command.slot)
    row = AuditRow("cache", ctx.now, actor(command.by), "forget", task_id=slot.source, reason=command.reason)
    return Commit((e.SlotClosed(command.slot),), True, (row,))


def may_see_slot(by: AgentId | None, slot: Slot) -> bool:
    return by is None or by.pubkey in (slot.cache_key.sender, slot.cache_key.recipient)


def cached(key: Key, slot: Slot) -> CachedResult:
    assert slot.result is not None and slot.source is not None
    return CachedResult(key, slot.cache_key, lent(slot.result), slot.source, slot.cached_ms, slot.due_ms)
