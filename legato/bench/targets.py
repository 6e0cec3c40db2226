"""What is measured: something that streams. Here the open model of this process; `legato.bench.remote` has servers."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Protocol

from legato.bench.errors import BenchError
from legato.core.events import Finished, Started, StreamEvent, TextDelta
from legato.core.usage import Usage


@dataclass(frozen=True, slots=True)
class Ask:
    """One request, drawn greedily. max_tokens: of the answer; it does not end before, where the target allows that."""

    user: str
    max_tokens: int
    system: str | None = None

    @property
    def messages(self) -> list[dict[str, str]]:
        head = [{"role": "system", "content": self.system}] if self.system else []
        return [*head, {"role": "user", "content": self.user}]

    @property
    def raw(self) -> str:
        """The same as plain text, for completions."""
        return f"{self.system}\n\n{self.user}" if self.system else self.user


@dataclass(frozen=True, slots=True)
class Piece:
    """Text, and when it was here (seconds of `time.perf_counter`). Never empty."""

    text: str
    at_s: float


@dataclass(frozen=True, slots=True)
class Ended:
    """The answer is complete. usage: None when the target did not tell."""

    reason: str
    usage: Usage | None


class Target(Protocol):
    """Streams answers; any number at once, on one event loop. Leaving a stream (`aclose`) cancels it."""

    @property
    def name(self) -> str: ...

    def stream(self, ask: Ask) -> AsyncGenerator[Piece | Ended, None]:
        """Pieces, then one Ended. Raises BenchError, RequestError or EngineError."""

    async def close(self) -> None: ...


class RunningStream(Protocol):
    def __aiter__(self) -> AsyncIterator[StreamEvent]: ...

    def cancel(self) -> None: ...


class OpenModel(Protocol):
    """The part of `legato.LLM` that is needed."""

    @property
    def model(self) -> str: ...

    def stream(self, messages: list[dict[str, str]], **options: object) -> RunningStream: ...

    def stream_completion(self, prompt: str, **options: object) -> RunningStream: ...


class LocalTarget:
    """An open model in this process. The caller closes the model."""

    def __init__(self, llm: OpenModel, *, is_raw: bool = False) -> None:
        """is_raw: prompts go without the chat template."""
        self._llm = llm
        self._is_raw = is_raw

    @property
    def name(self) -> str:
        return f"legato in process ({self._llm.model})"

    async def stream(self, ask: Ask) -> AsyncGenerator[Piece | Ended, None]:
        running = await asyncio.to_thread(self._start, ask)  # a long prompt is tokenized there
        try:
            async for event in running:
                match event:
                    case TextDelta(text) if text:
                        yield Piece(text, time.perf_counter())
                    case Finished():
                        yield Ended(event.reason.value, event.usage)
                    case Started() | TextDelta():
                        pass
        finally:
            running.cancel()

    def _start(self, ask: Ask) -> RunningStream:
        if self._is_raw:
            return self._llm.stream_completion(ask.raw, temperature=0, max_tokens=ask.max_tokens, ignore_eos=True)
        return self._llm.stream(ask.messages, temperature=0, max_tokens=ask.max_tokens, ignore_eos=True)

    async def close(self) -> None:
        pass


@dataclass(slots=True)
class Record:
    """What a reader saw of one stream; times are seconds of `time.perf_counter`."""

    sent_s: float
    piece_s: list[float] = field(default_factory=list)
    ended: Ended | None = None
    end_s: float | None = None

    @property
    def ttft_s(self) -> float | None:
        return self.piece_s[0] - self.sent_s if self.piece_s else None

    @property
    def num_tokens(self) -> int:
        """Of the answer: what the target says, else the pieces."""
        usage = self.ended.usage if self.ended else None
        return usage.completion_tokens if usage and usage.completion_tokens else len(self.piece_s)


class Reading:
    """A stream that a task reads, while others do something else. `async with`: leaving it cancels the stream."""

    def __init__(self, target: Target, ask: Ask, sent_s: float | None = None) -> None:
        """sent_s: when the request was due, if that was before now."""
        self._target = target
        self._ask = ask
        self.record = Record(time.perf_counter() if sent_s is None else sent_s)
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "Reading":
        self._task = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.leave()

    async def leave(self) -> None:
        """Stop reading, and let the target know. An error of the stream is not raised here."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            if not self._task.cancelled():
                self._task.exception()  # seen: asyncio need not complain of it

    async def until(self, holds: Callable[[Record], bool]) -> bool:
        """Wait until the record holds that, or the stream ends. → whether it does. Raises what the stream raised."""
        while not holds(self.record) and self.record.end_s is None:
            self._news.clear()
            await self._news.wait()
        if self.record.end_s is not None:
            await self.finish()
        return holds(self.record)

    async def finish(self) -> Record:
        """Read to the end. Raises what the stream raised."""
        assert self._task is not None, "enter it first"
        await self._task
        return self.record

    async def _read(self) -> None:
        record = self.record
        try:
            async with aclosing(self._target.stream(self._ask)) as events:
                async for event in events:
                    if isinstance(event, Piece):
                        record.piece_s.append(event.at_s)
                    else:
                        record.ended = event
                    self._news.set()
        finally:
            record.end_s = time.perf_counter()
            self._news.set()


async def read_all(target: Target, ask: Ask) -> Record:
    """Read one answer. Raises what the stream raises, BenchError for an answer without any text."""
    async with Reading(target, ask) as reading:
        record = await reading.finish()
    if not record.piece_s:
        raise BenchError(f"{target.name} answered without any text; try another model, or more --answer tokens")
    return record
