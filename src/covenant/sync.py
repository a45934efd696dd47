"""The mailbox for scripts: the same verbs, without async.

    with Mailbox.open("file:./data") as box:
        box.of("planner@lab").send_task(...)

The mailbox lives on an event loop in a thread of its own. Interrupting a call that waits takes nothing.
"""

from __future__ import annotations

import asyncio
import functools
import os
import threading
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar

from covenant import mailbox
from covenant.client.remote import Tokens
from covenant.model.agent import AgentId
from covenant.model.error import Malformed, StoreClosed
from covenant.model.limits import Limits
from covenant.rules.context import Ids
from covenant.store.clock import Clock

P = ParamSpec("P")
T = TypeVar("T")

_END_S = 10.0  # how long calls under way may take to end


class _LoopThread:
    """An event loop that other threads can hand coroutines to, until it is stopped."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._gate = threading.Lock()
        self._is_open = True
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, name="covenant-sync", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        if self._is_forked:
            work.close()
            raise Malformed("this mailbox was opened by the process that forked this one: open one of its own here")
        with self._gate:
            if not self._is_open:
                work.close()
                raise StoreClosed("the mailbox was closed")
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    @property
    def _is_forked(self) -> bool:
        """A forked process has no copy of the thread: a call would wait for ever."""
        return os.getpid() != self._process

    def stop(self, last: Callable[[], Coroutine[Any, Any, None]] | None = None) -> None:
        """Once: take no more calls, answer those that are under way, do the last thing, and end the thread."""
        if self._is_forked:
            return
        with self._gate:
            if not self._is_open:
                return
            self._is_open = False
            ending = asyncio.run_coroutine_threadsafe(self._end(last), self._loop)
        try:
            ending.result()
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    async def _end(self, last: Callable[[], Coroutine[Any, Any, None]] | None) -> None:
        if last is not None:
            await last()
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        if others:
            await asyncio.wait(others, timeout=_END_S)
        await self._loop.shutdown_default_executor()


def _sync(
    method: Callable[Concatenate[mailbox.Mailbox, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Mailbox, P], T]:
    def call(self: Mailbox, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._thread.run(method(self._box, *args, **kwargs))

    functools.update_wrapper(call, method)
    return call


class Mailbox:
    """`Mailbox.open(url)`, then `of(agent)`; see `covenant.Mailbox` for each verb."""

    def __init__(self, box: mailbox.Mailbox, thread: _LoopThread) -> None:
        self._box = box
        self._thread = thread

    @staticmethod
    def open(
        url: str,
        *,
        limits: Limits | None = None,
        clock: Clock | None = None,
        ids: Ids | None = None,
        token: str | None = None,
        tokens: Tokens | None = None,
    ) -> OpenMailbox:
        box = mailbox.Mailbox.open(url, limits=limits, clock=clock, ids=ids, token=token, tokens=tokens)
        return OpenMailbox(box, _LoopThread())

    def of(self, agent: AgentId | str, *, incarnation: str | None = None) -> Mailbox:
        return Mailbox(self._box.of(agent, incarnation=incarnation), self._thread)

    @property
    def agent(self) -> AgentId:
        return self._box.agent

    @property
    def limits(self) -> Limits:
        return self._box.limits

    send_task = _sync(mailbox.Mailbox.send_task)
    send_tasks = _sync(mailbox.Mailbox.send_tasks)
    recv_task = _sync(mailbox.Mailbox.recv_task)
    recv_tasks = _sync(mailbox.Mailbox.recv_tasks)
    try_recv_task_for = _sync(mailbox.Mailbox.try_recv_task_for)
    heartbeat = _sync(mailbox.Mailbox.heartbeat)
    release = _sync(mailbox.Mailbox.release)
    cancel_task = _sync(mailbox.Mailbox.cancel_task)
    get_task = _sync(mailbox.Mailbox.get_task)
    wait_generation = _sync(mailbox.Mailbox.wait_generation)
    recent_tasks = _sync(mailbox.Mailbox.recent_tasks)
    task_queue = _sync(mailbox.Mailbox.task_queue)
    task_tree = _sync(mailbox.Mailbox.task_tree)
    add_message = _sync(mailbox.Mailbox.add_message)
    update = _sync(mailbox.Mailbox.update)
    artifact = _sync(mailbox.Mailbox.artifact)
    ask = _sync(mailbox.Mailbox.ask)
    inputs = _sync(mailbox.Mailbox.inputs)
    reject = _sync(mailbox.Mailbox.reject)
    reply = _sync(mailbox.Mailbox.reply)
    send_result = _sync(mailbox.Mailbox.send_result)
    recv_result = _sync(mailbox.Mailbox.recv_result)
    recv_results = _sync(mailbox.Mailbox.recv_results)
    try_recv_result_for = _sync(mailbox.Mailbox.try_recv_result_for)
    get_result = _sync(mailbox.Mailbox.get_result)
    recent_results = _sync(mailbox.Mailbox.recent_results)
    commit_run = _sync(mailbox.Mailbox.commit_run)
    load_run = _sync(mailbox.Mailbox.load_run)
    look_around = _sync(mailbox.Mailbox.look_around)
    find_entry = _sync(mailbox.Mailbox.find_entry)
    resume_run = _sync(mailbox.Mailbox.resume_run)
    wake_run = _sync(mailbox.Mailbox.wake_run)
    signal_run = _sync(mailbox.Mailbox.signal_run)
    judge_effect = _sync(mailbox.Mailbox.judge_effect)
    get_run = _sync(mailbox.Mailbox.get_run)
    list_runs = _sync(mailbox.Mailbox.list_runs)
    run_entries = _sync(mailbox.Mailbox.run_entries)
    publish_agent = _sync(mailbox.Mailbox.publish_agent)
    withdraw_agent = _sync(mailbox.Mailbox.withdraw_agent)
    get_agent = _sync(mailbox.Mailbox.get_agent)
    list_agents = _sync(mailbox.Mailbox.list_agents)
    repair_task = _sync(mailbox.Mailbox.repair_task)
    retry_stale = _sync(mailbox.Mailbox.retry_stale)
    cached_results = _sync(mailbox.Mailbox.cached_results)
    forget_cached = _sync(mailbox.Mailbox.forget_cached)
    compact = _sync(mailbox.Mailbox.compact)
    recent_audit = _sync(mailbox.Mailbox.recent_audit)


class OpenMailbox(Mailbox):
    """Owns the loop. Use it with `with`; closing it earlier, or twice, does no harm."""

    _box: mailbox.OpenMailbox

    def __enter__(self) -> OpenMailbox:
        try:
            self._thread.run(self._box.__aenter__())
        except BaseException:
            self._thread.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._thread.stop(self._box.close)
