"""Short values of the limits that bound a wait for a process or connection that does not answer.

A test in which such a limit runs out asks for the fixture `short_waits`. Every other test keeps the real limits, so
that a slow machine is not taken for a dead process. A limit that is a setting (`Limits`, `Bounds`) is set there
instead.
"""

from __future__ import annotations

from typing import Final

SHORT: Final[dict[str, object]] = {
    "covenant.client.unheard._GIVE_BACK_S": 0.05,
    "covenant.exchange.exchange._GIVING_BACK_S": 0.05,
    "covenant.serve.a2a.rpc._LOOK_S": 0.02,
    "covenant.serve.events._LAST_WORD_S": 0.05,
    "covenant.store.postgres.batch.HELD_S": 0.05,
    "covenant.store.postgres.due.ASIDE_S": 0.1,
    "covenant.store.postgres.engine._ENDING_S": 0.3,
    "covenant.store.postgres.lane.LOCK_TIMEOUT": "100ms",
    "covenant.store.postgres.lane._CLOSE_S": 0.3,
    "covenant.store.postgres.queue.ASIDE_S": 0.1,
}
