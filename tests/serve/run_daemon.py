"""A daemon in a process of its own, forked or begun as `python -m tests.serve.run_daemon HOME`: it says where it is,
and serves until it is killed."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection

from covenant.serve.daemon import Daemon, Settings
from covenant.serve.home import Home
from tests.beings import until_hung_up


async def main(folder: str, say: Callable[[str], None], over: Awaitable[object]) -> None:
    home = Home(folder)
    home.make()
    settings = Settings(store=f"file:{home.data}", http="127.0.0.1:0", ipc=home.socket)
    daemon = Daemon(settings, home.realm(), home.tokens)
    await daemon.start()
    say(str(daemon.url))
    await over


def serve(line: Connection, folder: str) -> None:
    asyncio.run(main(folder, line.send, until_hung_up(line)))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], lambda url: print(url, flush=True), asyncio.Event().wait()))
