"""What an operator does to keep things going."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from covenant.model import command as c
from covenant.model import query as q
from covenant.model.view import (
    CachePage,
)
from covenant.serve import wire as w

if TYPE_CHECKING:
    from covenant.client.engine import RemoteEngine


async def repair(x: RemoteEngine, command: c.RepairTask) -> Any:
    done: w.Repaired = await x.call(w.Repair(request=command.request), w.Repaired, command.by)
    return done.outcome


async def retry_stale(x: RemoteEngine, command: c.RetryStale) -> Any:
    request = w.RetryStale(policy=command.policy, cursor=x.cursor(command.cursor), scheduled=command.scheduled)
    done: w.AutoRetried = await x.call(request, w.AutoRetried, command.by)
    return done.report


async def forget_cached(x: RemoteEngine, command: c.ForgetCached) -> bool:
    await x.call(w.ForgetCached(entry_id=command.slot, reason=command.reason), w.Forgotten, command.by)
    return True


async def list_cached(x: RemoteEngine, query: q.ListCached) -> CachePage:
    reply: w.CacheReply = await x.call(
        w.ListCache(limit=x.page(query.limit), cursor=x.cursor(query.cursor)), w.CacheReply, query.by
    )
    return CachePage(reply.entries, reply.cursor)
