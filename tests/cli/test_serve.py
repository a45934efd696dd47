"""`covenant serve`: how it begins, what it refuses to begin with, and how it ends."""

from __future__ import annotations

import json
import signal
import socket
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import urlopen

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.cli.support import Client, Process, process, run, serving


def test_a_daemon_says_where_it_is_and_ends_in_order_while_a_client_waits(home: Path) -> None:
    with serving(home, "--log", "json") as (daemon, told):
        assert told["http"].startswith("http://127.0.0.1:")
        assert told["ipc"] == str(home / "sock") and told["data"] == f"file:{home}/data"
        assert told["token"].startswith(str(home / "operator.token"))
        client = Client(home)
        running = client.json("version")["daemon"]
        assert running["realm"] == told["realm"]
        assert f"daemon {running['version']} at unix:{home}/sock, realm {told['realm']}" in client.text("version")

        second = run("serve", "--home", str(home), "--http", "127.0.0.1:0", "--ipc", str(home / "other"))
        assert (second.code, second.out) == (1, "")
        assert len(second.err.splitlines()) == 1 and "(store_locked)" in second.err

        client("peers", "enroll", "bob")
        task_id = client.json("a2a", "send", "bob", "wait for it")["task_id"]
        with client.running("a2a", "watch", task_id) as watching:
            watching.read_until("queued")  # and then it waits
            daemon.signal(signal.SIGTERM)
            ended = daemon.rest()
            assert (ended.code, ended.out) == (0, "")
            lost = watching.rest()
            assert lost.code == 1 and "(unreachable)" in lost.err
    rows = [json.loads(line) for line in ended.err.splitlines()]
    assert [row["message"] for row in rows][0::2] == ["ready", "ended"]
    assert all(set(row) == {"ts", "level", "logger", "message"} for row in rows)
    assert not (home / "sock").exists()
    assert client.json("audit", "verify")["valid"]


def test_a_second_signal_ends_it_at_once(home: Path) -> None:
    with serving(home) as (daemon, told):
        address = urlsplit(told["http"])
        with socket.create_connection((str(address.hostname), int(address.port or 0))) as half:
            token = (home / "operator.token").read_text().strip()
            request = (
                f"POST /a2a/compact HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\nContent-Length: 9\r\n\r\n"
            )
            half.sendall(request.encode() + b"{")  # a request that never ends keeps it from ending
            Client(home)("a2a", "status")  # by now it has that
            daemon.signal(signal.SIGINT)
            daemon.read_until("ending", "stderr")
            daemon.signal(signal.SIGINT)
            assert daemon.rest().code == 130


def test_a_port_in_use_is_told_in_one_line(home: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        for option in (("--http", address), ("--http", "127.0.0.1:0", "--grpc", address)):
            refused = run("serve", "--home", str(home), *option)
            assert refused.code == 2 and refused.out == ""
            advice = f"choose another with {option[-2]}"
            assert refused.err == f"error: cannot listen on {address}: Address already in use; {advice} (bad_setting)\n"


def test_a_home_in_use_stays_with_the_daemon_that_has_it(home: Path) -> None:
    """Also where no folder is locked: the second one would take the socket from the first, and the token too."""
    with serving(home):
        token = (home / "operator.token").read_text()
        for store in ("memory:", f"file:{home}/data"):
            refused = run("serve", "--home", str(home), "--http", "127.0.0.1:0", "--store", store)
            assert (refused.code, refused.out) == (2, "")
            (line,) = refused.err.splitlines()
            assert f"cannot listen on {home}/sock: a daemon does" in line and "--home" in line
            assert line.endswith("(bad_setting)")
        assert (home / "operator.token").read_text() == token
        Client(home)("a2a", "status")


def test_a_socket_that_was_left_behind_is_in_nobodys_way(home: Path) -> None:
    with serving(home) as (daemon, _):
        daemon.signal(signal.SIGKILL)
        daemon.rest()
    assert (home / "sock").exists()
    with serving(home):
        Client(home)("a2a", "status")


def test_grpc_is_served_where_it_is_asked_for(home: Path) -> None:
    with serving(home, "--grpc", "127.0.0.1:0") as (daemon, told):
        with grpc.insecure_channel(told["grpc"]) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            healthy = health.Check(health_pb2.HealthCheckRequest(service="lf.a2a.v1.A2AService"), timeout=10)
        assert healthy.status == health_pb2.HealthCheckResponse.SERVING
        daemon.signal(signal.SIGTERM)
        ended = daemon.rest()
        assert ended.code == 0 and ended.err.rstrip().endswith("ended")


def test_a_card_names_the_address_that_the_operator_says(home: Path) -> None:
    options = ("--grpc", "127.0.0.1:0", "--public-url", "https://agents.example", "--public-grpc", "grpc.example:443")
    with serving(home, *options) as (_, told):
        client = Client(home)
        client("peers", "enroll", "bob")
        client("agents", "publish", "bob")
        assert told["http"].startswith("http://127.0.0.1:")
        with urlopen(f"{told['http']}/.well-known/agent-card.json") as answer:
            card = json.load(answer)
    assert [one["url"] for one in card["supportedInterfaces"]] == [*["https://agents.example"] * 2, "grpc.example:443"]


def test_a_secret_that_others_can_read_is_refused(home: Path) -> None:
    (home / "operator.token").write_text("cov_known_to_all\n")
    (home / "operator.token").chmod(0o644)
    for refused in (
        run("serve", "--home", str(home), "--http", "127.0.0.1:0"),
        run("a2a", "status", "--home", str(home)),
    ):
        assert refused.code == 1 and "(unsafe_file)" in refused.err and "chmod 600" in refused.err


def test_what_makes_no_sense_is_wrong_usage(home: Path) -> None:
    covenant = Client(home)
    for options, env in (
        (("--http", "0.0.0.0:0"), {}),
        (("--grpc", "0.0.0.0:0"), {}),
        (("--grpc", "here"), {}),
        (("--public-url", "nowhere"), {}),
        (("--public-grpc", "grpc.example:443"), {}),
        (("--http", "off", "--ipc", "off"), {}),
        (("--alert-url", "nowhere"), {}),
        (("--store", "nowhere"), {}),
        (("--store", ""), {}),
        (("--home", "/dev/null"), {}),
        (("--tls-cert", __file__, "--tls-key", __file__), {}),
        (("--http", "off", "--default-agent", "bob"), {}),
        ((), {"COVENANT_A2A_AUTO_RETRY_SCHEDULER": "perhaps"}),
    ):
        refused = covenant("serve", *options, code=2, **env)
        assert refused.out == "", options
        assert refused.err.startswith("error: ") and refused.err.endswith(("(bad_setting)\n", "(unknown_store)\n"))
        assert len(refused.err.splitlines()) == 1
        assert not (home / "sock").exists()


def test_a_damaged_folder_is_told_and_not_served(home: Path) -> None:
    with process("serve", "--home", str(home), "--http", "off", "--queue-depth", "1") as daemon:
        assert "http   off" in daemon.read_until("a2a status")
        client = Client(home)
        client("peers", "enroll", "bob")
        client("a2a", "send", "bob", "one")
        assert client.refused("a2a", "send", "bob", "two") == "queue_full"
        _end(daemon)
    for file in (*(home / "data").glob("snapshot-*"), *(home / "data").glob("archive*")):
        file.unlink()
    segment = next((home / "data").glob("journal-*.jsonl"))
    segment.write_bytes(segment.read_bytes().replace(b'"one"', b'"two"'))
    refused = run("serve", "--home", str(home), "--http", "127.0.0.1:0")
    assert refused.code == 1 and "(store_damaged)" in refused.err


def _end(daemon: Process) -> None:
    daemon.signal(signal.SIGTERM)
    assert daemon.rest().code == 0
