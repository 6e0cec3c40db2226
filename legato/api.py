"""The Python API. `legato.open` gives an `LLM`; its `stream` gives a `Stream`.

with legato.open("smollm2") as llm:
    for text in llm.stream("Why is the sky blue?").text():
        print(text, end="", flush=True)
"""

import weakref
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any, Self

from legato.core.errors import ConfigError, RequestError
from legato.core.events import Finished, FinishReason, Started, StreamEvent, TextDelta, TokenLogprobs
from legato.core.messages import Conversation, as_messages
from legato.core.request import ChatRequest, CompletionRequest, make_options
from legato.core.usage import Timing, Usage
from legato.engine.config import CONFIG_NAMES, EngineConfig
from legato.models.registry import resolve
from legato.providers.local import LocalProvider, LocalStream

OnDelta = Callable[[str], object]
OnProgress = Callable[[float], None]


@dataclass(frozen=True, slots=True)
class Choice:
    """One finished answer."""

    text: str
    finish_reason: FinishReason
    usage: Usage
    timing: Timing
    stop_sequence: str | int | None
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """The joined stream. With n > 1, `choices` holds all answers; the properties speak of the first."""

    choices: tuple[Choice, ...]
    model: str
    seed: int

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def finish_reason(self) -> FinishReason:
        return self.choices[0].finish_reason

    @property
    def timing(self) -> Timing:
        return self.choices[0].timing

    @property
    def usage(self) -> Usage:
        """The prompt counted once, the completions of all choices summed."""
        first = self.choices[0].usage
        return Usage(
            first.prompt_tokens, first.cached_tokens, sum(choice.usage.completion_tokens for choice in self.choices)
        )

    def __str__(self) -> str:
        return self.text


class Stream:
    """A running generation. It starts when it is made; read it once, with `for` or `async for`.

    - `for event in stream` / `async for event in stream`: Started, then TextDelta …, one Finished per choice.
    - `stream.text()`: the same as plain pieces of text.
    - `stream.answer()` / `await stream`: the joined Answer.
    - `with` / `async with`: leaving the block early cancels and frees the slot. So does losing the last reference.
    - `stream.cancel()`: from any thread; the stream then ends with reason `cancelled` and the text so far.

    Raises EngineError while reading when the engine dies.
    """

    def __init__(self, source: LocalStream, owner: object) -> None:
        """owner: kept alive while the stream is."""
        self._source = source
        self._owner = owner
        self._is_taken = False
        self._pieces: list[list[TextDelta]] = [[] for _ in range(source.num_choices)]
        self._ends: list[Finished | None] = [None] * source.num_choices

    @property
    def request_id(self) -> str:
        return self._source.started.request_id

    @property
    def seed(self) -> int:
        """The seed in use: the one that was given, or the random one that was chosen."""
        return self._source.started.seed

    @property
    def finish_reason(self) -> FinishReason | None:
        """Of the first choice; None while it runs."""
        end = self._ends[0]
        return None if end is None else end.reason

    @property
    def usage(self) -> Usage | None:
        """Of the first choice; None while it runs."""
        end = self._ends[0]
        return None if end is None else end.usage

    @property
    def timing(self) -> Timing | None:
        """Of the first choice; None while it runs."""
        end = self._ends[0]
        return None if end is None else end.timing

    def cancel(self) -> None:
        self._source.cancel()

    def __iter__(self) -> Iterator[StreamEvent]:
        self._take()
        return self._watch(iter(self._source))

    def _watch(self, events: Iterator[StreamEvent]) -> Iterator[StreamEvent]:
        try:
            for event in events:
                self._note(event)
                yield event
        finally:
            self.cancel()

    async def __aiter__(self) -> AsyncIterator[StreamEvent]:
        self._take()
        try:
            async for event in self._source:
                self._note(event)
                yield event
        finally:
            self.cancel()

    def text(self) -> "TextStream":
        """Only the text, piece by piece. For one choice; with n > 1 read the events, which say whose text it is."""
        if len(self._ends) > 1:
            raise RequestError("text() is for one answer; with n > 1 iterate the stream's events", field="n")
        return TextStream(self)

    def answer(self, on_delta: OnDelta | None = None) -> Answer:
        """Read to the end and join. on_delta gets each piece of text; when it returns False the stream is cancelled."""
        for event in self:
            on_delta = self._tell(on_delta, event)
        return self._joined()

    async def answer_async(self, on_delta: OnDelta | None = None) -> Answer:
        """`answer` for an event loop."""
        async for event in self:
            on_delta = self._tell(on_delta, event)
        return self._joined()

    def _tell(self, on_delta: OnDelta | None, event: StreamEvent) -> OnDelta | None:
        """Hand text to the callback; → the callback, or None once it has said stop."""
        if on_delta is not None and isinstance(event, TextDelta) and event.text and on_delta(event.text) is False:
            self.cancel()
            return None
        return on_delta

    def __await__(self) -> Generator[Any, Any, Answer]:
        return self.answer_async().__await__()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        self.cancel()

    def __del__(self) -> None:
        if hasattr(self, "_source"):
            self.cancel()

    def _take(self) -> None:
        if self._is_taken:
            raise RequestError("this stream was read already; start another one")
        self._is_taken = True

    def _note(self, event: StreamEvent) -> None:
        match event:
            case TextDelta():
                self._pieces[event.index].append(event)
            case Finished():
                self._ends[event.index] = event
            case Started():
                pass

    def _joined(self) -> Answer:
        choices = tuple(
            _choice(pieces, end) for pieces, end in zip(self._pieces, self._ends, strict=True) if end is not None
        )
        return Answer(choices, self._source.started.model, self.seed)


class TextStream:
    """The text of a stream: iterate it with `for` or `async for`."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def __iter__(self) -> Iterator[str]:
        for event in self._stream:
            if isinstance(event, TextDelta) and event.text:
                yield event.text

    async def __aiter__(self) -> AsyncIterator[str]:
        async for event in self._stream:
            if isinstance(event, TextDelta) and event.text:
                yield event.text


def _choice(pieces: list[TextDelta], end: Finished) -> Choice:
    return Choice(
        text="".join(piece.text for piece in pieces),
        finish_reason=end.reason,
        usage=end.usage,
        timing=end.timing,
        stop_sequence=end.stop_sequence,
        token_ids=tuple(token for piece in pieces for token in piece.token_ids),
        logprobs=tuple(entry for piece in pieces for entry in piece.logprobs),
    )


class LLM:
    """An open model. All methods may be called from any thread and any event loop; requests run side by side.

    Options of the four generating methods are those of SamplingParams, Limits and GenerationOptions in
    `legato.core.request`, by name: `max_tokens=100, temperature=0, stop=["\\n\\n"], seed=7, n=2 …`. A wrong one raises
    RequestError, which names it, before anything starts.
    """

    def __init__(self, provider: LocalProvider) -> None:
        self._provider = provider
        # Runs when the last reference goes, or at exit: the engine's thread is inside libllama most of the time, and
        # must have left before the interpreter is taken down. Streams hold the LLM.
        self._finalizer = weakref.finalize(self, provider.close)

    @property
    def model(self) -> str:
        return self._provider.model_name

    @property
    def context_length(self) -> int:
        """Tokens that one conversation can hold, prompt and answer together."""
        return self._provider.context_length

    @property
    def has_chat_template(self) -> bool:
        """False: the model file brings none, and ChatML is used."""
        return not self._provider.template.is_default

    def stream(self, messages: Conversation, **options: object) -> Stream:
        """Answer a conversation: a string, or messages as `{"role": …, "content": …}`.

        The prompt is rendered and tokenized here, then this returns; a long prompt in an event loop is best sent with
        `await asyncio.to_thread(llm.stream, …)`. Raises RequestError (ContextLengthError, TemplateError), EngineError.
        """
        return Stream(self._provider.stream(ChatRequest(as_messages(messages), make_options(options))), self)

    def stream_completion(self, prompt: str | list[int], **options: object) -> Stream:
        """Continue a text, or token ids, without a chat template."""
        return Stream(self._provider.stream(_completion(prompt, options)), self)

    def chat(self, messages: Conversation, *, on_delta: OnDelta | None = None, **options: object) -> Answer:
        """`stream(…).answer(on_delta)`."""
        return self.stream(messages, **options).answer(on_delta)

    def complete(self, prompt: str | list[int], *, on_delta: OnDelta | None = None, **options: object) -> Answer:
        """`stream_completion(…).answer(on_delta)`."""
        return self.stream_completion(prompt, **options).answer(on_delta)

    def tokenize(self, text: str) -> list[int]:
        """Token ids of plain text, as `stream_completion` reads it."""
        return self._provider.prompt_ids(CompletionRequest(text))

    def count_tokens(self, messages: Conversation) -> int:
        """Prompt tokens that `stream(messages)` would use, exactly."""
        return len(self._provider.prompt_ids(ChatRequest(as_messages(messages))))

    def close(self) -> None:
        """Stop the engine and free the memory. Streams that still run get an EngineError."""
        self._provider.close()
        self._finalizer.detach()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()


def open(model: str = "smollm2", *, on_progress: OnProgress | None = None, **config: Any) -> LLM:
    """Open a model: `smollm2` (embedded), a pulled name, a path, or `hf:owner/repo:quant` (fetched when not here).

    config: fields of EngineConfig by name (`context=4096, slots=8, threads=2 …`). on_progress gets the share loaded.
    Raises UnknownModelError, ModelFileError, InsufficientMemoryError, ConfigError, DownloadError, EngineLibraryError.
    """
    settings = engine_config(config)
    resolved = resolve(model, download=True)
    return LLM(LocalProvider.open(resolved.name, resolved.path, settings, on_progress))


def engine_config(given: dict[str, Any]) -> EngineConfig:
    """EngineConfig from names and values. Raises ConfigError for an unknown name."""
    if unknown := sorted(given.keys() - CONFIG_NAMES):
        raise ConfigError(f"unknown setting {unknown[0]!r}; the settings are: {', '.join(sorted(CONFIG_NAMES))}")
    return EngineConfig(**given)


def _completion(prompt: str | list[int], options: dict[str, object]) -> CompletionRequest:
    if not isinstance(prompt, str | list | tuple):
        raise RequestError("prompt must be a string or a list of token ids", field="prompt")
    return CompletionRequest(prompt if isinstance(prompt, str) else tuple(prompt), make_options(options))
