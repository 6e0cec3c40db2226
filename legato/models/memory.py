"""How much memory a model takes with a context, against what there is: worked out before anything is allocated.

need = weights + KV cache + state of recurrent layers + compute buffer

- Weights: the size of the files. They are mapped, so they could be dropped and read again, but then each token would
  read them from the disk.
- KV cache: of each layer, cells × KV heads × (key + value numbers of a head) × bytes of the cache type. Every stream
  has its own cells, a multiple of 256. Sliding-window layers are counted in full: that is what the engine allocates.
- Recurrent state (Mamba, RWKV, hybrids): per stream and layer, in 32-bit floats; it does not grow with the context.
- Compute buffer: the larger of the logits of one micro-batch and its attention scores (which flash attention does not
  keep), plus activations. Compared with what libllama reports it is within a few percent for llama models.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from legato.core.errors import ConfigError, InsufficientMemoryError
from legato.models.header import GGUFHeader

CELLS = 256  # libllama rounds each stream's context up to a multiple of this
KV_BYTES: dict[str, tuple[int, int]] = {"f32": (1, 4), "f16": (1, 2), "q8_0": (32, 34), "q4_0": (32, 18)}
_FLOAT = 4
_NO_LIMIT = 1 << 60  # cgroup v1 writes a number near 2^63 for "no limit"


@dataclass(frozen=True, slots=True)
class ContextSettings:
    """`context_length`: tokens of each stream. `ubatch`: tokens that are computed in one go."""

    context_length: int
    streams: int = 1
    type_k: str = "f16"
    type_v: str = "f16"
    ubatch: int = 512
    flash_attention: bool = False

    def __post_init__(self) -> None:
        for name in ("context_length", "streams", "ubatch"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be 1 or more")
        for name in ("type_k", "type_v"):
            if getattr(self, name) not in KV_BYTES:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; it must be one of {', '.join(KV_BYTES)}")


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Bytes, by what they are for."""

    weights: int
    kv_cache: int
    state: int
    compute: int

    @property
    def total(self) -> int:
        return self.weights + self.kv_cache + self.state + self.compute


def memory_need(headers: Sequence[GGUFHeader], settings: ContextSettings) -> MemoryNeed:
    """What the model of these files (all parts, the first one first) takes with these settings."""
    model = headers[0]
    return MemoryNeed(
        weights=sum(header.file_size for header in headers),
        kv_cache=_kv_bytes(model, settings),
        state=_state_bytes(model) * settings.streams,
        compute=_compute_bytes(model, settings),
    )


def available_bytes(cgroups: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> int:
    """Bytes this process can still get: what the machine has free, or less where a container's limit is lower.

    A cgroup's file cache that is not in active use counts as free: the kernel drops it on demand.
    """
    free = int(psutil.virtual_memory().available)
    return max(0, min([free, *_cgroup_free(cgroups, membership)]))


def largest_context(headers: Sequence[GGUFHeader], settings: ContextSettings, have_bytes: int | None = None) -> int:
    """The longest context per stream, a multiple of 256, that fits `have_bytes` (default: what is available).

    At most the model's training length, rounded up; 0 when not even 256 tokens fit. `settings.context_length` plays
    no part.
    """
    have = available_bytes() if have_bytes is None else have_bytes
    limit = -(-(headers[0].n_ctx_train or 1 << 20) // CELLS)
    low, high = 0, limit  # low fits (or is 0), high + 1 does not
    while low < high:
        middle = (low + high + 1) // 2
        if memory_need(headers, replace(settings, context_length=middle * CELLS)).total <= have:
            low = middle
        else:
            high = middle - 1
    return low * CELLS


def check_memory(headers: Sequence[GGUFHeader], settings: ContextSettings, have_bytes: int | None = None) -> MemoryNeed:
    """What is needed, when it fits `have_bytes` (default: what is available).

    Raises InsufficientMemoryError that says what is needed, what there is, and which change would fit.
    """
    have = available_bytes() if have_bytes is None else have_bytes
    need = memory_need(headers, settings)
    if need.total <= have:
        return need
    streams = f" × {settings.streams} streams" if settings.streams > 1 else ""
    raise InsufficientMemoryError(
        f"{headers[0].path.name} with a context of {settings.context_length:,} tokens{streams} needs "
        f"{format_bytes(need.total)} of memory (weights {format_bytes(need.weights)}, KV cache "
        f"{format_bytes(need.kv_cache)}, work {format_bytes(need.compute + need.state)}), but {format_bytes(have)} "
        f"are available; {_advice(headers, settings, have)}",
        need_bytes=need.total,
        have_bytes=have,
    )


def format_bytes(count: int) -> str:
    """1536 → '1.5 KiB'."""
    size = float(count)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "bytes" or size >= 100 else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:,.0f} TiB" if size >= 100 else f"{size:.1f} TiB"


def _advice(headers: Sequence[GGUFHeader], settings: ContextSettings, have: int) -> str:
    """What to change, tried in the order of what costs the user least."""
    ideas: list[str] = []
    largest = largest_context(headers, settings, have)
    if largest:
        ideas.append(f"a context of {largest:,} tokens fits")
    fewer = settings.streams
    while fewer > 1 and memory_need(headers, replace(settings, streams=fewer)).total > have:
        fewer //= 2
    if fewer < settings.streams and memory_need(headers, replace(settings, streams=fewer)).total <= have:
        ideas.append(f"{fewer} stream{'s' if fewer > 1 else ''} would fit")
    for kind in ("q8_0", "q4_0"):
        smaller = replace(settings, type_k=kind, type_v=kind, flash_attention=True)
        if memory_need(headers, smaller).total <= have:
            ideas.append(f"KV cache type {kind} would fit")
            break
    if ideas:
        return ", or ".join(ideas)
    alone = sum(header.file_size for header in headers)
    if alone > have:
        return "the weights alone are too large: free memory, or take a smaller model or quantization"
    return "free memory, use fewer streams, or take a smaller model"


def _kv_bytes(model: GGUFHeader, settings: ContextSettings) -> int:
    cells = -(-settings.context_length // CELLS) * CELLS * settings.streams
    key, value = _widest_heads(model)
    per_cell = sum(
        _stored(heads * key, settings.type_k) + _stored(heads * value, settings.type_v) for heads in model.n_head_kv
    )
    return cells * per_cell


def _widest_heads(model: GGUFHeader) -> tuple[int, int]:
    """Numbers per head of key and value. Models whose window layers have heads of another size: the larger one."""
    key, value = model.head_dims
    return (
        max(key, model.arch_integer("attention.key_length_swa") or 0),
        max(value, model.arch_integer("attention.value_length_swa") or 0),
    )


def _stored(numbers: int, kind: str) -> int:
    elements, size = KV_BYTES[kind]
    return -(-numbers // elements) * size


def _state_bytes(model: GGUFHeader) -> int:
    """The recurrent state of one stream: Mamba's convolution and state, or RWKV's token shift and matrix."""
    layers, width = model.n_layer or 0, model.n_embd or 0
    inner = model.arch_integer("ssm.inner_size") or 0
    state = model.arch_integer("ssm.state_size") or 0
    if inner and state:
        groups = model.arch_integer("ssm.group_count") or 0
        kernel = model.arch_integer("ssm.conv_kernel") or 1
        return layers * _FLOAT * ((kernel - 1) * (inner + 2 * groups * state) + inner * state)
    head = model.arch_integer("wkv.head_size") or 0
    return layers * _FLOAT * (2 * width + width * head) if head else 0


def _compute_bytes(model: GGUFHeader, settings: ContextSettings) -> int:
    batch = min(settings.ubatch, settings.context_length * settings.streams)
    width, vocabulary = model.n_embd or 0, model.n_vocab or 0
    feed_forward = model.arch_integer("feed_forward_length") or 4 * width
    cells = -(-settings.context_length // CELLS) * CELLS
    scores = 0 if settings.flash_attention else cells * (model.n_head or 0)
    mask = cells if model.n_head else 0
    attention = scores + mask + 4 * width + 2 * feed_forward
    logits = vocabulary + 2 * width
    return _FLOAT * (batch * max(logits, attention) + settings.streams * vocabulary)


def _cgroup_free(cgroups: Path, membership: Path) -> list[int]:
    """Bytes left under the limit of each cgroup this process is in, from its own up to the root."""
    left: list[int] = []
    for line in _read(membership).splitlines():
        _, _, rest = line.partition(":")
        controllers, _, where = rest.partition(":")
        if controllers == "":
            root, limit, usage, cache = cgroups, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            root, limit = cgroups / "memory", "memory.limit_in_bytes"
            usage, cache = "memory.usage_in_bytes", "total_inactive_file"
        else:
            continue
        group = root / where.lstrip("/")
        # Inside a container the path may name a folder that only the host has; the root is then the container's own.
        for folder in (group, *group.parents):
            if folder == root.parent:
                break
            left += _folder_free(folder, limit, usage, cache)
    return left


def _folder_free(folder: Path, limit: str, usage: str, cache: str) -> list[int]:
    most, used = _read(folder / limit).strip(), _read(folder / usage).strip()
    if not most.isdigit() or not used.isdigit() or int(most) >= _NO_LIMIT:
        return []
    stats = dict(line.partition(" ")[::2] for line in _read(folder / "memory.stat").splitlines())
    dropped = stats.get(cache, "0").strip()
    return [int(most) - int(used) + (int(dropped) if dropped.isdigit() else 0)]


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
