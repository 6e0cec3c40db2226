"""What `legato doctor` runs as a child (arguments: [MODEL_FILE]): try the engine library, tell each stage on stdout.

One JSON object a line: `{"stage": …, "begin": true}` before a stage, so that the parent knows where the child died,
and `{"stage": …, "seconds": …, …facts}` after it. A failure that Legato understands is `{"stage": …, "error": …}`
with exit status 1.
"""

import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import numpy as np

from legato.core.errors import LegatoError
from legato.llama.batch import BatchRow
from legato.llama.context import LlamaContext
from legato.llama.library import system_info
from legato.llama.model import LlamaModel
from legato.llama.params import ContextParams, FlashAttention, KVType
from legato.llama.version import library_version

# Several rows at once take other kernels than one row does (AMX tiles among them): both must be tried.
_PROMPT_TOKENS = 40
Facts = Mapping[str, object]
T = TypeVar("T")


def _tell(**fields: object) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


class _StageError(Exception):
    pass


def _stage(name: str, work: Callable[[], T], facts: Callable[[T], Facts] = lambda _result: {}) -> T:
    _tell(stage=name, begin=True)
    started = time.monotonic()
    try:
        result = work()
        found = facts(result)
    except LegatoError as error:
        _tell(stage=name, error=str(error))
        raise _StageError from error
    _tell(stage=name, seconds=round(time.monotonic() - started, 4), **found)
    return result


def _library() -> Facts:
    return {"system_info": system_info(), "version": library_version()}


def _context(model: LlamaModel) -> LlamaContext:
    params = ContextParams(
        context_length=256,
        num_slots=1,
        batch_tokens=64,
        threads=1,
        flash_attention=FlashAttention.OFF,
        kv_type_k=KVType.F16,
        kv_type_v=KVType.F16,
    )
    return LlamaContext(model, params)


def _decode(context: LlamaContext, start: int, count: int) -> None:
    row = BatchRow(0, start, [(17 * i + 5) % context.vocab_size for i in range(count)], True)
    logits = context.decode([row])
    if not np.isfinite(logits).all():
        raise LegatoError("the engine computes values that are not numbers; rebuild it")


def main(arguments: list[str]) -> int:
    try:
        _stage("library", _library, lambda facts: facts)
        if not arguments:
            return 0
        model = _stage("model", lambda: LlamaModel.load(Path(arguments[0])))
        context = _stage("context", lambda: _context(model))
        _stage("prompt", lambda: _decode(context, 0, _PROMPT_TOKENS))
        _stage("token", lambda: _decode(context, _PROMPT_TOKENS, 1))
        context.close()
    except _StageError:
        return 1
    return 0
