"""One tree of errors. Each class carries a stable `code` and the HTTP status that fits it; nobody guesses from text."""

from typing import ClassVar


class LegatoError(Exception):
    """Base of everything Legato raises on purpose."""

    code: ClassVar[str] = "internal_error"
    status_hint: ClassVar[int] = 500


class RequestError(LegatoError):
    """The request is wrong; sending it again unchanged cannot work. `field` names the part that is wrong."""

    code = "invalid_request"
    status_hint = 400

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class ContextLengthError(RequestError):
    """The prompt does not fit the context. Both numbers are in the text and in the attributes (tokens)."""

    code = "context_length_exceeded"

    def __init__(self, num_prompt_tokens: int, context_length: int) -> None:
        super().__init__(
            f"the prompt has {num_prompt_tokens} tokens, but a stream of this model holds {context_length} and "
            "at least one must stay free for the answer; shorten the prompt or open the model with a larger context",
            field="messages",
        )
        self.num_prompt_tokens = num_prompt_tokens
        self.context_length = context_length

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.num_prompt_tokens, self.context_length)


class TemplateError(RequestError):
    """The chat template could not be loaded or rendered (bad syntax, a forbidden access, too long, too slow)."""

    code = "template_error"


class UnknownModelError(RequestError):
    """No model of that name is here."""

    code = "model_not_found"
    status_hint = 404


class ModelFileError(LegatoError):
    """The model file is missing, cut, damaged, or not a GGUF that this engine reads."""

    code = "model_file_invalid"


class InsufficientMemoryError(LegatoError):
    """The model with this context does not fit the memory that is free. Sizes are in bytes."""

    code = "insufficient_memory"
    status_hint = 507

    def __init__(self, message: str, need_bytes: int, have_bytes: int) -> None:
        super().__init__(message)
        self.need_bytes = need_bytes
        self.have_bytes = have_bytes

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (*self.args, self.need_bytes, self.have_bytes)


class ConfigError(LegatoError):
    """A setting is unknown, out of range, or does not fit another one."""

    code = "invalid_config"


class DownloadError(LegatoError):
    """A model could not be fetched from the hub."""

    code = "download_failed"
    status_hint = 502


class OverloadedError(LegatoError):
    """There is more work than fits; the same request may work later."""

    code = "overloaded"
    status_hint = 503


class EngineError(LegatoError):
    """The engine failed; every stream that was running on it gets this error, and every later call too."""

    code = "engine_error"


class EngineLibraryError(EngineError):
    """libllama is missing, cannot be loaded, or does not run on this processor."""

    code = "engine_library_unavailable"
