"""What a refusal says to somebody who has just begun: what is wrong, and what would be right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.conformance.support import refused

from covenant import AgentId, CovenantError, Mailbox, Task, TaskState, sync
from covenant.rules.grant import ACTIONS, PEER_ACTIONS, check_action


def test_a_name_that_is_none_is_repeated_but_not_at_any_length() -> None:
    with pytest.raises(CovenantError, match="'bad name' is no name of an agent: bob, or bob@lab"):
        AgentId.named("bad name")
    with pytest.raises(CovenantError) as refusal:
        AgentId.named("x" * 100_000)
    assert len(refusal.value.message) < 300


def test_an_action_that_is_none_is_told_which_there_are() -> None:
    with pytest.raises(CovenantError) as refusal:
        check_action("a2a.foo")
    assert all(action in refusal.value.message for action in (*ACTIONS, *PEER_ACTIONS))


@pytest.mark.parametrize("url", ["memory:", "file:{folder}", "postgresql://nobody@127.0.0.1:1/x"])
async def test_a_box_that_was_never_opened_says_how_it_is(url: str, tmp_path: Path) -> None:
    box = Mailbox.open(url.format(folder=tmp_path / "data"))
    for call in (box.recent_tasks(), box.recv_task(), box.send_task(Task(recipient=AgentId("bob"), intent_text="x"))):
        with pytest.raises(CovenantError, match=r"is not open: .*`async with`.*`await`") as refusal:
            await call
        assert refusal.value.code == "store_closed"


def test_a_box_for_scripts_that_was_never_opened_says_how_it_is() -> None:
    box = sync.Mailbox.open("memory:")
    with pytest.raises(CovenantError, match="`with`"):
        box.recent_tasks()
    box.close()


async def test_a_store_where_a_file_is_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in ("file", "file/below"):
        with pytest.raises(CovenantError, match="a file is there, and no folder") as refusal:
            await Mailbox.open(f"file:{tmp_path / path}")
        assert refusal.value.code == "store_unavailable"


@pytest.mark.parametrize("content", ["done", [b"done"], ["done"], [4]])
async def test_content_that_is_none_is_told_what_a_block_is(content: Any) -> None:
    async with Mailbox.open("memory:") as box:
        bob = box.of("bob")
        with pytest.raises(CovenantError, match=r"\[Text\('…'\)\]") as refusal:
            await bob.send_task(Task(recipient=bob.agent, intent_text="x", content=content))
        assert refusal.value.code == "malformed"


async def test_a_state_that_is_none_is_told_which_there_are() -> None:
    async with Mailbox.open("memory:") as box:
        with refused("malformed") as refusal:
            await box.task_queue(state="open")
    assert all(f"`{state}`" in refusal.value.message for state in TaskState)
