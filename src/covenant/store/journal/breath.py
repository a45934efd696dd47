"""How a thread beside the event loop lets it have the interpreter."""

from __future__ import annotations

import time
from typing import Final

_PAUSE_S: Final = 50e-6


def breathe() -> None:
    """Stand back long enough for the loop's thread to come in, if it wants to. A pause of no length may not do: whoever
    pauses can be back before the other has woken up, and then has the interpreter until a switch is forced."""
    time.sleep(_PAUSE_S)
