"""The keys of a run's operations: the same at each call of its function, and one for each. (Contract 20.)"""

from __future__ import annotations

from covenant.agents.memory import Memory


def keys(memory: Memory, *contents: str) -> list[str]:
    return [memory.key("effect", content) for content in contents]


def test_equal_operations_are_told_apart_by_their_number_and_others_do_not_count() -> None:
    first, second = Memory(), Memory()
    charged = keys(first, "charge", "charge", "charge")
    assert len(set(charged)) == 3
    among_others = keys(second, "charge", "mail", "charge", "mail", "mail", "charge")
    assert among_others[::2][:2] + among_others[-1:] == charged
    assert len(set(among_others)) == 6
    assert second.key("task", "charge") not in among_others


def test_the_key_of_what_came_to_nothing_goes_to_the_next_that_is_the_same() -> None:
    """The lowest first: at the next call of the function, where none is called off, it has the same."""
    memory = Memory()
    charged = keys(memory, "charge", "charge", "charge")
    for number in (2, 0):
        memory.give_back(charged[number])
    assert keys(memory, "mail") == keys(Memory(), "mail")
    again = keys(memory, "charge", "charge", "charge")
    assert again[:2] == [charged[0], charged[2]]
    assert again[2] not in charged


def test_a_checkpoint_resets_the_counts() -> None:
    memory = Memory()
    charged = keys(memory, "charge", "charge", "charge")
    memory.give_back(charged[1])
    memory.forget()
    assert keys(memory, "charge", "charge", "charge") == charged
