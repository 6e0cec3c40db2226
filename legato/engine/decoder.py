"""What the engine needs from a model: a forward pass over slots, and its vocabulary."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from legato.llama.batch import BatchRow

Logits = NDArray[np.float32]


class Decoder(Protocol):
    """libllama's context, or a small fake with logits of its own."""

    num_slots: int
    context_length: int
    vocab_size: int
    can_rewind: bool  # False: truncate never works, since the state is recurrent

    def decode(self, rows: Sequence[BatchRow]) -> Logits:
        """Logits [rows that want them, vocab], valid until the next call and free to be written to."""
        ...

    def truncate(self, slot: int, length: int) -> bool:
        """Forget positions from `length` on; False when the model cannot go back there."""
        ...

    def clear(self, slot: int) -> None: ...

    def fork(self, source: int, target: int) -> bool:
        """Make target hold what source holds; False when that cannot be done."""
        ...

    def save(self, slot: int) -> bytes:
        """What a slot holds, in a form that only the same kind of decoder reads."""
        ...

    def restore(self, slot: int, data: bytes) -> bool:
        """Make a slot hold what was saved; False when the data do not fit."""
        ...


class TokenTable(Protocol):
    """The part of a vocabulary that decides what a token means."""

    def token_bytes(self, token: int) -> bytes: ...

    def is_end(self, token: int) -> bool: ...

    @property
    def end_ids(self) -> tuple[int, ...]: ...
