"""`legato chat`: a conversation in the terminal."""

import importlib
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click

from legato.chat.interrupt import InterruptGuard
from legato.chat.repl import Answering, ModelInfo, Repl
from legato.chat.session import ChatSession
from legato.chat.view import is_terminal
from legato.cli.errors import INTERRUPTED
from legato.cli.opening import note_missing_template, open_model
from legato.cli.options import CommonOptions, SectionCommand, common_options, take_common
from legato.cli.run import OutputOptions, answer_once, join_prompt
from legato.cli.stdin import read_stdin
from legato.core.messages import Message

if TYPE_CHECKING:  # `open_model` imports it, while the model is being loaded
    from legato.api import LLM

PROMPT = "> "


@click.command(
    cls=SectionCommand,
    epilog="""\b
In the conversation: /help /clear /system TEXT /stats /quit.

\b
Examples:
  legato chat
  legato chat --system "Answer in one sentence." --temperature 0.3
  legato chat -m ./model.gguf --context 4096
  printf "Name a colour." | legato chat
""",
)
@common_options(chat=True)
def chat(**values: Any) -> None:
    """Talk with a model. Ctrl-C stops an answer, Ctrl-D leaves.

    When stdin is no terminal, all of it is one message, and the answer goes to stdout.
    """
    options = take_common(values)
    if not is_terminal(sys.stdin):
        text = join_prompt(None, read_stdin(has_prompt=False, wanted=None))
        if answer_once(text, options, OutputOptions()):
            sys.exit(INTERRUPTED)
        return
    _converse(options)


def _converse(options: CommonOptions) -> None:
    with open_model(options) as llm, InterruptGuard() as guard:
        note_missing_template(llm)
        Repl(
            ChatSession(options.system),
            ModelInfo(llm.model, llm.context_length),
            _asker(llm, options),
            line_reader(),
            guard,
        ).run()


def _asker(llm: "LLM", options: CommonOptions) -> Callable[[tuple[Message, ...]], Answering]:
    def ask(messages: tuple[Message, ...]) -> Answering:
        return llm.stream(messages, **options.generation)

    return ask


def line_reader() -> Callable[[], str]:
    """`input`, with line editing and a history where stdout is the terminal too; else the prompt goes to stderr."""
    if is_terminal(sys.stdout):
        with suppress(ImportError):  # not part of every Python
            importlib.import_module("readline")
        return lambda: input(PROMPT)

    def read() -> str:
        click.echo(PROMPT, err=True, nl=False)
        return input()

    return read
