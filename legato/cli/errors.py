"""Exit statuses, and one line on stderr for everything that goes wrong.

0 done, 1 the system, the model or the engine failed, 2 the command or a value in it is wrong, 130 interrupted,
141 whoever read the output has gone.
"""

import os
import sys
import traceback
from contextlib import suppress
from pathlib import Path

import click

from legato.core.errors import ConfigError, LegatoError, RequestError, TemplateError

FAILED = 1
WRONG_USE = 2
INTERRUPTED = 130  # 128 + SIGINT
CLOSED_PIPE = 141  # 128 + SIGPIPE: what a shell reports for other programs in this place


def report(error: BaseException) -> int:
    """Say on stderr what went wrong, if anything is to be said. → the exit status."""
    if isinstance(error, BrokenPipeError):
        discard_output()
        return CLOSED_PIPE
    if isinstance(error, click.Abort):
        return _report_abort(error)
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if debugging():
        traceback.print_exception(error)
    elif isinstance(error, click.ClickException):
        _report_usage(error)
    else:
        _say(f"error: {_text(error)}")
    return exit_status(error)


def exit_status(error: BaseException) -> int:
    """A template is part of the model, so its errors are no fault of the command's."""
    if isinstance(error, click.UsageError):
        return WRONG_USE
    if isinstance(error, RequestError | ConfigError) and not isinstance(error, TemplateError):
        return WRONG_USE
    return FAILED


def debugging() -> bool:
    """LEGATO_DEBUG is set: show tracebacks."""
    return bool(os.environ.get("LEGATO_DEBUG"))


def discard_output() -> None:
    """Point stdout at nothing: what is still buffered must not raise when the interpreter flushes it at its end."""
    with suppress(OSError, ValueError, AttributeError):
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, sys.stdout.fileno())
        os.close(devnull)


def _text(error: BaseException) -> str:
    if isinstance(error, LegatoError):
        return str(error)
    if isinstance(error, OSError):
        place = f": {Path(os.fsdecode(error.filename))}" if isinstance(error.filename, str | bytes) else ""
        return f"{error.strerror or error}{place}"
    return f"unexpected {type(error).__name__}: {error} (LEGATO_DEBUG=1 shows where; please report it)"


def _report_usage(error: click.ClickException) -> None:
    if isinstance(error, getattr(click.exceptions, "NoArgsIsHelpError", ())):
        error.show()
        return
    _say(f"error: {error.format_message()}")
    context = getattr(error, "ctx", None)
    if context is not None:
        _say(f"`{context.command_path} --help` lists what can be given")


def _report_abort(error: click.Abort) -> int:
    """click makes an Abort of Ctrl-C at its questions, and of an answer that is no."""
    cause = error.__cause__ or error.__context__
    if isinstance(cause, KeyboardInterrupt):
        return INTERRUPTED
    _say("not done")
    return FAILED


def _say(line: str) -> None:
    with suppress(OSError, ValueError):  # stderr may be gone too
        click.echo(line, err=True)
