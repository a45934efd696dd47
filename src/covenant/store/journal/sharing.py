"""Names that are kept once, above all those of agents. What is read from disk has them anew for each task, and a long
queue would take twice the memory after a start that it took before."""

from __future__ import annotations

from msgspec.structs import force_setattr

from covenant.model.agent import AgentId
from covenant.model.record import Key, Record, TaskRecord, Tombstone
from covenant.model.task import Task


class Sharing:
    """For the time of one start."""

    def __init__(self) -> None:
        self._agents: dict[tuple[str, str], AgentId] = {}

    def task(self, key: Key, task: Task) -> None:
        force_setattr(task, "id", key)
        if task.sender is not None:
            force_setattr(task, "sender", self._agent(task.sender))
        force_setattr(task, "recipient", self._agent(task.recipient))

    def record(self, key: Key, record: Record | Tombstone) -> None:
        if type(record) is not TaskRecord:
            return
        task = record.task
        self.task(key, task)
        assert task.sender is not None
        record.sender, record.recipient = task.sender.pubkey, task.recipient.pubkey
        if record.ready_for == record.recipient:
            record.ready_for = record.recipient

    def _agent(self, agent: AgentId) -> AgentId:
        return self._agents.setdefault((agent.pubkey, agent.display), agent)
