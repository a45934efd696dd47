"""What keeps the exchange in order: repair, the retry gate, the result cache and compaction."""

from __future__ import annotations

from covenant.exchange.exchange import Exchange
from covenant.model import command as c
from covenant.model import query as q
from covenant.model.peer import Caller
from covenant.model.repair import RetryReport
from covenant.model.view import CachePage
from covenant.serve import wire as w


async def repair(x: Exchange, caller: Caller, r: w.Repair) -> w.Repaired:
    return w.Repaired(outcome=await x.run(caller, c.RepairTask(x.by(caller), r.request)))


async def retry_stale(x: Exchange, caller: Caller, r: w.RetryStale) -> w.AutoRetried:
    report: RetryReport = await x.run(caller, c.RetryStale(x.by(caller), r.policy, r.cursor, r.scheduled))
    return w.AutoRetried(report=report)


async def list_cache(x: Exchange, caller: Caller, r: w.ListCache) -> w.CacheReply:
    page: CachePage = await x.ask(caller, q.ListCached(x.by(caller), r.limit, r.cursor))
    return w.CacheReply(entries=page.entries, cursor=page.cursor)


async def forget_cached(x: Exchange, caller: Caller, r: w.ForgetCached) -> w.Forgotten:
    await x.run(caller, c.ForgetCached(x.by(caller), r.entry_id, r.reason))
    return w.Forgotten(entry_id=r.entry_id)


async def compact(x: Exchange, caller: Caller, r: w.Compact) -> w.Compacted:
    done = await x.compact(caller, r.older_than_ms)
    return w.Compacted(
        dropped=done.tasks_dropped,
        tombstones_dropped=done.tombstones_dropped,
        segments_dropped=done.segments_dropped,
        bytes_freed=done.bytes_freed,
    )
