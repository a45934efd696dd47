"""The agents among the examples do what they promise, also when they are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.support import ROOT
from tests.docs.test_examples import PATIENCE_S, URLS, run

KILLS_MAX = 40
CHAT = """\
user   Shall I take an umbrella to Bergen?
       -> weather Bergen
       <- raining
agent  Yes: it is raining there.
user   What are 17 times 23?
       -> calculate ['*', 17, 23]
       <- 391
agent  They are 391.
user   And divided by 0?
       -> calculate ['/', 391, 0]
       <- it failed (ValueError: nothing is divided by 0)
agent  I tried: it failed (ValueError: nothing is divided by 0).
user   Bye.
agent  Goodbye.
a talk of 4 turns
"""
SUPERVISED = """\
agent  I would tag 1.4, drop the old tables, upload 1.4, tell everybody. Shall I?
user   No, do not drop the old tables.
agent  I would tag 1.4, upload 1.4, tell everybody. Shall I?
user   Yes.
agent  Done, as act 1: tag 1.4.
agent  Done, as act 2: upload 1.4.
agent  Done, as act 3: tell everybody.
1.4 is out
"""
DAEMON_ENDS = """\
seen 8, left {'tea': 12, 'salt': 8, 'rice': 12}, orders 2
closed after 8 events and 8 checkpoints
"""


def killed(example: str, url: str, lines: int, cwd: Path, seconds: str = "0.05") -> tuple[bool, str]:
    """Killed when it has printed so many lines; whether it came to its end before, and what it printed."""
    command = [sys.executable, "-X", "utf8", str(ROOT / "examples" / example), url, seconds]
    told = []
    with subprocess.Popen(command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8") as dying:
        assert dying.stdout is not None and dying.stderr is not None
        for line in dying.stdout:
            told.append(line)
            if len(told) == lines:
                os.kill(dying.pid, signal.SIGKILL)
                told += dying.stdout  # what it had said by then, too
                break
        code = dying.wait(PATIENCE_S)
        assert code in (0, -signal.SIGKILL), dying.stderr.read()
    return code == 0, "".join(told)


@pytest.mark.parametrize("url", URLS)
def test_the_chat_agent_talks_and_uses_its_tools(url: str, tmp_path: Path) -> None:
    assert run("chat_agent.py", url, tmp_path) == CHAT


def test_the_chat_agent_is_killed_in_every_turn_and_the_talk_is_the_same(tmp_path: Path) -> None:
    for lines in (1, 5, 9, 13):
        is_ended, told = killed("chat_agent.py", "file:./box", lines, tmp_path)
        assert not is_ended and CHAT.startswith(told)
    assert run("chat_agent.py", "file:./box", tmp_path) == CHAT
    assert run("chat_agent.py", "file:./box", tmp_path) == CHAT, "what has ended is told again"


@pytest.mark.parametrize("url", URLS)
def test_the_supervised_agent_acts_when_it_may(url: str, tmp_path: Path) -> None:
    assert run("supervised_agent.py", url, tmp_path) == SUPERVISED


def test_the_supervised_agent_is_killed_in_its_acts_and_does_each_of_them_once(tmp_path: Path) -> None:
    told = ""
    for lines in (1, 3, 4, 1, 5, 1):
        _, told = killed("supervised_agent.py", "file:./box", lines, tmp_path)
    told += run("supervised_agent.py", "file:./box", tmp_path)
    assert told.endswith(SUPERVISED)
    acts = (tmp_path / "box.acts").read_text(encoding="utf-8").splitlines()
    assert acts == ["tag 1.4", "upload 1.4", "tell everybody"]


@pytest.mark.parametrize("url", URLS)
def test_the_daemon_agent_lives_on_events(url: str, tmp_path: Path) -> None:
    lines = run("daemon_agent.py", url, tmp_path).splitlines(keepends=True)
    assert len(lines) == 10
    assert "".join(lines).endswith(DAEMON_ENDS)


def test_the_daemon_agent_is_killed_at_every_event_and_counts_each_once(tmp_path: Path) -> None:
    seen = []
    for _ in range(KILLS_MAX):
        is_ended, told = killed("daemon_agent.py", "file:./box", 2, tmp_path)
        seen += told.splitlines()
        if is_ended:
            break
    assert is_ended
    assert list(dict.fromkeys(seen)) == run("daemon_agent.py", "memory:", tmp_path).splitlines()
