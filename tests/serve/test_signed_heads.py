"""The end of the chain is signed, and whoever changes what lies before it is found out. (Contract 28.)"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import msgspec

from covenant import AgentId, Limits, Mailbox, Task
from covenant.exchange.realm import Realm
from covenant.serve.daemon import Daemon, Settings
from covenant.store.journal.files import Files
from covenant.store.journal.line import GENESIS, encode
from covenant.store.journal.segment import Reader, read_header, segment_names
from covenant.store.journal.verify import verify

TOKEN = "cov_operator"


async def busy_daemon(folder: Path, realm: Realm, limits: Limits, rounds: int) -> None:
    daemon = Daemon(Settings(store=f"file:{folder}", http=None, ipc=None, limits=limits), realm, TOKEN)
    await daemon.start()
    exchange = daemon.exchange
    operator = exchange.authenticate(TOKEN)
    if daemon.store.agent_of("bob@lab") is None:
        await exchange.enroll(operator, "bob@lab", AgentId.named("bob@lab").pubkey, ())
    for number in range(rounds):
        task = Task(recipient=AgentId.named("bob@lab"), intent_text=f"work {number}")
        await asyncio.gather(*(exchange.run(operator, exchange.send(operator, task)) for _ in range(3)))
        await exchange.heads.sign()
    await daemon.stop()


async def test_heads_are_signed_across_segments_snapshots_and_restarts(tmp_path: Path) -> None:
    realm = Realm.throwaway()
    limits = Limits(segment_bytes=4_000, snapshot_every_bytes=6_000)
    for _ in range(3):
        await busy_daemon(tmp_path / "data", realm, limits, 10)
    report = verify(tmp_path / "data", realm=realm.pubkey)
    assert report.is_sound, report.damage
    assert report.segments > 5
    assert report.signatures >= 30
    assert report.head is not None and report.signed_until >= report.head.seq - 2
    async with Mailbox.open(f"file:{tmp_path}/data", limits=limits) as box:
        assert len(await box.recent_tasks(1000)) == 90


async def test_another_realms_signature_is_found(tmp_path: Path) -> None:
    realm, other = Realm.throwaway(), Realm.throwaway()
    await busy_daemon(tmp_path / "data", realm, Limits(), 2)
    assert verify(tmp_path / "data", realm=realm.pubkey).is_sound
    assert not verify(tmp_path / "data", realm=other.pubkey).is_sound


async def test_a_rewritten_chain_is_found_by_its_signatures(tmp_path: Path) -> None:
    """Somebody with the folder and no key: every hash is made anew, so only the signatures can tell."""
    realm = Realm.throwaway()
    folder = tmp_path / "data"
    await busy_daemon(folder, realm, Limits(), 10)
    (name,) = segment_names(Files(folder))
    lines = list(Reader(Files(folder)))
    dice = random.Random(5)
    for _ in range(20):
        victim = dice.randrange(len(lines) - 3)
        kept = [line for at, line in enumerate(lines) if at != victim]
        header = read_header(Files(folder), name)
        assert header is not None
        data, mark = encode(header, GENESIS)
        seq, forged = header.first, [data]
        for line in kept:
            moved = msgspec.structs.replace(line, seq=seq)
            seq = moved.last + 1
            data, mark = encode(moved, mark)
            forged.append(data)
        copy = tmp_path / f"forged-{victim}-{dice.random()}"
        copy.mkdir()
        (copy / name).write_bytes(b"".join(forged))
        report = verify(copy, realm=realm.pubkey)
        assert not report.is_sound, f"line {victim} was taken out and nobody noticed"
