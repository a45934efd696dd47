"""What the commonest commands are sure to ask for first: known without asking them.

A hint is no rule: what it leaves out is asked for later, and what it brings in vain does no harm.
"""

from __future__ import annotations

from typing import Any

from covenant.model.agent import AgentId
from covenant.model.command import Call, Command, DrainResults, LeaseTasks, PostResult, SendTask
from covenant.model.task import Idempotency, Result, Task
from covenant.store.postgres.rows import ANSWERS, READY
from covenant.store.postgres.want import First, Fresh

_ID_LENGTH = 36
_LIMIT_MAX = 1000


def hint(command: Command | Call) -> list[Any] | None:
    """None where it has to be asked."""
    asked = command.command if type(command) is Call else command
    if type(asked) is SendTask:
        return _sent(asked)
    if type(asked) is PostResult:
        result = asked.result
        task_id = result.task_id if type(result) is Result else None
        return [task_id] if _is_id(task_id) else None
    if type(asked) is LeaseTasks:
        return None if asked.kinds is not None else _first(READY, asked.recipient, asked.limit)
    if type(asked) is DrainResults:
        return _first(ANSWERS, asked.peer, asked.limit)
    return None


def is_plainest(command: Command | Call) -> bool:
    """Whether it is what most are: a new task without an id or a key of its own, a result, or the wish for the first
    that stands somewhere. Of these, rules ask for nothing but what is known to them, or to stand there."""
    asked = command.command if type(command) is Call else command
    if type(asked) is SendTask:
        task = asked.task
        return type(task) is Task and not task.id and asked.key is None and task.idempotency is None
    if type(asked) is LeaseTasks:
        return (
            type(asked.limit) is int and asked.limit == 1 and asked.kinds is None and type(asked.recipient) is AgentId
        )
    if type(asked) is DrainResults:
        return type(asked.peer) is AgentId and type(asked.limit) is int and asked.limit == 1
    return type(asked) is PostResult


def _sent(command: SendTask) -> list[Any] | None:
    """A new task that nothing else depends on; under an id of the sender's, if nothing is known under that."""
    task = command.task
    if type(task) is not Task or command.key is not None:
        return None
    if task.idempotency is not None and (type(task.idempotency) is not Idempotency or task.is_idempotent):
        return None
    if not task.id:
        return []
    return [Fresh(task.id)] if _is_id(task.id) else None


def _is_id(task_id: object) -> bool:
    return type(task_id) is str and len(task_id) == _ID_LENGTH


def _first(shelf: bytes, agent: object, limit: object) -> list[Any] | None:
    if type(agent) is not AgentId or type(limit) is not int or not 0 < limit <= _LIMIT_MAX:
        return None
    return [First(shelf, agent.pubkey, limit)]
