"""`covenant why`: the story of a task, the one reason for where it is, and the command that would move it."""

from __future__ import annotations

import click

from covenant.cli.audit import row_cells
from covenant.cli.entry import between, state_line
from covenant.cli.option import answers
from covenant.cli.session import Session
from covenant.cli.table import Column, print_table
from covenant.cli.words import ago, brief, clock, safe
from covenant.serve import wire as w
from covenant.serve.why import reason_of


@click.command()
@click.argument("task_id")
@answers
def why(session: Session, task_id: str) -> None:
    """Tell why a task is where it is, and what would move it."""
    story = session.ask(w.Story(task_id=task_id), w.StoryReply)
    session.answer(story, lambda: _tell(session, story))


def _tell(session: Session, story: w.StoryReply) -> None:
    task = story.entry.task
    click.echo(f"{click.style(task.id, bold=True)}  {brief(task.intent_text)}")
    click.echo(f"{between(task)}: {state_line(story.entry)}\n")
    if not story.complete:
        click.echo("(what happened first is past retention)")
    columns = (Column("when"), Column("who"), Column("what"), Column("more", wraps=True))
    print_table(columns, ((ago(row.at_ms), *row_cells(row, with_task=False)) for row in story.rows))
    told = reason_of(story.entry, lambda at_ms: f"{clock(at_ms)}, {ago(at_ms)}", story.run, story.revoked).explanation
    click.echo(f"\n{click.style(story.reason.replace('_', ' '), bold=True)}: {safe(told)}")
    if story.command is not None:
        click.echo(f"to move it: {session.command(safe(story.command.removeprefix('covenant ')))}")
