"""What this process is called, for people who look for it."""

from __future__ import annotations

import os
import socket


def label_of_process() -> str:
    return f"{socket.gethostname()}:{os.getpid()}"
