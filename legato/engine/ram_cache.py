"""KV that was pushed out of its slot, kept in RAM up to a budget. Pure."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from legato.core.errors import EngineError

_MOST_ENTRIES = 128  # each look-up compares them all


@dataclass(frozen=True, slots=True, eq=False)
class RamEntry:
    """The saved state of a slot (`data`, libllama's own format) that held `tokens`."""

    tokens: NDArray[np.int32]
    salt: str
    data: bytes


class RamCache:
    """Least recently used entries go first when the budget is used up."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget = budget_bytes
        self._entries: dict[RamEntry, None] = {}  # oldest use first
        self._used = 0

    @property
    def has_room(self) -> bool:
        """Whether anything is kept at all."""
        return self._budget > 0

    def longest(
        self, wanted: NDArray[np.int32], salt: str, usable: Callable[[int, int, int], int]
    ) -> tuple[RamEntry | None, int]:
        """The entry that saves most reading, and how many tokens. usable(shared, held, wanted) → tokens saved."""
        best: tuple[RamEntry | None, int] = (None, 0)
        for entry in self._entries:
            if entry.salt == salt:
                saved = usable(common_prefix(entry.tokens, wanted), len(entry.tokens), len(wanted))
                if saved > best[1]:
                    best = entry, saved
        return best

    def covers(self, tokens: NDArray[np.int32], salt: str) -> bool:
        return any(entry.salt == salt and common_prefix(entry.tokens, tokens) == len(tokens) for entry in self._entries)

    def put(self, entry: RamEntry) -> None:
        """Keep it, instead of entries that it contains, and of the oldest ones where room is needed."""
        if len(entry.data) > self._budget:
            return
        for old in [old for old in self._entries if old.salt == entry.salt]:
            if common_prefix(old.tokens, entry.tokens) == len(old.tokens):
                self._drop(old)
        self._entries[entry] = None
        self._used += len(entry.data)
        while self._used > self._budget or len(self._entries) > _MOST_ENTRIES:
            self._drop(next(iter(self._entries)))

    def touch(self, entry: RamEntry) -> None:
        """It was used just now."""
        if entry in self._entries:
            del self._entries[entry]
            self._entries[entry] = None

    def check(self) -> None:
        used = sum(len(entry.data) for entry in self._entries)
        if used != self._used or used > self._budget:
            raise EngineError(f"the RAM cache holds {used} bytes, counts {self._used}, and may hold {self._budget}")

    def _drop(self, entry: RamEntry) -> None:
        del self._entries[entry]
        self._used -= len(entry.data)


def common_prefix(a: NDArray[np.int32], b: NDArray[np.int32]) -> int:
    """Tokens that both begin with."""
    size = min(len(a), len(b))
    different = np.flatnonzero(a[:size] != b[:size])
    return int(different[0]) if len(different) else size
