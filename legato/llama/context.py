"""A context: one KV stream per slot, and the forward pass over them."""

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from legato.core.errors import ConfigError, EngineError
from legato.llama.batch import BatchBuffer, BatchRow
from legato.llama.library import clear_log, load_library, recent_log
from legato.llama.model import LlamaModel
from legato.llama.params import ContextParams


class LlamaContext:
    """Owned by one thread. Slots are numbered from 0; each holds `context_length` positions of its own."""

    def __init__(self, model: LlamaModel, params: ContextParams) -> None:
        """Raises ConfigError when libllama refuses these settings (its reason is in the text)."""
        lib = self._lib = load_library()
        raw = lib.llama_context_default_params()
        raw.n_ctx = params.context_length * params.num_slots
        raw.n_seq_max = params.num_slots
        raw.n_batch = raw.n_ubatch = params.batch_tokens
        raw.n_threads = raw.n_threads_batch = params.threads
        raw.flash_attn_type = params.flash_attention.value
        raw.type_k, raw.type_v = params.kv_type_k.value, params.kv_type_v.value
        raw.kv_unified = False  # a stream per slot: idle neighbours cost nothing
        raw.swa_full = False
        raw.no_perf = True
        clear_log()
        self._handle = lib.llama_init_from_model(model.weights.pointer, raw)
        if not self._handle:
            raise ConfigError(
                f"libllama cannot make a context of {params.num_slots} × {params.context_length} tokens "
                f"with these settings: {recent_log() or 'no reason given'}"
            )
        self._memory = lib.llama_get_memory(self._handle)
        self._batch = BatchBuffer(params.batch_tokens)
        self._weights = model.weights  # must outlive the context
        self._scratch = np.empty(0, dtype=np.uint8)
        self._view_key = (0, 0)
        self._view: NDArray[np.float32] = np.empty((0, 0), dtype=np.float32)
        self._window = model.window
        self.can_rewind = not model.has_recurrent_state
        self.num_slots = params.num_slots
        self.context_length = min(params.context_length, int(lib.llama_n_ctx_seq(self._handle)))
        self.vocab_size = model.vocab.num_tokens

    def decode(self, rows: Sequence[BatchRow]) -> NDArray[np.float32]:
        """One forward pass. Returns logits [rows that want them, vocab]: libllama's buffer, valid to the next call.

        Raises EngineError when the pass fails; the engine cannot go on after that.
        """
        num_logits = self._batch.fill(rows)
        code = self._lib.llama_decode(self._handle, self._batch.raw)
        if code != 0:
            reason = recent_log() or "no reason given"
            raise EngineError(f"llama_decode returned {code} for {self._batch.raw.n_tokens} tokens: {reason}")
        if num_logits == 0:
            self._lib.llama_synchronize(self._handle)  # on a GPU the call returns early; its time is wanted
            return np.empty((0, self.vocab_size), dtype=np.float32)
        pointer: Any = self._lib.llama_get_logits(self._handle)
        key = (ctypes.addressof(pointer.contents), num_logits)
        if key != self._view_key:  # the buffer seldom moves, and making a view costs more than the argmax over it
            self._view_key = key
            self._view = np.ctypeslib.as_array(pointer, shape=(num_logits, self.vocab_size))
        return self._view

    def truncate(self, slot: int, length: int) -> bool:
        """Forget the slot's positions from `length` on. False when this model cannot go back there: then the slot must
        be cleared and read again."""
        if length == 0:
            self.clear(slot)
            return True
        held = self.length(slot)
        if length >= held:
            return length == held
        if not self.can_rewind:
            return False
        if self._window:
            # A sliding window has dropped old cells, and seq_rm says True all the same.
            first = int(self._lib.llama_memory_seq_pos_min(self._memory, slot))
            if not 0 <= first <= max(0, length - self._window):
                return False
        return bool(self._lib.llama_memory_seq_rm(self._memory, slot, length, -1))

    def fork(self, source: int, target: int) -> bool:
        """Copy all that source holds to target, exactly. False when libllama cannot; target is then empty.

        By way of a buffer: that costs by the tokens held (600: 5 ms, 2,600: 25-50 ms measured), where libllama's own
        copy of a stream costs by its length, and puts the work into the next decode.
        """
        return self._put(target, self._get(source))

    def save(self, slot: int) -> bytes:
        """The slot's state, in libllama's format: valid for the same model, engine build and KV types."""
        return self._scratch[: self._get(slot)].tobytes()

    def restore(self, slot: int, data: bytes) -> bool:
        """False when libllama refuses the data; the slot is then empty."""
        self._make_room(len(data))
        self._scratch[: len(data)] = np.frombuffer(data, dtype=np.uint8)
        return self._put(slot, len(data))

    def _get(self, slot: int) -> int:
        """A slot's state into the buffer; → bytes."""
        self._make_room(int(self._lib.llama_state_seq_get_size(self._handle, slot)))
        return int(self._lib.llama_state_seq_get_data(self._handle, self._scratch_pointer(), len(self._scratch), slot))

    def _put(self, slot: int, size: int) -> bool:
        self.clear(slot)
        if self._lib.llama_state_seq_set_data(self._handle, self._scratch_pointer(), size, slot):
            return True
        self.clear(slot)
        return False

    def _make_room(self, size: int) -> None:
        """Kept from call to call: fresh pages would cost more than the copy."""
        if size > len(self._scratch):
            self._scratch = np.empty(size, dtype=np.uint8)

    def _scratch_pointer(self) -> Any:
        return self._scratch.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))

    def clear(self, slot: int) -> None:
        self._lib.llama_memory_seq_rm(self._memory, slot, -1, -1)

    def length(self, slot: int) -> int:
        """Positions that the slot holds."""
        return int(self._lib.llama_memory_seq_pos_max(self._memory, slot)) + 1

    def close(self) -> None:
        if self._handle:
            self._lib.llama_free(self._handle)
            self._handle = None

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self.close()
