"""The newest rows of the audit, page by page, and what a row tells. (Contract 28.)"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Final, get_args

import pytest

from covenant import AuditRow, ForceError, RepairRequest, Result, Text
from covenant.exchange.history import recent_rows
from covenant.model.audit import Logged
from covenant.model.event import Event
from covenant.rules.audit import rows_of
from covenant.store.clock import ManualClock
from tests.conformance.support import plain, uid
from tests.exchange import Site, site


@pytest.fixture
async def there(clock: ManualClock) -> AsyncIterator[Site]:
    async with site(clock) as there:
        for number in range(1, 7):
            await there.alice.send_task(plain(there.bob, id=uid(number)))
            delivery = await there.bob.try_recv_task_for()
            assert delivery is not None
            if number % 2:
                await there.bob.send_result(Result.ok(delivery, [Text("done")]))
            else:  # one commit of several rows
                await there.box.repair_task(RepairRequest(delivery.task.id, ForceError("given up"), "stuck"))
        yield there


async def pages(there: Site, limit: int) -> list[list[AuditRow]]:
    found: list[list[AuditRow]] = []
    before = None
    while True:
        rows, before = await recent_rows(there.exchange.store, limit, before, lambda row: True)
        if rows:
            found.append(rows)
        if before is None:
            return found


async def pages_of_whole_commits(there: Site, limit: int) -> list[list[AuditRow]]:
    found: list[list[AuditRow]] = [[]]
    log = await there.exchange.store.log_back(None, 1000)
    assert any(len(list(rows_of(logged))) > 1 for logged in log)
    for logged in log:
        if len(found[-1]) >= limit:
            found.append([])
        found[-1] += reversed(list(rows_of(logged)))
    return found


@pytest.mark.parametrize("limit", range(1, 12))
async def test_a_page_ends_with_the_commit_that_fills_it(there: Site, limit: int) -> None:
    """It has at most the other rows of its last commit more than were asked for, and the next begins behind it."""
    found = await pages(there, limit)
    assert found == await pages_of_whole_commits(there, limit)
    assert len(found) > 1


async def test_a_row_names_the_lease_and_what_came_of_it(there: Site) -> None:
    """Contract 28: who did what, under which lease."""
    rows = [row for page in await pages(there, 1000) for row in page]
    leases = {row.task_id: row.lease_id for row in rows if row.kind == "leased"}
    assert len(leases) == 6
    answered = [row for row in rows if row.kind == "answered"]
    assert len(answered) == 3
    assert all(row.lease_id == leases[row.task_id] and row.reason == "ok" for row in answered)


TOLD_BY_A_ROW_OF_THEIR_OWN: Final = (  # the check, the decision or the refusal beside them
    *("enrolled", "token_rotated", "peer_revoked", "granted", "grant_used", "grant_revoked"),
    *("card_published", "card_withdrawn", "run_resumed"),
)
BOOKKEEPING: Final = (
    *("heartbeat", "said", "chunk_kept", "push_delivered", "head_signed", "key_taken", "action_held"),
    *("slot_opened", "slot_led", "slot_cached", "slot_closed"),
    *("run_begun", "run_waits", "task_awaited", "run_closed", "run_swept"),
    *("step_kept", "step_dropped", "entry_kept", "marked", "signal_taken"),
)


@pytest.mark.parametrize("kind", get_args(Event), ids=lambda kind: kind.__struct_config__.tag)
def test_an_event_is_a_row_unless_another_row_tells_it_or_nobody_asks(kind: Any) -> None:
    """Contract 28: as docs/audit.md has it. An event that is new says here which it is."""
    event = kind(**{**dict.fromkeys(kind.__struct_fields__), "key": uid(1)})
    tag = kind.__struct_config__.tag
    rows = [row.kind for row in rows_of(Logged(1, 1, "someone", (event,)))]
    assert rows == ([] if tag in (*TOLD_BY_A_ROW_OF_THEIR_OWN, *BOOKKEEPING) else [tag])
