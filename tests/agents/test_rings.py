"""A run among its own children: links between tasks may run in a circle."""

from __future__ import annotations

from covenant import Mailbox, TaskState
from covenant.model import command as c
from covenant.model.run import Wait
from tests.conformance.runs import RUN, part, parts, step
from tests.conformance.support import nothing_for


async def test_a_run_that_ends_together_with_what_it_waits_for_is_not_woken() -> None:
    async with Mailbox.open("memory:") as box:
        alice, bob, carol = (box.of(name) for name in ("alice@lab", "bob@lab", "carol@lab"))
        await alice.send_task(part(1, bob, parent=RUN))
        delivery = await bob.recv_task()
        await bob.commit_run(delivery, step(1, tasks=[part(10, carol)], wait=Wait(tasks=parts(10))))
        await box._engine.run(c.CancelChildren(None, RUN))
        assert (await alice.get_task(RUN)).state is TaskState.RESULT_PENDING
        assert await nothing_for(bob)
        await alice.recv_result()
        assert (await alice.get_task(RUN)).state is TaskState.RESOLVED
        assert await nothing_for(bob)
