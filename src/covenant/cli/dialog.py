"""What is said about a task before its end: by the worker that holds it, and by its sender."""

from __future__ import annotations

import click

from covenant.cli.bounds import GENERATION, MESSAGE
from covenant.cli.option import answers, wait_option
from covenant.cli.session import Daemon, Session, waits
from covenant.cli.words import safe
from covenant.model.message import Artifact, Message, Part
from covenant.model.record import Asks
from covenant.rules.dialog import text_of
from covenant.serve import wire as w


@click.command()
@click.argument("task_id")
@click.argument("text")
@click.option("--if-generation", type=GENERATION, help="Only if nothing has happened to it since.")
@answers
def say(session: Session, task_id: str, text: str, if_generation: int | None) -> None:
    """Add to an open task, or answer what its holder asks."""
    request = w.AddMessage(task_id=task_id, text=text, if_generation=if_generation)
    _answer(session, session.ask(request, w.MovedReply), "told the holder of")


def _answer(session: Session, done: w.MovedReply, what: str) -> None:
    session.answer(done, lambda: click.echo(f"{what} {done.task_id}, generation {done.generation}"))


@click.command()
@click.argument("lease_id")
@click.argument("text")
@answers
def update(session: Session, lease_id: str, text: str) -> None:
    """Say how far the work is."""
    _answer(session, session.ask(w.Update(lease_id=lease_id, text=text), w.MovedReply), "told the sender of")


@click.command()
@click.argument("lease_id")
@click.argument("text")
@click.option("--name", required=True, help="Which artifact: the same name is the same one.")
@click.option("--append", is_flag=True, help="A piece more of it, instead of all of it.")
@click.option("--last", is_flag=True, help="There are no more pieces to come.")
@answers
def artifact(session: Session, lease_id: str, text: str, name: str, append: bool, last: bool) -> None:
    """Hand over what was made."""
    made = Artifact(artifact_id=name, name=name, parts=(Part(text=text),))
    request = w.AddArtifact(lease_id=lease_id, artifact=made, append=append, last=last)
    _answer(session, session.ask(request, w.MovedReply), "handed over to the sender of")


@click.command()
@click.argument("lease_id")
@click.argument("text", required=False)
@click.option("--auth", is_flag=True, help="It is an authorisation that is needed.")
@answers
def ask(session: Session, lease_id: str, text: str | None, auth: bool) -> None:
    """Ask the sender; `covenant a2a inputs` waits for the answer."""
    request = w.Ask(lease_id=lease_id, asks=Asks.AUTH if auth else Asks.INPUT, text=text)
    _answer(session, session.ask(request, w.MovedReply), "asked the sender of")


@click.command()
@click.argument("lease_id")
@click.option("--after", type=MESSAGE, default=0, help="Only what comes behind this number.")
@wait_option("Wait until the sender says something, for ever or so long.")
@answers
def inputs(session: Session, lease_id: str, after: int, wait_ms: int | None) -> None:
    """What the sender has said since it sent the task."""

    async def listen(daemon: Daemon) -> w.InputsReply:
        for once_ms in waits(wait_ms):
            heard = await daemon.call(w.ListInputs(lease_id=lease_id, after=after, wait_ms=once_ms), w.InputsReply)
            if heard.inputs or heard.cancel_requested:
                break
        return heard

    heard = session.run(listen)

    def tell() -> None:
        for one in heard.inputs:
            click.echo(f"{one.number}  {_said(one.message)}")
        if heard.cancel_requested:
            click.echo(f"stop: a cancel of {heard.task_id} was asked for: {safe(heard.cancel_reason or '')}")
        elif not heard.inputs:
            click.echo("nothing was said")

    session.answer(heard, tell)


def _said(message: Message) -> str:
    return safe(text_of(message))


@click.command()
@click.argument("lease_id")
@click.argument("text")
@answers
def reject(session: Session, lease_id: str, text: str) -> None:
    """Refuse a leased task, and say why."""
    _answer(session, session.ask(w.Reject(lease_id=lease_id, text=text), w.MovedReply), "rejected")


@click.command()
@click.argument("lease_id")
@click.argument("text")
@answers
def reply(session: Session, lease_id: str, text: str) -> None:
    """Answer an A2A client by a message alone."""
    _answer(session, session.ask(w.ReplyDirectly(lease_id=lease_id, text=text), w.MovedReply), "replied instead of")
