"""What goes into a step: every running stream in the decode call, then one prefill call up to a budget. Pure."""

from collections import deque
from collections.abc import Iterator

from legato.engine.sequence import Sequence, SequenceStatus
from legato.llama.batch import BatchRow

_AGEING = 64  # tokens of remaining prompt that one step of waiting makes up for


class Scheduler:
    """First come, first admitted; of the prompts being read, the shortest remainder goes first, with ageing."""

    def __init__(self, *, chunk_busy: int, chunk_idle: int) -> None:
        """The most prompt tokens per prefill call while someone decodes, and while nobody does."""
        self._chunk_busy = chunk_busy
        self._chunk_idle = chunk_idle
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # PREFILL, DECODE or PARKED

    @property
    def has_work(self) -> bool:
        return any(seq.status is not SequenceStatus.PARKED for seq in self.running)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self.running
        yield from self.waiting

    def remove(self, seq: Sequence) -> None:
        if seq.slot is None:
            self.waiting.remove(seq)
        else:
            self.running.remove(seq)

    def decode_rows(self) -> list[tuple[Sequence, BatchRow]]:
        """One row for every running stream: its last token. Nobody is left out."""
        return [
            (seq, BatchRow(_slot(seq), seq.num_computed_tokens, seq.token_ids[-1:], wants_logits=True))
            for seq in self.running
            if seq.status is SequenceStatus.DECODE
        ]

    def prefill_rows(self) -> list[tuple[Sequence, BatchRow]]:
        """Chunks of equal length for as many prompts as the budget holds.

        Unequal chunks would be split by libllama into groups that can have one row, and one row of a sequence is not
        bitwise what it is among several; for the same reason no chunk leaves a remainder of one token.
        """
        reading = [seq for seq in self.running if seq.status is SequenceStatus.PREFILL]
        if not reading:
            return []
        busy = any(seq.status is SequenceStatus.DECODE for seq in self.running)
        budget = self._chunk_busy if busy else self._chunk_idle
        reading.sort(key=lambda seq: seq.num_unread_prompt_tokens - _AGEING * seq.steps_in_prefill)
        length = _chunk_length(reading[0].num_unread_prompt_tokens, budget)
        chosen = [seq for seq in reading if _fits(seq.num_unread_prompt_tokens, length)]
        chosen = chosen[: max(1, budget // length)]
        for seq in reading:
            seq.steps_in_prefill += 1
        return [(seq, _chunk(seq, length)) for seq in chosen]


def _chunk_length(remaining: int, budget: int) -> int:
    """At most the budget, and never so that one token is left over (a budget of 2 then takes all 3)."""
    length = min(remaining, budget)
    if remaining - length != 1:
        return length
    return length - 1 if length > 2 else remaining


def _fits(remaining: int, length: int) -> bool:
    return remaining == length or remaining - length > 1


def _chunk(seq: Sequence, length: int) -> BatchRow:
    start = seq.num_computed_tokens
    is_last = start + length == seq.num_prompt_tokens
    return BatchRow(_slot(seq), start, seq.token_ids[start : start + length], wants_logits=is_last)


def _slot(seq: Sequence) -> int:
    assert seq.slot is not None  # running sequences have one
    return seq.slot
