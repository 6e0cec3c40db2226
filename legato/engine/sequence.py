"""One generation, from waiting to finished."""

from dataclasses import dataclass, field
from enum import Enum, auto

from legato.core.errors import EngineError
from legato.core.events import FinishReason, TokenLogprobs
from legato.core.request import GenerationOptions
from legato.core.usage import Timing, Usage
from legato.engine.sampler import Sampler
from legato.text.detokenizer import Detokenizer
from legato.text.stops import StopStrings


class SequenceStatus(Enum):
    WAITING = auto()  # no slot yet
    PREFILL = auto()  # its prompt is being read
    DECODE = auto()  # one token a step
    PARKED = auto()  # its reader is behind: keeps its slot, takes no part in steps
    FINISHED = auto()


_NEXT = {
    SequenceStatus.WAITING: {SequenceStatus.PREFILL, SequenceStatus.FINISHED},
    SequenceStatus.PREFILL: {SequenceStatus.DECODE, SequenceStatus.FINISHED},
    SequenceStatus.DECODE: {SequenceStatus.PARKED, SequenceStatus.FINISHED},
    SequenceStatus.PARKED: {SequenceStatus.DECODE, SequenceStatus.FINISHED},
    SequenceStatus.FINISHED: set[SequenceStatus](),
}


@dataclass(frozen=True, slots=True)
class SequenceEnd:
    reason: FinishReason
    usage: Usage
    timing: Timing
    stop_sequence: str | int | None


@dataclass(frozen=True, slots=True)
class SequenceOutput:
    """All that leaves the engine thread. `end` is set on a sequence's last output."""

    request_id: str
    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    end: SequenceEnd | None


@dataclass(slots=True)
class SequenceClock:
    """Seconds on the engine's clock; None = has not happened."""

    received: float
    admitted: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    first_text: float | None = None
    last_text: float | None = None
    parked: float | None = None
    num_gaps: int = 0
    largest_gap: float = 0.0

    def saw_text(self, now: float) -> None:
        if self.last_text is None:
            self.first_text = now
        else:
            self.num_gaps += 1
            self.largest_gap = max(self.largest_gap, now - self.last_text)
        self.last_text = now

    def saw_token(self, now: float) -> None:
        if self.first_token is None:
            self.first_token = now
        self.last_token = now

    def timing(self, now: float, completion_tokens: int) -> Timing:
        first, last = self.first_text, self.last_text
        has_gaps = first is not None and last is not None and self.num_gaps > 0
        decode = (self.last_token or 0.0) - (self.first_token or 0.0)
        return Timing(
            queued_s=(now if self.admitted is None else self.admitted) - self.received,
            ttft_s=None if first is None else first - self.received,
            itl_s=(last - first) / self.num_gaps if has_gaps and first is not None and last is not None else None,
            stall_s=self.largest_gap if has_gaps else None,
            decode_s=decode,
            total_s=now - self.received,
            completion_tokens=completion_tokens,
        )


@dataclass(slots=True, eq=False)
class Sequence:
    """`token_ids` = prompt, then what was drawn. `token_ids[:num_computed_tokens]` are in the slot's KV."""

    request_id: str
    index: int
    token_ids: list[int]
    options: GenerationOptions
    clock: SequenceClock
    sampler: Sampler
    detokenizer: Detokenizer
    stops: StopStrings
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_computed_tokens: int = 0
    steps_in_prefill: int = 0
    slot: int | None = None
    status: SequenceStatus = SequenceStatus.WAITING
    unsent_ids: list[int] = field(default_factory=list)
    unsent_logprobs: list[TokenLogprobs] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.token_ids)

    def advance(self, to: SequenceStatus) -> None:
        if to not in _NEXT[self.status]:
            raise EngineError(f"sequence {self.request_id}/{self.index}: {self.status.name} → {to.name}")
        self.status = to

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_unread_prompt_tokens(self) -> int:
        return self.num_prompt_tokens - self.num_computed_tokens

    def usage(self) -> Usage:
        return Usage(self.num_prompt_tokens, self.num_cached_tokens, self.num_generated)
