"""The mailbox for scripts."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import threading
from pathlib import Path

import pytest

import covenant
from covenant import AgentId, CovenantError, Limits, Result, Task, Text
from covenant.sync import Mailbox
from tests.daemons import OPERATOR_TOKEN, Realmful, start_daemon


def test_a_script_sends_receives_and_answers(tmp_path: Path) -> None:
    with Mailbox.open(f"file:{tmp_path}/data") as box:
        ann, bob = box.of("ann@lab"), box.of("bob@lab")
        ann.send_task(Task(recipient=bob.agent, intent_text="draft"))
        delivery = bob.recv_task()
        bob.send_result(Result.ok(delivery, [Text("done")]))
        assert ann.recv_result().status == "ok"
    with Mailbox.open(f"file:{tmp_path}/data") as box:
        assert box.recent_tasks(1)[0].intent_text == "draft"


def test_a_waiting_call_is_answered_from_another_thread() -> None:
    with Mailbox.open("memory:") as box:
        ann, bob = box.of("ann@lab"), box.of("bob@lab")
        received: list[str] = []
        worker = threading.Thread(target=lambda: received.append(bob.recv_task().task.intent_text))
        worker.start()
        ann.send_task(Task(recipient=bob.agent, intent_text="from afar"))
        worker.join(timeout=30)
        assert received == ["from afar"]


def test_a_refusal_is_raised_as_it_is() -> None:
    with Mailbox.open("memory:") as box, pytest.raises(CovenantError) as refused:
        box.get_task("00000000-0000-4000-8000-000000000000")
    assert refused.value.code == "unknown_task"


def test_a_box_that_does_not_open_leaves_no_thread_behind(tmp_path: Path) -> None:
    with Mailbox.open(f"file:{tmp_path}/data"):
        before = threading.active_count()
        with pytest.raises(CovenantError), Mailbox.open(f"file:{tmp_path}/data"):
            pass
        assert threading.active_count() == before


def test_it_is_opened_with_the_same_arguments() -> None:
    assert (
        inspect.signature(Mailbox.open).parameters.keys() == inspect.signature(covenant.Mailbox.open).parameters.keys()
    )


async def test_a_script_brings_its_token_to_a_daemon() -> None:
    daemon = await start_daemon("memory:", Limits())
    realm = Realmful()
    await realm.enroll(daemon)

    def script() -> str:
        with Mailbox.open(str(daemon.url), token=realm.tokens["alice@lab"]) as alice:
            alice.send_task(Task(recipient=AgentId("bob@lab"), intent_text="draft"))
        with Mailbox.open(str(daemon.url), token=OPERATOR_TOKEN, tokens=realm.tokens) as box:
            return box.of("bob@lab").recv_task().task.intent_text

    assert await asyncio.to_thread(script) == "draft"
    await daemon.stop()


def test_every_verb_of_the_mailbox_is_there() -> None:
    verbs = {name for name, _ in inspect.getmembers(covenant.Mailbox, callable) if not name.startswith("_")}
    assert verbs <= set(dir(Mailbox))


def test_closing_while_other_threads_call_answers_them_all() -> None:
    for _ in range(5):
        box = Mailbox.open("memory:").__enter__()
        codes: list[str] = []

        def ask(box: Mailbox = box, codes: list[str] = codes) -> None:
            try:
                while True:
                    box.recent_tasks()
            except CovenantError as refusal:
                codes.append(refusal.code)

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        box.close()
        for thread in threads:
            thread.join(timeout=30)
            assert not thread.is_alive()
        assert codes == ["store_closed"] * 4


def test_closing_twice_does_no_harm_and_a_call_afterwards_has_a_code() -> None:
    with Mailbox.open("memory:") as box:
        box.close()
        with pytest.raises(CovenantError) as refused:
            box.recent_tasks()
        assert refused.value.code == "store_closed"


def test_a_forked_process_is_told_that_the_box_is_not_its_own(tmp_path: Path) -> None:
    """It has no copy of the thread that the box lives in: a call would wait for ever, and so would its closing."""
    told = tmp_path / "told"
    with Mailbox.open(f"file:{tmp_path}/data") as box:
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            try:
                box.recent_tasks()
            except CovenantError as refusal:
                told.write_text(refusal.code)
            box.close()
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert told.read_text() == "malformed"
        box.of("ann@lab").send_task(Task(recipient=box.of("bob@lab").agent, intent_text="still here"))
