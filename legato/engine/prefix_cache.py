"""What is known already: the longest known prefix of a prompt over running sequences, idle slots and RAM. Pure.

A slot keeps the KV of its last sequence until someone needs the slot. A prompt that shares its beginning with what a
slot holds goes on in that slot, when little else of it would be lost, or gets a copy in another one (a fork). What is
pushed out of a slot goes to RAM, least worth first. A prompt whose beginning is being read right now by someone else
waits for that part and forks, instead of reading it a second time.

The engine moves the KV; this module only says what to move, and keeps the accounts.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto

import numpy as np
from numpy.typing import NDArray

from legato.core.errors import EngineError
from legato.engine.ram_cache import RamCache, RamEntry, common_prefix
from legato.engine.sequence import Sequence, SequenceStatus

Tokens = NDArray[np.int32]

# A last chunk of one token would not be bitwise what the same position gives inside several rows (measured), so a
# prompt that is known whole is still read again in its last two tokens.
MIN_REREAD = 2
WORTH_WAITING = 8  # tokens: reading fewer is quicker than waiting a step for them
WORTH_MOVING = 16  # tokens: likewise for a copy between slots or from RAM
_NOTHING: Tokens = np.empty(0, dtype=np.int32)


class Start(Enum):
    """How a sequence begins in its slot."""

    FRESH = auto()  # the slot is cleared
    IN_PLACE = auto()  # the slot holds the prefix
    FORK = auto()  # the prefix is copied from another slot
    RESTORE = auto()  # the prefix comes from RAM


@dataclass(frozen=True, slots=True)
class Plan:
    """Into `slot`, with `num_known` tokens that need not be read, from `source` (FORK) or `entry` (RESTORE).

    evicts: what the slot holds now is worth keeping: save it to RAM first.
    """

    slot: int
    start: Start
    num_known: int = 0
    source: int | None = None
    entry: RamEntry | None = None
    evicts: bool = False


@dataclass(slots=True)
class _Slot:
    tokens: Tokens = field(default_factory=lambda: _NOTHING)  # what its KV holds, while nobody uses it
    salt: str = ""
    holder: Sequence | None = None
    last_used: int = 0


class PrefixCache:
    """Bookkeeping over all slots of one decoder."""

    def __init__(self, num_slots: int, ram: RamCache, *, can_rewind: bool) -> None:
        """can_rewind: False for models with recurrent state: only what is held whole can be gone on from."""
        self._slots = [_Slot() for _ in range(num_slots)]
        self._ram = ram
        self._can_rewind = can_rewind
        self._uses = 0

    @property
    def num_free(self) -> int:
        return sum(slot.holder is None for slot in self._slots)

    def plan(self, seq: Sequence) -> Plan | None:
        """Where to put a waiting sequence; None when it should go on waiting.

        It waits while every slot is in use, and while another sequence is reading what it needs.
        """
        free = [i for i, slot in enumerate(self._slots) if slot.holder is None]
        if not free:
            return None
        wanted = np.asarray(seq.token_ids, dtype=np.int32)
        salt = seq.options.cache_salt
        matches = {i: self._match(self._held(slot), wanted) for i, slot in self._of_salt(salt)}
        source = max(matches, key=lambda i: (matches[i], i in free, -self._slots[i].last_used), default=None)
        known = matches[source] if source is not None else 0
        if self._can_rewind and self._is_being_read(wanted, salt, known):
            return None
        entry, in_ram = self._ram.longest(wanted, salt, self._usable)
        if entry is not None and in_ram >= known + WORTH_MOVING:
            self._ram.touch(entry)  # before what the slot holds comes in and pushes the oldest out
            return self._into(self._victim(free), Start.RESTORE, in_ram, entry=entry)
        if source is None or known == 0:
            return self._into(self._victim(free), Start.FRESH)
        return self._from_slot(source, known, free)

    def occupy(self, slot: int, seq: Sequence) -> None:
        if self._slots[slot].holder is not None:
            raise EngineError(f"slot {slot} is in use")
        self._slots[slot].holder = seq
        self._slots[slot].salt = seq.options.cache_salt

    def release(self, slot: int, tokens: list[int]) -> None:
        """Give the slot back; `tokens` are what its KV holds now."""
        held = self._slots[slot]
        if held.holder is None:
            raise EngineError(f"slot {slot} was released twice")
        self._uses += 1
        held.holder, held.last_used = None, self._uses
        held.tokens = np.asarray(tokens, dtype=np.int32)

    def evicted(self, slot: int, data: bytes) -> None:
        """Keep what an idle slot held."""
        self._ram.put(RamEntry(self._slots[slot].tokens, self._slots[slot].salt, data))

    def check(self, running: dict[int, Sequence]) -> None:
        """Raises EngineError unless exactly these sequences hold these slots."""
        held = {i: slot.holder for i, slot in enumerate(self._slots) if slot.holder is not None}
        if held != running:
            raise EngineError(f"slots in use: {sorted(running)}, marked as such: {sorted(held)}")
        self._ram.check()

    def _of_salt(self, salt: str) -> Iterator[tuple[int, _Slot]]:
        return ((i, slot) for i, slot in enumerate(self._slots) if slot.salt == salt)

    def _held(self, slot: _Slot) -> Tokens:
        if slot.holder is None:
            return slot.tokens
        return np.asarray(slot.holder.token_ids[: slot.holder.num_computed_tokens], dtype=np.int32)

    def _match(self, held: Tokens, wanted: Tokens) -> int:
        return self._usable(common_prefix(held, wanted), len(held), len(wanted))

    def _usable(self, shared: int, num_held: int, num_wanted: int) -> int:
        """Of `shared` tokens, how many save reading: not the prompt's last two, and no part of what cannot rewind."""
        usable = max(0, min(shared, num_wanted - MIN_REREAD))
        return usable if self._can_rewind or usable == num_held else 0

    def _is_being_read(self, wanted: Tokens, salt: str, known: int) -> bool:
        """Whether someone reads, right now, clearly more of this prompt than is known."""
        for _, slot in self._of_salt(salt):
            holder = slot.holder
            if holder is not None and holder.status is SequenceStatus.PREFILL:
                prompt = np.asarray(holder.token_ids, dtype=np.int32)
                if self._match(prompt, wanted) >= known + WORTH_WAITING:
                    return True
        return False

    def _from_slot(self, source: int, known: int, free: list[int]) -> Plan:
        """Go on in the source when that loses no more than taking another slot would; else copy, if worth it."""
        others = [i for i in free if i != source]
        if source in free:
            lost = len(self._slots[source].tokens) - known
            if not others or lost <= len(self._slots[self._victim(others)].tokens):
                saves = lost >= WORTH_MOVING and self._is_worth_saving(source)
                return Plan(source, Start.IN_PLACE, known, evicts=saves)
        if known < WORTH_MOVING:
            return self._into(self._victim(others), Start.FRESH)
        return self._into(self._victim(others), Start.FORK, known, source=source)

    def _into(
        self, slot: int, start: Start, num_known: int = 0, *, source: int | None = None, entry: RamEntry | None = None
    ) -> Plan:
        return Plan(slot, start, num_known, source, entry, evicts=self._is_worth_saving(slot))

    def _victim(self, free: list[int]) -> int:
        """The free slot whose loss costs least: few tokens, unused for long."""

        def worth(i: int) -> tuple[float, int]:
            slot = self._slots[i]
            return len(slot.tokens) / (1 + self._uses - slot.last_used), slot.last_used

        return min(free, key=worth)

    def _is_worth_saving(self, slot: int) -> bool:
        """Whether RAM should have it: it is long, and no other slot or entry holds the same."""
        tokens, salt = self._slots[slot].tokens, self._slots[slot].salt
        if len(tokens) < WORTH_MOVING or not self._ram.has_room:
            return False
        others = (self._held(other) for i, other in self._of_salt(salt) if i != slot)
        covered = any(common_prefix(held, tokens) >= len(tokens) for held in others)
        return not covered and not self._ram.covers(tokens, salt)
