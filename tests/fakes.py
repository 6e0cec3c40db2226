"""Small real classes in place of a model: a vocabulary of pieces, and decoders whose logits follow from what they hold.

Both decoders check what libllama would not forgive: positions without gaps, slots that exist, and they remember every
call, so that a test can see which path was taken.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from legato.core.request import GenerationOptions, make_options
from legato.engine.config import EngineConfig
from legato.engine.cost_model import CallCost, CostModel
from legato.engine.engine import Engine
from legato.engine.sampler import Sampler
from legato.engine.sequence import Sequence as EngineSequence
from legato.engine.sequence import SequenceClock, SequenceOutput
from legato.llama.batch import BatchRow
from legato.llama.samplers import SamplerSpace
from legato.text.detokenizer import Detokenizer
from legato.text.stops import StopStrings

START = 0  # the prompt of a scripted run


class FakeTokens:
    """Token id → bytes. Ids in `ends` end a run; ids in `control` have no text."""

    def __init__(self, pieces: Sequence[bytes], ends: set[int], control: frozenset[int] = frozenset()) -> None:
        self._pieces = list(pieces)
        self._ends = ends
        self._control = control
        self.end_ids = tuple(sorted(ends))

    def token_bytes(self, token: int) -> bytes:
        return b"" if token in self._ends | self._control else self._pieces[token]

    def is_end(self, token: int) -> bool:
        return token in self._ends


@dataclass
class RecordingDecoder:
    """Holds each slot's tokens as libllama would; subclasses say which logits follow from them."""

    vocab_size: int
    num_slots: int = 4
    context_length: int = 64
    can_rewind: bool = True
    batch_tokens: int = 512
    calls: list[list[BatchRow]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.held: list[list[int]] = [[] for _ in range(self.num_slots)]

    def decode(self, rows: Sequence[BatchRow]) -> NDArray[np.float32]:
        self.calls.append(list(rows))
        assert len({row.slot for row in rows}) == len(rows), "a slot twice in one call"
        assert sum(len(row.tokens) for row in rows) <= self.batch_tokens, "more tokens than a call can hold"
        for row in rows:
            assert row.start == len(self.held[row.slot]), f"gap in slot {row.slot}: {row.start}"
            assert len(row.tokens) > 0
            self.held[row.slot] += row.tokens
            assert len(self.held[row.slot]) <= self.context_length
        logits = [self.logits(self.held[row.slot]) for row in rows if row.wants_logits]
        return np.stack(logits) if logits else np.empty((0, self.vocab_size), dtype=np.float32)

    def truncate(self, slot: int, length: int) -> bool:
        if length > len(self.held[slot]) or (length < len(self.held[slot]) and not self.can_rewind):
            return False
        del self.held[slot][length:]
        return True

    def clear(self, slot: int) -> None:
        self.held[slot].clear()

    def fork(self, source: int, target: int) -> bool:
        self.held[target] = list(self.held[source])
        return True

    def save(self, slot: int) -> bytes:
        return array("i", self.held[slot]).tobytes()

    def restore(self, slot: int, data: bytes) -> bool:
        self.held[slot] = array("i", data).tolist()
        return True

    def logits(self, held: list[int]) -> NDArray[np.float32]:
        raise NotImplementedError


class ScriptedDecoder(RecordingDecoder):
    """Says its pieces in order: after token t comes t + 1. Token 0 is the prompt, the last one ends the run."""

    def logits(self, held: list[int]) -> NDArray[np.float32]:
        row = np.zeros(self.vocab_size, dtype=np.float32)
        row[(held[-1] + 1) % self.vocab_size] = 10
        return row


class HashDecoder(RecordingDecoder):
    """Logits follow from everything the slot holds, so one wrong or missing token changes the text."""

    def logits(self, held: list[int]) -> NDArray[np.float32]:
        seed = hash(tuple(held)) & 0xFFFFFFFF
        return np.random.default_rng(seed).normal(0, 3, self.vocab_size).astype(np.float32)


class FixedDecoder(RecordingDecoder):
    """The same logits always."""

    def __init__(self, row: Sequence[float]) -> None:
        super().__init__(vocab_size=len(row))
        self._row = np.array(row, dtype=np.float32)

    def logits(self, held: list[int]) -> NDArray[np.float32]:
        return self._row.copy()


class FakeClock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Wish:
    """Stands in a sequence for its sampler until an engine says which vocabulary it has."""

    options: GenerationOptions
    seed: int


def make_sequence(
    prompt: Sequence[int],
    *,
    request_id: str = "r",
    index: int = 0,
    seed: int = 1,
    received: float = 0.0,
    strip_space_prefix: bool = False,
    **options: Any,
) -> EngineSequence:
    made = make_options(options)
    return EngineSequence(
        request_id=request_id,
        index=index,
        token_ids=list(prompt),
        options=made,
        clock=SequenceClock(received),
        sampler=Wish(made, seed),  # type: ignore[arg-type]
        detokenizer=Detokenizer(strip_space_prefix=strip_space_prefix),
        stops=StopStrings(made.limits.stop),
    )


class EngineUnderTest(Engine):
    """Gives each sequence its sampler when it is submitted, as the provider does on the caller's thread."""

    def __init__(self, decoder: RecordingDecoder, tokens: FakeTokens, config: EngineConfig, **more: Any) -> None:
        super().__init__(decoder, tokens, config, cost=CostModel(FreeCalls(), FreeCalls()), **more)
        self._tokens_under_test = tokens
        self._space = SamplerSpace(decoder.vocab_size, decoder.context_length)

    def submit(self, seq: EngineSequence) -> None:
        wish = seq.sampler
        assert isinstance(wish, Wish)
        seq.sampler = Sampler(wish.options, wish.seed, self._space, self._tokens_under_test)
        seq.sampler.read_prompt(seq.token_ids)
        super().submit(seq)


def make_engine(
    decoder: RecordingDecoder, tokens: FakeTokens, config: EngineConfig | None = None, clock: FakeClock | None = None
) -> Engine:
    return EngineUnderTest(decoder, tokens, config or EngineConfig(), clock=clock or FakeClock())


class FreeCalls(CallCost):
    """Calls that take no time: chunks are as large as the settings allow."""

    def predict_ms(self, num_tokens: int, depth: float) -> float:
        return 0.0

    def largest(self, budget_ms: float, depth: float) -> int:
        return 2**31 - 1


def run_all(engine: Engine, *sequences: EngineSequence) -> list[SequenceOutput]:
    """Submit, step until idle, and give every output in order."""
    outputs: list[SequenceOutput] = []
    for seq in sequences:
        engine.submit(seq)
    while not engine.idle:
        engine.step(outputs.extend)
        engine.check()
    return outputs


def scripted(pieces: Sequence[bytes]) -> tuple[ScriptedDecoder, FakeTokens]:
    """A model that says these pieces, then ends."""
    table = [b"", *pieces, b""]
    return ScriptedDecoder(len(table)), FakeTokens(table, ends={len(table) - 1})


def say(pieces: Sequence[bytes], **options: Any) -> tuple[list[str], SequenceOutput]:
    """Run a scripted model greedily: (text deltas, last output)."""
    decoder, tokens = scripted(pieces)
    outputs = run_all(make_engine(decoder, tokens), make_sequence([START], temperature=0, **options))
    assert outputs[-1].end is not None
    assert all(output.end is None for output in outputs[:-1])
    return [output.text for output in outputs if output.text], outputs[-1]
