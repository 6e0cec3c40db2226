"""Settings of one engine, checked once."""

from dataclasses import dataclass, fields
from typing import Literal, get_args

from legato.core.errors import ConfigError

FlashAttentionSetting = Literal["auto", "on", "off"]
KVTypeSetting = Literal["f16", "q8_0", "q4_0"]

MAX_SLOTS = 256  # libllama's limit on sequence ids


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How a model is opened.

    context: tokens per slot; None = what the model was trained for, or less where memory asks for it.
    slots: generations that run at once, each with a KV stream of `context` tokens; others wait.
    threads: None = one per physical core.
    flash_attention: auto = off with several slots (a stream beside others stays even), on with one slot.
    kv_type: element type of the KV cache; q8_0 and q4_0 need flash attention, so auto turns it on.
    gpu_layers: layers to offload; -1 = all, when the engine was built for a GPU.
    itl_target_ms: no running stream waits longer than this between two tokens because a prompt is read beside it;
        None = 100 ms (10 tokens a second, faster than people read) or 3 × a pure decode step, whichever is more.
    prefill_chunk: the most prompt tokens per step, whatever the target allows.
    cache_ram_mb: RAM for the KV of prompts that were pushed out of their slots; 0 = keep none.
    max_queue: generations that may wait for a slot; one more is refused with OverloadedError.
    unread_limit: tokens a reader may leave unread before its generation is parked.
    stall_timeout_s: a parked generation is cancelled after this long.
    """

    context: int | None = None
    slots: int = 4
    threads: int | None = None
    flash_attention: FlashAttentionSetting = "auto"
    kv_type: KVTypeSetting = "f16"
    gpu_layers: int = -1
    itl_target_ms: float | None = None
    prefill_chunk: int = 512
    cache_ram_mb: int = 512
    max_queue: int = 1024
    unread_limit: int = 1024
    stall_timeout_s: float = 300.0

    def __post_init__(self) -> None:
        for name, low, high in (
            ("slots", 1, MAX_SLOTS),
            ("context", 16, 2**31 - 1),
            ("threads", 1, 1024),
            ("gpu_layers", -1, 100_000),
            ("prefill_chunk", 4, 65_536),
            ("max_queue", 0, 2**31 - 1),
            ("cache_ram_mb", 0, 2**31 - 1),
            ("unread_limit", 1, 2**31 - 1),
        ):
            value = getattr(self, name)
            if value is None and name in ("context", "threads"):
                continue
            if type(value) is not int or not low <= value <= high:
                raise ConfigError(f"{name} must be a whole number from {low} to {high}, not {value!r}")
        _check_positive("stall_timeout_s", self.stall_timeout_s)
        if self.itl_target_ms is not None:
            _check_positive("itl_target_ms", self.itl_target_ms)
        _check_choice("flash_attention", self.flash_attention, get_args(FlashAttentionSetting))
        _check_choice("kv_type", self.kv_type, get_args(KVTypeSetting))
        if self.kv_type != "f16" and self.flash_attention == "off":
            raise ConfigError(f"kv_type {self.kv_type} needs flash_attention on or auto")


def _check_positive(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1e9:
        raise ConfigError(f"{name} must be a number above 0, at most 1e9, not {value!r}")


def _check_choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} must be one of {', '.join(allowed)}, not {value!r}")


CONFIG_NAMES = {f.name for f in fields(EngineConfig)}
