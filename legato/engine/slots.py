"""Which slot holds what: a slot keeps the KV of its last sequence until someone needs the slot."""

from collections.abc import Sequence as Tokens
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from legato.core.errors import EngineError

_NOTHING: NDArray[np.int32] = np.empty(0, dtype=np.int32)

# A last chunk of one token would not be bitwise what the same position gives inside several rows (measured), so a
# prompt that is known whole is still read again in its last two tokens.
MIN_REREAD = 2


@dataclass(slots=True)
class _Slot:
    tokens: NDArray[np.int32]  # what its KV holds; meaningless while it is in use
    in_use: bool = False
    last_used: int = 0


class SlotPool:
    """Pure bookkeeping; the caller moves the KV."""

    def __init__(self, num_slots: int) -> None:
        self._slots = [_Slot(_NOTHING) for _ in range(num_slots)]
        self._uses = 0

    @property
    def num_free(self) -> int:
        return sum(not slot.in_use for slot in self._slots)

    def acquire(self, prompt: Tokens[int]) -> tuple[int, int] | None:
        """Take the free slot that remembers most of this prompt: (slot, tokens that need not be read again).

        A slot that remembers nothing is taken before one whose memory would be mostly thrown away; of several, the one
        unused for longest. None when all are in use.
        """
        free = [i for i, slot in enumerate(self._slots) if not slot.in_use]
        if not free:
            return None
        wanted = np.asarray(prompt, dtype=np.int32)
        matches = {i: _common_prefix(self._slots[i].tokens, wanted) for i in free}
        best = max(free, key=lambda i: (matches[i], -self._slots[i].last_used))
        if matches[best] * 2 < len(self._slots[best].tokens):
            empty = [i for i in free if not len(self._slots[i].tokens)]
            oldest = min(free, key=lambda i: self._slots[i].last_used)
            best = empty[0] if empty else oldest
        self._slots[best].in_use = True
        return best, max(0, min(matches[best], len(wanted) - MIN_REREAD))

    def release(self, slot: int, tokens: Tokens[int]) -> None:
        """Give the slot back; `tokens` are what its KV holds now."""
        held = self._slots[slot]
        if not held.in_use:
            raise EngineError(f"slot {slot} was released twice")
        self._uses += 1
        held.in_use, held.last_used = False, self._uses
        held.tokens = np.asarray(tokens, dtype=np.int32)

    def check(self, in_use: set[int]) -> None:
        """Raises EngineError unless exactly these slots are in use."""
        marked = {i for i, slot in enumerate(self._slots) if slot.in_use}
        if marked != in_use:
            raise EngineError(f"slots in use: {sorted(in_use)}, marked as such: {sorted(marked)}")


def _common_prefix(a: NDArray[np.int32], b: NDArray[np.int32]) -> int:
    size = min(len(a), len(b))
    different = np.flatnonzero(a[:size] != b[:size])
    return int(different[0]) if len(different) else size
