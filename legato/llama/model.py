"""A model file in memory."""

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from legato.core.errors import ModelFileError
from legato.llama.library import clear_log, load_library, recent_log
from legato.llama.vocab import Vocab

Progress = Callable[[float], None]


class Weights:
    """Owns a `llama_model *`: freed with the last of the model, its vocabulary and its contexts that refers to it.

    So another thread may still be tokenizing while a model is being closed.
    """

    def __init__(self, pointer: Any) -> None:
        self.pointer = pointer
        self._free = load_library().llama_model_free

    def __del__(self) -> None:
        self._free(self.pointer)


class LlamaModel:
    """Weights and vocabulary."""

    def __init__(self, weights: Weights, path: Path) -> None:
        self._lib = load_library()
        self.weights = weights
        self.path = path
        handle = weights.pointer
        prefix = self.metadata("tokenizer.ggml.add_space_prefix")
        self.vocab = Vocab(
            self._lib.llama_model_get_vocab(handle),
            owner=weights,
            adds_space_prefix=None if prefix is None else prefix == "true",
        )
        self.train_context = int(self._lib.llama_model_n_ctx_train(handle))
        self.window = int(self._lib.llama_model_n_swa(handle))  # tokens; 0 = full attention
        self.has_recurrent_state = bool(
            self._lib.llama_model_is_recurrent(handle) or self._lib.llama_model_is_hybrid(handle)
        )

    @classmethod
    def load(cls, path: Path, *, gpu_layers: int = -1, on_progress: Progress | None = None) -> Self:
        """Load a GGUF whose header was checked before. gpu_layers: -1 = all that fit a GPU, if there is one.

        on_progress gets the share that is loaded, 0 to 1, on this thread. Raises ModelFileError with libllama's reason.
        """
        lib = load_library()
        params = lib.llama_model_default_params()
        params.n_gpu_layers = gpu_layers
        raised: list[BaseException] = []
        if on_progress is not None:

            def report(share: float, _user_data: object) -> bool:
                try:
                    on_progress(share)
                except BaseException as exc:  # ctypes would swallow it; libllama stops when told so
                    raised.append(exc)
                return not raised

            params.progress_callback = lib.llama_progress_callback(report)
        clear_log()
        handle = lib.llama_model_load_from_file(str(path).encode(), params)
        if raised:
            raise raised[0]
        if not handle:
            raise ModelFileError(f"{path}: libllama cannot load this model: {recent_log() or 'no reason given'}")
        return cls(Weights(handle), path)

    def metadata(self, key: str) -> str | None:
        """A scalar of the file's metadata, as text; None when it is not there."""
        size = self._lib.llama_model_meta_val_str(self.weights.pointer, key.encode(), None, 0)
        if size < 0:
            return None
        buffer = ctypes.create_string_buffer(size + 1)
        self._lib.llama_model_meta_val_str(self.weights.pointer, key.encode(), buffer, len(buffer))
        return buffer.value.decode("utf-8", "replace")

    @property
    def chat_template(self) -> str | None:
        """The default chat template's source, untrusted; None when the file has none."""
        source = self._lib.llama_model_chat_template(self.weights.pointer, None)
        return source.decode("utf-8", "replace") if source else None
