"""The daemon, and a first task going round in it.

    python examples/serve.py [HOME]

Starts `covenant serve`, enrolls two agents, and lets a task go from one to the other and its result back, each step as
its own call over HTTP. Then it serves until Ctrl-C, if a terminal is there to press it on; without one it ends.
"""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from covenant import AgentId, Mailbox, Result, Task, Text

GRANTS = ["--grant", "a2a.send.*", "--grant", "a2a.respond.*"]


def start(home: Path) -> tuple[subprocess.Popen[str], str]:
    """The daemon, and its URL; what it says goes to this terminal."""
    command = [sys.executable, "-m", "covenant", "serve", "--home", str(home)]
    daemon = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert daemon.stdout is not None
    url = ""
    for line in daemon.stdout:
        print(line, end="", flush=True)
        words = line.split()
        if words[:1] == ["http"]:
            url = words[1]
        if words[-2:] == ["a2a", "status"]:
            break
    if not url:
        raise SystemExit(daemon.wait())
    return daemon, url


def enroll(home: Path, name: str) -> tuple[AgentId, str]:
    """A peer and its token; at the second run its token is changed for a new one."""
    known = _covenant(home, "peers", "list", "--json")
    is_there = any(peer["display"] == f"{name}@local" for peer in known["peers"])
    words = ["peers", "rotate", name] if is_there else ["peers", "enroll", name, *GRANTS]
    peer = _covenant(home, *words, "--json")
    return AgentId(peer["display"], peer["pubkey"]), peer["token"]


def _covenant(home: Path, *words: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "covenant", "--home", str(home), *words], capture_output=True, text=True, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


async def go_round(url: str, planner_token: str, writer: AgentId, writer_token: str) -> None:
    async with Mailbox.open(url, token=planner_token) as planning, Mailbox.open(url, token=writer_token) as writing:
        sent = await planning.send_task(Task(recipient=writer, intent_text="draft the brief"))
        print(f"{planning.agent} sent task {sent.task_id}")
        delivery = await writing.recv_task()
        print(f"{writing.agent} holds it: attempt {delivery.attempt}, lease {delivery.lease_id}")
        await writing.send_result(Result.ok(delivery, [Text("the brief, drafted")]))
        print(f"{writing.agent} answered")
        answer = await planning.recv_result()
        brief = answer.content[0]
        assert isinstance(brief, Text)
        print(f"{planning.agent} received: {answer.status}, {brief.text!r}")


def main() -> int:
    home = Path(sys.argv[1] if len(sys.argv) > 1 else ".covenant").absolute()
    daemon, url = start(home)
    try:
        _, planner_token = enroll(home, "planner")
        writer, writer_token = enroll(home, "writer")
        print("\nA first task goes round:\n")
        asyncio.run(go_round(url, planner_token, writer, writer_token))
        if sys.stdin.isatty():
            print(f"\nServing at {url}; its API is described at {url}/docs. Ctrl-C ends it.", flush=True)
            return daemon.wait()
    except KeyboardInterrupt:
        pass
    finally:
        daemon.send_signal(signal.SIGTERM)
        code = daemon.wait()
    print("\nThe daemon has ended in order: nothing was lost.")
    return code


if __name__ == "__main__":
    sys.exit(main())
