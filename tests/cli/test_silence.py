"""A daemon that does not answer, or answers by hanging up: the program says so, and ends."""

from __future__ import annotations

import signal
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cli.support import Client, run, serving

SHORT: tuple[str, ...] = ("--timeout", "300ms")


@contextmanager
def listening(path: Path, answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """The address of something that takes connections and is no daemon."""
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(path))
    server.listen()
    taken: list[socket.socket] = []

    def serve() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            taken.append(connection)
            answer(connection)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"unix:{path}"
    finally:
        server.shutdown(socket.SHUT_RDWR)
        server.close()
        thread.join()
        for connection in taken:
            connection.close()


def test_a_daemon_that_is_stopped_is_told_as_such(home: Path) -> None:
    """Over the socket and over HTTP: its kernel takes connections all the same."""
    with serving(home) as (daemon, told):
        token = (home / "operator.token").read_text().strip()
        daemon.signal(signal.SIGSTOP)
        try:
            for address in (f"unix:{home}/sock", told["http"]):
                lost = run("--url", address, "--token", token, *SHORT, "a2a", "status", "--json")
                assert (lost.code, lost.json["code"], lost.json["outcome"]) == (1, "unreachable", "unknown")
                assert lost.json["message"] == f"the daemon at {address} does not answer; is it stopped?"
        finally:
            daemon.signal(signal.SIGCONT)
        assert Client(home).json("a2a", "status")["tasks"] == []


@pytest.mark.parametrize(
    "call",
    [
        ("why", "00000000-0000-0000-0000-000000000000"),
        ("a2a", "send", "bob", "hi"),
        ("a2a", "next", "--wait", "0.1"),
        ("a2a", "send", "bob", "hi", "--wait", "0.1"),
        ("peers", "list"),
        ("runs", "list"),
        ("agents", "list"),
        ("audit", "recent"),
    ],
)
def test_no_call_waits_for_a_daemon_that_never_answers(covenant: Client, home: Path, call: tuple[str, ...]) -> None:
    with listening(home / "mute", lambda _: None) as address:
        lost = covenant("--url", address, "--token", "x", *call, *SHORT, "--json", code=1)
    assert lost.json["code"] == "unreachable" and "does not answer" in lost.json["message"]


def test_a_wait_that_was_asked_for_is_no_silence(covenant: Client) -> None:
    """The limit comes on top of it."""
    idle = Client(covenant.home, covenant.json("peers", "enroll", "idle")["token"])
    assert idle.json("a2a", "next", "--wait", "0.6", *SHORT)["task"] is None


def test_version_says_its_own_before_it_asks(covenant: Client, home: Path) -> None:
    """A person sees it at once, and not behind the silence of a daemon."""
    mine = covenant.text("--version").split()[1]
    with listening(home / "mute", lambda _: None) as address:
        asked = covenant("--url", address, "--token", "x", "version", *SHORT)
        with covenant.running("--url", address, "--token", "x", "--timeout", "1h", "version") as waiting:
            assert waiting.read_until("covenant") == f"covenant {mine}\n"
    silent = f"the daemon at {address} does not answer; is it stopped? (unreachable)"
    assert asked.out.splitlines() == [f"covenant {mine}", silent]


REFUSAL = b'{"kind":"error","code":"too_many_connections","message":"too many connections","retry_after_ms":1000}'


@pytest.mark.parametrize("waits_for_words", [False, True])
def test_what_a_daemon_said_before_it_hung_up_is_told(covenant: Client, home: Path, waits_for_words: bool) -> None:
    def refuse(connection: socket.socket) -> None:
        if waits_for_words:
            connection.recv(1)
        connection.sendall(struct.pack(">I", len(REFUSAL)) + REFUSAL)
        connection.close()

    with listening(home / "full", refuse) as address:
        answers = [covenant("--url", address, "--token", "x", "a2a", "status", "--json", code=1) for _ in range(10)]
    assert {answer.json["code"] for answer in answers} == {"too_many_connections"}
