"""Opening the model of a command, and saying so when it takes time.

Half of the time to the first word would be Python importing the API, the other half libllama loading the model. The
second does not need the first, and runs outside the GIL: so it runs on a thread, beside the import.
"""

import importlib
import sys
import threading
from typing import TYPE_CHECKING, Any

from legato.chat.interrupt import interrupt_kills
from legato.chat.view import Notices, WaitNote, is_terminal
from legato.cli.options import CommonOptions
from legato.core.errors import UnknownModelError
from legato.engine.config import EngineConfig

if TYPE_CHECKING:
    from legato.api import LLM

_NOTE_AFTER_S = 1.0
_SHARE_S = 0.0002  # each call into libllama gives the GIL away and must get it back from the imports
_LARGE = 512 * 2**20  # bytes; smaller models are loaded before a share of them could be read


def open_model(options: CommonOptions) -> "LLM":
    """Fetch a model `hf:…` that is not here, with a progress bar; then load it. Raises what `legato.open` does."""
    if options.model.startswith("hf:"):
        _fetch(options.model)
    config = EngineConfig(**options.engine)
    note = WaitNote(f"loading {options.model} …", _NOTE_AFTER_S)
    try:
        with interrupt_kills():
            loading = _Loading(options.model, config, note)
            interval = sys.getswitchinterval()
            sys.setswitchinterval(_SHARE_S)
            try:
                api, local = importlib.import_module("legato.api"), importlib.import_module("legato.providers.local")
                name, model, context = loading.result()
            finally:
                sys.setswitchinterval(interval)
            llm: LLM = api.LLM(local.LocalProvider(name, model, context, config))
            return llm
    finally:
        note.clear()


def note_missing_template(llm: "LLM") -> None:
    """A chat with a model that was not made for one deserves a word."""
    if not llm.has_chat_template:
        Notices().say(f"note: {llm.model} brings no chat template; ChatML is used, and answers may be poor")


class _Loading:
    """A model on its way into memory, on a thread of its own."""

    def __init__(self, model: str, config: EngineConfig, note: WaitNote) -> None:
        self._loaded: tuple[str, Any, Any] | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=[model, config, note], name="legato-load", daemon=True)
        self._thread.start()

    def result(self) -> tuple[str, Any, Any]:
        """(name, model, context), when it is there. Raises what loading raised."""
        self._thread.join()
        if self._loaded is None:
            assert self._error is not None
            raise self._error
        return self._loaded

    def _run(self, name: str, config: EngineConfig, note: WaitNote) -> None:
        try:
            resolved = importlib.import_module("legato.models.registry").resolve(name)
            load_model = importlib.import_module("legato.engine.loader").load_model
            # Each report wants the GIL, which the imports beside this thread hold: only where it will be read.
            progress = note.share if resolved.size_bytes >= _LARGE else None
            model, params = load_model(resolved.path, config, progress)
            context = importlib.import_module("legato.llama.context").LlamaContext(model, params)
            self._loaded = (resolved.name, model, context)
        except BaseException as error:
            self._error = error


def _fetch(ref: str) -> None:
    registry = importlib.import_module("legato.models.registry")
    try:
        registry.resolve(ref)
    except UnknownModelError:
        bar = importlib.import_module("legato.cli.models").ProgressBar(on_terminal=is_terminal(sys.stderr))
        try:
            registry.pull(ref, bar.update)
        finally:
            bar.close()
