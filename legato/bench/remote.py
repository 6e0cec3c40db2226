"""A server that speaks the OpenAI protocol, as a target. Needs httpx."""

import ipaddress
import json
import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx

from legato.bench.errors import BenchError
from legato.bench.sse import ServerEvent, SseParser
from legato.bench.targets import Ask, Ended, Piece
from legato.core.usage import Usage

_CONNECT_TIMEOUT_S = 10.0
_SHOWN_CHARS = 300  # of a server's own words


@dataclass(frozen=True, slots=True)
class Endpoint:
    """url: of the server, with or without `/v1`. model: None = the first one that the server lists.

    is_raw: `/v1/completions` instead of `/v1/chat/completions`. is_strict: send no field that OpenAI does not have
    (`ignore_eos`), for servers that refuse those.
    """

    url: str
    model: str | None = None
    api_key: str | None = None
    is_raw: bool = False
    is_strict: bool = False

    @property
    def base(self) -> str:
        return self.url.rstrip("/").removesuffix("/v1") + "/v1"


class UrlTarget:
    """One server. Connections are kept and reused. Use it on one event loop, and close it there."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._model = endpoint.model
        headers = {"Authorization": f"Bearer {endpoint.api_key}"} if endpoint.api_key else {}
        # Reads have no limit of their own: a long prompt is silent for long, and the round is limited as a whole.
        self._client = httpx.AsyncClient(
            headers=headers,
            timeout=httpx.Timeout(None, connect=_CONNECT_TIMEOUT_S),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            trust_env=not _is_loopback(endpoint.url),  # a proxy on the way to this machine would be measured too
        )

    @property
    def name(self) -> str:
        return self._endpoint.url.rstrip("/")

    async def prepare(self) -> None:
        """Find the server, and the model if none was named. Raises BenchError."""
        if self._model is not None:
            return
        try:
            response = await self._client.get(f"{self._endpoint.base}/models", timeout=_CONNECT_TIMEOUT_S)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        if response.status_code in (404, 405):
            raise BenchError(f"{self.name} does not list its models; name one with --model")
        if response.is_error:
            raise self._refused(response)
        try:
            self._model = str(response.json()["data"][0]["id"])
        except (ValueError, LookupError, TypeError) as error:
            raise BenchError(f"{self.name} lists no model at /v1/models; name one with --model") from error

    async def stream(self, ask: Ask) -> AsyncGenerator[Piece | Ended, None]:
        await self.prepare()
        path = "completions" if self._endpoint.is_raw else "chat/completions"
        try:
            async with self._client.stream("POST", f"{self._endpoint.base}/{path}", json=self._body(ask)) as response:
                if response.is_error:
                    await response.aread()
                    raise self._refused(response)
                answer = _Answer(self.name)
                async for chunk in response.aiter_bytes():
                    for event in answer.push(chunk):
                        yield event
                    if answer.is_complete:
                        break
                for event in answer.flush():
                    yield event
        except httpx.ConnectError as error:
            raise self._unreachable(error) from error
        except httpx.TimeoutException as error:
            raise self._unreachable(error) from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise BenchError(
                f"the connection to {self.name} broke ({_words(str(error) or type(error).__name__)}); see its log"
            ) from error

    async def close(self) -> None:
        await self._client.aclose()

    def _body(self, ask: Ask) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._model,
            "max_tokens": ask.max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        body |= {"prompt": ask.raw} if self._endpoint.is_raw else {"messages": ask.messages}
        return body if self._endpoint.is_strict else body | {"ignore_eos": True}

    def _unreachable(self, error: Exception) -> BenchError:
        why = _words(str(error) or type(error).__name__)
        return BenchError(f"no server answers at {self.name} ({why}); start it, or correct the URL")

    def _refused(self, response: httpx.Response) -> BenchError:
        hint = {
            401: "give --api-key",
            403: "give --api-key",
            404: "check the URL and --model",
            429: "it is too busy: use fewer requests",
            503: "it is too busy, or still loading: try again",
        }.get(response.status_code, "--strict leaves out ignore_eos; --tokens and --answer set the lengths")
        words = _words(_error_text(response.text))
        return BenchError(f"{self.name} refused the request with status {response.status_code} ({words}); {hint}")


class _Answer:
    """The bytes of one streamed answer, made events."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._parser = SseParser()
        self._reason: str | None = None
        self._usage: Usage | None = None
        self.is_complete = False  # the closing [DONE] was there

    def push(self, chunk: bytes) -> Iterator[Piece | Ended]:
        now = time.perf_counter()
        for event in self._parser.push(chunk):
            yield from self._read(event, now)

    def flush(self) -> Iterator[Piece | Ended]:
        """The end of the bytes. Raises BenchError when the answer has none."""
        now = time.perf_counter()
        for event in [] if self.is_complete else self._parser.flush():
            yield from self._read(event, now)
        if self._reason is None and not self.is_complete:
            raise BenchError(f"{self._name} broke the stream off before its end; see its log")
        yield Ended(self._reason or "stop", self._usage)

    def _read(self, event: ServerEvent, now: float) -> Iterator[Piece]:
        if self.is_complete:
            return
        if event.data.startswith("[DONE]"):
            self.is_complete = True
            return
        try:
            chunk = json.loads(event.data)
        except ValueError as error:
            raise BenchError(
                f"{self._name} sent an event that is not JSON ({_words(event.data)}); is it an OpenAI server?"
            ) from error
        if not isinstance(chunk, dict):
            raise BenchError(f"{self._name} sent {_words(event.data)}; is it an OpenAI server?")
        if chunk.get("error") or event.name == "error":
            raise BenchError(f"{self._name} failed within the stream ({_words(_error_text(event.data))}); see its log")
        self._usage = _usage(chunk.get("usage")) or self._usage
        if text := self._text(chunk):
            yield Piece(text, now)

    def _text(self, chunk: Mapping[str, Any]) -> str:
        """Of the first choice: the answer's text or its reasoning, whatever the reader sees."""
        choices = chunk.get("choices")
        choice = choices[0] if isinstance(choices, list) and choices else None
        if not isinstance(choice, dict):
            return ""
        if isinstance(reason := choice.get("finish_reason"), str):
            self._reason = reason
        delta = choice.get("delta")
        holder = delta if isinstance(delta, dict) else choice
        found = (holder.get(key) for key in ("reasoning_content", "reasoning", "content", "text"))
        return "".join(text for text in found if isinstance(text, str))


def _usage(value: object) -> Usage | None:
    if not isinstance(value, dict):
        return None
    details = value.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else 0
    counts = (value.get("prompt_tokens"), cached, value.get("completion_tokens"))
    prompt, cached, completion = (count if isinstance(count, int) else 0 for count in counts)
    return Usage(prompt, cached, completion)


def _error_text(body: str) -> str:
    """The message of an error in one of the shapes that servers use; else the text itself."""
    try:
        value = json.loads(body)
    except ValueError:
        return body
    for key in ("error", "message", "detail"):
        if isinstance(value, dict) and key in value:
            value = value[key]
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _words(text: str) -> str:
    """A server's own words, fit for one line of a terminal."""
    shown = "".join(c if c.isprintable() else " " for c in text[:_SHOWN_CHARS])
    return " ".join(shown.split()) or "no reason given"


def _is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
