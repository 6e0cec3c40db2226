"""libllama as the engine relies on it, on the embedded model: the facts that the scheduler is built on."""

from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from legato.core.errors import ModelFileError, RequestError
from legato.core.request import SamplingParams
from legato.llama.batch import BatchRow
from legato.llama.context import LlamaContext
from legato.llama.library import load_library, system_info
from legato.llama.model import LlamaModel
from legato.llama.params import ContextParams, FlashAttention, KVType
from legato.llama.samplers import SamplerChain, SamplerSpace
from legato.models.registry import resolve

PROMPT = [int(t) for t in np.random.default_rng(3).integers(100, 40_000, 90)]


@pytest.fixture(scope="module")
def model() -> LlamaModel:
    return LlamaModel.load(resolve("smollm2").path)


@pytest.fixture(scope="module")
def context(model: LlamaModel) -> Iterator[LlamaContext]:
    made = LlamaContext(model, ContextParams(256, 3, 128, 2, FlashAttention.OFF, KVType.F16, KVType.F16))
    yield made
    made.close()


def read(context: LlamaContext, slot: int, tokens: list[int], chunk: int, start: int = 0) -> NDArray[np.float32]:
    """Prefill in chunks (the last two tokens never apart); the last logits."""
    logits = np.empty((0, 0), dtype=np.float32)
    while start < len(tokens):
        end = len(tokens) if len(tokens) - start - chunk < 2 else start + chunk
        logits = context.decode([BatchRow(slot, start, tokens[start:end], wants_logits=end == len(tokens))])
        start = end
    last: NDArray[np.float32] = logits[0].copy()
    return last


def test_every_chunking_gives_the_same_logits_bit_for_bit(context: LlamaContext) -> None:
    context.clear(0)
    whole = read(context, 0, PROMPT, 128)
    for chunk in (2, 3, 7, 32, 64):
        context.clear(0)
        assert np.array_equal(read(context, 0, PROMPT, chunk), whole), chunk


def test_a_rewound_slot_equals_a_fresh_one_bit_for_bit(context: LlamaContext) -> None:
    context.clear(0)
    fresh = read(context, 0, PROMPT, 64)
    context.clear(1)
    read(context, 1, PROMPT[:60] + [5] * 30, 64)
    assert context.length(1) == 90
    assert context.truncate(1, 60)
    assert context.length(1) == 60
    assert np.array_equal(read(context, 1, PROMPT, 64, start=60), fresh)
    assert not context.truncate(1, 91)
    assert context.truncate(1, 90)  # nothing to forget


def test_a_fork_and_a_restored_state_equal_a_fresh_one_bit_for_bit(context: LlamaContext) -> None:
    context.clear(0)
    fresh = read(context, 0, PROMPT, 64)
    for slot in (1, 2):
        context.clear(slot)
    read(context, 1, [9] * 40, 64)  # something else was there
    context.clear(0)
    read(context, 0, [*PROMPT[:70], 5, 6, 7], 64)
    assert context.fork(0, 1)
    assert context.length(1) == 73
    assert context.truncate(1, 70)
    data = context.save(0)
    assert context.restore(2, data)
    assert context.truncate(2, 70)
    context.clear(0)  # neither depends on the source
    for slot in (1, 2):
        assert np.array_equal(read(context, slot, PROMPT, 64, start=70), fresh)
    assert not context.restore(2, data[: len(data) // 2])
    assert context.length(2) == 0


def test_a_decode_row_is_the_same_alone_and_beside_others(context: LlamaContext) -> None:
    def step(*slots: int) -> NDArray[np.float32]:
        for slot in slots:
            context.clear(slot)
            read(context, slot, PROMPT[slot:], 64)
        rows = [BatchRow(slot, len(PROMPT) - slot, [7], wants_logits=True) for slot in slots]
        return context.decode(rows).copy()

    assert np.array_equal(step(0)[0], step(0, 1, 2)[0])


def test_rows_come_back_in_order(context: LlamaContext) -> None:
    for slot in range(3):
        context.clear(slot)
    logits = context.decode([BatchRow(s, 0, PROMPT[s : s + 9], wants_logits=s != 1) for s in (2, 1, 0)])
    assert logits.shape == (2, context.vocab_size)
    first = logits[0].copy()
    context.clear(2)
    assert np.array_equal(context.decode([BatchRow(2, 0, PROMPT[2:11], wants_logits=True)])[0], first)


@pytest.mark.parametrize("text", ["Hello, world!", " leading", "日本 🦙 naïve", "a\n\n\tb", "<|im_end|>", "\ufffd\0"])
def test_tokens_hold_exactly_the_text(model: LlamaModel, text: str) -> None:
    vocab = model.vocab
    tokens = vocab.tokenize(text)
    assert b"".join(vocab.token_bytes(token) for token in tokens).decode() == text
    assert not set(tokens) & set(vocab.control_tokens.values())


def test_control_tokens_are_known_and_silent(model: LlamaModel) -> None:
    vocab = model.vocab
    end = vocab.control_tokens["<|im_end|>"]
    assert vocab.token_bytes(end) == b""
    assert vocab.token_text(end) == "<|im_end|>"
    assert vocab.is_end(end)
    assert end in vocab.end_ids
    assert vocab.token_text(-1) == ""


def test_a_long_text_is_tokenized_whole(model: LlamaModel) -> None:
    text = "lorem ipsum " * 5000
    assert b"".join(map(model.vocab.token_bytes, model.vocab.tokenize(text))).decode() == text


def test_ids_are_checked(model: LlamaModel) -> None:
    for bad in (-1, model.vocab.num_tokens, True):
        with pytest.raises(RequestError, match="prompt"):
            model.vocab.check_ids((3, bad), "prompt")


def test_a_file_that_libllama_refuses_says_why() -> None:
    with pytest.raises(ModelFileError, match="nothing-here"):
        LlamaModel.load(resolve("smollm2").path.with_name("nothing-here.gguf"))


def test_loading_reports_progress() -> None:
    shares: list[float] = []
    LlamaModel.load(resolve("smollm2").path, on_progress=shares.append)
    assert shares[-1] == 1
    assert shares == sorted(shares)


def test_dry_holds_a_repetition_back(model: LlamaModel) -> None:
    """After A B C … A B the next C is punished; a breaker in between forgives it."""
    vocab = model.vocab
    row = np.zeros(vocab.num_tokens, dtype=np.float32)
    a, b, c, other = (vocab.tokenize(text)[0] for text in (" red", " green", " blue", " grey"))
    row[[c, other]] = 5, 4.5
    space = SamplerSpace(vocab.num_tokens, 256, vocab)

    def drawn(history: list[int], **options: float) -> int:
        chain = SamplerChain(SamplingParams(temperature=0, **options), 1, space)  # type: ignore[arg-type]
        for token in history:
            chain.accept(token)
        return chain.sample(row)

    history = [a, b, c, 40, a, b]
    assert drawn(history) == c
    assert drawn(history, dry_multiplier=2.0, dry_allowed_length=1) == other
    newline = vocab.tokenize("\n")[0]
    assert drawn([a, b, c, 40, newline, b], dry_multiplier=2.0, dry_allowed_length=2) == c


def test_the_library_is_loaded_once_and_leaves_the_package_alone() -> None:
    assert load_library() is load_library()
    assert "CPU" in system_info()
