"""Results, from the holder who posts one to the sender who drains it; and what undoes a receive."""

from __future__ import annotations

from covenant.exchange.exchange import Exchange
from covenant.model import query as q
from covenant.model.peer import Caller
from covenant.model.view import Answer, Posted
from covenant.rules.envelope import check_batch
from covenant.serve import wire as w
from covenant.serve.verbs.received import of_kind, wait_of


async def post_result(x: Exchange, caller: Caller, r: w.PostResult) -> w.ResultPosted:
    posted: Posted = await x.run(caller, x.post(caller, r.result, r.incarnation))
    return w.ResultPosted(
        task_id=posted.task_id, generation=posted.generation, duplicate=posted.duplicate, sequence=posted.sequence
    )


async def recv_result(x: Exchange, caller: Caller, r: w.RecvResult) -> w.ResultOpt:
    found = await x.take(caller, x.drain_results(caller, r.peer), wait_of(r.wait_ms), r.receipt)
    taken = of_kind(Answer, found)
    return _result(taken[0] if taken else None)


def _result(answer: Answer | None) -> w.ResultOpt:
    if answer is None:
        return w.ResultOpt()
    return w.ResultOpt(
        result=answer.result, generation=answer.generation, attempt=answer.attempt, replayed=answer.replayed
    )


async def recv_results(x: Exchange, caller: Caller, r: w.RecvResults) -> w.Results:
    limit = check_batch(r.limit, x.store.limits)
    found = await x.take(caller, x.drain_results(caller, r.peer, limit), wait_of(r.wait_ms), r.receipt)
    return _results(of_kind(Answer, found))


async def give_back(x: Exchange, caller: Caller, r: w.GiveBack) -> w.GivenBack:
    return w.GivenBack(receipt=r.receipt, count=await x.give_back(caller, r.receipt))


def _results(answers: list[Answer]) -> w.Results:
    return w.Results(results=[answer.result for answer in answers], beside=[w.beside(answer) for answer in answers])


async def recent_results(x: Exchange, caller: Caller, r: w.RecentResults) -> w.Results:
    return _results(await x.ask(caller, q.RecentResults(x.by(caller), r.limit)))


async def get_result(x: Exchange, caller: Caller, r: w.GetResult) -> w.ResultOpt:
    return _result(await x.ask(caller, q.GetResult(x.by(caller), r.task_id)))
