"""What is said of a command that has been committed, where something fails behind it: never that it was not stored."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from covenant import Limits
from covenant.model import command as c
from covenant.store.journal.engine import Journal
from tests.a2a.served import VERSION, Site, events_of, message, start_site
from tests.until import until

HOOK: Final = "https://hook.example/told"


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    async with httpx.AsyncClient() as client:
        site = await start_site(client, store=f"file:{tmp_path}/data", limits=Limits(reopen_delay_ms=20))
        yield site
        await site.daemon.stop()


def break_behind(site: Site, kind: type[c.Command], monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk fails as soon as a command of this kind is durable; then the journal reopens by itself."""
    journal: Any = site.exchange.store
    assert isinstance(journal, Journal)
    run = journal.run

    async def run_and_break(command: c.Command | c.Call) -> Any:
        reply = await run(command)
        if isinstance(command, c.Call) and isinstance(command.command, kind):
            journal._fail(OSError(errno.EIO, "it is gone"))
        return reply

    monkeypatch.setattr(journal, "run", run_and_break)


async def is_open_again(site: Site) -> None:
    store: Any = site.exchange.store
    await until(lambda: store.is_up)


async def rotate(site: Site) -> None:
    """alice gets another token, while she waits under the one that she had."""
    await until(lambda: site.exchange.waits.total == 1)
    await site.exchange.trust.rotate(site.exchange.authenticate(site.tokens["alice"]), None)


def said_in(refused: dict[str, Any]) -> tuple[Any, Any]:
    """Which error it is, and what it says of the call."""
    metadata = refused["data"][0]["metadata"]
    return metadata["code"], metadata.get("outcome")


async def test_a_cancel_that_was_made_is_not_said_to_be_not_stored(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    task = await site.start()
    break_behind(site, c.CancelTask, monkeypatch)
    refused = await site.rpc("CancelTask", {"id": task["id"]})
    assert said_in(refused) == ("store_unavailable", "unknown")
    await is_open_again(site)
    assert (await site.rpc("GetTask", {"id": task["id"]}))["status"]["state"] == "TASK_STATE_CANCELED"


@pytest.mark.parametrize("method", ["SendMessage", "SendStreamingMessage"])
async def test_a_message_that_was_taken_is_not_said_to_be_not_stored(
    site: Site, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    break_behind(site, c.SendTask, monkeypatch)
    settings = {"returnImmediately": True}
    refused = await site.rpc(method, {"message": message(), "configuration": settings})
    assert said_in(refused) == ("store_unavailable", "unknown")
    await is_open_again(site)
    assert (await site.lease()).task.message is not None


async def test_a_webhook_that_was_set_or_deleted_is_answered_as_done(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is nothing behind it to be looked at."""
    task = await site.start()
    hook = {"taskId": task["id"], "id": "hook"}
    with monkeypatch.context() as breaking:
        break_behind(site, c.SetPush, breaking)
        made = await site.rpc("CreateTaskPushNotificationConfig", {**hook, "url": HOOK})
    assert made["url"] == HOOK
    await is_open_again(site)
    assert (await site.rpc("GetTaskPushNotificationConfig", hook))["url"] == HOOK
    with monkeypatch.context() as breaking:
        break_behind(site, c.DropPush, breaking)
        assert not await site.rpc("DeleteTaskPushNotificationConfig", hook)
    await is_open_again(site)
    assert not (await site.rpc("ListTaskPushNotificationConfigs", {"taskId": task["id"]})).get("configs")


async def test_who_loses_its_token_while_it_waits_is_not_told_that_its_message_was_refused(site: Site) -> None:
    """It is turned away from what it would see next; what it has sent is done all the same."""
    sending = asyncio.ensure_future(site.rpc("SendMessage", {"message": message()}))
    delivery = await site.lease()
    await rotate(site)
    assert said_in(await sending) == ("unauthenticated", "unknown")
    await site.finish(delivery)


async def test_who_loses_its_token_in_a_stream_is_not_told_that_its_message_was_refused(site: Site) -> None:
    call = {"jsonrpc": "2.0", "id": "c-1", "method": "SendStreamingMessage", "params": {"message": message()}}
    told = {**VERSION, **site.auth("alice")}
    async with site.client.stream("POST", site.url, json=call, headers=told) as response:
        delivery = await site.lease()
        await rotate(site)
        events = await events_of(response.aiter_lines())
    assert said_in(events[-1][1]["error"]) == ("unauthenticated", "unknown")
    await site.finish(delivery)
