"""How long the parts of the program wait for somebody who does not answer, and how long they do in a test of that.

A test that lets such a limit run out asks for the fixture `short_waits`; every other test keeps the real limits, so
that a slow machine is not taken for a peer that is gone. A limit that belongs to `Limits` or `Bounds` is set there
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
