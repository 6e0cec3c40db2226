"""What a stream consists of: a closed union of frozen values, the same for local and remote models."""

from dataclasses import dataclass
from enum import StrEnum

from legato.core.usage import Timing, Usage


class FinishReason(StrEnum):
    STOP = "stop"  # the model ended its turn, or a stop string or stop token came
    LENGTH = "length"  # max_tokens, max_time_s, or the end of the context
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token and its natural-log probability under the model, before any sampling option.

    `raw` are the token's bytes; a token can be part of a character, and then `text` holds U+FFFD.
    """

    token_id: int
    text: str
    raw: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The token that was drawn, and the likeliest alternatives, best first."""

    chosen: Logprob
    top: tuple[Logprob, ...]


@dataclass(frozen=True, slots=True)
class Started:
    """The request was admitted. Choice `i` draws with seed `seed + i`; the same seed replays the same text."""

    request_id: str
    model: str
    seed: int


@dataclass(frozen=True, slots=True)
class TextDelta:
    """The next piece of text of choice `index`. Empty only where tokens have no text to show: `logprobs` of half a
    character, or the tokens of a stop string at the end.

    `token_ids` are the tokens drawn since the delta before; text may lag behind them (an unfinished character, a
    possible stop string).
    """

    text: str
    index: int = 0
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of choice `index`. `stop_sequence`: the stop string or stop token id that ended it, if one did."""

    reason: FinishReason
    usage: Usage
    timing: Timing
    index: int = 0
    stop_sequence: str | int | None = None


StreamEvent = Started | TextDelta | Finished
