"""Covenant: the durable exchange between agents.

async with Mailbox.open("file:./data") as box:
    planner, writer = box.of("planner@lab"), box.of("writer@lab")
    await planner.send_task(Task(recipient=writer.agent, intent_text="draft the brief"))
"""

from covenant.mailbox import Mailbox, OpenMailbox
from covenant.model.agent import AgentId
from covenant.model.audit import AuditRow
from covenant.model.content import Audio, Content, Image, Json, Resource, ResourceContents, ResourceLink, Text
from covenant.model.error import CovenantError
from covenant.model.limits import Limits
from covenant.model.record import Outcome, TaskState
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
    LeaseStatus,
    Posted,
    QueueEntry,
    QueuePage,
    Released,
    Sent,
    Tree,
    TreeNode,
)
from covenant.worker import WorkContext, Worker

__all__ = [
    "AgentId",
    "Answer",
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
    "Json",
    "LeaseStatus",
    "Limits",
    "Mailbox",
    "OpenMailbox",
    "Outcome",
    "Posted",
    "QueueEntry",
    "QueuePage",
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
    "Task",
    "TaskState",
    "Text",
    "Tree",
    "TreeNode",
    "WorkContext",
    "Worker",
]
