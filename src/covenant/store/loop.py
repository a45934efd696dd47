"""A store lives on the event loop that opened it: only there commands take turns, and callers are woken."""

from __future__ import annotations

from asyncio import AbstractEventLoop, get_running_loop
from typing import Final

from covenant.model.error import Malformed

NOT_OPEN: Final = "the mailbox is not open: use `async with`, or `await` it (in covenant.sync, `with`)"


def check_home(home: AbstractEventLoop | None) -> None:
    """Raise on any other loop than this one. None: it was not opened yet."""
    if home is not None and home is not get_running_loop():
        raise Malformed("this mailbox was opened on another event loop: open one of its own here", field="loop")
