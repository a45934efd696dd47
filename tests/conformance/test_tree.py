"""Tasks hang on one another by `parent`, a link that nobody validates."""

from __future__ import annotations

import pytest

from covenant import Limits, Mailbox, OpenMailbox, Outcome, TaskState, Text, TreeNode
from covenant.model.limits import RETENTION_MS
from covenant.store.clock import ManualClock

from .support import Reopen, answer_next, drain, finish, plain, refused, uid


def shape(node: TreeNode) -> dict[str, object]:
    return {"id": node.id, "below": [shape(child) for child in node.children]}


def leaf(number: int) -> dict[str, object]:
    return {"id": uid(number), "below": []}


async def test_a_tree_is_read_back_from_its_root(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 13: children in the order in which they were sent, each with its state."""
    await alice.send_task(plain(bob, id=uid(1)))
    for number, parent in ((3, 1), (2, 1), (5, 3), (4, 3)):
        await alice.send_task(plain(bob, id=uid(number), parent=uid(parent)))
    tree = await alice.task_tree(uid(1))
    assert shape(tree.root) == {
        "id": uid(1),
        "below": [{"id": uid(3), "below": [leaf(5), leaf(4)]}, leaf(2)],
    }
    assert (tree.size, tree.truncated) == (5, False)
    assert shape((await alice.task_tree(uid(3))).root) == {"id": uid(3), "below": [leaf(5), leaf(4)]}
    entry = tree.root.children[0].entry
    assert entry is not None
    assert (entry.task, entry.state) == ((await alice.get_task(uid(3))).task, TaskState.QUEUED)


async def test_a_tree_may_hang_on_an_intent_that_is_no_task(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 13: `parent` is a link, never validated."""
    await alice.send_task(plain(bob, id=uid(1), parent=uid(99)))
    tree = await alice.task_tree(uid(99))
    assert tree.root.entry is None
    assert shape(tree.root) == {"id": uid(99), "below": [leaf(1)]}


async def test_a_child_may_come_before_its_parent(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 13: the tree is the same, whichever was sent first."""
    await alice.send_task(plain(bob, id=uid(2), parent=uid(1)))
    await alice.send_task(plain(bob, id=uid(1)))
    tree = await alice.task_tree(uid(1))
    assert tree.root.entry is not None
    assert shape(tree.root) == {"id": uid(1), "below": [leaf(2)]}


async def test_finished_tasks_stay_in_their_tree(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 13: a fan-out can be reconstructed with its results."""
    await alice.send_task(plain(bob, id=uid(1), parent=uid(99)))
    await alice.send_task(plain(bob, id=uid(2), parent=uid(99)))
    await answer_next(bob)
    await drain(alice)
    tree = await alice.task_tree(uid(99))
    outcomes = [child.entry.outcome for child in tree.root.children if child.entry is not None]
    assert outcomes == [Outcome.ANSWERED, None]


async def test_a_ring_of_parents_is_read_once(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 13: a link that leads back is not followed twice."""
    await alice.send_task(plain(bob, id=uid(1), parent=uid(2)))
    await alice.send_task(plain(bob, id=uid(2), parent=uid(1)))
    await alice.send_task(plain(bob, id=uid(3), parent=uid(3)))
    assert shape((await alice.task_tree(uid(1))).root) == {"id": uid(1), "below": [leaf(2)]}
    assert shape((await alice.task_tree(uid(3))).root) == leaf(3)


async def test_a_peer_sees_its_own_part_of_a_tree(
    box: OpenMailbox, alice: Mailbox, bob: Mailbox, carol: Mailbox
) -> None:
    """Contract 13: what a peer cannot see is left out, and a tree of nothing else is unknown."""
    await alice.send_task(plain(bob, id=uid(1)))
    await alice.send_task(plain(bob, id=uid(2), parent=uid(1)))
    await alice.send_task(plain(carol, id=uid(3), parent=uid(1)))
    tree = await carol.task_tree(uid(1))
    assert tree.root.entry is None
    assert shape(tree.root) == {"id": uid(1), "below": [leaf(3)]}
    with refused("unknown_task"):
        await carol.task_tree(uid(2))
    assert (await box.task_tree(uid(1))).size == 3


@pytest.mark.parametrize("limits", [Limits(tree_nodes_max=4)], ids=["four nodes"])
async def test_a_tree_is_bounded_and_says_so(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 13: a tree that is too large for one answer is cut, never silently."""
    for number in range(1, 4):
        await alice.send_task(plain(bob, id=uid(number), parent=uid(99)))
    whole = await alice.task_tree(uid(99))
    assert (whole.size, whole.truncated) == (4, False)
    await alice.send_task(plain(bob, id=uid(4), parent=uid(99)))
    cut = await alice.task_tree(uid(99))
    assert (cut.size, cut.truncated) == (4, True)


@pytest.mark.parametrize("limits", [Limits(page_bytes_max=3000)], ids=["3000 bytes"])
async def test_a_tree_carries_no_more_than_an_answer_does(alice: Mailbox, bob: Mailbox) -> None:
    for number in range(1, 6):
        await alice.send_task(plain(bob, id=uid(number), parent=uid(99), content=(Text("x" * 1000),)))
    cut = await alice.task_tree(uid(99))
    assert (cut.size, cut.truncated) == (3, True)


@pytest.mark.parametrize("limits", [Limits(tree_nodes_max=4)], ids=["four nodes"])
async def test_tasks_of_others_do_not_use_up_the_bound_of_a_tree(alice: Mailbox, bob: Mailbox, carol: Mailbox) -> None:
    """Contract 13: visibility comes before the bound."""
    for number in range(1, 9):
        await alice.send_task(plain(bob, id=uid(number), parent=uid(99)))
    await alice.send_task(plain(carol, id=uid(9), parent=uid(99)))
    tree = await carol.task_tree(uid(99))
    assert shape(tree.root) == {"id": uid(99), "below": [leaf(9)]}
    assert not tree.truncated


@pytest.mark.parametrize("limits", [Limits(scan_max=10)], ids=["scan of 10"])
async def test_a_tree_does_not_look_at_what_its_peer_cannot_see(
    box: OpenMailbox, alice: Mailbox, bob: Mailbox, carol: Mailbox
) -> None:
    """Contract 13: anybody may hang tasks on any id, and that costs nobody else anything."""
    await alice.send_tasks([plain(bob, id=uid(number), parent=uid(99)) for number in range(100, 400)])
    await alice.send_task(plain(carol, id=uid(1), parent=uid(99)))
    await carol.send_task(plain(carol, id=uid(2), parent=uid(1)))
    tree = await carol.task_tree(uid(99))
    assert shape(tree.root) == {"id": uid(99), "below": [{"id": uid(1), "below": [leaf(2)]}]}
    assert not tree.truncated
    whole = await box.task_tree(uid(99))
    assert (whole.size, whole.truncated) == (11, True)


@pytest.mark.parametrize("limits", [Limits(scan_max=10)], ids=["scan of 10"])
async def test_a_tree_that_had_to_pass_over_too_much_says_so(
    alice: Mailbox, bob: Mailbox, carol: Mailbox, clock: ManualClock
) -> None:
    """Contract 13: children past retention are looked at too, up to a bound."""
    for number in range(1, 21):
        await finish(alice, bob, plain(bob, id=uid(number), parent=uid(99)))
    clock.advance(RETENTION_MS + 1)
    await alice.send_task(plain(bob, id=uid(21), parent=uid(99)))
    await alice.send_task(plain(bob, id=uid(99)))
    tree = await alice.task_tree(uid(99))
    assert (tree.size, tree.truncated) == (1, True)


async def test_a_wide_tree_is_whole(alice: Mailbox, bob: Mailbox) -> None:
    """Contract 13: more children than any page."""
    await alice.send_tasks([plain(bob, id=uid(number), parent=uid(5000)) for number in range(1000)])
    await alice.send_tasks([plain(bob, id=uid(number), parent=uid(5000)) for number in range(1000, 1500)])
    tree = await alice.task_tree(uid(5000))
    assert [child.id for child in tree.root.children] == [uid(number) for number in range(1500)]
    assert (tree.size, tree.truncated) == (1501, False)


async def test_a_tree_survives_a_restart(alice: Mailbox, bob: Mailbox, reopen: Reopen) -> None:
    """Contract 13: open and finished children, in their order."""
    await finish(alice, bob, plain(bob, id=uid(1), parent=uid(99)))
    await alice.send_task(plain(bob, id=uid(3), parent=uid(99)))
    await alice.send_task(plain(bob, id=uid(2), parent=uid(1)))
    before = await alice.task_tree(uid(99))
    assert await (await reopen()).of("alice@lab").task_tree(uid(99)) == before
