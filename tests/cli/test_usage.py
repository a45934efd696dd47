"""The manners of the program: refusals, help, what a terminal sees, and that every command has its line in the docs."""

from __future__ import annotations

import json
import logging
import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from covenant.cli import log, main, words
from covenant.cli.entry import state_line
from covenant.cli.main import COMMANDS
from covenant.cli.main import covenant as program
from covenant.cli.option import Duration
from covenant.cli.session import Session
from covenant.cli.table import Column, _fitted
from covenant.model.agent import AgentId
from covenant.model.record import TaskState
from covenant.model.task import Task
from covenant.model.view import QueueEntry
from covenant.serve import wire as w
from covenant.version import VERSION
from tests.cli.conftest import Served
from tests.cli.support import PROGRAM, Client, environment, run

MISSING = "00000000-0000-7000-8000-000000000000"


def test_a_refusal_has_its_code_and_exits_with_1(covenant: Client, bob: Client, served: Served) -> None:
    assert covenant.refused("a2a", "show", MISSING) == "unknown_task"
    assert covenant.refused("why", "no-id") == "bad_id"
    requeue = ("a2a", "requeue", MISSING, "--duplicate-risk", "idempotent")
    assert bob.refused(*requeue, "--reason", "is it there?") == "unknown_task"
    assert bob.refused("a2a", "retry-stale", "--enable") == "missing_capability"
    blank = ("--duplicate-risk", "idempotent", "--reason", "  ")
    assert covenant.refused("a2a", "requeue", served.stale.kept, *blank) == "blank_text"
    assert Client(covenant.home, "cov_wrong").refused("a2a", "status") == "unauthenticated"


def test_without_a_daemon_it_says_how_to_start_one(home: Path) -> None:
    alone = run("a2a", "status", "--home", str(home))
    assert (alone.code, alone.out) == (1, "")
    assert alone.err == (
        f"error: no daemon at {home}/sock (unreachable)\nstart one with: covenant serve --home {home}\n"
    )
    assert Client(home).refused("a2a", "status") == "unreachable"
    assert run("version", "--home", str(home), "--json").json["daemon"] is None


def test_no_time_is_told_as_less_than_nothing() -> None:
    """Where the clock here is behind that of the daemon."""
    later_ms = words.now_ms() + 3_600_000
    task = Task(recipient=AgentId.named("bob"), intent_text="x", sender=AgentId.named("ann"))
    held = QueueEntry(
        TaskState.IN_FLIGHT, task, 1, 2, later_ms, "l-1", task.recipient, leased_at_ms=later_ms, heartbeat_ms=later_ms
    )
    assert state_line(held) == "in flight, held by bob for 0 s, attempt 1"


def test_status_looks_for_stale_leases_behind_any_number_of_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A daemon looks at ten thousand of them for a page, and those that wait for their senders stand first."""
    task = Task(recipient=AgentId.named("bob"), intent_text="x", sender=AgentId.named("ann"), id=MISSING)
    lost = QueueEntry(TaskState.IN_FLIGHT, task, 1, 2, 1, "l-1", task.recipient, leased_at_ms=1, heartbeat_ms=1)
    pages = {None: w.QueueReply([], [], [], "lease:1"), "lease:1": w.QueueReply([], [], [], "lease:2")}

    def ask(_: Session, request: w.Queue, __: type) -> w.QueueReply:
        return pages.get(request.cursor, w.QueueReply([lost], [], []))

    monkeypatch.setattr(Session, "ask", ask)
    assert main.run(["a2a", "status"]) == 0
    assert capsys.readouterr().out.startswith("on this page: 0 queued, 0 in flight, 0 results pending; in all 1 stale")


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_an_answer_for_which_there_is_no_room_is_told_in_one_line(served: Served, form: tuple[str, ...]) -> None:
    command = [*PROGRAM, "--home", str(served.home), "peers", "enroll", f"late{len(form)}", *form]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=environment(), timeout=60)
    told = "it was done, but the answer could not be written: No space left on device"
    assert (done.returncode, done.stderr) == (1, f"error: {told} (store_unavailable)\n")


@pytest.mark.parametrize(("call", "code"), [(("a2a", "show", MISSING), 1), (("a2a", "shew"), 2)])
def test_a_refusal_that_cannot_be_written_has_its_exit_code(served: Served, call: tuple[str, ...], code: int) -> None:
    command = [*PROGRAM, "--json", "--home", str(served.home), *call]
    reading, unread = os.pipe()
    os.close(reading)
    with open("/dev/full", "w") as full, open(unread, "w") as broken:
        for out in (full, broken):
            done = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, text=True, env=environment(), timeout=60)
            assert done.returncode == code
            assert done.stderr.startswith("error: ") and len(done.stderr.splitlines()) == 1
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=full, text=True, env=environment(), timeout=60)
        assert done.returncode == code and json.loads(done.stdout)["kind"] == "error"


def test_who_reads_no_further_is_no_trouble(served: Served) -> None:
    for command in (("audit", "export"), ("a2a", "status"), ("a2a", "status", "--json")):
        reading, writing = os.pipe()
        os.close(reading)
        done = subprocess.run(
            [*PROGRAM, "--home", str(served.home), *command], stdout=writing, stderr=subprocess.PIPE, timeout=60
        )
        os.close(writing)
        assert (done.returncode, done.stderr) == (1, b"")


def test_a_closed_stdout_is_no_trouble(served: Served) -> None:
    """What is opened next must not be taken for it, either."""
    command = " ".join([*PROGRAM, "--home", str(served.home), "a2a", "status"])
    done = subprocess.run(["sh", "-c", f"{command} <&- >&-"], stderr=subprocess.PIPE, env=environment(), timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")


def test_wrong_usage_exits_with_2(served: Served) -> None:
    client = Client(served.home)
    wrong = client("a2a", "status", "--json", "--state", "lost", code=2)
    assert wrong.json["code"] == "bad_setting" and "see covenant a2a status --help" in wrong.err
    assert "Missing option '--reason'" in client("a2a", "force-error", MISSING, "--message", "x", code=2).err
    both = ("--deadline-ms", "1", "--deadline-in", "1m")
    assert "give one" in client("a2a", "send", "bob", "x", *both, code=2).err
    assert "(bad_setting)" in run("--url", "gopher://x", "--token", "t", "a2a", "status").err
    assert "Commands:" in client("peers", code=2).err


def test_what_cannot_be_said_in_json_is_wrong_usage(served: Served) -> None:
    client = Client(served.home)
    for call in (("a2a", "send", "bob", "x", "--data"), ("runs", "signal", MISSING, "go")):
        assert "this is no text" in client(*call, "\udcff", code=2).err
    deep = f'{{"type":"json","value":{"[" * 100_000}{"]" * 100_000}}}'
    assert "holds no content blocks" in client("a2a", "send", "bob", "x", "--file", "-", stdin=deep, code=2).err


def test_json_may_stand_before_a_command_too(covenant: Client) -> None:
    assert covenant("--json", "a2a", "status").json["kind"] == "a2a_status"
    assert covenant("--json", "a2a", "show", MISSING, code=1).json["code"] == "unknown_task"


def test_wrong_usage_is_told_in_one_line(covenant: Client) -> None:
    for arguments in (
        ("a2a", "requeue", MISSING, "--reason", "x"),
        ("a2a", "status", "--jason"),
        ("--url", "http://", "--token", "x", "a2a", "status"),
        ("--url", "http://h:99999", "--token", "x", "a2a", "status"),
    ):
        (line,) = covenant(*arguments, code=2).err.splitlines()
        assert "?;" not in line and line.endswith("(bad_setting)")
    assert "operator_accepted" not in covenant("a2a", "requeue", MISSING, "--reason", "x", code=2).err


def test_an_address_that_cannot_be_one_is_told_before_a_token_is_asked_for(covenant: Client) -> None:
    for address in ("", "unix:", "gopher://x"):
        (line,) = covenant("--url", address, "a2a", "status", code=2).err.splitlines()
        assert line == f"error: {address!r} is no address of a daemon: http://HOST:PORT or unix:PATH (bad_setting)"


def test_a_database_whose_url_does_not_read_is_told_in_one_line(covenant: Client, tmp_path: Path) -> None:
    database = "postgresql://ann:secret@[/x"
    for arguments in (
        ("db", "status", "--store", database),
        ("audit", "verify", "--store", database),
        ("store", "copy", f"file:{tmp_path}", database),
    ):
        (line,) = covenant(*arguments, code=2).err.splitlines()
        assert line.endswith("(unknown_store)") and "secret" not in line
    (line,) = run("serve", "--home", str(tmp_path / "home"), "--ipc", "off", "--store", database).err.splitlines()
    assert line.endswith("(unknown_store)")


def test_a_store_that_does_not_fit_is_told_without_its_password(covenant: Client, home: Path) -> None:
    other, database = "mysql://ann:secret@[db/x", "postgresql://ann:secret@db/x"
    for arguments in (
        ("db", "status", "--store", other),
        ("audit", "verify", "--store", other),
        ("journal", "verify", "--store", database),
        ("store", "copy", database, other),
        ("store", "copy", other, database),
    ):
        refused = covenant(*arguments, "--json", code=2)
        assert "ann:***@" in refused.json["message"] and "secret" not in refused.out + refused.err
    (line,) = run("serve", "--home", str(home), "--store", other).err.splitlines()
    assert "memory:, file: and postgresql:" in line and line.endswith("(unknown_store)")


def test_what_cannot_be_read_from_a_file_or_stdin_is_told_in_one_line(covenant: Client, tmp_path: Path) -> None:
    nested = tmp_path / "nested.json"
    nested.write_text('[{"type":"json","value":' + "[" * 100_000 + "]" * 100_000 + "}]")
    (line,) = covenant("a2a", "send", "bob", "hi", "--file", str(nested), code=2).err.splitlines()
    assert "holds no content blocks" in line and line.endswith("(bad_setting)")
    for arguments in (("a2a", "send", "bob", "hi", "--file", "-"), ("agents", "publish", "bob", "-")):
        closed = ["bash", "-c", 'exec "$@" <&-', "-", *PROGRAM, "--home", str(covenant.home), *arguments]
        done = subprocess.run(closed, capture_output=True, text=True, env=environment(), timeout=30)
        (line,) = done.stderr.splitlines()
        assert done.returncode == 2 and "stdin is closed" in line and line.endswith("(bad_setting)")


def test_the_version_is_told_as_everywhere(covenant: Client) -> None:
    assert covenant.text("--version") == f"covenant {VERSION}\n"


@pytest.mark.parametrize("group", [name for name in COMMANDS if name != "serve"])
def test_no_line_of_a_list_of_commands_breaks_off(group: str, covenant: Client) -> None:
    assert "..." not in covenant.text(group, "--help").partition("Commands:")[2]


@pytest.mark.parametrize("wait", [["--wait=-3s"], ["--wait", "-3"]])
def test_a_number_below_zero_is_not_merely_no_option(wait: list[str]) -> None:
    (line,) = run("a2a", "next", *wait).err.splitlines()
    assert "no number is below zero; see covenant a2a next --help" in line and line.endswith("(bad_setting)")


def test_a_choice_is_understood_with_either_dash(covenant: Client) -> None:
    for risk in ("operator-accepted", "operator_accepted"):
        wanted = ("--duplicate-risk", risk, "--reason", "is it there?")
        assert covenant.refused("a2a", "requeue", MISSING, *wanted) == "unknown_task"


def test_an_action_that_is_not_there_is_not_merely_denied(covenant: Client) -> None:
    assert covenant.refused("capabilities", "check", "a2a.fly") == "bad_action"


def test_who_enrolls_a_label_twice_is_told_what_to_do(covenant: Client) -> None:
    again = covenant("peers", "enroll", "bob", code=1)
    assert "bob@local is enrolled already, under another key (peer_conflict)" in again.err
    assert "peers rotate bob@local" in again.err


def test_what_to_type_next_names_the_token_that_was_given(served: Served, bob: Client) -> None:
    bob("a2a", "send", "bob", "mine")
    said = bob.text("a2a", "next")
    assert f"answer it:     covenant --home {served.home} --token TOKEN a2a post" in said
    assert served.bob not in said


def test_nobody_at_a_url_is_told_shortly_and_nothing_was_sent() -> None:
    lost = run("--url", "http://127.0.0.1:1", "--token", "x", "a2a", "send", "bob", "hi", "--json")
    assert lost.code == 1 and lost.json["outcome"] == "not_sent"
    assert lost.json["message"] == "no daemon at http://127.0.0.1:1: Connection refused"


def test_version_tells_of_a_daemon_that_is_not_there_once(home: Path) -> None:
    said = run("version", "--home", str(home)).out.splitlines()
    assert said[1] == f"no daemon at {home}/sock (unreachable)"


def test_a_token_that_may_not_be_read_is_told_with_what_helps(home: Path) -> None:
    (home / "operator.token").mkdir(0o700)  # as unreadable to root as to anybody
    refused = Client(home)("a2a", "status", code=1)
    assert f"{home}/operator.token cannot be read: Is a directory" in refused.err
    assert "--token" in refused.err and "(unauthenticated)" in refused.err


def test_a_file_that_fails_is_told_in_words() -> None:
    denied = PermissionError(13, "Permission denied", "/")
    assert words.failure(denied) == "/: Permission denied (it belongs to root)"
    assert words.failure(OSError(28, "No space left on device")) == "No space left on device"


def test_a_terminal_gets_colours_and_whole_ids(served: Served) -> None:
    arguments = ("--home", str(served.home), "a2a", "status", "--min-lease-age-ms", "1", "-n", "50")
    seen = _on_a_terminal(*arguments)
    assert "\x1b[31m" in seen and served.stale.kept in seen
    for line in re.sub(r"\x1b\[[0-9;]*m", "", seen).splitlines()[:6]:
        assert len(line) <= 100
    assert "\x1b[31m" not in _on_a_terminal(*arguments, NO_COLOR="1")


def _on_a_terminal(*arguments: str, **env: str) -> str:
    ours, theirs = pty.openpty()
    variables = environment(TERM="xterm-256color", **env)
    with subprocess.Popen([*PROGRAM, *arguments], stdin=theirs, stdout=theirs, stderr=theirs, env=variables):
        os.close(theirs)
        return b"".join(_read(ours)).decode()


def _read(fd: int) -> Iterator[bytes]:
    try:
        while block := os.read(fd, 65536):
            yield block
    except OSError:
        return  # a terminal that nobody holds any more
    finally:
        os.close(fd)


def test_what_a_peer_writes_cannot_command_the_terminal() -> None:
    assert words.safe("red \x1b[31m, back \x08, turned \u202e") == "red \\x1b[31m, back \\x08, turned \\u202e"
    assert words.safe("two\nlines") == "two\nlines"
    assert words.brief("a\nb\r\n  c\x1b") == "a b c\\x1b"
    assert words.brief("x" * 500) == f"{'x' * 79}…"


HIDDEN = "csi \x9b31m, turned \u202e, nothing \u200b, tag \U000e0041, del \x7f, c0 \x1b"
SPELLED = ("\\u009b", "\\u202e", "\\u200b", "\\udb40\\udc41", "\\u007f", "\\u001b")


def test_json_for_a_terminal_prints_whole(covenant: Client) -> None:
    """JSON for a terminal has the same values as JSON for a program, and nothing that a terminal obeys."""
    hidden = Client(covenant.home, covenant.json("peers", "enroll", "hidden")["token"])
    covenant("agents", "publish", "hidden", "-", stdin=json.dumps({"name": "x", "description": HIDDEN}))
    task_id = covenant.json("a2a", "send", "hidden", HIDDEN, "--data", json.dumps([HIDDEN]))["task_id"]
    hidden("a2a", "next")
    covenant("a2a", "force-error", task_id, "--reason", HIDDEN, "--message", HIDDEN)
    for call in (
        ("a2a", "show", task_id, "--json"),
        ("why", task_id, "--json"),
        ("a2a", "results", "--recent", "1000", "--json"),
        ("agents", "show", "hidden", "--json"),
        ("audit", "recent", "--task", task_id, "--json"),
        ("audit", "export"),
        ("audit", "export", "--json"),
    ):
        answer = covenant(*call)
        assert all(line.isprintable() for line in (answer.out + answer.err).splitlines()), answer
        said = "".join(json.dumps(json.loads(line), ensure_ascii=False) for line in answer.out.splitlines())
        assert all(spelled in answer.out for spelled in SPELLED), call
        assert json.dumps(HIDDEN, ensure_ascii=False)[1:-1] in said, call
    covenant("agents", "withdraw", "hidden")


def test_a_line_of_the_log_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    """Neither form lets what somebody else wrote begin a line, or command a terminal."""
    record = logging.LogRecord("x", logging.INFO, "", 0, "said: %s", (HIDDEN + "\n2026 INFO forged",), None)
    for formatter in (log._Text(), log._Json()):
        line = formatter.format(record)
        assert line.isprintable() and "forged" in line
    assert json.loads(log._Json().format(record))["message"] == record.getMessage()


@pytest.mark.parametrize(
    ("passed_ms", "told"),
    [
        (0, "now"),
        (999, "now"),
        (5_000, "5 s ago"),
        (180_000, "3 min ago"),
        (7_200_000, "2 h ago"),
        (-90_000, "in 1 min"),
    ],
)
def test_a_time_is_told_as_a_person_tells_it(passed_ms: int, told: str) -> None:
    assert words.ago(10_000_000_000 - passed_ms, 10_000_000_000) == told


def test_a_duration_has_a_unit() -> None:
    """`--older-than 7` could be meant as days, and let go of all that is older than 7 ms."""
    duration = Duration()
    assert [duration.convert(text, None, None) for text in ("0", "7d", "1.5s")] == [0, 604_800_000, 1500]
    for bare in ("7", "60", "1.5"):
        with pytest.raises(click.BadParameter, match="needs a unit: 90s, 5m, 36h or 7d"):
            duration.convert(bare, None, None)


def test_a_wait_has_a_unit_or_is_in_seconds() -> None:
    seconds = Duration("s")
    told = {"90": 90_000, "1.5": 1500, "250ms": 250, "5m": 300_000, "36h": 129_600_000, "7d": 604_800_000}
    assert {text: seconds.convert(text, None, None) for text in told} == told
    for wrong in ("", "soon", "-1", "5 m", "9999999d"):
        with pytest.raises(click.BadParameter):
            seconds.convert(wrong, None, None)


def test_a_table_gives_up_what_can_be_read_elsewhere() -> None:
    columns = (Column("id"), Column("who", fits=True), Column("what", fits=True))
    assert _fitted(columns, (36, 10, 20), 100) == [36, 10, 20]
    assert _fitted(columns, (36, 10, 200), 100) == [36, 10, 50]
    assert _fitted(columns, (36, 30, 200), 60) == [36, 10, 10]
    assert _fitted(columns, (36, 30, 200), 20) == [36, 8, 8]


def test_help_comes_at_once() -> None:
    """Nothing slow is imported for it."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "covenant", "--help"],
        capture_output=True,
        text=True,
        env=environment(),
        check=True,
    )
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    slow = {"aiohttp", "asyncio", "cryptography", "httptools", "msgspec", "rich", "sqlite3", "uvicorn", "uvloop"}
    assert not imported & (slow | {"covenant.mailbox", "covenant.serve.wire", "covenant.worker"})
    for name, told in COMMANDS.items():
        assert f"{name} " in done.stdout and told in done.stdout


def commands() -> list[tuple[str, click.Command]]:
    """Every command that does something, with all that is typed to call it."""
    found: list[tuple[str, click.Command]] = []
    context = click.Context(program)
    waiting = [(name, program.get_command(context, name)) for name in program.list_commands(context)]
    while waiting:
        path, command = waiting.pop()
        if isinstance(command, click.Group):
            waiting += [(f"{path} {name}", below) for name, below in command.commands.items()]
        elif command is not None:
            found.append((path, command))
    return found


def test_help_and_docs_know_every_command() -> None:
    page = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
    known = commands()
    assert len(known) > 30
    for path, command in known:
        assert f"`covenant {path}" in page, path
        assert command.help
        assert path == "serve" or "--json" in [name for param in command.params for name in param.opts]
    for name, told in COMMANDS.items():
        group = program.get_command(click.Context(program), name)
        assert group is not None and (group.help or "").splitlines()[0] == told
