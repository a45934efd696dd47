"""Ids are UUIDs in their canonical form, each its own, and a child of a process draws others."""

from __future__ import annotations

import os
import time
import uuid

from covenant.store.clock import RandomIds

_SOME = 1000  # more than are drawn at once


def test_a_lease_has_a_random_id() -> None:
    ids = RandomIds()
    drawn = [ids.lease() for _ in range(_SOME)]
    assert len(set(drawn)) == _SOME
    for one in drawn:
        read = uuid.UUID(one)
        assert str(read) == one
        assert read.version == 4 and read.variant == uuid.RFC_4122
    for place in range(36):  # every digit that may vary does
        assert (len({one[place] for one in drawn}) > 1) == (place not in (8, 13, 14, 18, 23))


def test_an_id_of_a_task_begins_with_the_time() -> None:
    ids = RandomIds()
    before = time.time_ns() // 1_000_000
    drawn = [ids.task() for _ in range(_SOME)]
    after = time.time_ns() // 1_000_000
    assert len(set(drawn)) == _SOME
    for one in drawn:
        read = uuid.UUID(one)
        assert str(read) == one
        assert read.version == 7 and read.variant == uuid.RFC_4122
        assert before <= read.int >> 80 <= after
    assert len({one[15:] for one in drawn}) == _SOME


def test_a_forked_child_draws_its_own_ids() -> None:
    ids = RandomIds()
    ids.lease()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, ids.lease().encode())
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    os.close(write)
    with open(read, "rb") as said:
        assert said.read().decode() != ids.lease()
