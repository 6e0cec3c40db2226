"""Settings of a context. Apart from it, since they are wanted before numpy is there."""

from dataclasses import dataclass
from enum import Enum


class FlashAttention(Enum):
    AUTO = -1
    OFF = 0
    ON = 1


class KVType(Enum):
    """Element types of the KV cache; values are ggml's."""

    F16 = 1
    Q4_0 = 2
    Q8_0 = 8


@dataclass(frozen=True, slots=True)
class ContextParams:
    """context_length: tokens per slot. batch_tokens: the most tokens in one decode call. threads: for every call."""

    context_length: int
    num_slots: int
    batch_tokens: int
    threads: int
    flash_attention: FlashAttention
    kv_type_k: KVType
    kv_type_v: KVType
