"""A daemon in a process of its own: `python -m tests.serve.run_daemon HOME` says `ready` and serves until killed."""

from __future__ import annotations

import asyncio
import sys

from covenant.serve.daemon import Daemon, Settings
from covenant.serve.home import Home


async def main(folder: str) -> None:
    home = Home(folder)
    home.make()
    settings = Settings(store=f"file:{home.data}", http="127.0.0.1:0", ipc=home.socket)
    daemon = Daemon(settings, home.realm(), home.tokens)
    await daemon.start()
    print(f"ready {daemon.url}", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
