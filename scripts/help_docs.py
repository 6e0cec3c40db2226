"""Put the `--help` of every command into docs/cli.md, between its markers.

    python scripts/help_docs.py           rewrite the page
    python scripts/help_docs.py --check   exit with 1 when the page is not what it would write

A block begins with `<!-- help: legato run -->` and ends with `<!-- /help -->`. Every command must have one.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from legato.cli.main import cli

PAGE = Path(__file__).parents[1] / "docs" / "cli.md"
WIDTH = 100  # columns; fixed, so that the page does not depend on the terminal
_BLOCK = re.compile(r"<!-- help: (?P<name>[a-z ]+) -->\n.*?<!-- /help -->\n", re.DOTALL)


def helps(command: click.Command = cli, parent: click.Context | None = None) -> Iterator[tuple[str, str]]:
    """(the command in full, its help) for a command and all below it."""
    name = "legato" if parent is None else command.name
    context = click.Context(command, parent, name, terminal_width=WIDTH, max_content_width=WIDTH)
    context.help_option_names = cli.context_settings["help_option_names"]
    yield context.command_path, command.get_help(context)
    if isinstance(command, click.Group):
        for child in command.list_commands(context):
            found = command.get_command(context, child)
            assert found is not None
            yield from helps(found, context)


def filled(page: str) -> str:
    """The page with every block renewed. Raises ValueError for a command without a block, and the reverse."""
    texts = dict(helps())
    blocks = [match["name"] for match in _BLOCK.finditer(page)]
    if sorted(blocks) != sorted(texts):
        raise ValueError(f"the page has blocks for {sorted(blocks)}, and the commands are {sorted(texts)}")
    return _BLOCK.sub(lambda match: _block(match["name"], texts[match["name"]]), page)


def _block(name: str, text: str) -> str:
    lines = "\n".join(line.rstrip() for line in text.strip().splitlines())
    return f"<!-- help: {name} -->\n```text\n{lines}\n```\n<!-- /help -->\n"


def main(args: list[str]) -> int:
    old = PAGE.read_text(encoding="utf-8")
    new = filled(old)
    if args == ["--check"]:
        if new != old:
            print(f"{PAGE.name} is not up to date; run: python scripts/help_docs.py", file=sys.stderr)
        return int(new != old)
    PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
