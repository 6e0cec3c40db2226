"""Streams and models as objects: leaving, dropping, forking, failing. On the embedded model."""

import asyncio
import gc
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any

import pytest

import legato
from legato import LLM, FinishReason, Stream, TextDelta
from legato.engine.config import EngineConfig
from legato.llama.context import LlamaContext
from legato.llama.model import LlamaModel
from legato.llama.params import ContextParams, FlashAttention, KVType
from legato.models.registry import resolve
from legato.providers.local import LocalProvider

CONTEXT = 2000  # tokens; a stream without another limit makes that many steps before it ends by itself


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with legato.open("smollm2", slots=2, context=CONTEXT) as opened:
        yield opened


def wait_until_idle(llm: LLM) -> None:
    deadline = time.monotonic() + 60
    while not llm._provider.is_idle:
        assert time.monotonic() < deadline, "the engine still serves somebody after 60 s"
        time.sleep(0.005)


def endless(llm: LLM) -> Stream:
    return llm.stream("Write a long story.", ignore_eos=True, temperature=0)


def leave_with(llm: LLM) -> None:
    with endless(llm) as stream:
        assert next(iter(stream.text()))


def leave_async_with(llm: LLM) -> None:
    async def leave() -> None:
        async with endless(llm) as stream:
            events = aiter(stream)
            assert isinstance(events, AsyncGenerator)
            for _ in range(2):
                await anext(events)
        await asyncio.to_thread(wait_until_idle, llm)
        await events.aclose()  # held until here, because closing the reader cancels as well

    asyncio.run(leave())


def leave_with_unread(llm: LLM) -> None:
    with endless(llm):
        pass


def leave_by_error(llm: LLM) -> None:
    with pytest.raises(ZeroDivisionError), endless(llm):
        raise ZeroDivisionError


def drop_unread(llm: LLM) -> None:
    stream = endless(llm)
    del stream


def drop_half_read(llm: LLM) -> None:
    stream = endless(llm)
    pieces = iter(stream.text())
    assert next(pieces)
    del stream, pieces


def break_out_of_the_loop(llm: LLM) -> None:
    stream = endless(llm)
    for _ in stream.text():
        break
    del stream


@pytest.mark.parametrize(
    "leave",
    [
        leave_with,
        leave_async_with,
        leave_with_unread,
        leave_by_error,
        drop_unread,
        drop_half_read,
        break_out_of_the_loop,
    ],
)
def test_b28_whoever_leaves_a_stream_frees_the_engine(llm: LLM, leave: Callable[[LLM], None]) -> None:
    before = llm._provider._worker.num_steps
    leave(llm)
    gc.collect()
    wait_until_idle(llm)
    # Nobody waited for the answer to end by itself.
    assert llm._provider._worker.num_steps - before < CONTEXT // 2


def test_leaving_a_block_cancels_though_the_stream_is_kept(llm: LLM) -> None:
    with endless(llm) as stream:
        pass
    answer = stream.answer()
    assert answer.finish_reason is FinishReason.CANCELLED
    assert answer.usage.completion_tokens < CONTEXT // 2


def engine_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "legato-engine"}


def test_a_model_dropped_without_close_ends_its_thread() -> None:
    before = engine_threads()
    llm = legato.open("smollm2", slots=1, context=256)
    (thread,) = engine_threads() - before
    assert llm.chat("hi", max_tokens=2, ignore_eos=True).usage.completion_tokens == 2
    del llm
    gc.collect()
    thread.join(30)
    assert not thread.is_alive()
    assert engine_threads() == before


def test_a_stream_keeps_its_model_alive_and_no_longer() -> None:
    before = engine_threads()
    answer = legato.open("smollm2", slots=1, context=256).stream("hi", max_tokens=3, ignore_eos=True).answer()
    assert answer.usage.completion_tokens == 3
    pieces = legato.open("smollm2", slots=1, context=256).stream("hi", max_tokens=3, temperature=0).text()
    gc.collect()
    assert "".join(pieces)
    del pieces
    gc.collect()
    for thread in engine_threads() - before:
        thread.join(30)
    assert engine_threads() == before


def test_on_delta_is_not_called_again_after_it_said_stop(llm: LLM) -> None:
    stream = llm.stream("Tell me a story.", n=2, max_tokens=8, ignore_eos=True, temperature=0)
    wait_until_idle(llm)  # all pieces of both answers lie ready, so cancelling takes none of them away
    calls: list[str] = []

    def stop(piece: str) -> bool:
        calls.append(piece)
        return False

    answer = stream.answer(on_delta=stop)
    assert len(calls) == 1
    assert [choice.usage.completion_tokens for choice in answer.choices] == [8, 8]


def test_on_delta_goes_on_after_anything_but_false(llm: LLM) -> None:
    stream = llm.stream("Tell me a story.", n=2, max_tokens=6, ignore_eos=True, temperature=0)
    wait_until_idle(llm)
    calls: list[str] = []

    def note(piece: str) -> None:
        calls.append(piece)

    answer = stream.answer(on_delta=note)
    assert len(calls) > 2
    assert sorted("".join(calls)) == sorted("".join(choice.text for choice in answer.choices))


@pytest.mark.parametrize("options", [{"stop": [" 8"]}, {"stop": ["8"]}, {"max_tokens": 6}, {"stop_token_ids": [40]}])
def test_a_late_reader_gets_the_same_token_ids(llm: LLM, options: dict[str, Any]) -> None:
    given: dict[str, Any] = {"temperature": 0, "max_tokens": 10, **options}
    at_once = llm.complete("1, 2, 3, 4, 5,", **given)
    stream = llm.stream_completion("1, 2, 3, 4, 5,", **given)
    wait_until_idle(llm)
    late = stream.answer()
    assert late.choices[0].token_ids == at_once.choices[0].token_ids
    assert late.text == at_once.text
    if "stop_token_ids" not in options:
        assert len(late.choices[0].token_ids) == late.usage.completion_tokens


def test_a_late_reader_gets_everything_in_one_delta(llm: LLM) -> None:
    stream = llm.stream_completion("1, 2, 3, 4, 5,", temperature=0, max_tokens=8)
    wait_until_idle(llm)
    events = list(stream)
    assert len([event for event in events if isinstance(event, TextDelta)]) == 1
    assert isinstance(events[-1], legato.Finished)


def test_penalties_see_the_prompt_of_a_request(llm: LLM) -> None:
    liked, second, other = 500, 600, 700
    options: dict[str, Any] = {
        "temperature": 0,
        "max_tokens": 1,
        "logit_bias": {liked: 1050, second: 1000},
        "presence_penalty": 100,
    }
    assert llm.complete([other], **options).choices[0].token_ids == (liked,)
    assert llm.complete([liked, other], **options).choices[0].token_ids == (second,)


def test_errors_survive_a_pickle() -> None:
    length = pickle.loads(pickle.dumps(legato.ContextLengthError(9000, 2048)))
    assert type(length) is legato.ContextLengthError
    assert (length.num_prompt_tokens, length.context_length, length.field) == (9000, 2048, "messages")
    assert str(length) == str(legato.ContextLengthError(9000, 2048))
    memory = pickle.loads(pickle.dumps(legato.InsufficientMemoryError("too large", 20, 10)))
    assert type(memory) is legato.InsufficientMemoryError
    assert (str(memory), memory.need_bytes, memory.have_bytes) == ("too large", 20, 10)
    request = pickle.loads(pickle.dumps(legato.RequestError("top_p is odd", field="top_p")))
    assert (str(request), request.field) == ("top_p is odd", "top_p")


@pytest.mark.parametrize("raised", [KeyboardInterrupt(), ZeroDivisionError("oh")], ids=["interrupt", "bug"])
def test_what_on_progress_raises_comes_out_of_open(raised: BaseException) -> None:
    before = engine_threads()

    def on_progress(_share: float) -> None:
        raise raised

    with pytest.raises(type(raised)) as caught:
        legato.open("smollm2", slots=1, context=256, on_progress=on_progress)
    assert caught.value is raised
    assert engine_threads() == before


FORK = """
import os, sys, time, warnings
warnings.simplefilter("ignore")
import legato

llm = legato.open("smollm2", slots=1, context=256)
child = os.fork()
if child == 0:
    try:
        llm.chat("hi", max_tokens=1)
    except legato.EngineError as exc:
        os.write(1, str(exc).encode())
        os._exit(7)
    os._exit(1)
deadline = time.monotonic() + 30
while (done := os.waitpid(child, os.WNOHANG))[0] == 0:
    if time.monotonic() > deadline:
        os.kill(child, 9)
        os.waitpid(child, 0)
        sys.exit("the child hangs")
    time.sleep(0.01)
llm.chat("hi", max_tokens=1)
llm.close()
sys.exit(0 if os.waitstatus_to_exitcode(done[1]) == 7 else f"the child's status was {done[1]}")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="forks a process with threads")
def test_a_forked_child_gets_an_error_at_once_and_the_parent_goes_on() -> None:
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "open it again" in done.stdout


class BrokenTemplateModel(LlamaModel):
    """The embedded weights with a chat template that is none."""

    @property
    def chat_template(self) -> str | None:
        return "{% if %}"


class CountedContext(LlamaContext):
    """Says when it was freed."""

    def __init__(self, model: LlamaModel, params: ContextParams, freed: list[bool]) -> None:
        super().__init__(model, params)
        self._freed = freed

    def close(self) -> None:
        self._freed.append(self._handle is not None)
        super().close()


def test_a_broken_chat_template_leaks_neither_the_context_nor_a_thread() -> None:
    before = engine_threads()
    freed: list[bool] = []

    def open_it() -> None:
        model = BrokenTemplateModel.load(resolve("smollm2", download=False).path, gpu_layers=0)
        params = ContextParams(256, 1, 64, 1, FlashAttention.OFF, KVType.F16, KVType.F16)
        LocalProvider("broken", model, CountedContext(model, params, freed), EngineConfig(slots=1))

    with pytest.raises(legato.TemplateError):
        open_it()
    gc.collect()
    assert freed == [True]
    assert engine_threads() == before
