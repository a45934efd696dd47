"""A real daemon and its clients, which send bytes of their own over HTTP, the Unix socket and the command line."""

from __future__ import annotations

import http.client
import itertools
import json
import shutil
import signal
import socket
import struct
import tempfile
import uuid
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias
from urllib.parse import urlsplit

from tests.cli.support import LAST_LINE, PATIENCE_S, Client, Process, fields, process

Json: TypeAlias = dict[str, Any]

WORKING: Final = ("a2a.send.*", "a2a.respond.*")
_numbers: Final = itertools.count(1)


class Answer(NamedTuple):
    status: int
    body: Json


class RealDaemon:
    """`python -m covenant serve`: one home and store, served by one process after another."""

    def __init__(self, store: str | None = None, operator_token: str | None = None) -> None:
        self.home = Path(tempfile.mkdtemp(prefix="cov-"))  # short: a socket has to fit into it
        self.address = ""
        self._store = store
        self._token = operator_token
        self._life = ExitStack()
        self._process: Process | None = None
        self._operator: Peer | None = None

    def start(self, **env: str) -> None:
        options = ("--home", str(self.home), "--http", "127.0.0.1:0")
        store = () if self._store is None else ("--store", self._store)
        self._process = self._life.enter_context(process("serve", *options, *store, **env))
        self.address = urlsplit(fields(self._process.read_until(LAST_LINE))["http"]).netloc

    def kill(self) -> None:
        assert self._process is not None
        self._process.signal(signal.SIGKILL)
        assert self._process.rest().code == -signal.SIGKILL

    def close(self) -> None:
        self._life.close()
        shutil.rmtree(self.home)

    @property
    def operator(self) -> Peer:
        if self._operator is None:
            token = self._token or (self.home / "operator.token").read_text().strip()
            self._operator = Peer(self, token, _http(self.address, token, "GET", "/whoami").body["agent"])
        return self._operator

    def enroll(self, *grants: str, name: str | None = None, pubkey: str | None = None) -> Peer:
        """Enroll a peer, by default one that may send and answer."""
        display = name or f"p{next(_numbers)}@lab"
        wanted = {"display": display, "pubkey": pubkey, "grants": list(grants or WORKING)}
        made = self.operator.ok("POST", "/peers", wanted)
        return Peer(self, made["token"], {"display": display, "pubkey": made["pubkey"]})


class Peer:
    """A client with a token. Each call over HTTP and the socket is a connection of its own."""

    def __init__(self, daemon: RealDaemon, token: str, agent: Json) -> None:
        self.daemon = daemon
        self.token = token
        self.agent = agent

    def at(self, daemon: RealDaemon) -> Peer:
        """Return the same peer as a client of another daemon."""
        return Peer(daemon, self.token, self.agent)

    @property
    def label(self) -> str:
        return str(self.agent["display"])

    @property
    def cli(self) -> Client:
        return Client(self.daemon.home, self.token)

    def http(self, method: str, path: str, body: Any = None) -> Answer:
        return _http(self.daemon.address, self.token, method, path, body)

    def ok(self, method: str, path: str, body: Any = None) -> Json:
        status, answer = self.http(method, path, body)
        assert status == 200, answer
        return answer

    def refused(self, method: str, path: str, body: Any = None) -> tuple[int, str]:
        """Return the status and the code of the refusal."""
        status, answer = self.http(method, path, body)
        assert answer["kind"] == "error" and answer["message"], answer
        return status, answer["code"]

    def ipc(self, kind: str, **members: Any) -> Json:
        """Send one frame and return the one that comes back."""
        with socket.socket(socket.AF_UNIX) as line:
            line.settimeout(PATIENCE_S)
            line.connect(str(self.daemon.home / "sock"))
            greeted = _framed(line, {"kind": "authenticate", "token": self.token})
            assert greeted["kind"] == "authenticated" and greeted["display"] == self.label
            return _framed(line, {"kind": kind, **members})

    # --- calls that most tests make -----------------------------------------------------------------------

    def task(self, recipient: Peer, **members: Any) -> Json:
        """An A2ATask as the text prints it: all of its members, and no others."""
        return {
            "id": str(uuid.uuid4()),
            "sender": self.agent,
            "recipient": recipient.agent,
            "intent_text": "do the thing",
            "parent": None,
            "deadline_ms": None,
            "idempotency": None,
            **members,
        }

    def send(self, recipient: Peer, **members: Any) -> str:
        task = self.task(recipient, **members)
        assert self.ok("POST", "/a2a/tasks", task)["task_id"] == task["id"]
        return str(task["id"])

    def lease(self) -> Json:
        got = self.ok("GET", "/a2a/tasks/next")
        assert got["task"] is not None, "no task waits"
        return got

    def post(self, task_id: str, status: str = "ok", **members: Any) -> Answer:
        return self.http("POST", "/a2a/results", result(task_id, status, **members))

    def drain(self) -> Json:
        got = self.ok("GET", "/a2a/results/next")
        assert got["result"] is not None, "no result waits"
        return got

    def entry(self, task_id: str) -> Json:
        entry: Json = self.ok("GET", f"/a2a/tasks/{task_id}")["entry"]
        return entry

    def rows(self, task_id: str, *kinds: str) -> list[Json]:
        """Return the audit rows of a task of these kinds, oldest first."""
        rows = self.ok("GET", f"/audit?limit=200&task_id={task_id}")["rows"]
        return [row for row in reversed(rows) if row["kind"] in kinds]


def result(task_id: str, status: str = "ok", **members: Any) -> Json:
    """An A2ATaskResult as the text prints it: all of its members, and no others."""
    content = [{"type": "text", "text": "done"}]
    return {"task_id": task_id, "status": status, "content": content, "error_message": None, **members}


def idempotent(key: str) -> Json:
    return {"duplicate_safety": "idempotent", "key": key}


def _http(address: str, token: str, method: str, path: str, body: Any = None) -> Answer:
    connection = http.client.HTTPConnection(address, timeout=PATIENCE_S)
    try:
        data = None if body is None else json.dumps(body).encode()
        connection.request(method, path, data, {"Authorization": f"Bearer {token}"})
        response = connection.getresponse()
        return Answer(response.status, json.loads(response.read()))
    finally:
        connection.close()


def _framed(line: socket.socket, frame: Mapping[str, Any]) -> Json:
    data = json.dumps(frame).encode()
    line.sendall(struct.pack(">I", len(data)) + data)
    with line.makefile("rb") as replies:
        (size,) = struct.unpack(">I", replies.read(4))
        reply: Json = json.loads(replies.read(size))
    return reply
