"""A real server on the loopback, for one kind of client: it says what its script says, when the script says it."""

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Call:
    """One request, and the way to answer it. `left` is set when the client has gone."""

    method: str
    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    _writer: asyncio.StreamWriter
    left: asyncio.Event = field(default_factory=asyncio.Event)

    async def head(self, status: str = "200 OK", kind: str = "text/event-stream") -> None:
        await self.send(f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nConnection: close\r\n\r\n".encode())

    async def send(self, raw: bytes) -> None:
        self._writer.write(raw)
        await self._writer.drain()

    async def event(self, value: object) -> None:
        await self.send(b"data: " + json.dumps(value).encode() + b"\n\n")

    async def text(self, text: str) -> None:
        await self.event(text_chunk(text, self.path))


Script = Callable[[Call], Awaitable[None]]


def text_chunk(text: str, path: str = "/v1/chat/completions") -> dict[str, Any]:
    choice = {"delta": {"content": text}} if "chat" in path else {"text": text}
    return {"choices": [{"index": 0, "finish_reason": None, **choice}]}


USAGE = {"prompt_tokens": 7, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 2}}


async def answer(call: Call) -> None:
    """As many words as were asked for, at most until the client leaves; then the usage and [DONE]."""
    await call.head()
    await call.event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
    for _ in range(call.body["max_tokens"]):
        await call.text("word ")
        await asyncio.sleep(0.01)
    await call.event({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
    usage = {"prompt_tokens": 9, "completion_tokens": call.body["max_tokens"]}
    await call.event({"choices": [], "usage": usage})
    await call.send(b"data: [DONE]\n\n")


class OpenAIServer:
    """Runs on a thread. `calls` are the requests so far, without those for the list of models."""

    def __init__(self, script: Script) -> None:
        self.calls: list[Call] = []
        self.url = ""
        self._script = script
        self._handlers: set[asyncio.Task[Any]] = set()
        self._ready = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    def start(self) -> None:
        self._thread.start()
        assert self._ready.wait(30)

    def stop(self) -> None:
        assert self._loop is not None and self._stop is not None
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30)

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._handle, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._ready.set()
        await self._stop.wait()
        server.close()
        # The loop must not end before its sockets are closed.
        for handler in self._handlers:
            handler.cancel()
        await asyncio.gather(*self._handlers, return_exceptions=True)

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        work: asyncio.Task[None] | None = None
        this = asyncio.current_task()
        assert this is not None
        self._handlers.add(this)
        try:
            call = await _read_call(reader, writer)
            work = asyncio.create_task(self._answer(call))
            gone = asyncio.create_task(reader.read(1))
            await asyncio.wait([work, gone], return_when=asyncio.FIRST_COMPLETED)
            if gone.done() or work.exception() is not None:  # the client's end, or a write to it failed
                call.left.set()
            gone.cancel()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            if work is not None:
                work.cancel()
                await asyncio.gather(work, return_exceptions=True)
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()
            self._handlers.discard(this)

    async def _answer(self, call: Call) -> None:
        if call.path == "/v1/models":
            await call.head(kind="application/json")
            await call.send(b'{"data": [{"id": "tiny"}]}')
            return
        self.calls.append(call)
        await self._script(call)


async def _read_call(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Call:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    first, *lines = head.strip().split("\r\n")
    method, path, _ = first.split(" ")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    raw = await reader.readexactly(int(headers.get("content-length", "0")))
    return Call(method, path, headers, json.loads(raw) if raw else {}, writer)


@contextmanager
def serving(script: Script = answer) -> Iterator[OpenAIServer]:
    server = OpenAIServer(script)
    server.start()
    try:
        yield server
    finally:
        server.stop()
