"""Which engine answers to a URL. Others join by the entry point group `covenant.stores`."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Final, cast

from covenant.model.error import Malformed, UnknownStore
from covenant.model.limits import Limits
from covenant.rules.context import Ids
from covenant.rules.secret import without_passwords
from covenant.store.clock import Clock
from covenant.store.engine import Engine

ENTRY_POINT_GROUP = "covenant.stores"
_BUILT_IN: Final = "memory:, file: and postgresql:"
_TRY: Final = "memory:, file:./data or postgresql://USER@HOST/NAME"

EngineFactory = Callable[[str, Limits, Clock, Ids], Engine]


def engine_for(url: str, limits: Limits, clock: Clock, ids: Ids, besides: str = "") -> Engine:
    """The engine of a store URL; not opened yet. `besides` says what else than a store would do, to who names none."""
    if not isinstance(url, str):
        raise Malformed("a store is named by a URL, a text such as file:./data", field="url")
    scheme, colon, rest = url.partition(":")
    if not colon:
        raise UnknownStore(f"{url!r} is no store URL; try {_TRY}{besides}", url=url)
    if scheme == "memory":
        from covenant.store.memory import Memory

        return Memory(limits, clock, ids)
    if scheme == "file":
        from covenant.store.journal.engine import Journal

        return Journal(_folder(url, rest), limits, clock, ids)
    if scheme in ("postgresql", "postgres"):
        try:
            from covenant.store.postgres.engine import Postgres
        except ImportError as missing:
            why = f"the store on PostgreSQL needs a package that is not installed ({missing.name})"
            raise UnknownStore(f"{why}: pip install 'covenant-exchange[postgres]'", url=scheme) from missing
        return Postgres(url, limits, clock, ids)
    for entry in entry_points(group=ENTRY_POINT_GROUP, name=scheme):
        factory = cast(EngineFactory, entry.load())
        return factory(url, limits, clock, ids)
    raise UnknownStore(f"no store engine for {scheme}: there are {_BUILT_IN}{besides}", url=without_passwords(url))


def _folder(url: str, rest: str) -> str:
    """`file:./data`, `file:/var/lib/x` and `file:///var/lib/x`."""
    path = rest.removeprefix("//") if rest.startswith("///") else rest
    if not path or path.startswith("//") or "\0" in path:
        raise UnknownStore("a file store needs a folder: file:./data", url=url)
    return path
