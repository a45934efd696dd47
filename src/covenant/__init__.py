"""Covenant: the durable exchange between agents.

async with Mailbox.open("file:./data") as box:
    planner, writer = box.of("planner@lab"), box.of("writer@lab")
    await planner.send_task(Task(recipient=writer.agent, intent_text="draft the brief"))

This is the table of contents: a name is imported when it is first asked for, so that whoever needs one of them, or only
`covenant --help`, does not wait for all.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from covenant.exchange.alerts import Thresholds
    from covenant.mailbox import Mailbox, OpenMailbox
    from covenant.model.agent import AgentId
    from covenant.model.audit import AuditRow
    from covenant.model.content import (
        Audio,
        Content,
        Image,
        Json,
        Resource,
        ResourceContents,
        ResourceLink,
        Text,
        read_block,
    )
    from covenant.model.error import CovenantError, InvalidInput, StoreError
    from covenant.model.limits import Limits
    from covenant.model.message import Artifact, Message, Part
    from covenant.model.record import Asks, Outcome, TaskState
    from covenant.model.repair import (
        ForceError,
        RepairOutcome,
        RepairRequest,
        Requeue,
        RetryPolicy,
        RetryReport,
        SkipReason,
    )
    from covenant.model.task import Idempotency, Result, Task
    from covenant.model.view import (
        Answer,
        CachedResult,
        CachePage,
        Canceled,
        Compaction,
        Delivery,
        Input,
        Inputs,
        LeaseStatus,
        Moved,
        Posted,
        QueueEntry,
        QueuePage,
        Released,
        Sent,
        Tree,
        TreeNode,
    )
    from covenant.store.clock import ManualClock
    from covenant.worker import Release, WorkContext, Worker

    __version__: str

__all__ = [
    "AgentId",
    "Answer",
    "Artifact",
    "Asks",
    "Audio",
    "AuditRow",
    "CachePage",
    "CachedResult",
    "Canceled",
    "Compaction",
    "Content",
    "CovenantError",
    "Delivery",
    "ForceError",
    "Idempotency",
    "Image",
    "Input",
    "Inputs",
    "InvalidInput",
    "Json",
    "LeaseStatus",
    "Limits",
    "Mailbox",
    "ManualClock",
    "Message",
    "Moved",
    "OpenMailbox",
    "Outcome",
    "Part",
    "Posted",
    "QueueEntry",
    "QueuePage",
    "Release",
    "Released",
    "RepairOutcome",
    "RepairRequest",
    "Requeue",
    "Resource",
    "ResourceContents",
    "ResourceLink",
    "Result",
    "RetryPolicy",
    "RetryReport",
    "Sent",
    "SkipReason",
    "StoreError",
    "Task",
    "TaskState",
    "Text",
    "Thresholds",
    "Tree",
    "TreeNode",
    "WorkContext",
    "Worker",
    "read_block",
]

_CONTENTS: Final = {
    "covenant.exchange.alerts": ("Thresholds",),
    "covenant.mailbox": (
        "Mailbox",
        "OpenMailbox",
    ),
    "covenant.model.agent": ("AgentId",),
    "covenant.model.audit": ("AuditRow",),
    "covenant.model.content": (
        "Audio",
        "Content",
        "Image",
        "Json",
        "Resource",
        "ResourceContents",
        "ResourceLink",
        "Text",
        "read_block",
    ),
    "covenant.model.error": (
        "CovenantError",
        "InvalidInput",
        "StoreError",
    ),
    "covenant.model.limits": ("Limits",),
    "covenant.model.message": (
        "Artifact",
        "Message",
        "Part",
    ),
    "covenant.model.record": (
        "Asks",
        "Outcome",
        "TaskState",
    ),
    "covenant.model.repair": (
        "ForceError",
        "RepairOutcome",
        "RepairRequest",
        "Requeue",
        "RetryPolicy",
        "RetryReport",
        "SkipReason",
    ),
    "covenant.model.task": (
        "Idempotency",
        "Result",
        "Task",
    ),
    "covenant.model.view": (
        "Answer",
        "CachedResult",
        "CachePage",
        "Canceled",
        "Compaction",
        "Delivery",
        "Input",
        "Inputs",
        "LeaseStatus",
        "Moved",
        "Posted",
        "QueueEntry",
        "QueuePage",
        "Released",
        "Sent",
        "Tree",
        "TreeNode",
    ),
    "covenant.store.clock": ("ManualClock",),
    "covenant.worker": (
        "Release",
        "WorkContext",
        "Worker",
    ),
}
_MODULE_OF: Final = {name: module for module, names in _CONTENTS.items() for name in names}


if not TYPE_CHECKING:  # or a type checker would believe in any name

    def __getattr__(name: str) -> Any:
        if name == "__version__":
            return import_module("covenant.version").VERSION
        module = _MODULE_OF.get(name)
        if module is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = globals()[name] = getattr(import_module(module), name)
        return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
