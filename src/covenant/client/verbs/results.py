"""Posting results, taking them, and reading them again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from covenant.model import command as c
from covenant.model import query as q
from covenant.model.view import (
    Answer,
    Posted,
)
from covenant.rules.envelope import check_id, seal_result
from covenant.serve import wire as w

if TYPE_CHECKING:
    from covenant.client.engine import RemoteEngine


def answers(results: w.Results) -> list[Answer]:
    return [
        Answer(result, beside.generation, beside.attempt, beside.replayed)
        for result, beside in zip(results.results, results.beside, strict=True)
    ]


async def post_result(x: RemoteEngine, command: c.PostResult) -> Posted:
    request = w.PostResult(result=seal_result(command.result, x.limits), incarnation=command.incarnation)
    done: w.ResultPosted = await x.call(request, w.ResultPosted, command.by)
    return Posted(done.task_id, done.generation, done.duplicate, done.sequence)


async def drain(x: RemoteEngine, command: c.DrainResults) -> list[Answer]:
    return await x.take(command, 0)


async def get_result(x: RemoteEngine, query: q.GetResult) -> Answer | None:
    r: w.ResultOpt = await x.call(w.GetResult(task_id=check_id(query.task_id, "task_id")), w.ResultOpt, query.by)
    if r.result is None:
        return None
    return Answer(r.result, r.generation or 0, r.attempt or 0, r.replayed)


async def recent_results(x: RemoteEngine, query: q.RecentResults) -> list[Answer]:
    return answers(await x.call(w.RecentResults(limit=x.page(query.limit)), w.Results, query.by))
