"""Say what a file is that was taken for a GGUF."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Foreign:
    """`what` the file is, and the `advice` that goes with it."""

    what: str
    advice: str


_CONVERT = "convert it with llama.cpp's convert_hf_to_gguf.py, or pull a GGUF of the model"
_PULL = "pull the model itself (`legato models pull hf:OWNER/REPO`)"
_UNPACK = "unpack it and name the .gguf file in it"
_PREFIXES: tuple[tuple[bytes, Foreign], ...] = (
    (b"version https://git-lfs", Foreign("a Git LFS pointer, not the model it points to", _PULL)),
    (b"PK\x03\x04", Foreign("a zip archive (perhaps a PyTorch checkpoint), not a GGUF", _CONVERT)),
    (b"\x80\x02", Foreign("a Python pickle (perhaps a PyTorch checkpoint), not a GGUF", _CONVERT)),
    (b"\x80\x03", Foreign("a Python pickle, not a GGUF", _CONVERT)),
    (b"\x80\x04", Foreign("a Python pickle, not a GGUF", _CONVERT)),
    (b"\x80\x05", Foreign("a Python pickle, not a GGUF", _CONVERT)),
    (b"\x1f\x8b", Foreign("a gzip archive, not a GGUF", _UNPACK)),
    (b"7z\xbc\xaf", Foreign("a 7z archive, not a GGUF", _UNPACK)),
    (b"lmgg", Foreign("a model in the old GGML format", "pull a GGUF of the model")),
    (b"fmgg", Foreign("a model in the old GGMF format", "pull a GGUF of the model")),
    (b"tjgg", Foreign("a model in the old GGJT format", "pull a GGUF of the model")),
    (b"FUGG", Foreign("a GGUF with its bytes swapped", "get the little-endian file of the model")),
)


def describe_foreign(head: bytes) -> Foreign | None:
    """`head`: the first bytes of the file (up to 512). None when they begin like a GGUF, even a cut one."""
    again = "download it again"
    if not head:
        return Foreign("the file is empty", again)
    if b"GGUF".startswith(head[:4]):
        return None
    for prefix, foreign in _PREFIXES:
        if head.startswith(prefix):
            return foreign
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith((b"<!doctype html", b"<html", b"<head", b"<?xml")):
        return Foreign("a web page, not a GGUF: the download got an HTML page instead of the model", again)
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 1 << 32:
        return Foreign("a safetensors file, not a GGUF", _CONVERT)
    if text.startswith((b"{", b"[")):
        return Foreign("a JSON text, not a GGUF: perhaps an error message of the download", again)
    if not any(head):
        return Foreign("it begins with zeros: a download that was not finished", again)
    return Foreign(f"not a GGUF: it begins with {head[:4]!r} instead of b'GGUF'", "name a .gguf model file")
