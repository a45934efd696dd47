"""Runs google-adk and ag2 against a daemon: `python -m tests.clients PYTHON [--record]`, or `make clients`.

PYTHON is the interpreter of the environment in which they are installed. A daemon is started twice, without gRPC and
with it, with a worker over HTTP. Each client runs all plays (sending, streaming, a question …) through a proxy that
records its requests. The requests and the outcomes must equal the recordings in `tests/a2a/recordings`; `--record`
overwrites those. `tests/a2a/test_recordings.py` sends the recorded requests again, without the clients.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from covenant import Mailbox, Worker
from tests.clients.recorder import recording
from tests.clients.worker import HEARTBEAT_MS, work

HERE: Final = Path(__file__).parent
RECORDINGS: Final = HERE.parent / "a2a" / "recordings"
CLIENTS: Final = ("adk", "ag2")
PLAYING_S: Final = 180
QUIET: Final = {"OTEL_SDK_DISABLED": "true", "PYTHONWARNINGS": "ignore"}  # no telemetry


@contextmanager
def daemon(home: Path, *options: str) -> Iterator[str]:
    """Run a daemon, and yield its URL."""
    command = [sys.executable, "-m", "covenant", "serve", "--home", str(home), "--http", "127.0.0.1:0", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        url = ""
        for line in process.stdout:
            words = line.split()
            if words[:1] == ["http"]:
                url = words[1]
            if words[-2:] == ["a2a", "status"]:
                break
        if not url:
            raise SystemExit("the daemon does not start")
        yield url
    finally:
        process.terminate()
        process.wait()


def covenant(home: Path, *words: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "covenant", "--home", str(home), *words, "--json"]
    told: dict[str, Any] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return told


async def play(python: str, client: str, url: str, token: str, folder: Path) -> dict[str, Any]:
    """Return what the client makes of each play. A client that tries to reach beyond this machine fails."""
    notes = folder / "left"
    environment = {
        "PATH": os.environ.get("PATH", ""),
        "HOME": str(folder),
        "PYTHONPATH": str(HERE / "loopback"),
        "LEFT_LOOPBACK": str(notes),
        **QUIET,
    }
    probe = "import socket; socket.create_connection(('192.0.2.1', 9), 1)"
    probed = subprocess.run([python, "-c", probe], env=environment, capture_output=True, text=True)
    if "stays on loopback" not in probed.stderr:
        raise SystemExit(f"nothing keeps {python} on this machine: {probed.stderr}")
    notes.unlink()
    arguments = [python, str(HERE / f"play_{client}.py"), url, token]
    process = await asyncio.create_subprocess_exec(*arguments, env=environment, stdout=asyncio.subprocess.PIPE)
    try:
        async with asyncio.timeout(PLAYING_S):
            out, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    if process.returncode:
        raise SystemExit(f"{client} ended with {process.returncode}")
    if notes.exists():
        raise SystemExit(f"{client} wanted to leave this machine: {notes.read_text()}")
    told: dict[str, Any] = json.loads(out.decode().splitlines()[-1])
    return told


async def perform(python: str, client: str, with_grpc: bool) -> dict[str, Any]:
    """Run all plays of one client with one daemon, and return them as they are recorded."""
    folder = Path(tempfile.mkdtemp(prefix="cov-"))
    home = folder / "home"
    try:
        async with recording() as recorder:
            options = ["--public-url", recorder.url, *(["--grpc", "127.0.0.1:0"] if with_grpc else [])]
            with daemon(home, *options) as recorder.target:
                writer = covenant(home, "peers", "enroll", "writer", "--grant", "a2a.respond.*")["token"]
                grants = ["--grant", "a2a.send.*", "--grant", "a2a.cancel.*"]
                recorder.token = alice = covenant(home, "peers", "enroll", "alice", *grants)["token"]
                bindings = ["--binding", "jsonrpc", "--binding", "rest"] if with_grpc else []
                covenant(home, "agents", "publish", "writer", *bindings)
                async with Mailbox.open(recorder.target, token=writer) as box, Worker(box, work, 4, HEARTBEAT_MS):
                    told = await play(python, client, recorder.url, alice, folder)
        return {
            "client": told["client"],
            "plays": {
                name: {"outcome": outcome, "exchanges": recorder.plays[name]} for name, outcome in told["plays"].items()
            },
        }
    finally:
        shutil.rmtree(folder)


def written(recording: dict[str, Any]) -> str:
    """Return a recording as JSON with a line for each request."""
    plays = []
    for name, play in recording["plays"].items():
        exchanges = ",\n".join(f"  {json.dumps(one)}" for one in play["exchanges"])
        head = f'{json.dumps(name)}: {{"outcome": {json.dumps(play["outcome"])}, "exchanges": ['
        plays.append(f"{head}\n{exchanges}\n]}}")
    return f'{{"client": {json.dumps(recording["client"])}, "plays": {{\n' + ",\n".join(plays) + "\n}}\n"


def differences(known: dict[str, Any], seen: dict[str, Any]) -> list[str]:
    """Compare two recordings, play by play."""
    found = [] if known["client"] == seen["client"] else [f"this is {seen['client']}, recorded was {known['client']}"]
    for name in {**known["plays"], **seen["plays"]}:
        before, now = known["plays"].get(name, {}), seen["plays"].get(name, {})
        for part in ("outcome", "exchanges"):
            if before.get(part) != now.get(part):
                recorded, came = json.dumps(before.get(part)), json.dumps(now.get(part))
                found.append(f"{name}: {part}\n  recorded {recorded}\n  seen     {came}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.clients")
    parser.add_argument("python")
    parser.add_argument("--record", action="store_true")
    given = parser.parse_args()
    logging.getLogger("covenant.worker").setLevel(logging.CRITICAL)  # which fails where a play wants it
    failed = False
    for client in CLIENTS:
        file = RECORDINGS / f"{client}.json"
        for with_grpc in (False, True):
            seen = asyncio.run(perform(given.python, client, with_grpc))
            if given.record and not with_grpc:
                file.write_text(written(seen))
            found = differences(json.loads(file.read_text()), seen)
            failed = failed or bool(found)
            exchanges = sum(len(one["exchanges"]) for one in seen["plays"].values())
            where = "a daemon with gRPC" if with_grpc else "a daemon without gRPC"
            verdict = "as recorded" if not found else f"{len(found)} differences"
            print(f"{seen['client']}, {where}: {len(seen['plays'])} plays, {exchanges} requests: {verdict}")
            print("".join(f"{difference}\n" for difference in found), end="", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
