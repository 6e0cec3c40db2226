"""Small GGUF files for tests: valid ones by the `gguf` package, malformed ones byte by byte."""

import struct
from pathlib import Path

import gguf
import numpy as np

U32, F32, BOOL, STRING, ARRAY, U64 = 4, 6, 7, 8, 9, 10


def write_model(path: Path, *, n_vocab: int = 100, rows: int = 64, seed: int = 0, license: str = "mit") -> Path:
    """A well-formed llama model in name only: right header, random weights of about 64 × `rows` floats."""
    writer = gguf.GGUFWriter(path, "llama")
    add_metadata(writer, n_vocab, license)
    weights = np.random.default_rng(seed).standard_normal((rows, 64)).astype(np.float32)
    writer.add_tensor("token_embd.weight", weights)
    writer.add_tensor("blk.0.attn_norm.weight", np.ones(64, dtype=np.float32))
    writer.add_tensor("blk.0.attn_q.weight", weights.astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_metadata(writer: gguf.GGUFWriter, n_vocab: int = 100, license: str = "mit") -> None:
    writer.add_name("Tiny")
    writer.add_license(license)
    writer.add_context_length(2048)
    writer.add_embedding_length(64)
    writer.add_block_count(2)
    writer.add_feed_forward_length(128)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_token_list([f"token{i}" for i in range(n_vocab)])
    writer.add_token_scores([0.0] * n_vocab)
    writer.add_chat_template("{{ messages }}")


def write_split_model(folder: Path, stem: str, count: int = 3) -> list[Path]:
    """The same in `count` parts, metadata in the first one, a tensor in each."""
    paths = []
    for number in range(count):
        path = folder / f"{stem}-{number + 1:05d}-of-{count:05d}.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        if number == 0:
            add_metadata(writer)
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", count)
        writer.add_tensor(f"blk.{number}.attn_q.weight", np.full((64, 64), number, dtype=np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        paths.append(path)
    return paths


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def entry(key: str, kind: int, payload: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + payload


def tensor(name: str, dims: tuple[int, ...] = (32,), kind: int = 0, offset: int = 0) -> bytes:
    shape = b"".join(struct.pack("<Q", dim) for dim in dims)
    return text(name) + struct.pack("<I", len(dims)) + shape + struct.pack("<IQ", kind, offset)


ARCHITECTURE = entry("general.architecture", STRING, text("llama"))


def gguf_bytes(
    entries: list[bytes],
    tensors: list[bytes],
    data: int = 128,
    version: int = 3,
    counts: tuple[int, int] | None = None,
) -> bytes:
    """A file of these parts; `data`: bytes of tensor data; `counts`: (tensors, keys) that the header claims."""
    n_tensors, n_entries = counts if counts is not None else (len(tensors), len(entries))
    head = b"GGUF" + struct.pack("<IQQ", version, n_tensors, n_entries) + b"".join(entries) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + bytes(data)
