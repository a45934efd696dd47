"""Where a webhook may lead: out into the world, and nowhere on this machine or in its network."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from typing import Any, Final

import pytest

from covenant.a2a import wire as a
from covenant.a2a.fault import INVALID_PARAMS
from covenant.exchange.outbound import Outbound
from covenant.model.push import Authentication
from covenant.rules.address import is_public, is_surely_private
from covenant.rules.push import PUSHES_MAX
from tests.a2a.conftest import Town, says
from tests.a2a.receiver import Receiver
from tests.a2a.test_operations import refused

PRIVATE: Final = (
    *("127.0.0.1", "127.8.8.8", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1"),
    *("0.0.0.0", "0.1.2.3", "224.0.0.1", "240.0.0.1", "255.255.255.255", "192.0.2.1", "198.18.0.1"),
    *("::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "fd12::1", "fec0::1", "ff02::1", "2001:db8::1", "100::1"),
    *("::ffff:127.0.0.1", "::ffff:10.0.0.1", "::127.0.0.1"),
    *("64:ff9b::7f00:1", "64:ff9b::a00:1", "64:ff9b:1::1", "2002:7f00:1::1", "2001:0:7f00:1::1"),
)
PUBLIC: Final = ("1.1.1.1", "8.8.8.8", "93.184.216.34", "2606:4700:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808")


@pytest.mark.parametrize("address", PRIVATE)
def test_no_address_of_this_machine_or_its_network_is_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", PUBLIC)
def test_an_address_out_in_the_world_is_public(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize(
    ("host", "is_private"),
    [
        ("localhost", True),
        ("LOCALHOST.", True),
        ("x.localhost", True),
        ("127.1", True),
        ("2130706433", True),
        ("0x7f.0.0.1", True),
        ("0177.0.0.1", True),
        ("::ffff:7f00:1", True),
        ("1.1.1.1", False),
        ("localhost.example.com", False),
        ("hooks.example.com", False),
    ],
)
def test_some_hosts_are_private_by_their_name_alone(host: str, is_private: bool) -> None:
    assert is_surely_private(host) is is_private


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:8080/hook",
        "http://[::1]:8080/hook",
        "http://[::ffff:10.0.0.1]/hook",
        "http://169.254.169.254/latest/meta-data",
        "http://localhost:8080/hook",
        "http://2130706433/hook",
        "https://user:secret@hooks.example.com/",
        "https://hooks.example.com:22/",
        "https://hooks.example.com:25/",
        "https://hooks.example.com:99999/",
        "ftp://hooks.example.com/",
        "file:///etc/passwd",
        "//hooks.example.com",
        "https://",
        "https://hooks example.com/",
        "https://hooks.example.com\0/",
        "https://hooks.example.com/\r\nX-Other: 1",
    ],
)
async def test_a_url_that_cannot_be_right_is_refused_at_once_and_nothing_is_sent(town: Town, url: str) -> None:
    task = await town.send()
    settings = a.PushSettings(task_id=task.id, url=url)
    assert await refused(town.operations.set_push(town.alice, town.agent, settings)) is INVALID_PARAMS
    ride = a.PushSettings(url=url)
    assert await refused(town.send(says("other"), task_push_notification_config=ride)) is INVALID_PARAMS
    listing = await town.operations.list_tasks(town.alice, town.agent, a.ListTasks())
    assert [known.id for known in listing.tasks] == [task.id]


@pytest.mark.parametrize("scheme", ["", " "])
async def test_who_is_to_be_told_by_a_scheme_names_one(town: Town, scheme: str) -> None:
    """As over gRPC, where an empty one is none."""
    task = await town.send()
    settings = a.PushSettings(task_id=task.id, url="https://example.com/", authentication=Authentication(scheme, "x"))
    assert await refused(town.operations.set_push(town.alice, town.agent, settings)) is INVALID_PARAMS


async def test_a_task_has_so_many_webhooks_and_no_more(town: Town) -> None:
    task = await town.send()
    for number in range(PUSHES_MAX):
        config = a.PushSettings(task_id=task.id, id=f"w-{number}", url="https://hooks.example.com/")
        await town.operations.set_push(town.alice, town.agent, config)
    await town.operations.set_push(town.alice, town.agent, config)
    more = a.PushSettings(task_id=task.id, id="more", url="https://hooks.example.com/")
    assert (await refused(town.operations.set_push(town.alice, town.agent, more))).reason == "REQUEST_TOO_LARGE"


@pytest.fixture
async def outside() -> AsyncIterator[Outbound]:
    outside = Outbound()
    yield outside
    await outside.close()


@pytest.mark.parametrize(
    ("host", "trouble"),
    [
        ("127.0.0.1", "address_refused"),
        ("localhost", "address_refused"),
        ("[::ffff:127.0.0.1]", "address_refused"),
        ("0.0.0.0", "address_refused"),
        ("127.1", "bad_url"),
        ("2130706433", "bad_url"),
    ],
)
async def test_what_leads_here_is_not_connected_to(
    outside: Outbound, receiver: Receiver, host: str, trouble: str
) -> None:
    assert await outside.post(receiver.url("one", host), b"{}", {}) == trouble
    assert receiver.posts == []


async def test_the_address_is_checked_that_is_connected_to_whatever_the_name_said_before(
    outside: Outbound, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = [["10.0.0.1"], ["127.0.0.1"], ["::1", "127.0.0.1"]]

    def lookup(host: str, port: int, *rest: Any) -> list[Any]:
        assert host == "rebinding.example"
        kind = socket.SOCK_STREAM
        families = {True: socket.AF_INET6, False: socket.AF_INET}
        return [(families[":" in found], kind, 6, "", (found, port)) for found in answers.pop(0)]

    monkeypatch.setattr("covenant.exchange.outbound.socket.getaddrinfo", lookup)
    for _ in range(3):
        assert await outside.post(receiver.url("one", "rebinding.example"), b"{}", {}) == "address_refused"
        assert outside._session is not None
        connector: Any = outside._session.connector
        connector.clear_dns_cache()
    assert (answers, receiver.posts) == ([], [])


async def test_a_name_that_nobody_has_is_unreachable(outside: Outbound) -> None:
    assert await outside.post("http://nobody.invalid/", b"{}", {}) == "unreachable"
