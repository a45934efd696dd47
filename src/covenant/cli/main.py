"""`covenant`: the program. Its commands are imported when they are called, so that help comes at once."""

from __future__ import annotations

import importlib
import io
import os
import sys
from collections.abc import Sequence
from typing import Final

import click

from covenant.cli.option import Given, connection, json_option
from covenant.cli.output import Unwritten, have_streams, silence
from covenant.model.error import BadSetting, CovenantError, StoreUnavailable
from covenant.version import VERSION

COMMANDS: Final = {  # the first line of each one's help, so that none need be imported to list them
    "a2a": "Send tasks, work on them, see and repair what is stuck.",
    "agents": "Whom A2A clients reach: publish, list, show, withdraw.",
    "audit": "Who did what, and whether the record of it is whole.",
    "capabilities": "Who may do what: grant, revoke, list, check.",
    "daemons": "Who has the store open.",
    "db": "The schema of a store on PostgreSQL: migrate, status.",
    "journal": "The folder of a daemon: verify, repair, back up, restore.",
    "peers": "Who may come in: enroll, list, revoke, rotate tokens.",
    "runs": "Durable agents: list, show, signal, cancel, resume, judge.",
    "serve": "Run a daemon until it is told to end.",
    "store": "Move a store: copy.",
    "version": "Which Covenant this is, and which one runs.",
    "why": "Tell why a task is where it is, and what would move it.",
}


class Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = getattr(importlib.import_module(f"covenant.cli.{cmd_name}"), cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(VERSION, prog_name="covenant", message="%(prog)s %(version)s")
@connection(hidden=False)
@json_option
@click.pass_context
def covenant(ctx: click.Context) -> None:
    """A durable, explicitly leased mailbox between agents.

    Start a daemon with `covenant serve`; the other commands talk to it, but for those that work on a store themselves
    (they take --store, or a folder). The options below may also stand behind a command. Exit codes: 0 done, 1 refused,
    2 wrong usage.
    """
    if os.environ.get("NO_COLOR"):
        ctx.color = False


def run(arguments: Sequence[str]) -> int:
    """Do it; the exit code."""
    given = Given()
    try:
        code = covenant.main(list(arguments), prog_name="covenant", obj=given, standalone_mode=False)
        return code if isinstance(code, int) else 0
    except click.exceptions.NoArgsIsHelpError as wanting:
        wanting.show()
        return 2
    except click.ClickException as wrong:
        given.as_json = given.as_json or "--json" in arguments  # it may not have come to be read
        return _refuse(given, _wrong_usage(wrong))
    except (click.Abort, KeyboardInterrupt):
        return 130
    except CovenantError as refusal:
        return _refuse(given, refusal)
    except Unwritten as lost:
        return _end_unheard(given, lost.failed)
    except OSError as failed:
        from covenant.cli.words import failure

        return _refuse(given, StoreUnavailable(failure(failed)))


def _wrong_usage(wrong: click.ClickException) -> CovenantError:
    context = wrong.ctx if isinstance(wrong, click.UsageError) else None
    path = "covenant" if context is None else context.command_path
    told = " ".join(wrong.format_message().split()).rstrip(".")
    if isinstance(wrong, click.NoSuchOption) and wrong.option_name[1:].isdigit():  # as it reads `--wait=-3s`
        told += ": no number is below zero"
    return BadSetting(f"{told}{' ' if told.endswith('?') else '; '}see {path} --help", name=path)


def _refuse(given: Given, refusal: CovenantError) -> int:
    from covenant.cli.session import Session

    return Session(given).refuse(refusal)


def _end_unheard(given: Given, failed: OSError) -> int:
    silence(sys.stdout)
    if isinstance(failed, BrokenPipeError):
        return 1  # who read it has heard enough
    given.as_json = False
    why = f"it was done, but the answer could not be written: {failed.strerror}"
    return _refuse(given, StoreUnavailable(why))


def main() -> None:
    have_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # not every terminal can show what agents write
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
