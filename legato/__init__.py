"""Legato: a local-first streaming runtime for language models.

`legato.open()` gives a model, `llm.stream(…)` a stream. Names are loaded when they are first used, so that importing
the package, or asking the command line for help, costs next to nothing.
"""

import importlib
from typing import TYPE_CHECKING

from legato._version import __version__

if TYPE_CHECKING:
    from legato.api import LLM, Answer, Choice, Stream, open
    from legato.core.errors import (
        ConfigError,
        ContextLengthError,
        DownloadError,
        EngineError,
        EngineLibraryError,
        InsufficientMemoryError,
        LegatoError,
        ModelFileError,
        RequestError,
        TemplateError,
        UnknownModelError,
    )
    from legato.core.events import Finished, FinishReason, Logprob, Started, StreamEvent, TextDelta, TokenLogprobs
    from legato.core.messages import Message, Role
    from legato.core.usage import Timing, Usage

_HOMES = {
    "legato.api": ("LLM", "Answer", "Choice", "Stream", "open"),
    "legato.core.errors": (
        "ConfigError",
        "ContextLengthError",
        "DownloadError",
        "EngineError",
        "EngineLibraryError",
        "InsufficientMemoryError",
        "LegatoError",
        "ModelFileError",
        "RequestError",
        "TemplateError",
        "UnknownModelError",
    ),
    "legato.core.events": (
        "Finished",
        "FinishReason",
        "Logprob",
        "Started",
        "StreamEvent",
        "TextDelta",
        "TokenLogprobs",
    ),
    "legato.core.messages": ("Message", "Role"),
    "legato.core.usage": ("Timing", "Usage"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "LLM",
    "Answer",
    "Choice",
    "ConfigError",
    "ContextLengthError",
    "DownloadError",
    "EngineError",
    "EngineLibraryError",
    "FinishReason",
    "Finished",
    "InsufficientMemoryError",
    "LegatoError",
    "Logprob",
    "Message",
    "ModelFileError",
    "RequestError",
    "Role",
    "Started",
    "Stream",
    "StreamEvent",
    "TemplateError",
    "TextDelta",
    "Timing",
    "TokenLogprobs",
    "UnknownModelError",
    "Usage",
    "__version__",
    "open",
]


def __getattr__(name: str) -> object:
    if (home := _HOME_OF.get(name)) is not None:
        return getattr(importlib.import_module(home), name)
    raise AttributeError(f"module 'legato' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
