import contextlib
import struct
import time
from pathlib import Path

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from legato.core.errors import ModelFileError
from legato.models.ggml_types import FILE_TYPES, GGML_TYPES
from legato.models.gguf import check_model, read_header
from legato.models.header import SkippedArray
from legato.models.registry import EMBEDDED, resolve
from tests.models.model_files import (
    ARCHITECTURE,
    ARRAY,
    STRING,
    U32,
    U64,
    entry,
    gguf_bytes,
    tensor,
    text,
    write_model,
    write_split_model,
)


def refused(path: Path, content: bytes) -> str:
    """The one-line error that these bytes get. It names the file, and it comes at once."""
    path.write_bytes(content)
    began = time.process_time()
    with pytest.raises(ModelFileError) as caught:
        check_model(path)
    assert time.process_time() - began < 2
    message = str(caught.value)
    assert message.startswith(str(path)) and "\n" not in message
    return message


def test_the_header_says_what_the_gguf_package_wrote(tmp_path: Path) -> None:
    path = write_model(tmp_path / "tiny.gguf")
    header = read_header(path)
    reader = gguf.GGUFReader(path)
    assert header.file_size == path.stat().st_size
    assert header.data_offset == reader.data_offset
    assert [(t.name, t.type_name, t.dims, t.offset + header.data_offset, t.nbytes) for t in header.tensors] == [
        (t.name, t.tensor_type.name, tuple(map(int, t.shape)), t.data_offset, t.n_bytes) for t in reader.tensors
    ]
    assert (header.architecture, header.name, header.license) == ("llama", "Tiny", "mit")
    assert (header.n_ctx_train, header.n_layer, header.n_embd, header.n_head) == (2048, 2, 64, 4)
    assert (header.n_head_kv, header.head_dims, header.n_vocab) == ((2, 2), (16, 16), 100)
    assert (header.quantization, header.has_chat_template, header.sliding_window) == ("F32", True, None)
    assert header.metadata["tokenizer.ggml.tokens"] == SkippedArray(100)


def test_the_embedded_model_reads_as_the_gguf_package_reads_it() -> None:
    (header,) = check_model(resolve(EMBEDDED).path)
    reader = gguf.GGUFReader(header.path)
    assert {t.name: (t.offset + header.data_offset, t.nbytes) for t in header.tensors} == {
        t.name: (t.data_offset, t.n_bytes) for t in reader.tensors
    }
    assert (header.n_vocab, header.n_layer, header.n_head_kv[0], header.head_dims) == (49152, 30, 3, (64, 64))
    assert header.quantization == "Q4_1"


def test_type_tables_agree_with_the_gguf_package() -> None:
    for kind, (elements, size) in gguf.GGML_QUANT_SIZES.items():
        ours = GGML_TYPES[kind.value]
        # The package has 40 bytes for Q8_1, a type of temporaries that no file holds; ggml-common.h says 36.
        expected = (32, 36) if kind.name == "Q8_1" else (elements, size)
        assert (ours.name, ours.block_elements, ours.block_bytes) == (kind.name, *expected)
    for file_type in gguf.LlamaFileType:
        if file_type.name != "GUESSED":
            assert FILE_TYPES[file_type.value] in file_type.name


def test_every_byte_of_a_long_string_array_counts(tmp_path: Path) -> None:
    """The array is longer than one read, so the walk must go on across the border between two reads."""
    strings = [b"x" * (i % 300) for i in range(20_000)]
    array = struct.pack("<IQ", STRING, len(strings)) + b"".join(map(text, strings))
    path = tmp_path / "long.gguf"
    path.write_bytes(
        gguf_bytes([entry("many", ARRAY, array), ARCHITECTURE, entry("after", U32, b"\x07\0\0\0")], [tensor("a")])
    )
    header = read_header(path)
    assert len(array) > 2 << 20
    assert header.metadata["many"] == SkippedArray(20_000) and header.metadata["after"] == 7


def test_short_arrays_are_kept(tmp_path: Path) -> None:
    heads = struct.pack("<IQ4i", 5, 4, 1, 0, 1, 0)
    words = struct.pack("<IQ", STRING, 2) + text("en") + text("fr")
    path = tmp_path / "a.gguf"
    entries = [ARCHITECTURE, entry("llama.block_count", U32, struct.pack("<I", 4))]
    entries += [entry("llama.attention.head_count_kv", ARRAY, heads), entry("languages", ARRAY, words)]
    path.write_bytes(gguf_bytes(entries, [tensor("a")]))
    header = read_header(path)
    assert header.n_head_kv == (1, 0, 1, 0)
    assert header.metadata["languages"] == ("en", "fr")


def test_split_models_are_checked_whole(tmp_path: Path) -> None:
    paths = write_split_model(tmp_path, "tiny-F32")
    for path in paths:
        assert [header.path for header in check_model(path)] == paths
    swapped = paths[1].read_bytes()
    paths[1].write_bytes(paths[2].read_bytes())
    with pytest.raises(ModelFileError, match="part 3 of 3 by its header, but part 2 of 3 by its name"):
        check_model(paths[0])
    paths[1].write_bytes(swapped[:-10])
    with pytest.raises(ModelFileError, match=f"{paths[1].name}: truncated"):
        check_model(paths[0])
    paths[1].unlink()
    with pytest.raises(ModelFileError, match=f"1 of the model's 3 parts are missing, first {paths[1].name}"):
        check_model(paths[0])


def test_b79_cut_at_every_sixteenth(tmp_path: Path) -> None:
    whole = write_model(tmp_path / "whole.gguf", rows=8).read_bytes()
    for sixteenth in range(16):
        kept = len(whole) * sixteenth // 16
        message = refused(tmp_path / "cut.gguf", whole[:kept])
        assert "cut" in message or "truncated" in message or "empty" in message
        assert kept == 0 or str(kept) in message
    assert "truncated" in refused(tmp_path / "cut.gguf", whole[:-1])
    for kept in range(1, 64):
        refused(tmp_path / "cut.gguf", whole[:kept])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "empty"),
        (b"<!DOCTYPE html><html><head><title>Sign in</title>", "web page"),
        (b"\xef\xbb\xbf\n <HTML>", "web page"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "Git LFS pointer"),
        (b"PK\x03\x04" + bytes(40), "zip"),
        (b"\x80\x02}q\x00" + bytes(40), "pickle"),
        (struct.pack("<Q", 30) + b'{"__metadata__":{}}' + bytes(40), "safetensors"),
        (b'{"error":"not found"}', "JSON"),
        (b"tjgg" + bytes(60), "GGJT"),
        (bytes(4096), "zeros"),
        (b"MZ" + bytes(60), "not a GGUF"),
    ],
)
def test_b79_foreign_files_are_named(tmp_path: Path, content: bytes, said: str) -> None:
    assert said in refused(tmp_path / "model.gguf", content)


OK = [tensor("a")]
SMALL = entry("general.alignment", U32, struct.pack("<I", 48))
MALFORMED = {
    "an empty key": (gguf_bytes([ARCHITECTURE, entry("", U32, bytes(4))], OK), "empty key"),
    "a key twice": (gguf_bytes([ARCHITECTURE, ARCHITECTURE], OK), "twice"),
    "a tensor twice": (gguf_bytes([ARCHITECTURE], [tensor("a"), tensor("a", offset=128)], 256), "twice"),
    "2^60 tensors": (gguf_bytes([ARCHITECTURE], OK, counts=(2**60, 1)), "claims 1152921504606846976 tensors"),
    "2^60 keys": (gguf_bytes([ARCHITECTURE], OK, counts=(1, 2**60)), "claims 1152921504606846976 metadata"),
    "2^64-1 keys": (gguf_bytes([ARCHITECTURE], OK, counts=(1, 2**64 - 1)), "metadata keys"),
    "one key too many": (gguf_bytes([ARCHITECTURE], OK, counts=(1, 2)), "damaged"),
    "a key of 2^63 bytes": (gguf_bytes([struct.pack("<Q", 2**63)], OK), "claims 9223372036854775808 bytes"),
    "a string of 2^63": (gguf_bytes([entry("k", STRING, struct.pack("<Q", 2**63))], OK), "claims 92233720"),
    "a string past the end": (gguf_bytes([entry("k", STRING, struct.pack("<Q", 9999))], OK), "truncated"),
    "a value of unknown type": (gguf_bytes([entry("k", 13, bytes(4))], OK), "value type 13"),
    "an array of arrays": (gguf_bytes([entry("k", ARRAY, struct.pack("<IQ", 9, 1))], OK), "array of type 9"),
    "an array of unknowns": (gguf_bytes([entry("k", ARRAY, struct.pack("<IQ", 77, 1))], OK), "type 77"),
    "2^61 array items": (gguf_bytes([entry("k", ARRAY, struct.pack("<IQ", U64, 2**61))], OK), "truncated"),
    "2^61 array strings": (gguf_bytes([entry("k", ARRAY, struct.pack("<IQ", 8, 2**61))], OK), "2305843009"),
    "a long array with a string of 2^63": (
        gguf_bytes([entry("k", ARRAY, struct.pack("<IQ", 8, 90) + struct.pack("<Q", 2**63) + bytes(999))], OK),
        "truncated",
    ),
    "a long array that ends past the end": (
        gguf_bytes([entry("k", ARRAY, struct.pack("<IQ", 8, 90) + bytes(89 * 8) + struct.pack("<Q", 999))], []),
        "truncated",
    ),
    "a key that would break the line": (gguf_bytes([entry("a\nb", 13, bytes(4))], OK), r"a\nb has value type"),
    "an odd alignment": (gguf_bytes([ARCHITECTURE, SMALL], OK), "48, which is not a power of two"),
    "a dimension of zero": (gguf_bytes([ARCHITECTURE], [tensor("a", (32, 0))]), "shape 32 × 0"),
    "no dimensions": (gguf_bytes([ARCHITECTURE], [tensor("a", ())]), "0 dimensions"),
    "five dimensions": (gguf_bytes([ARCHITECTURE], [tensor("a", (2,) * 5)]), "5 dimensions"),
    "2^32 dimensions": (
        gguf_bytes([ARCHITECTURE], [text("a") + struct.pack("<I", 2**32 - 1)]),
        "4294967295 dimensions",
    ),
    "dimensions that overflow": (gguf_bytes([ARCHITECTURE], [tensor("a", (2**32, 2**32))]), "cannot have"),
    "half a block": (gguf_bytes([ARCHITECTURE], [tensor("a", (33,), kind=2)]), "Q4_0 cannot have the shape 33"),
    "an unknown tensor type": (gguf_bytes([ARCHITECTURE], [tensor("a", kind=99)]), "type 99"),
    "a removed tensor type": (gguf_bytes([ARCHITECTURE], [tensor("a", kind=4)]), "type 4"),
    "an offset beyond the end": (gguf_bytes([ARCHITECTURE], [tensor("a", offset=1 << 40)]), "offset 1099511"),
    "an offset in between": (gguf_bytes([ARCHITECTURE], [tensor("a", offset=7)], 256), "offset 7, not 0"),
    "overlapping tensors": (gguf_bytes([ARCHITECTURE], [tensor("a"), tensor("b", offset=64)], 256), "not 128"),
    "a tensor larger than the file": (gguf_bytes([ARCHITECTURE], [tensor("a", (1 << 30,))]), "truncated"),
    "a tensor without a name": (gguf_bytes([ARCHITECTURE], [tensor("")]), "without a name"),
    "a name of 64 bytes": (gguf_bytes([ARCHITECTURE], [tensor("n" * 64)]), "tensor name"),
    "version 1": (gguf_bytes([ARCHITECTURE], OK, version=1), "version 1"),
    "version 99": (gguf_bytes([ARCHITECTURE], OK, version=99), "version 99"),
    "big endian": (gguf_bytes([ARCHITECTURE], OK, version=3 << 24), "big-endian"),
    "no architecture": (gguf_bytes([entry("k", U32, bytes(4))], OK), "which architecture"),
    "no weights": (gguf_bytes([ARCHITECTURE], []), "no weights"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_b79_malformed_headers_are_refused(tmp_path: Path, name: str) -> None:
    content, said = MALFORMED[name]
    assert said in refused(tmp_path / "bad.gguf", content)


def test_the_builder_of_malformed_files_can_write_a_right_one(tmp_path: Path) -> None:
    path = tmp_path / "right.gguf"
    path.write_bytes(gguf_bytes([ARCHITECTURE], [tensor("a"), tensor("b", offset=128)], 256))
    assert [t.name for t in check_model(path)[0].tensors] == ["a", "b"]


def test_b79_absurd_layer_counts_make_no_lists(tmp_path: Path) -> None:
    path = tmp_path / "deep.gguf"
    layers = entry("llama.block_count", U32, struct.pack("<I", 2**32 - 1))
    path.write_bytes(gguf_bytes([ARCHITECTURE, layers], OK))
    with pytest.raises(ModelFileError, match="4294967295 layers"):
        _ = read_header(path).n_head_kv


def test_b79_folders_devices_and_missing_files(tmp_path: Path) -> None:
    for path, said in [
        (tmp_path, "folder"),
        (Path("/dev/zero"), "not a regular file"),
        (tmp_path / "none.gguf", "no such file"),
        (tmp_path / ("x" * 300), "cannot be read"),
        (Path("a\0b"), "cannot be read"),
    ]:
        with pytest.raises(ModelFileError, match=said):
            check_model(path)


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    folder = tmp_path_factory.mktemp("fuzz")
    return folder / "fuzzed.gguf", write_model(folder / "whole.gguf", rows=8).read_bytes()


_BYTES = st.one_of(st.binary(min_size=1, max_size=9), st.sampled_from([b"\xff" * 8, bytes(8), b"\x7f" * 4]))


@settings(max_examples=200, deadline=2000, derandomize=True, database=None)
@given(edits=st.lists(st.tuples(st.integers(0, 3000), _BYTES), max_size=4), cut=st.integers(0, 6000))
def test_b79_any_bytes_give_a_header_or_a_model_file_error(
    fuzzed: tuple[Path, bytes], edits: list[tuple[int, bytes]], cut: int
) -> None:
    path, whole = fuzzed
    content = bytearray(whole)
    for place, piece in edits:
        content[place : place + len(piece)] = piece
    path.write_bytes(content[: len(content) - cut] if cut > 3000 else content)
    try:
        (header,) = check_model(path)
    except ModelFileError as exc:
        assert "\n" not in str(exc)
        return
    last = header.tensors[-1]
    assert header.data_offset + last.offset + last.nbytes <= header.file_size
    with contextlib.suppress(ModelFileError):
        _ = (header.n_head_kv, header.head_dims, header.n_vocab, header.quantization, header.n_ctx_train)
