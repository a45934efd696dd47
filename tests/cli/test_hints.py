"""A hint names the command that works in the state in which it is shown: each one is typed here."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

import pytest

from tests.cli.support import Client, Done, serving


@pytest.fixture(scope="module")
def operator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """The operator of a daemon whose peers come and go."""
    home = tmp_path_factory.mktemp("hints")
    with serving(home):
        yield Client(home)


def enrolled(operator: Client, name: str, *grants: str) -> Client:
    given = [word for grant in grants for word in ("--grant", grant)]
    return Client(operator.home, operator.json("peers", "enroll", name, *given)["token"])


def hint(answer: str) -> tuple[str, ...]:
    """The one command that an answer names, as it is typed."""
    (line,) = [line for line in answer.splitlines() if ": covenant " in line]
    words = shlex.split(line[line.index("covenant ") :])
    return tuple(words[1:])


def typed(operator: Client, command: tuple[str, ...], **placeholders: str) -> Done:
    filled = [placeholders.get(word, word) for word in command]
    assert filled[:2] == ["--home", str(operator.home)]
    return operator(*filled[2:])


@pytest.mark.parametrize("verb", ["enroll", "rotate", "revoke"])
def test_a_revoked_peer_is_let_in_again_as_the_hint_says(operator: Client, verb: str) -> None:
    """Not sent in a circle from one refusal to the other."""
    name = f"gone-{verb}"
    enrolled(operator, name)
    pubkey = operator.json("peers", "revoke", name)["pubkey"]
    refusal = operator("peers", verb, name, code=1)
    assert f"{name}@local was revoked" in refusal.err
    command = hint(refusal.err)
    assert command[2:] == ("peers", "enroll", f"{name}@local", "--key", pubkey)
    assert typed(operator, command).out
    back = operator.json("peers", "rotate", name)
    assert Client(operator.home, back["token"]).json("a2a", "next")["task"] is None


def test_a_key_of_a_revoked_peer_says_the_same(operator: Client) -> None:
    enrolled(operator, "one-key")
    pubkey = operator.json("peers", "revoke", "one-key")["pubkey"]
    refusal = operator("peers", "enroll", "another", "--key", pubkey, code=1)
    typed(operator, hint(refusal.err))
    (known,) = [one for one in operator.json("peers", "list")["peers"] if one["display"] == "one-key@local"]
    assert known["pubkey"] == pubkey and "revoked_ms" not in known


def test_only_the_operator_is_told_how_a_revoked_peer_comes_back(operator: Client) -> None:
    clerk = enrolled(operator, "clerk", "peers.enroll", "peers.revoke")
    enrolled(operator, "gone-clerk")
    pubkey = operator.json("peers", "revoke", "gone-clerk")["pubkey"]
    enroll = clerk("peers", "enroll", "gone-clerk", "--json", code=1)
    assert enroll.json["code"] == "peer_conflict" and pubkey not in enroll.out and "covenant" not in enroll.err
    revoke = clerk("peers", "revoke", "gone-clerk", "--json", code=1)
    assert revoke.json["message"] == f"no peer {pubkey}"


def test_a_living_peer_gets_a_new_token_as_the_hint_says(operator: Client) -> None:
    enrolled(operator, "alive")
    assert "shown this once" in typed(operator, hint(operator("peers", "enroll", "alive", code=1).err)).out


def test_a_missing_right_is_given_as_the_hint_says(operator: Client) -> None:
    poor = enrolled(operator, "poor")
    command = hint(poor("a2a", "send", "poor", "hi", code=1).err)
    typed(operator, command, NAME="poor")
    poor("a2a", "send", "poor", "hi")


def test_a_right_that_is_used_up_is_widened_as_the_hint_says(operator: Client) -> None:
    narrow = enrolled(operator, "narrow")
    enrolled(operator, "far")
    operator("capabilities", "grant", "narrow", "a2a.send.far", "--scope", '{"max_uses":1}')
    narrow("a2a", "send", "far", "first")
    refusal = narrow("a2a", "send", "far", "second", code=1)
    assert "scope_mismatch" in refusal.err
    typed(operator, hint(refusal.err), NAME="narrow")
    narrow("a2a", "send", "far", "second")


def test_who_meets_an_enrolled_label_is_sent_to_the_operator(operator: Client) -> None:
    clerk = enrolled(operator, "porter", "peers.enroll")
    enrolled(operator, "known")
    refusal = clerk("peers", "enroll", "known", code=1)
    assert "the operator gives it a new token" in refusal.err
    assert typed(operator, hint(refusal.err)).out


def test_an_unknown_peer_is_looked_up_as_the_hint_says(operator: Client) -> None:
    assert "operator" in typed(operator, hint(operator("peers", "revoke", "nobody-here", code=1).err)).out


REASON = {"REASON": "the story ends"}


def why(operator: Client, task_id: str) -> tuple[str, str]:
    story = operator.json("why", task_id)
    return story["reason"], story["explanation"]


def test_a_task_for_a_revoked_peer_says_so_and_what_moves_it(operator: Client) -> None:
    """Queued, in flight, and with a result for a sender who is gone."""
    worker = enrolled(operator, "leaver", "a2a.send.leaver", "a2a.respond.*")
    answered = worker.json("a2a", "send", "leaver", "answered")["task_id"]
    got = worker.json("a2a", "next")
    worker("a2a", "post", answered, "--lease-id", got["lease_id"], "--text", "done")
    held = operator.json("a2a", "send", "leaver", "held")["task_id"]
    assert worker.json("a2a", "next")["task"]["id"] == held
    queued = operator.json("a2a", "send", "leaver", "queued")["task_id"]
    later = operator.json("a2a", "send", "leaver", "later", "--not-before-ms", "4000000000000")["task_id"]
    assert why(operator, queued)[0] == "waits_for_a_worker" and "revoked" not in operator.text("a2a", "status")
    pubkey = operator.json("peers", "revoke", "leaver")["pubkey"]

    for task_id in (queued, later, held, answered):
        reason, told = why(operator, task_id)
        assert reason == "revoked" and "was revoked" in told
        assert f"covenant peers enroll leaver@local --key {pubkey}" in told
    status = operator.text("a2a", "status")
    rows = [line.split() for line in status.splitlines() if line[:36] in (queued, later, held)]
    assert [row[1] for row in rows] == ["revoked"] * 3
    assert "revoked: these wait for peers that were thrown out" in status
    assert operator.json("a2a", "status")["revoked"] == [pubkey]

    for task_id in (queued, later, held):
        assert f"a2a cancel {task_id} --reason REASON" in status
        typed(operator, hint(operator.text("why", task_id)), **REASON)
        assert operator.json("a2a", "show", task_id)["entry"]["outcome"] == "canceled"
    assert "done" in typed(operator, hint(operator.text("why", answered))).out
    assert operator.json("a2a", "show", answered)["entry"]["state"] == "resolved"


def test_what_why_says_to_type_moves_the_task(operator: Client) -> None:
    """In each state in which a person can do something about it."""
    worker = enrolled(operator, "mover", "a2a.respond.*")

    def sent(*more: str) -> str:
        return str(operator.json("a2a", "send", "mover", "move me", *more)["task_id"])

    def moved(task_id: str, reason: str, state: str, **placeholders: str) -> None:
        assert why(operator, task_id)[0] == reason
        typed(operator, hint(operator.text("why", task_id)), **REASON, **placeholders)
        assert operator.json("a2a", "show", task_id)["entry"]["state"] == state

    moved(sent(), "waits_for_a_worker", "result_pending")
    held = sent()
    lease = worker.json("a2a", "next")["lease_id"]
    moved(held, "held", "queued")
    moved(held, "requeued", "result_pending")
    asking = sent("--key", "asking")
    lease = worker.json("a2a", "next")["lease_id"]
    worker("a2a", "ask", lease, "which colour?")
    moved(asking, "waiting_for_input", "in_flight", TEXT="red")
    moved(asking, "held", "queued")
    follower = sent("--key", "asking")
    assert why(operator, follower)[0] == "follows_another"
    assert asking in typed(operator, hint(operator.text("why", follower))).out
    operator("a2a", "cancel", asking)
    lease = worker.json("a2a", "next")["lease_id"]
    assert why(operator, follower)[0] == "held" and lease in operator.text("why", follower)
    operator("a2a", "cancel", follower, "--graceful")
    moved(follower, "cancel_asked", "result_pending")
