"""Runs from the command line."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from msgspec import Raw

from covenant import Mailbox, Result, Text
from covenant.model.run import EntryDraft, EntryRole, EntryType, RunCommit, Wait
from tests.cli.conftest import Served
from tests.cli.support import Client

WORKER = "worker-1"


class Agent:
    """Bob's worker: what it does in a run, at once."""

    def __init__(self, served: Served) -> None:
        self._served = served

    def do(self, work: Callable[[Mailbox], Awaitable[Any]]) -> Any:
        async def connected() -> Any:
            async with Mailbox.open(f"unix:{self._served.home}/sock", token=self._served.bob) as box:
                return await work(box.of(box.agent, incarnation=WORKER))

        return asyncio.run(connected())

    def commit(self, task_id: str, **step: Any) -> None:
        """Take the run up and make its next step."""

        async def work(bob: Mailbox) -> None:
            delivery = await bob.recv_task()
            assert delivery.task.id == task_id
            number = (await bob.load_run(delivery)).step + 1
            await bob.commit_run(delivery, RunCommit(number=number, **step))

        self.do(work)


@pytest.fixture
def agent(served: Served) -> Agent:
    return Agent(served)


def begin(covenant: Client) -> str:
    return str(covenant.json("a2a", "send", "bob", "write a report")["task_id"])


def test_a_run_that_awaits_input_is_shown_and_told(covenant: Client, agent: Agent) -> None:
    run = begin(covenant)
    entries = [
        EntryDraft("e1", EntryRole.USER, said=0),
        EntryDraft("e2", EntryRole.ASSISTANT, Raw(b'{"plan":["read \\u001b[31m"]}'), 1, EntryType.LLM_CALL),
    ]
    wait = Wait(signals=("approve", "reject.*"), until_ms=4_000_000_000_000)
    agent.commit(run, entries=entries, leaf=2, checkpoint=Raw(b'{"phase":"plan"}'), wait=wait)

    shown = covenant.json("runs", "show", run)
    assert (shown["kind"], shown["run"]["status"]) == ("run", "awaiting_input")
    said = covenant.text("runs", "show", run)
    assert "awaiting input" in said and "signal approve, signal reject.*, 2096" in said
    assert '{"phase": "plan"}' in said
    assert f"runs signal {run} approve VALUE" in said

    said = covenant.text("runs", "show", run, "--entries")
    assert "write a report" in said and "assistant (llm call)" in said and '"plan"' in said
    both = covenant.json("runs", "show", run, "--entries", "1")
    assert ([entry["number"] for entry in both["entries"]], both["before"]) == ([2], 1)
    assert f"--before {both['before']}" in covenant.text("runs", "show", run, "--entries", "1")

    listed = covenant.text("runs", "list", "--status", "awaiting-input")
    assert run in listed and "bob" in listed
    assert run not in covenant.text("runs", "list", "--status", "ended")
    assert "1 parked" in covenant.text("a2a", "status", "--state", "parked")
    assert f"runs signal {run} approve" in covenant.text("why", run)
    assert covenant.json("why", run)["reason"] == "awaiting_input"

    assert covenant.refused("runs", "signal", run, "effect:x") == "malformed"
    assert covenant.text("runs", "signal", run, "approve", '{"by": "me"}', "--key", "k") == f"told {run}: approve\n"
    assert "it was told before" in covenant.text("runs", "signal", run, "approve", "--key", "k")
    assert covenant.json("runs", "signal", run, "note", "just text")["kind"] == "run_signaled"
    assert covenant.json("why", run)["reason"] == "woken"
    assert "unheard" in covenant.text("runs", "show", run)
    agent.commit(run, leaf=2, result=Result(run, "ok", (Text("done"),)))
    assert "answered" in covenant.text("runs", "show", run)


def test_a_run_that_failed_says_why(covenant: Client, agent: Agent) -> None:
    run = begin(covenant)
    agent.commit(run, result=Result(run, "error", (), "no paper"))
    assert "It is over: answered, with an error: no paper." in covenant.text("runs", "show", run)


def test_a_run_that_awaits_work_tells_for_what(covenant: Client, agent: Agent) -> None:
    run = begin(covenant)
    agent.commit(run, wait=Wait(until_ms=4_000_000_000_000))
    assert covenant.json("why", run)["reason"] == "awaiting_work"
    assert "It sleeps, until 2096" in covenant.text("why", run)
    assert covenant.text("runs", "cancel", run, "--reason", "enough") == f"canceled {run}\n"
    assert covenant.json("runs", "show", run)["run"]["outcome"] == "canceled"
    assert covenant.refused("runs", "signal", run, "go") == "task_terminal"


def test_a_run_of_a_dead_worker_is_resumed(covenant: Client, agent: Agent) -> None:
    run = begin(covenant)
    agent.commit(run)
    assert covenant.json("why", run)["command"] == f"covenant runs resume {run} --reason REASON"
    assert f"worker      {WORKER}" in covenant.text("runs", "show", run)
    assert covenant.refused("runs", "resume", run, "--reason", "gone") == "not_proven_dead"
    told = ("runs", "resume", run, "--reason", "gone", "--attested")
    assert covenant.refused(*told, "--dead", "another") == "lease_mismatch"
    assert covenant.text(*told) == f"{run} waits for a worker of bob\n"
    assert covenant.json("runs", "show", run)["run"]["status"] == "woken"
    assert "resume" in covenant.text("audit", "recent", "--task", run)
    agent.commit(run, result=Result(run, "ok", ()))


def test_an_effect_in_doubt_is_judged(covenant: Client, agent: Agent) -> None:
    run = begin(covenant)
    agent.commit(run, wait=Wait(signals=("effect:charge the card",), doubt="charge the card"))
    said = covenant.text("runs", "show", run)
    assert "effect in doubt" in said
    assert f"runs judge {run} 'charge the card' done|failed|retry --reason REASON" in said
    assert covenant.json("why", run)["reason"] == "effect_in_doubt"
    judged = ("runs", "judge", run, "charge the card", "done", "--reason", "the bank says so", "--value", '{"id": 7}')
    assert covenant.text(*judged) == f"judged charge the card of {run}: done\n"
    assert covenant.refused(*judged) == "not_in_doubt"
    assert "maybe" in covenant("runs", "judge", run, "x", "maybe", "--reason", "x", code=2).err
    agent.commit(run, result=Result(run, "ok", ()))


def test_what_is_no_run_says_so(covenant: Client) -> None:
    task = begin(covenant)
    assert covenant.refused("runs", "show", task) == "not_a_run"
    assert covenant.refused("runs", "resume", task, "--reason", "x") == "not_a_run"
    covenant("a2a", "cancel", task)
