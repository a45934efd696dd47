"""A page that is followed to the letter, command by command, in one shell."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from covenant import Limits
from tests.daemons import OPERATOR_TOKEN, start_daemon
from tests.docs.support import blocks, page

_PATIENCE_S = 150


async def typed(script: str, folder: Path, environment: Mapping[str, str], programs: Iterable[Path] = ()) -> str:
    """What it says. It ends at the first command that fails, and takes with it what it has started."""
    ours = (str(place) for place in (*programs, Path(sys.executable).parent))
    running = await asyncio.create_subprocess_exec(
        *("bash", "-euo", "pipefail", "-c", f"trap 'jobs -p | xargs -r kill; wait' EXIT\n{script}"),
        cwd=folder,
        env={**environment, "PATH": os.pathsep.join((*ours, os.environ["PATH"]))},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    async with asyncio.timeout(_PATIENCE_S):
        output, _ = await running.communicate()
    said = output.decode()
    assert running.returncode == 0, said[-5000:]
    return said


async def typed_beside_a_daemon(name: str, folder: Path) -> str:
    """The commands of a page that wants a daemon; where it calls one by curl, a refusal is a failure, too."""
    daemon = await start_daemon(f"file:{folder / 'data'}", Limits())
    token = folder / ".covenant" / "operator.token"
    token.parent.mkdir()
    token.write_text(OPERATOR_TOKEN)
    script = "\n".join(blocks(page(name), "sh")).replace("http://127.0.0.1:8421", str(daemon.url))
    script = script.replace("curl -s", "curl --fail-with-body -s").replace("--fail-with-body -s -o", "-s -o")
    try:
        return await typed(script, folder, {**os.environ, "HOME": str(folder)})
    finally:
        await daemon.stop()


def environment_without(*prefixes: str) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}
