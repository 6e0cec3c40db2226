"""From a file to a model: everything is checked and sized before libllama sees it."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import psutil

from legato.core.errors import ConfigError
from legato.engine.config import EngineConfig
from legato.llama.model import LlamaModel, Progress
from legato.llama.params import ContextParams, FlashAttention, KVType
from legato.models.gguf import check_model
from legato.models.header import GGUFHeader
from legato.models.memory import ContextSettings, check_memory, largest_context

AUTO_CONTEXT = 8192  # tokens per slot when none is asked for: a long conversation, and memory left for others
_LEAST_CONTEXT = 256
_KV_TYPE = {"f16": KVType.F16, "q8_0": KVType.Q8_0, "q4_0": KVType.Q4_0}


def load_model(
    path: Path, config: EngineConfig, on_progress: Progress | None = None
) -> tuple[LlamaModel, ContextParams]:
    """The model, and the settings of a context for it. Needs no numpy: a command can load beside its imports.

    Raises ModelFileError, InsufficientMemoryError, ConfigError or EngineLibraryError.
    """
    params = _context_params(config, check_model(path))
    return LlamaModel.load(path, gpu_layers=config.gpu_layers, on_progress=on_progress), params


def _context_params(config: EngineConfig, headers: Sequence[GGUFHeader]) -> ContextParams:
    """Settings filled in for this model and machine. Raises InsufficientMemoryError, ConfigError."""
    batch_tokens = max(config.prefill_chunk, config.slots)
    trained = headers[0].n_ctx_train
    # Off even for a lone stream: on a CPU its fast kernel only serves long chunks, and decoding at depth pays for it.
    flash = FlashAttention.ON if config.flash_attention == "on" or config.kv_type != "f16" else FlashAttention.OFF
    need = ContextSettings(
        context_length=config.context or 1,
        streams=config.slots,
        type_k=config.kv_type,
        type_v=config.kv_type,
        ubatch=batch_tokens,
        flash_attention=flash is FlashAttention.ON,
    )
    if config.context is None:
        length = max(_LEAST_CONTEXT, min(trained or AUTO_CONTEXT, AUTO_CONTEXT, largest_context(headers, need)))
        need = replace(need, context_length=length)
    check_memory(headers, need)
    if trained and need.context_length > trained:
        raise ConfigError(f"context is {need.context_length}; this model was trained for {trained} tokens at most")
    kv_type = _KV_TYPE[config.kv_type]
    return ContextParams(
        context_length=need.context_length,
        num_slots=config.slots,
        batch_tokens=batch_tokens,
        threads=config.threads or _usable_cores(),
        flash_attention=flash,
        kv_type_k=kv_type,
        kv_type_v=kv_type,
    )


def _usable_cores() -> int:
    """Physical cores, or fewer where the process is bound to fewer."""
    cores = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
    return max(1, min(cores, bound))
