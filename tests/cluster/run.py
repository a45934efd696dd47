"""A whole run: peers, eight clients over all daemons, chaos for a while, and everything brought to its end."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from functools import partial
from time import monotonic
from typing import Any, Final, NamedTuple

from covenant import AgentId, Mailbox, TaskState
from covenant.a2a import Client
from covenant.serve import wire as w
from tests.cluster.caller import Caller, Progress
from tests.cluster.chaos import Chaos
from tests.cluster.clients import PAGE, Follower, Operator, Over, Sender, Worker, note_answer
from tests.cluster.daemons import Cluster, ServedDaemon
from tests.cluster.frozen import Play
from tests.cluster.history import Step, Verb
from tests.daemons import WORKING

SENDERS: Final = 3
WORKERS: Final = 3
FOLLOWERS: Final = 2
DRAIN_S: Final = 90.0
LOOK_BACK: Final = 10
_OPERATOR: Final = "operator"
_PEERS: Final = (*(f"sender-{n}" for n in range(SENDERS)), "worker", "follower", "asker", "holder")


class Told(NamedTuple):
    """What a run leaves behind."""

    steps: list[Step]
    counts: Counter[str]
    standing: list[str]  # what is not at its end
    exits: list[int]
    faults: list[str]  # what the daemons say went wrong inside them


class Run:
    def __init__(self, cluster: Cluster, seed: int) -> None:
        self._cluster = cluster
        self._seed = seed
        self._progress = Progress()
        self._over = Over()
        self._callers: list[Caller] = []
        self._tokens: dict[str, str] = {}
        self._agents: dict[str, AgentId] = {}
        self._card: dict[str, Any] = {}

    @property
    def steps(self) -> list[Step]:
        return [step for caller in self._callers for step in caller.history.steps]

    async def play(self, for_s: float, has_time: bool = False) -> Told:
        await self._settle()
        chance = random.Random(self._seed)
        play = Play(self._cluster.daemons, self._cast, self._agents["holder"], chance)
        chaos = Chaos(self._cluster, self._progress, play, chance, has_time)
        async with asyncio.TaskGroup() as group:
            clients = [group.create_task(client.run()) for client in self._clients()]
            operator = group.create_task(
                Operator(self._cast(_OPERATOR, self._cluster.daemons), self._agents["worker"], self._over).run()
            )
            await chaos.run(monotonic() + for_s)
            self._over.sending.set()
            asking = clients[:SENDERS] + clients[SENDERS + WORKERS :]
            await asyncio.wait(asking, timeout=DRAIN_S)
            self._over.working.set()
            _, stuck = await asyncio.wait([*clients, operator], timeout=DRAIN_S)
            assert not stuck, f"{len(stuck)} clients do not end"
        standing = await self._standing()
        await self._look_back()
        await asyncio.gather(*(caller.close() for caller in self._callers))
        exits = [await daemon.stop() for daemon in self._cluster.daemons]
        faults = [fault for daemon in self._cluster.daemons for fault in daemon.faults()]
        return Told(self.steps, chaos.counts, standing, exits, faults)

    # --- before -------------------------------------------------------------------------------------------

    async def _settle(self) -> None:
        first = self._cluster.daemons[0]
        self._tokens[_OPERATOR] = self._cluster.operator_token
        async with Mailbox.open(first.url, token=self._tokens[_OPERATOR]) as operator:
            engine: Any = operator._engine
            for name in _PEERS:
                peer: w.PeerEnrolled = await engine.call(
                    w.EnrollPeer(display=name, grants=list(WORKING)), w.PeerEnrolled
                )
                self._tokens[name], self._agents[name] = peer.token, AgentId(peer.display, peer.pubkey)
            await engine.call(w.PublishAgent(name="worker"), Any)
        async with Client.connect(first.url) as client:
            self._card = client.card

    def _clients(self) -> list[Sender | Worker | Follower]:
        daemons, over = self._cluster.daemons, self._over
        clients: list[Sender | Worker | Follower] = []
        for number in range(SENDERS):
            caller = self._cast(f"sender-{number}", daemons, number)
            clients.append(Sender(caller, self._agents["worker"], over))
        clients += [Worker(self._cast("worker", daemons, number), over) for number in range(WORKERS)]
        clients += [self._follower(self._cast("follower", daemons)) for _ in range(FOLLOWERS)]
        return clients

    def _follower(self, caller: Caller) -> Follower:
        return Follower(caller, self._card, self._tokens["follower"], self._over)

    def _cast(self, role: str, daemons: list[ServedDaemon], first: int = 0) -> Caller:
        name = f"{role} {len(self._callers)}"
        caller = Caller(name, daemons, self._tokens[role], self._progress, random.Random(f"{self._seed} {name}"), first)
        self._callers.append(caller)
        return caller

    # --- after --------------------------------------------------------------------------------------------

    async def _standing(self) -> list[str]:
        """What no client has brought to its end, as each of the daemons sees it."""
        found: list[str] = []
        for daemon in self._cluster.daemons:
            caller = self._cast(_OPERATOR, [daemon])
            for state in (TaskState.QUEUED, TaskState.IN_FLIGHT):
                page = await caller.call(Verb.STANDING, partial(Mailbox.task_queue, limit=PAGE, state=state))
                for entry in page.tasks:
                    caller.done(Verb.STANDING, monotonic(), task=entry.task.id)
                    found.append(f"{entry.task.id} is {entry.state}, by daemon {daemon.number}")
        return found

    async def _look_back(self) -> None:
        """The newest results and streams once more, by each of the daemons."""
        results = [step for step in self.steps if step.verb in (Verb.DRAIN, Verb.READ) and step.is_last]
        streams = dict.fromkeys(step.task for step in self.steps if step.verb is Verb.EVENT and step.is_last)
        for daemon in self._cluster.daemons:
            for step in results[-LOOK_BACK:]:
                caller = self._cast(step.client.partition(" ")[0], [daemon])
                began = monotonic()
                answer = await caller.call(Verb.READ, partial(Mailbox.get_result, task_id=step.task), task=step.task)
                assert answer is not None, f"the result of {step.task} is gone, by daemon {daemon.number}"
                note_answer(caller, Verb.READ, began, answer)
            follower = self._follower(self._cast("follower", [daemon]))
            for task in [*streams][-LOOK_BACK:]:
                await follower.follow(task, f"looked back by daemon {daemon.number}")
