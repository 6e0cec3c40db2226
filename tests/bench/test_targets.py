"""Both kinds of target, by what a reader sees of them."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

import legato
from legato.bench.errors import BenchError
from legato.bench.remote import Endpoint, UrlTarget
from legato.bench.targets import Ask, Ended, LocalTarget, Piece, Reading, Target, read_all
from legato.core.errors import ContextLengthError
from legato.core.usage import Usage
from tests.bench.openai_server import USAGE, Call, Script, answer, serving

PATIENCE_S = 60


async def read(target: Target, ask: Ask | None = None) -> tuple[list[str], Ended]:
    *pieces, ended = [event async for event in target.stream(ask or Ask("hi", 3))]
    assert isinstance(ended, Ended)
    return [piece.text for piece in pieces if isinstance(piece, Piece)], ended


async def eventually(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not holds():  # noqa: ASYNC110 - another thread's state
            await asyncio.sleep(0.01)


async def ask_server(script: Script, **endpoint: Any) -> tuple[list[str], Ended, list[Call]]:
    with serving(script) as server:
        target = UrlTarget(Endpoint(server.url, **endpoint))
        try:
            return *await read(target), server.calls
        finally:
            await target.close()


def raw_script(*chunks: bytes) -> Script:
    async def say(call: Call) -> None:
        await call.head()
        for chunk in chunks:
            await call.send(chunk)

    return say


def frames(*values: Any) -> bytes:
    return b"".join(b"data: " + (v if isinstance(v, bytes) else json.dumps(v).encode()) + b"\n\n" for v in values)


CHUNK = {"choices": [{"delta": {"content": "é"}}]}
END = {"choices": [{"delta": {}, "finish_reason": "stop"}]}


async def test_an_answer_its_usage_and_what_was_sent() -> None:
    texts, ended, calls = await ask_server(answer, api_key="secret")
    assert (texts, ended) == (["word "] * 3, Ended("length", Usage(9, 0, 3)))
    body, headers = calls[0].body, calls[0].headers
    assert (calls[0].path, headers["authorization"]) == ("/v1/chat/completions", "Bearer secret")
    assert body == {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 3,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }


async def test_completions_strict_and_a_named_model() -> None:
    texts, _, calls = await ask_server(answer, is_raw=True, is_strict=True, model="mine")
    assert texts == ["word "] * 3 and calls[0].path == "/v1/completions"
    assert calls[0].body["prompt"] == "hi" and calls[0].body["model"] == "mine" and "ignore_eos" not in calls[0].body


async def test_a_url_with_v1_is_the_same_server() -> None:
    assert {Endpoint(url).base for url in ("http://a", "http://a/", "http://a/v1", "http://a/v1/")} == {"http://a/v1"}


async def test_every_byte_on_its_own_pings_roles_and_odd_frames() -> None:
    odd = [{"choices": []}, {"choices": None}, {"choices": [None]}, {"usage": 3}, {"choices": [{"delta": None}]}]
    whole = b": ping\r\n\r\n" + frames(*odd, CHUNK) + frames({"choices": [], "usage": USAGE}, END, b"[DONE]", b"x")
    texts, ended, _ = await ask_server(raw_script(*(whole[i : i + 1] for i in range(len(whole)))))
    assert (texts, ended) == (["é"], Ended("stop", Usage(7, 2, 5)))


async def test_reasoning_is_text_that_the_reader_sees() -> None:
    chunk = {"choices": [{"delta": {"reasoning_content": "hm", "content": None}}]}
    texts, *_ = await ask_server(raw_script(frames(chunk, CHUNK, END)))
    assert texts == ["hm", "é"]


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (frames(CHUNK), "broke the stream off"),
        (
            frames(CHUNK, {"error": {"message": "out of memory", "code": 500}}),
            "failed within the stream (out of memory)",
        ),
        (b"event: error\n" + frames({"message": "no"}), "failed within the stream (no)"),
        (frames(CHUNK, b"{oops"), "not JSON"),
        (frames([1]), "OpenAI server?"),
        (b"", "broke the stream off"),
    ],
)
async def test_broken_streams_are_errors_that_say_so(raw: bytes, said: str) -> None:
    with pytest.raises(BenchError) as caught:
        await ask_server(raw_script(raw))
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        ("401 Unauthorized", '{"error": {"message": "no key"}}', "(no key); give --api-key"),
        ("400 Bad Request", '{"detail": "ignore_eos?"}', "(ignore_eos?); --strict"),
        ("503 Service Unavailable", "busy\x1b[2J", "(busy [2J); it is too busy"),
        ("500 Oops", "", "no reason given"),
    ],
)
async def test_refusals_say_why_and_what_to_do(status: str, body: str, said: str) -> None:
    async def refuse(call: Call) -> None:
        await call.head(status, "application/json")
        await call.send(body.encode())

    with pytest.raises(BenchError) as caught:
        await ask_server(refuse)
    assert f"with status {status[:3]}" in str(caught.value) and said in str(caught.value)


async def test_no_server_is_a_clear_error() -> None:
    with serving() as gone:
        pass
    for model in (None, "x"):
        target = UrlTarget(Endpoint(gone.url, model))
        with pytest.raises(BenchError, match="no server answers at http://127"):
            await read(target)
        await target.close()


async def test_the_first_text_is_not_the_role_frame() -> None:
    go, waiting = asyncio.Event(), asyncio.Event()
    here = asyncio.get_running_loop()
    loops: list[asyncio.AbstractEventLoop] = []

    async def paused(call: Call) -> None:
        await call.head()
        await call.event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        loops.append(asyncio.get_running_loop())
        here.call_soon_threadsafe(waiting.set)
        await go.wait()
        await call.send(frames(CHUNK, END))

    with serving(paused) as server:
        target = UrlTarget(Endpoint(server.url))
        async with Reading(target, Ask("hi", 3)) as reading:
            await asyncio.wait_for(waiting.wait(), PATIENCE_S)
            with pytest.raises(TimeoutError):  # the role frame is on its way or here: no text either way
                await asyncio.wait_for(reading.until(lambda record: bool(record.piece_s)), 0.2)
            loops[0].call_soon_threadsafe(go.set)
            assert await asyncio.wait_for(reading.until(lambda record: bool(record.piece_s)), PATIENCE_S)
            record = await reading.finish()
        assert record.ttft_s is not None and record.ttft_s > 0.2 and record.num_tokens == 1
        await target.close()


async def test_leaving_closes_the_connection() -> None:
    with serving() as server:
        target = UrlTarget(Endpoint(server.url))
        async with Reading(target, Ask("hi", 10**9)) as reading:
            await reading.until(lambda record: len(record.piece_s) >= 2)
        await eventually(lambda: server.calls[0].left.is_set())
        assert reading.record.ended is None
        await target.close()


async def test_an_error_reaches_who_waits_for_the_first_text() -> None:
    with serving(raw_script(frames({"error": "no"}))) as server:
        target = UrlTarget(Endpoint(server.url))
        with pytest.raises(BenchError, match=r"\(no\)"):
            async with Reading(target, Ask("hi", 3)) as reading:
                await reading.until(lambda record: bool(record.piece_s))
        await target.close()


async def test_an_answer_without_text_is_an_error() -> None:
    with serving(raw_script(frames(END))) as server:
        target = UrlTarget(Endpoint(server.url))
        with pytest.raises(BenchError, match="without any text"):
            await read_all(target, Ask("hi", 3))
        await target.close()


async def test_the_open_model_streams_to_the_length_that_was_asked_for(llm: legato.LLM) -> None:
    texts, ended = await read(LocalTarget(llm), Ask("hi", 5, system="Be brief."))
    assert texts and all(texts)
    assert ended.reason == "length" and ended.usage is not None and ended.usage.completion_tokens == 5
    assert ended.usage.prompt_tokens == llm.count_tokens(Ask("hi", 5, system="Be brief.").messages)


async def test_raw_goes_without_the_template(llm: legato.LLM) -> None:
    _, ended = await read(LocalTarget(llm, is_raw=True), Ask("hi there", 2))
    assert ended.usage is not None and ended.usage.prompt_tokens == len(llm.tokenize("hi there"))


async def test_leaving_the_open_model_frees_it(llm: legato.LLM) -> None:
    async with Reading(LocalTarget(llm), Ask("Tell a story.", 200)) as reading:
        await reading.until(lambda record: bool(record.piece_s))
        assert not llm._provider.is_idle
    await eventually(lambda: llm._provider.is_idle)
    assert reading.record.ended is None


async def test_what_does_not_fit_is_refused_as_by_the_engine(llm: legato.LLM) -> None:
    with pytest.raises(ContextLengthError):
        await read_all(LocalTarget(llm), Ask("word " * 300, 5))
