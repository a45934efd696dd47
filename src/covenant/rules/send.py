"""Sending: a new task, the same send again, a follower of open work, or a hit in the cache. (Contract 1, 5, 10, 11.)"""

from __future__ import annotations

from covenant.model import event as e
from covenant.model.command import SendTask
from covenant.model.error import IdempotencyConflict, QueueFull, TaskConflict
from covenant.model.record import Slot, TaskRecord, Tombstone
from covenant.model.task import Task
from covenant.model.view import Sent
from covenant.rules.cache import answer_from, is_stale
from covenant.rules.context import Commit, Context, View
from covenant.rules.envelope import cache_key_of, digest_of, seal_task, slot_key
from covenant.rules.push import brought
from covenant.rules.retention import is_free, is_retained
from covenant.rules.send_key import send_key, sent_under
from covenant.rules.sight import leader_of


def send(command: SendTask, view: View, ctx: Context) -> Commit:
    task = seal_task(command.task, command.by, ctx)
    known = view.get(task.id) if command.task.id else None  # an id that was made just now is new
    if known is not None and not is_free(known, ctx):
        assert isinstance(known, (TaskRecord, Tombstone))
        return _again(task, known, view, ctx)
    place, digest = None, ""
    if command.key is not None:
        assert task.sender is not None
        place, digest = send_key(task.sender.pubkey, task.recipient.pubkey, command.key, ctx), digest_of(task)
        first = sent_under(place, digest, view, ctx)
        if first is not None:
            return Commit((), Sent(first.task.id, first.generation, duplicate=True))
    if view.depth(task.recipient.pubkey) >= ctx.limits.queue_depth_max:
        raise QueueFull(f"{task.recipient} has too many tasks waiting", limit=ctx.limits.queue_depth_max)
    if task.is_idempotent:
        commit = _send_keyed(task, command, view, ctx)
    else:
        commit = Commit((_sent(task, command),), Sent(task.id, 1))
    if known is None:
        commit.fresh = task.id
    if place is not None:
        commit.events = (*commit.events, e.KeyTaken(place, task.id, digest))
    if command.push is not None:
        commit.events = (*commit.events, *brought(command.push, task.id, 0, (), ctx))
    return commit


def _sent(
    task: Task, command: SendTask, slot: str | None = None, follows: bool = False, replayed: bool = False
) -> e.Sent:
    return e.Sent(task.id, task, slot, follows, replayed, command.protocol, command.shown)


def _again(task: Task, known: TaskRecord | Tombstone, view: View, ctx: Context) -> Commit:
    """The same id: the same send when the content is the same, a conflict when it is not. Ids are unique over all
    parties, so a taken one cannot be hidden; nothing is told of what took it."""
    digest = known.digest if isinstance(known, Tombstone) else digest_of(known.task)
    if digest != digest_of(task):
        raise TaskConflict(f"the id {task.id} is taken by other content", task_id=task.id)
    if isinstance(known, Tombstone) or not is_retained(known, ctx):
        return Commit((), Sent(task.id, 0, duplicate=True))
    return Commit(
        (), Sent(task.id, known.generation, duplicate=True, replayed=known.replayed, follows=leader_of(known, view))
    )


def _send_keyed(task: Task, command: SendTask, view: View, ctx: Context) -> Commit:
    cache_key = cache_key_of(task)
    key = slot_key(cache_key)
    digest = digest_of(task)
    slot = view.get(key)
    if slot is None or (isinstance(slot, Slot) and is_stale(key, slot, view, ctx)):
        opened = e.SlotOpened(key, cache_key, digest, task.id)
        return Commit((_sent(task, command, key), opened), Sent(task.id, 1))
    assert isinstance(slot, Slot)
    if slot.digest != digest:
        raise IdempotencyConflict(
            "this idempotency key is in use for other content",
            task_id=task.id,
            key=cache_key.key,
            held_by=slot.leader or slot.source,
        )
    if slot.result is None:
        return Commit((_sent(task, command, key, follows=True),), Sent(task.id, 1, follows=slot.leader))
    replay = answer_from(slot, task.id)
    generation = 3 if replay.result.content else 2
    return Commit((_sent(task, command, key, replayed=True), replay), Sent(task.id, generation, replayed=True))
