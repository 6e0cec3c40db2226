"""What goes into one `llama_decode`."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from legato.llama.library import load_library


@dataclass(frozen=True, slots=True)
class BatchRow:
    """Consecutive tokens of one slot: `tokens` take positions [start, start + len(tokens)).

    wants_logits: whether the logits after the last of them are needed.
    """

    slot: int
    start: int
    tokens: Sequence[int]
    wants_logits: bool


class BatchBuffer:
    """A `llama_batch` over numpy arrays that are filled anew for each call. Not thread-safe."""

    def __init__(self, capacity: int) -> None:
        """capacity: tokens in one call."""
        lib = load_library()
        self.capacity = capacity
        self._token = np.zeros(capacity, dtype=np.int32)
        self._pos = np.zeros(capacity, dtype=np.int32)
        self._seq = np.zeros(capacity, dtype=np.int32)
        self._logits = np.zeros(capacity, dtype=np.int8)
        self._num_seq = np.ones(capacity, dtype=np.int32)  # each token belongs to one sequence
        step = self._seq.itemsize
        base = self._seq.ctypes.data
        self._seq_pointers = np.arange(base, base + capacity * step, step, dtype=np.uintp)
        self.raw: Any = lib.llama_batch(
            n_tokens=0,
            token=_pointer(self._token, ctypes.c_int32),
            embd=None,
            pos=_pointer(self._pos, ctypes.c_int32),
            n_seq_id=_pointer(self._num_seq, ctypes.c_int32),
            seq_id=_pointer(self._seq_pointers, ctypes.POINTER(ctypes.c_int32)),
            logits=_pointer(self._logits, ctypes.c_int8),
        )

    def fill(self, rows: Sequence[BatchRow]) -> int:
        """Lay the rows into the buffer, in order. Returns how many rows want logits."""
        used = 0
        num_logits = 0
        for row in rows:
            end = used + len(row.tokens)
            if end - used == 1:  # a running stream's row, the common case: no slices
                self._token[used], self._pos[used], self._seq[used] = row.tokens[0], row.start, row.slot
                self._logits[used] = row.wants_logits
            else:
                self._token[used:end] = row.tokens
                self._pos[used:end] = np.arange(row.start, row.start + len(row.tokens))
                self._seq[used:end] = row.slot
                self._logits[used:end] = 0
                self._logits[end - 1] = row.wants_logits
            num_logits += row.wants_logits
            used = end
        self.raw.n_tokens = used
        return num_logits


def _pointer(array: Any, kind: Any) -> Any:
    return ctypes.cast(array.ctypes.data, ctypes.POINTER(kind))
