"""What goes into a step: every running stream in the decode call, then one prefill call up to a budget. Pure."""

from itertools import islice

from legato.engine.cost_model import CostModel
from legato.engine.sequence import Sequence, SequenceStatus
from legato.llama.batch import BatchRow

_AGEING = 64  # tokens of remaining prompt that one step of waiting makes up for
_IDLE_CHUNK_MS = 250.0  # a cancel waits for the chunk under way
_AUTO_TARGET_MS = 100.0  # 10 tokens a second: faster than people read
_AUTO_STEPS = 3.0  # … and never so tight that a prompt beside many streams hardly moves
_MARGIN = 0.9  # of the target; the rest is for what a prediction cannot know
_LEAST = 2  # tokens: one row of a sequence is not bitwise what it is among several


class Scheduler:
    """First come, first admitted; of the prompts being read, the shortest remainder goes first, with ageing."""

    def __init__(self, cost: CostModel, *, most_tokens: int, itl_target_ms: float | None) -> None:
        """most_tokens: prompt tokens per call at most. itl_target_ms: see EngineConfig."""
        self._cost = cost
        self._most_tokens = most_tokens
        self._itl_target_ms = itl_target_ms
        self._waiting: dict[int, dict[Sequence, None]] = {}  # priority → sequences in order of arrival
        self.running: list[Sequence] = []  # PREFILL, DECODE or PARKED

    @property
    def has_work(self) -> bool:
        return any(seq.status is not SequenceStatus.PARKED for seq in self.running)

    def add(self, seq: Sequence) -> None:
        self._waiting.setdefault(seq.options.priority, {})[seq] = None

    @property
    def num_waiting(self) -> int:
        return sum(len(level) for level in self._waiting.values())

    def first_waiting(self, count: int) -> list[Sequence]:
        """Those to admit next: lowest priority number, then first come."""
        in_order = (seq for priority in sorted(self._waiting) for seq in self._waiting[priority])
        return list(islice(in_order, count))

    def admit(self, seq: Sequence) -> None:
        """It has a slot now."""
        self._leave_queue(seq)
        self.running.append(seq)

    def remove(self, seq: Sequence) -> None:
        if seq.slot is None:
            self._leave_queue(seq)
        else:
            self.running.remove(seq)

    def _leave_queue(self, seq: Sequence) -> None:
        level = self._waiting[seq.options.priority]
        del level[seq]
        if not level:
            del self._waiting[seq.options.priority]

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
        reading.sort(key=_reading_order)
        budget = self._budget(reading[0].num_computed_tokens)
        length = _chunk_length(reading[0].num_unread_prompt_tokens, budget)
        chosen = [seq for seq in reading if _fits(seq.num_unread_prompt_tokens, length)]
        chosen = chosen[: max(1, budget // length)]
        for seq in reading:
            seq.steps_in_prefill += 1
        return [(seq, _chunk(seq, length)) for seq in chosen]

    def _budget(self, depth: int) -> int:
        """Prompt tokens at this depth that keep the promise to the running streams, and a cancel quick without any."""
        decoding = [seq for seq in self.running if seq.status is SequenceStatus.DECODE]
        if not decoding:
            return max(_LEAST, min(self._most_tokens, self._cost.prefill.largest(_IDLE_CHUNK_MS, depth)))
        mean_depth = sum(seq.num_computed_tokens for seq in decoding) / len(decoding)
        decode_ms = self._cost.decode.predict_ms(len(decoding), mean_depth)
        target_ms = self._itl_target_ms or max(_AUTO_TARGET_MS, _AUTO_STEPS * decode_ms)
        spare_ms = target_ms * _MARGIN - decode_ms
        return max(_LEAST, min(self._most_tokens, self._cost.prefill.largest(spare_ms, depth)))


def _reading_order(seq: Sequence) -> tuple[int, int]:
    return seq.options.priority, seq.num_unread_prompt_tokens - _AGEING * seq.steps_in_prefill


def _chunk_length(remaining: int, budget: int) -> int:
    """At most the budget, and never so that one token is left over (a budget of 2 then takes all 3)."""
    length = min(remaining, budget)
    if remaining - length != 1:
        return length
    return length - 1 if length > 2 else remaining


def _fits(remaining: int, length: int) -> bool:
    return remaining == length or (length > 1 and remaining - length > 1)


def _chunk(seq: Sequence, length: int) -> BatchRow:
    start = seq.num_computed_tokens
    is_last = start + length == seq.num_prompt_tokens
    return BatchRow(_slot(seq), start, seq.token_ids[start : start + length], wants_logits=is_last)


def _slot(seq: Sequence) -> int:
    assert seq.slot is not None  # running sequences have one
    return seq.slot
