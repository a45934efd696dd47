"""Every bound of the system, named once.

A constant is the default; `Limits` carries the values in force, and any of them can be set when a mailbox is opened.
Units stand last in a name.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from covenant.model.error import Malformed

DAY_MS: Final = 24 * 60 * 60 * 1000
SPAN_MS_MAX: Final = 10 * 365 * DAY_MS  # of a threshold or an interval: a longer one would never take effect

INTENT_TEXT_BYTES_MAX: Final = 256 * 1024
TASK_KIND_BYTES_MAX: Final = 256
KEY_BYTES_MAX: Final = 1024
TEXT_BYTES_MAX: Final = 16 * 1024
CONTENT_BLOCKS_MAX: Final = 1024
CONTENT_BYTES_MAX: Final = 4 * 1024 * 1024
CONTENT_DEPTH_MAX: Final = 64

BATCH_MAX: Final = 1000
PAGE_MAX: Final = 1000
PAGE_BYTES_MAX: Final = 8 * 1024 * 1024
SCAN_MAX: Final = 10_000
TREE_NODES_MAX: Final = 10_000
WAITERS_MAX: Final = 100_000
STEP_RECORDS_MAX: Final = 100
LEASES_REMEMBERED_MAX: Final = 64  # not settable: replaying a journal must not depend on it
RECEIPTS_REMEMBERED_MAX: Final = 64  # of one lease; not settable either
ACTIONS_HELD_MAX: Final = 1000  # the last ones granted to one peer; not settable either
LOG_TAIL_MAX: Final = 10_000
QUEUE_DEPTH_MAX: Final = 10_000_000
MESSAGES_MAX: Final = 100_000
CHUNKS_MAX: Final = 100_000
ARTIFACTS_MAX: Final = 1000
SIGNALS_MAX: Final = 10_000
ENTRIES_MAX: Final = 1_000_000
RESUMES_MAX: Final = 20
RUN_LAPSE_MS: Final = 15_000

RETENTION_MS: Final = 7 * DAY_MS
RETENTION_BYTES: Final = 8 * 1024 * 1024 * 1024
DEDUP_MS: Final = 30 * DAY_MS
ERROR_TTL_MS: Final = 60_000

SEGMENT_BYTES: Final = 64 * 1024 * 1024
SNAPSHOT_EVERY_BYTES: Final = 64 * 1024 * 1024
FINISHED_TAIL_MAX: Final = 4096
ARCHIVE_BATCH: Final = 512
UNARCHIVED_MAX: Final = 16_384
UNSYNCED_BYTES_MAX: Final = 64 * 1024 * 1024
REOPEN_DELAY_MS: Final = 1000
INLINE_SYNC_US_MAX: Final = 5000
CLOCK_CHECK_MS: Final = 30_000  # how late a jump of the clock may be noticed


class Limits(Struct, frozen=True, kw_only=True):
    """The bounds in force for one mailbox."""

    # What one call may carry.
    intent_text_bytes_max: int = INTENT_TEXT_BYTES_MAX
    task_kind_bytes_max: int = TASK_KIND_BYTES_MAX
    key_bytes_max: int = KEY_BYTES_MAX
    text_bytes_max: int = TEXT_BYTES_MAX  # reasons, error messages
    content_blocks_max: int = CONTENT_BLOCKS_MAX
    content_bytes_max: int = CONTENT_BYTES_MAX  # of all blocks of one task or result, as JSON
    content_depth_max: int = CONTENT_DEPTH_MAX  # of the JSON in a block
    batch_max: int = BATCH_MAX

    # What one answer may carry, and how far a filtered page looks before it hands back a cursor.
    page_max: int = PAGE_MAX
    page_bytes_max: int = PAGE_BYTES_MAX  # of the tasks, or of the results, as JSON; one of any size goes alone
    scan_max: int = SCAN_MAX
    tree_nodes_max: int = TREE_NODES_MAX
    waiters_max: int = WAITERS_MAX

    # What one commit may touch.
    step_records_max: int = STEP_RECORDS_MAX
    log_tail_max: int = LOG_TAIL_MAX  # commits that a store without a disk can tell of
    queue_depth_max: int = QUEUE_DEPTH_MAX  # ready tasks of one recipient

    # What one task may gather.
    messages_max: int = MESSAGES_MAX  # of each side
    chunks_max: int = CHUNKS_MAX
    artifacts_max: int = ARTIFACTS_MAX
    signals_max: int = SIGNALS_MAX  # that wait for one run
    entries_max: int = ENTRIES_MAX

    # When a worker that gives no sign of life may be taken for dead, and how often in a row its run is taken up again
    # without getting any further.
    run_lapse_ms: int = RUN_LAPSE_MS
    resumes_max: int = RESUMES_MAX

    # How long resolved tasks are kept, from the moment their result was drained; and cached errors.
    retention_ms: int = RETENTION_MS
    retention_bytes: int = RETENTION_BYTES
    dedup_ms: int = DEDUP_MS
    error_ttl_ms: int = ERROR_TTL_MS

    # The journal.
    segment_bytes: int = SEGMENT_BYTES
    snapshot_every_bytes: int = SNAPSHOT_EVERY_BYTES
    finished_tail_max: int = FINISHED_TAIL_MAX
    archive_batch: int = ARCHIVE_BATCH
    unarchived_max: int = UNARCHIVED_MAX  # beyond it, senders wait for the archive
    unsynced_bytes_max: int = UNSYNCED_BYTES_MAX
    reopen_delay_ms: int = REOPEN_DELAY_MS
    inline_sync_us_max: int = INLINE_SYNC_US_MAX  # a disk that syncs faster is waited for on the spot

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            least = 0 if name in _MAY_BE_NOTHING else 1
            if type(value) is not int or value < least:
                raise Malformed(f"{name} is a number from {least}", field=name)
        if self.dedup_ms < self.retention_ms:
            raise Malformed(
                "an id is remembered at least as long as its task: dedup_ms >= retention_ms", field="dedup_ms"
            )


_MAY_BE_NOTHING: Final = frozenset(
    ("retention_ms", "dedup_ms", "error_ttl_ms", "log_tail_max", "finished_tail_max", "inline_sync_us_max")
)
