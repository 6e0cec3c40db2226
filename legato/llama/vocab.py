"""Tokens to bytes and text to tokens."""

import ctypes
from functools import cached_property
from typing import Any

from legato.core.errors import RequestError
from legato.llama.library import load_library

_SPM = 1  # llama_vocab_type: SentencePiece with byte fallback


class Vocab:
    """The vocabulary of a loaded model. Thread-safe."""

    def __init__(self, handle: Any, *, owner: object, adds_space_prefix: bool | None) -> None:
        """handle: `llama_vocab *`, kept alive by `owner`. adds_space_prefix: the file's word; None = the type's."""
        self._lib = load_library()
        self._owner = owner
        self._handle = handle
        self._pieces: dict[int, bytes] = {}
        self.num_tokens = int(self._lib.llama_vocab_n_tokens(handle))
        is_spm = self._lib.llama_vocab_type(handle) == _SPM
        self.adds_space_prefix = is_spm if adds_space_prefix is None else adds_space_prefix
        self.bos_id = int(self._lib.llama_vocab_bos(handle))
        self.eos_id = int(self._lib.llama_vocab_eos(handle))
        self.adds_bos = bool(self._lib.llama_vocab_get_add_bos(handle))

    @property
    def handle(self) -> Any:
        return self._handle

    def token_bytes(self, token: int) -> bytes:
        """The bytes a token adds to visible text: empty for control tokens."""
        piece = self._pieces.get(token)
        if piece is None:
            piece = self._pieces[token] = self._piece(token, special=False)
        return piece

    def token_text(self, token: int) -> str:
        """The text of any token, control tokens included (`<|im_end|>`); "" for a token that is not there (-1)."""
        return self._piece(token, special=True).decode("utf-8", "replace") if token >= 0 else ""

    def _piece(self, token: int, *, special: bool) -> bytes:
        buffer = ctypes.create_string_buffer(64)
        size = self._lib.llama_token_to_piece(self._handle, token, buffer, len(buffer), 0, special)
        if size < 0:
            buffer = ctypes.create_string_buffer(-size)
            size = self._lib.llama_token_to_piece(self._handle, token, buffer, len(buffer), 0, special)
        return buffer.raw[: max(size, 0)]

    def is_end(self, token: int) -> bool:
        """Whether the token ends a generation (end of sequence, of turn, of message …)."""
        return bool(self._lib.llama_vocab_is_eog(self._handle, token))

    @cached_property
    def end_ids(self) -> tuple[int, ...]:
        """All end-of-generation ids, ascending."""
        is_end, handle = self._lib.llama_vocab_is_eog, self._handle
        return tuple(t for t in range(self.num_tokens) if is_end(handle, t))

    @cached_property
    def control_tokens(self) -> dict[str, int]:
        """Text → id of the tokens that only a template may produce."""
        lib, handle = self._lib, self._handle
        wanted = lib.LLAMA_TOKEN_ATTR_CONTROL | lib.LLAMA_TOKEN_ATTR_UNKNOWN
        attr = lib.llama_vocab_get_attr
        ids = [t for t in range(self.num_tokens) if attr(handle, t) & wanted]
        return {text: t for t in ids if (text := self.token_text(t))}

    def tokenize(self, text: str, *, add_special: bool = False) -> list[int]:
        """Token ids of plain text: no text becomes a control token.

        add_special: put the begin-of-sequence token in front where the model wants one.
        Raises RequestError for text that cannot be encoded (lone surrogates).
        """
        try:
            raw = text.encode()
        except UnicodeEncodeError as exc:
            raise RequestError(f"the text is not valid Unicode ({exc.reason} at character {exc.start})") from None
        capacity = len(raw) + 8
        while True:
            buffer = (ctypes.c_int32 * capacity)()
            count = self._lib.llama_tokenize(self._handle, raw, len(raw), buffer, capacity, add_special, False)
            if count >= 0:
                return buffer[:count]
            if count == -(2**31):
                raise RequestError(f"the text is too long to tokenize ({len(raw)} bytes)")
            capacity = -count

    def check_ids(self, tokens: tuple[int, ...], field: str) -> None:
        """Raises RequestError unless every id is in the vocabulary."""
        for token in tokens:
            if type(token) is not int or not 0 <= token < self.num_tokens:
                raise RequestError(
                    f"{field} has the token id {token!r}; this model's ids run from 0 to {self.num_tokens - 1}",
                    field=field,
                )
