"""Where the figures come from, as far as it matters to a reader: no names of hosts, no paths."""

from __future__ import annotations

import os
import platform
import sqlite3
from importlib.metadata import PackageNotFoundError, version
from typing import Final

_PACKAGES: Final = (
    "covenant-exchange",
    "msgspec",
    "uvloop",
    "huey",
    "dbos",
    "langgraph",
    "asyncpg",
    "procrastinate",
    "absurd-sdk",
)


def facts() -> dict[str, str]:
    found = {
        "cpus": str(os.cpu_count()),
        "system": f"{platform.system()} {platform.machine()}",
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "sqlite": sqlite3.sqlite_version,
    }
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found
