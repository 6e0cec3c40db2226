"""The command `legato`. `legato --help` imports no command: their one-line descriptions are in the table below."""

import importlib
import io
import sys
from collections.abc import Mapping, Sequence
from difflib import get_close_matches

import click

from legato._version import __version__
from legato.cli.errors import report

# name → (module:attribute, what it does)
COMMANDS = {
    "run": ("legato.cli.run:run", "Answer one prompt; made for pipes."),
    "chat": ("legato.cli.chat:chat", "Talk with a model, here in the terminal."),
    "models": ("legato.cli.models:models", "List, get, inspect and remove models."),
    "doctor": ("legato.cli.doctor:doctor", "Say what is here, try the engine, and say what is wrong."),
    "bench": ("legato.cli.bench:bench", "Measure latency, stalls and load, beside any server."),
}


class LazyGroup(click.Group):
    """A group whose commands are imported when they are called."""

    def __init__(self, table: Mapping[str, tuple[str, str]], **attrs: object) -> None:
        """table: name → ("module:attribute", one line of help)."""
        super().__init__(**attrs)  # type: ignore[arg-type]
        self._table = table

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._table)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._table:
            return None
        module, _, attribute = self._table[cmd_name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in self._table and not name.startswith("-"):
            near = get_close_matches(name, self._table, 1)
            hint = f"did you mean `{near[0]}`?" if near else f"the commands are: {', '.join(self._table)}"
            raise click.UsageError(f"there is no command {name!r}; {hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in self._table.items()])


def _root(ctx: click.Context) -> None:
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


cli = LazyGroup(
    COMMANDS,
    name="legato",
    callback=click.pass_context(_root),
    invoke_without_command=True,
    help="Language models on this machine: the first token at once, and no gap after it.",
    epilog="""\b
Examples:
  legato run "Why is the sky blue?"
  legato chat
  git diff | legato run "Write a commit message for this change."
""",
    params=[
        click.Option(
            ["--version"],
            is_flag=True,
            is_eager=True,
            expose_value=False,
            callback=lambda ctx, _, wanted: _print_version(ctx) if wanted else None,
            help="Show the version and exit.",
        )
    ],
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def _print_version(ctx: click.Context) -> None:
    click.echo(f"legato {__version__}")
    ctx.exit()


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line. → the exit status; the statuses are listed in `legato.cli.errors`."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # help and tables in a locale that has fewer letters
    try:
        with cli.make_context("legato", list(sys.argv[1:] if args is None else args)) as ctx:
            cli.invoke(ctx)
        if sys.stdout is not None:
            sys.stdout.flush()  # here, where a closed pipe or a full disk can still be reported
    except click.exceptions.Exit as done:
        return done.exit_code
    except (Exception, KeyboardInterrupt) as error:
        return report(error)
    return 0
