"""Read and check a GGUF header before the native loader sees the file.

libllama aborts, or faults later through its memory map, on files that are cut, damaged or something else; so every
count, length, size and offset is checked here against the file. The header is read with plain reads, not a memory map:
a file that shrinks under a map is a SIGBUS. Layout: the GGUF specification, versions 2 and 3, little endian.
"""

import stat
import struct
from io import BufferedReader
from pathlib import Path

from legato.core.errors import ModelFileError
from legato.models.foreign import describe_foreign
from legato.models.ggml_types import GGML_TYPES
from legato.models.header import GGUFHeader, SkippedArray, TensorInfo, Value
from legato.models.refs import split_paths

_MAX_HEADER_BYTES = 256 << 20
_MAX_ENTRIES = 100_000  # metadata keys, and tensors: real models have dozens, and at most some thousands
_MAX_STRINGS = 4_000_000  # in one array: the largest vocabularies have 262,144 tokens and 515,000 merges
_MAX_KEY_BYTES = 65_535
_MAX_NAME_BYTES = 63
_MAX_DIMS = 4
_MAX_ELEMENTS = 2**63 - 1
_KEPT_ITEMS = 4096  # numbers of an array that are kept (per-layer values); longer ones are only counted
_KEPT_STRINGS = 64
_READ_AHEAD = 1 << 20

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: _U32,
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: _U64,
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_AGAIN = "get the file again (a pulled model: `legato models pull hf:OWNER/REPO`)"


class _Reader:
    """A cursor over the head of the file, which is read as far as it is needed and never past its end."""

    def __init__(self, path: Path, file: BufferedReader, size: int) -> None:
        self.path, self.size = path, size
        self.pos = 0
        self._file = file
        self._buffer = bytearray()

    def fail(self, what: str, advice: str = _AGAIN) -> ModelFileError:
        shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in what[:300])  # it may quote the file
        return ModelFileError(f"{self.path}: {shown}; {advice}")

    def cut(self, needed: int) -> ModelFileError:
        return self.fail(f"truncated: the file has {self.size} bytes and {needed} or more are needed")

    def need(self, end: int) -> None:
        """Have the bytes [0, end) of the file in the buffer."""
        if end <= len(self._buffer):
            return
        if end > self.size:
            raise self.cut(end)
        if end > _MAX_HEADER_BYTES:
            raise self.fail(f"its header is larger than {_MAX_HEADER_BYTES >> 20} MiB, so it must be damaged")
        wanted = min(self.size, max(end, 2 * len(self._buffer), _READ_AHEAD))
        self._buffer += self._file.read(wanted - len(self._buffer))
        if end > len(self._buffer):
            raise self.cut(end)

    def number(self, layout: struct.Struct) -> int | float | bool:
        self.need(self.pos + layout.size)
        (value,) = layout.unpack_from(self._buffer, self.pos)
        self.pos += layout.size
        assert isinstance(value, int | float)
        return value

    def u32(self) -> int:
        return int(self.number(_U32))

    def u64(self) -> int:
        return int(self.number(_U64))

    def raw(self, length: int) -> bytes:
        self.need(self.pos + length)
        self.pos += length
        return bytes(self._buffer[self.pos - length : self.pos])

    def string(self, limit: int, what: str) -> str:
        length = self.u64()
        if length > limit:
            raise self.fail(f"damaged: {what} at byte {self.pos - 8} claims {length} bytes")
        return self.raw(length).decode("utf-8", "replace")

    def skip_strings(self, count: int) -> None:
        """Walk `count` strings without making them. This loop is most of the time a header takes: 0.2 µs a string."""
        unpack, buffer, pos = _U64.unpack_from, self._buffer, self.pos
        while count:
            try:
                while count:
                    pos += 8 + unpack(buffer, pos)[0]
                    count -= 1
            except (struct.error, OverflowError):  # past the end of the buffer, or past any end
                self.need(pos + 8)
        if pos > self.size:
            raise self.cut(pos)
        self.pos = pos

    def skip(self, length: int) -> None:
        if self.pos + length > self.size:
            raise self.cut(self.pos + length)
        self.pos += length


def read_header(path: Path) -> GGUFHeader:
    """The header of one GGUF file, checked against the file's size.

    Raises ModelFileError: one line with the file, what is wrong with it, and what to do.
    """
    try:
        info = path.stat()
        if stat.S_ISDIR(info.st_mode):
            raise ModelFileError(f"{path} is a folder; name the .gguf file in it")
        if not stat.S_ISREG(info.st_mode):
            raise ModelFileError(f"{path} is not a regular file; name a .gguf file")
        with path.open("rb") as file:
            return _parse(_Reader(path, file, info.st_size))
    except FileNotFoundError:
        raise ModelFileError(f"{path}: there is no such file; `legato models list` shows what is here") from None
    except (OSError, ValueError) as exc:  # ValueError: a NUL in the path
        raise ModelFileError(f"{path}: it cannot be read ({exc}); check the path and its permissions") from exc


def check_model(path: Path) -> tuple[GGUFHeader, ...]:
    """The headers of every file of the model whose (first) file is `path`, in order, all checked.

    Raises ModelFileError when a part is missing or damaged, or when there is nothing to run in them.
    """
    paths = split_paths(path)
    missing = [part for part in paths if not part.exists()] if len(paths) > 1 else []
    if missing:
        raise ModelFileError(
            f"{path}: {len(missing)} of the model's {len(paths)} parts are missing, first {missing[0].name}; "
            f"put them beside it or {_AGAIN}"
        )
    headers = tuple(read_header(part) for part in paths)
    first = headers[0]
    if first.architecture is None:
        raise ModelFileError(f"{paths[0]}: it does not say which architecture it is; it is not a model file")
    for number, header in enumerate(headers):
        if (header.split_no, header.split_count) != (number, len(headers)):
            raise ModelFileError(
                f"{header.path}: it is part {header.split_no + 1} of {header.split_count} by its header, but part "
                f"{number + 1} of {len(headers)} by its name; keep the names that the parts came with"
            )
    if not any(header.tensors for header in headers):
        raise ModelFileError(f"{paths[0]}: it has no weights (a vocabulary only); get the full model file")
    return headers


def _parse(reader: _Reader) -> GGUFHeader:
    version = _parse_magic(reader)
    n_tensors, n_entries = reader.u64(), reader.u64()
    # A tensor takes at least 8 + 4 + 8 + 4 + 8 bytes and an entry 8 + 4 + 1, whatever their number claims.
    for count, least, what in ((n_tensors, 32, "tensors"), (n_entries, 13, "metadata keys")):
        if count > _MAX_ENTRIES or count * least > reader.size:
            raise reader.fail(f"damaged or cut: it claims {count} {what} in {reader.size} bytes")
    metadata: dict[str, Value] = {}
    for _ in range(n_entries):
        key = reader.string(_MAX_KEY_BYTES, "a metadata key")
        if not key or key in metadata:
            raise reader.fail(f"damaged: metadata key {key!r} is there twice" if key else "damaged: an empty key")
        metadata[key] = _parse_value(reader, key, reader.u32())
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
        raise reader.fail(f"damaged: general.alignment is {alignment!r}, which is not a power of two")
    tensors = _parse_tensors(reader, n_tensors, alignment)
    data_offset = _padded(reader.pos, alignment)
    if tensors and (end := data_offset + tensors[-1].offset + tensors[-1].nbytes) > reader.size:
        raise reader.fail(f"truncated: {reader.size} of {end} bytes are there")
    architecture = metadata.get("general.architecture")
    return GGUFHeader(
        path=reader.path,
        version=version,
        architecture=architecture if isinstance(architecture, str) and architecture else None,
        metadata=metadata,
        tensors=tensors,
        data_offset=data_offset,
        file_size=reader.size,
    )


def _parse_magic(reader: _Reader) -> int:
    """Check the first bytes; → the version."""
    reader.need(min(reader.size, 512))
    head = reader.raw(min(reader.size, 512))
    if foreign := describe_foreign(head):
        raise reader.fail(foreign.what, foreign.advice)
    if len(head) < 24:
        raise reader.cut(24)
    reader.pos = 4
    version = reader.u32()
    if version and not version & 0xFFFF:
        raise reader.fail(
            "a big-endian GGUF, which this engine does not read", "get the little-endian file of the model"
        )
    if version not in (2, 3):
        raise reader.fail(
            f"GGUF version {version}, but versions 2 and 3 are supported",
            "get a newer conversion of the model" if version == 1 else _AGAIN,
        )
    return version


def _parse_value(reader: _Reader, key: str, kind: int) -> Value:
    if kind in _SCALARS:
        return reader.number(_SCALARS[kind])
    if kind == _STRING:
        return reader.string(_MAX_HEADER_BYTES, f"the value of {key}")
    if kind == _ARRAY:
        return _parse_array(reader, key, reader.u32(), reader.u64())
    raise reader.fail(f"damaged: {key} has value type {kind}, which does not exist")


def _parse_array(reader: _Reader, key: str, kind: int, length: int) -> Value:
    if kind == _STRING:
        if length > _MAX_STRINGS or length * 8 > reader.size:
            raise reader.fail(f"damaged or cut: {key} claims {length} strings in {reader.size} bytes")
        if length <= _KEPT_STRINGS:
            return tuple(reader.string(_MAX_HEADER_BYTES, key) for _ in range(length))
        reader.skip_strings(length)
        return SkippedArray(length)
    if kind not in _SCALARS:
        raise reader.fail(f"damaged: {key} is an array of type {kind}, which the engine does not read")
    layout = _SCALARS[kind]
    if length > _KEPT_ITEMS:
        reader.skip(length * layout.size)
        return SkippedArray(length)
    data = reader.raw(length * layout.size)
    return tuple(item for (item,) in layout.iter_unpack(data))


def _parse_tensors(reader: _Reader, count: int, alignment: int) -> tuple[TensorInfo, ...]:
    tensors: list[TensorInfo] = []
    names: set[str] = set()
    expected = 0
    for _ in range(count):
        tensor = _parse_tensor(reader)
        if tensor.name in names:
            raise reader.fail(f"damaged: tensor {tensor.name!r} is there twice")
        # ggml wants the tensors back to back, in order; so none can overlap another or leave the file in between.
        if tensor.offset != expected:
            raise reader.fail(f"damaged: tensor {tensor.name!r} is at offset {tensor.offset}, not {expected}")
        names.add(tensor.name)
        tensors.append(tensor)
        expected = _padded(tensor.offset + tensor.nbytes, alignment)
    return tuple(tensors)


def _parse_tensor(reader: _Reader) -> TensorInfo:
    name = reader.string(_MAX_NAME_BYTES, "a tensor name")
    if not name:
        raise reader.fail("damaged: a tensor without a name")
    n_dims = reader.u32()
    if not 1 <= n_dims <= _MAX_DIMS:
        raise reader.fail(f"damaged: tensor {name!r} has {n_dims} dimensions")
    dims = tuple(reader.u64() for _ in range(n_dims))
    kind = GGML_TYPES.get(type_id := reader.u32())
    offset = reader.u64()
    if kind is None:
        raise reader.fail(
            f"tensor {name!r} has type {type_id}, which this engine does not know",
            "get another quantization of the model, or update llama-cpp-python and Legato",
        )
    elements = 1
    for dim in dims:
        elements *= dim
    if not 0 < elements <= _MAX_ELEMENTS or dims[0] % kind.block_elements:
        shape = " × ".join(map(str, dims))
        raise reader.fail(f"damaged: tensor {name!r} of type {kind.name} cannot have the shape {shape}")
    return TensorInfo(name, kind.name, dims, offset, elements // kind.block_elements * kind.block_bytes)


def _padded(size: int, alignment: int) -> int:
    return (size + alignment - 1) // alignment * alignment
