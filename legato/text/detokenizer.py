"""Token bytes to text, one token at a time."""

import codecs


class Detokenizer:
    """Bytes in, whole characters out.

    Bytes that can never become a character turn into U+FFFD, as UTF-8 decoding with "replace" does. An unfinished
    character at the very end of an answer is dropped: the limit fell inside it, and the reader can do nothing with it.
    """

    def __init__(self, *, strip_space_prefix: bool = False) -> None:
        """strip_space_prefix: remove the one space that SentencePiece vocabularies put before a text's first word."""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = strip_space_prefix

    def push(self, piece: bytes) -> str:
        """The text that is certain after these bytes; "" while a character is unfinished."""
        if self._strip and piece:
            self._strip = False
            piece = piece.removeprefix(b" ")
        return self._decoder.decode(piece)

    def flush(self) -> str:
        """The end of the answer: nothing more comes out (see the class)."""
        self._decoder.reset()
        return ""
