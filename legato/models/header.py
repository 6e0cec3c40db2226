"""A model's header, as values: what a GGUF file says about itself, and the questions Legato asks of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from legato.core.errors import ModelFileError
from legato.models.ggml_types import FILE_TYPES

MAX_LAYERS = 4096  # llama.cpp stops at 512; a damaged number must not become a list of 2^32 items


@dataclass(frozen=True, slots=True)
class SkippedArray:
    """An array that was walked and checked, but not kept: only how many items it has."""

    length: int


Scalar = int | float | bool | str
Value = Scalar | tuple[Scalar, ...] | SkippedArray


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor. `dims`: fastest first, as ggml has them. `offset`: bytes from the start of the tensor data."""

    name: str
    type_name: str
    dims: tuple[int, ...]
    offset: int
    nbytes: int

    @property
    def num_elements(self) -> int:
        count = 1
        for dim in self.dims:
            count *= dim
        return count


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """The checked header of one GGUF file. Sizes and offsets in bytes; `architecture` is None in later split parts."""

    path: Path
    version: int
    architecture: str | None
    metadata: Mapping[str, Value]
    tensors: tuple[TensorInfo, ...]
    data_offset: int
    file_size: int

    def text(self, key: str) -> str | None:
        value = self.metadata.get(key)
        return value if isinstance(value, str) else None

    def integer(self, key: str) -> int | None:
        """A whole number of 0 or more; None when the key is absent or holds something else."""
        value = self.metadata.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None

    def arch_integer(self, suffix: str) -> int | None:
        """`<architecture>.<suffix>`; of a per-layer array, the largest item."""
        per_layer = self.per_layer(suffix)
        return max(per_layer) if per_layer else None

    def per_layer(self, suffix: str) -> tuple[int, ...] | None:
        """`<architecture>.<suffix>` as a tuple: one item when the file has one number for all layers."""
        value = self.metadata.get(f"{self.architecture}.{suffix}")
        items = value if isinstance(value, tuple) else (value,)
        numbers = tuple(item for item in items if isinstance(item, int) and item >= 0)
        return numbers if numbers and len(numbers) == len(items) else None

    @property
    def n_ctx_train(self) -> int | None:
        """The context length, in tokens, that the model was trained for."""
        return self.arch_integer("context_length")

    @property
    def n_layer(self) -> int | None:
        """Raises ModelFileError when the number is absurd."""
        layers = self.arch_integer("block_count")
        if layers is not None and layers > MAX_LAYERS:
            raise ModelFileError(
                f"{self.path}: it claims {layers} layers (at most {MAX_LAYERS} are possible); the file is damaged, "
                "get it again"
            )
        return layers

    @property
    def n_embd(self) -> int | None:
        return self.arch_integer("embedding_length")

    @property
    def n_head(self) -> int | None:
        return self.arch_integer("attention.head_count")

    @property
    def n_head_kv(self) -> tuple[int, ...]:
        """Key and value heads of each layer; empty when the file does not say. 0 marks a layer without attention."""
        layers = self.n_layer or 0
        heads = self.per_layer("attention.head_count_kv") or self.per_layer("attention.head_count") or ()
        if len(heads) == 1:
            return heads * layers
        return heads[:layers]

    @property
    def head_dims(self) -> tuple[int, int]:
        """Numbers per head of a key and of a value; (0, 0) when the file does not say."""
        n_head, n_embd = self.n_head, self.n_embd
        usual = n_embd // n_head if n_head and n_embd else 0
        key = self.arch_integer("attention.key_length")
        value = self.arch_integer("attention.value_length")
        return (usual if key is None else key, usual if value is None else value)

    @property
    def n_vocab(self) -> int | None:
        """Tokens in the vocabulary."""
        tokens = self.metadata.get("tokenizer.ggml.tokens")
        if isinstance(tokens, SkippedArray):
            return tokens.length
        if isinstance(tokens, tuple):
            return len(tokens)
        return self.arch_integer("vocab_size")

    @property
    def sliding_window(self) -> int | None:
        """Tokens that a sliding-window layer looks back; None for a model without such layers."""
        return self.arch_integer("attention.sliding_window") or None

    @property
    def num_parameters(self) -> int:
        """Numbers in the tensors of this file."""
        return sum(tensor.num_elements for tensor in self.tensors)

    @property
    def quantization(self) -> str:
        """What most weights are stored as: from `general.file_type`, else the type that holds the most bytes."""
        named = FILE_TYPES.get(self.integer("general.file_type") or 0)
        if named is not None and "general.file_type" in self.metadata:
            return named
        held: dict[str, int] = {}
        for tensor in self.tensors:
            held[tensor.type_name] = held.get(tensor.type_name, 0) + tensor.nbytes
        return max(held, key=held.__getitem__) if held else "unknown"

    @property
    def name(self) -> str | None:
        return self.text("general.name")

    @property
    def license(self) -> str | None:
        return self.text("general.license")

    @property
    def has_chat_template(self) -> bool:
        return bool(self.text("tokenizer.chat_template"))

    @property
    def split_no(self) -> int:
        """Place of this file in a split model, from 0."""
        return self.integer("split.no") or 0

    @property
    def split_count(self) -> int:
        """Number of files the model is split into; 1 for a model in one file."""
        return self.integer("split.count") or 1
