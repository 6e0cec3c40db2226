"""Opening the model of a command, and saying so when it takes time."""

import sys

from legato.api import LLM
from legato.api import open as open_llm
from legato.chat.interrupt import interrupt_kills
from legato.chat.view import WaitNote
from legato.cli.options import CommonOptions
from legato.core.errors import UnknownModelError
from legato.models.registry import pull, resolve

_NOTE_AFTER_S = 1.0


def open_model(options: CommonOptions) -> LLM:
    """Fetch a model `hf:…` that is not here, with a progress bar; then load it. Raises what `legato.open` does."""
    if options.model.startswith("hf:"):
        _fetch(options.model)
    note = WaitNote(f"loading {options.model} …", _NOTE_AFTER_S)
    try:
        with interrupt_kills():
            return open_llm(options.model, on_progress=note.share, **options.engine)
    finally:
        note.clear()


def _fetch(ref: str) -> None:
    try:
        resolve(ref)
    except UnknownModelError:
        from legato.cli.models import ProgressBar  # noqa: PLC0415  it is part of a command, and rarely needed here

        bar = ProgressBar(on_terminal=sys.stderr is not None and sys.stderr.isatty())
        try:
            pull(ref, bar.update)
        finally:
            bar.close()
