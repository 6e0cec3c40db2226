"""What a generation used, and how long it took. One source for every wire."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts. `cached_tokens` of the prompt's tokens were not read again; they are part of `prompt_tokens`."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds, measured where the tokens are made.

    queued_s: received → admitted to a slot. ttft_s: received → first text; None when there was no text.
    itl_s, stall_s: mean and largest gap between two text deltas; None with fewer than two.
    decode_s: first token → last token. total_s: received → finished.
    """

    queued_s: float
    ttft_s: float | None
    itl_s: float | None
    stall_s: float | None
    decode_s: float
    total_s: float
    completion_tokens: int

    @property
    def tokens_per_s(self) -> float | None:
        """Decode speed: (tokens - 1) / decode_s; None with fewer than two tokens."""
        if self.completion_tokens < 2 or self.decode_s <= 0:
            return None
        return (self.completion_tokens - 1) / self.decode_s
