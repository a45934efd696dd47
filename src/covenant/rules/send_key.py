"""Keys under which messages are sent, so that one whose answer was lost can be sent again. (Contract 9, 17.)

A key is of one caller and one agent; for a message to a task, of that task too. It deduplicates the send, says nothing
about duplicate safety, and is free again when its task is past retention.
"""

from __future__ import annotations

import hashlib

from covenant.model.error import IdempotencyConflict
from covenant.model.record import SEND_KEY_PREFIX, Key, SendKey, TaskRecord
from covenant.rules.context import Context, View
from covenant.rules.envelope import check_key
from covenant.rules.retention import is_retained


def send_key(sender: str, recipient: str, key: str, ctx: Context, task_id: str = "") -> Key:
    """Nothing but the key may hold a line break, so no two of these are written alike."""
    check_key(key, "Idempotency-Key", ctx.limits.key_bytes_max)
    name = "\n".join((sender, recipient, task_id, key))
    return SEND_KEY_PREFIX + hashlib.sha256(name.encode()).hexdigest()


def sent_under(place: Key, digest: str, view: View, ctx: Context) -> TaskRecord | None:
    """The task to which the same message led before. Another message under the same key is refused."""
    known = view.get(place)
    if not isinstance(known, SendKey):
        return None
    record = view.get(known.task_id)
    if not isinstance(record, TaskRecord) or record.sent_order > known.order or not is_retained(record, ctx):
        return None  # the task has gone, and its id may be somebody else's by now
    if known.digest != digest:
        raise IdempotencyConflict("this key was used for another message", task_id=known.task_id)
    return record
