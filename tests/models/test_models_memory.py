import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from legato.core.errors import ConfigError, InsufficientMemoryError
from legato.models.gguf import check_model
from legato.models.header import GGUFHeader
from legato.models.memory import (
    ContextSettings,
    available_bytes,
    check_memory,
    format_bytes,
    largest_context,
    memory_need,
)
from legato.models.registry import EMBEDDED, resolve
from tests.models.model_files import ARCHITECTURE, ARRAY, U32, entry, gguf_bytes, tensor, write_model

MIB = 1 << 20


@pytest.fixture(scope="module")
def embedded() -> tuple[GGUFHeader, ...]:
    return check_model(resolve(EMBEDDED).path)


def test_b80_a_context_too_large_for_memory(embedded: tuple[GGUFHeader, ...]) -> None:
    settings = ContextSettings(100_000_000)
    with pytest.raises(InsufficientMemoryError) as caught:
        check_memory(embedded, settings)
    message = str(caught.value)
    assert "context of 100,000,000 tokens needs" in message and "are available" in message
    assert f"a context of {largest_context(embedded, settings):,} tokens fits" in message
    assert caught.value.need_bytes == memory_need(embedded, settings).total > 2 << 40
    assert caught.value.have_bytes < caught.value.need_bytes


def test_b80_the_advice_fits(embedded: tuple[GGUFHeader, ...]) -> None:
    """What the error proposes is then accepted, and one step more is not."""
    settings = ContextSettings(8192, streams=8)
    have = 900 * MIB
    with pytest.raises(InsufficientMemoryError) as caught:
        check_memory(embedded, settings, have)
    message = str(caught.value)
    largest = largest_context(embedded, settings, have)
    assert 0 < largest < 8192 and largest % 256 == 0
    assert f"a context of {largest:,} tokens fits" in message
    check_memory(embedded, ContextSettings(largest, streams=8), have)
    with pytest.raises(InsufficientMemoryError):
        check_memory(embedded, ContextSettings(largest + 1, streams=8), have)
    assert "2 streams would fit" in message
    check_memory(embedded, ContextSettings(8192, streams=2), have)
    assert "KV cache type q4_0 would fit" in message
    check_memory(embedded, ContextSettings(8192, 8, "q4_0", "q4_0", flash_attention=True), have)


def test_b80_weights_larger_than_memory(embedded: tuple[GGUFHeader, ...]) -> None:
    assert largest_context(embedded, ContextSettings(256), 50 * MIB) == 0
    with pytest.raises(InsufficientMemoryError, match="the weights alone are too large"):
        check_memory(embedded, ContextSettings(256), 50 * MIB)


def test_the_largest_context_stops_at_what_the_model_was_trained_for(embedded: tuple[GGUFHeader, ...]) -> None:
    assert largest_context(embedded, ContextSettings(1), 1 << 50) == 8192


def test_need_grows_with_every_setting(embedded: tuple[GGUFHeader, ...]) -> None:
    base = memory_need(embedded, ContextSettings(4096, 2))
    assert base.total == base.weights + base.kv_cache + base.state + base.compute
    assert base.weights == embedded[0].file_size
    assert memory_need(embedded, ContextSettings(8192, 2)).kv_cache == 2 * base.kv_cache
    assert memory_need(embedded, ContextSettings(4096, 4)).kv_cache == 2 * base.kv_cache
    assert memory_need(embedded, ContextSettings(4096, 2, "f32", "f32")).kv_cache == 2 * base.kv_cache
    assert memory_need(embedded, ContextSettings(4097, 2)).kv_cache > base.kv_cache
    assert memory_need(embedded, ContextSettings(8192, 2)).compute > base.compute
    q8 = memory_need(embedded, ContextSettings(4096, 2, "q8_0", "q8_0")).kv_cache
    assert q8 * 64 == base.kv_cache * 34


MEASURE = """
import json, re, sys
import llama_cpp.llama_cpp as L

said = []
callback = L.llama_log_callback(lambda level, text, _: said.append(text.decode()))
L.llama_log_set(callback, None)
L.llama_backend_init()
model = L.llama_model_load_from_file(sys.argv[1].encode(), L.llama_model_default_params())
results = []
for length, streams, kind, flash in json.loads(sys.argv[2]):
    params = L.llama_context_default_params()
    params.n_ctx, params.n_seq_max, params.kv_unified = length * streams, streams, False
    params.n_batch = params.n_ubatch = 512
    params.type_k = params.type_v = kind
    params.flash_attn_type = flash
    said.clear()
    context = L.llama_init_from_model(model, params)
    text = "".join(said)
    kv = re.search(r"llama_kv_cache: size = +([0-9.]+) MiB", text)[1]
    compute = re.search(r"compute buffer size = +([0-9.]+) MiB", text)[1]
    results.append([float(kv), float(compute)])
    L.llama_free(context)
L.llama_model_free(model)
print(json.dumps(results))
"""


def test_the_estimate_is_what_libllama_allocates(embedded: tuple[GGUFHeader, ...]) -> None:
    types = {"f16": 1, "q8_0": 8, "q4_0": 2}
    cases = [
        (4096, 1, "f16", False),
        (8192, 1, "f16", False),
        (8192, 4, "f16", True),
        (2000, 3, "f16", False),
        (8192, 2, "q8_0", True),
        (1024, 1, "q4_0", True),
    ]
    asked = json.dumps([[length, streams, types[kind], int(fa)] for length, streams, kind, fa in cases])
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, str(embedded[0].path), asked], capture_output=True, text=True, check=True
    )
    for (length, streams, kind, fa), (kv_mib, compute_mib) in zip(cases, json.loads(run.stdout), strict=True):
        need = memory_need(embedded, ContextSettings(length, streams, kind, kind, flash_attention=fa))
        assert need.kv_cache / MIB == pytest.approx(kv_mib, rel=0.01)
        assert need.compute / MIB == pytest.approx(compute_mib, rel=0.06)


def test_layers_without_attention_cost_no_cache(tmp_path: Path) -> None:
    numbers = {"block_count": 4, "embedding_length": 64, "attention.head_count": 4}
    entries = [
        ARCHITECTURE,
        *(entry(f"llama.{key}", U32, struct.pack("<I", value)) for key, value in numbers.items()),
    ]
    full, half = tmp_path / "full.gguf", tmp_path / "half.gguf"
    full.write_bytes(gguf_bytes(entries, [tensor("a")]))
    heads = struct.pack("<IQ4I", U32, 4, 4, 0, 4, 0)
    half.write_bytes(gguf_bytes([*entries, entry("llama.attention.head_count_kv", ARRAY, heads)], [tensor("a")]))
    settings = ContextSettings(1024)
    whole = memory_need(check_model(full), settings).kv_cache
    assert whole == 1024 * 4 * 4 * 16 * 2 * 2
    assert memory_need(check_model(half), settings).kv_cache == whole // 2


def test_recurrent_models_pay_by_stream_and_not_by_context(tmp_path: Path) -> None:
    numbers = {
        "block_count": 4,
        "embedding_length": 64,
        "ssm.inner_size": 128,
        "ssm.state_size": 16,
        "ssm.conv_kernel": 4,
    }
    entries = [
        ARCHITECTURE,
        *(entry(f"llama.{key}", U32, struct.pack("<I", value)) for key, value in numbers.items()),
    ]
    path = tmp_path / "mamba.gguf"
    path.write_bytes(gguf_bytes(entries, [tensor("a")]))
    model = check_model(path)
    small, large = memory_need(model, ContextSettings(256)), memory_need(model, ContextSettings(8192, 2))
    assert small.kv_cache == large.kv_cache == 0
    assert large.state == 2 * small.state == 2 * 4 * 4 * (3 * 128 + 128 * 16)


def test_an_unknown_architecture_still_gets_a_number(tmp_path: Path) -> None:
    path = tmp_path / "unknown.gguf"
    path.write_bytes(gguf_bytes([ARCHITECTURE], [tensor("a")]))
    assert memory_need(check_model(path), ContextSettings(4096)).total >= path.stat().st_size


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match="context_length is 0"):
        ContextSettings(0)
    with pytest.raises(ConfigError, match="streams is -1"):
        ContextSettings(9, streams=-1)
    with pytest.raises(ConfigError, match="type_v is 'q5_1'; it must be one of f32, f16"):
        ContextSettings(9, type_v="q5_1")


def cgroup(folder: Path, names: tuple[str, str], limit: str, usage: int, stat: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{usage}\n")
    (folder / "memory.stat").write_text(stat)


V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")
V2 = ("memory.max", "memory.current")


def test_a_container_limit_counts_v2(tmp_path: Path) -> None:
    member, root = tmp_path / "member", tmp_path / "fs"
    member.write_text("0::/a/b\n")
    cgroup(root / "a", V2, str(60 * MIB), 30 * MIB, "anon 1\ninactive_file 1048576\n")
    cgroup(root / "a/b", V2, "max", 20 * MIB, "inactive_file 0\n")
    assert available_bytes(root, member) == 31 * MIB  # the parent's limit binds
    cgroup(root / "a/b", V2, str(21 * MIB), 20 * MIB, "inactive_file 0\n")
    assert available_bytes(root, member) == 1 * MIB
    cgroup(root / "a/b", V2, str(19 * MIB), 20 * MIB, "")
    assert available_bytes(root, member) == 0


def test_a_container_limit_counts_v1_also_when_only_the_root_is_visible(tmp_path: Path) -> None:
    member, root = tmp_path / "member", tmp_path / "fs"
    member.write_text("5:devices:/x\n4:cpu,memory:/host/only/path\n0::/\n")
    cgroup(root / "memory", V1, str(64 * MIB), 40 * MIB, "total_inactive_file 8388608\n")
    assert available_bytes(root, member) == 32 * MIB


def test_no_limit_is_the_machines_memory(tmp_path: Path) -> None:
    member, root = tmp_path / "member", tmp_path / "fs"
    member.write_text("4:memory:/\n")
    cgroup(root / "memory", V1, str(2**63 - 4096), 1, "")
    assert available_bytes(root, member) > 256 * MIB
    assert available_bytes(tmp_path / "none", tmp_path / "none") > 256 * MIB


def test_sizes_are_readable() -> None:
    assert [format_bytes(n) for n in (0, 1023, 1536, 200 << 20, 5 << 30, 3000 << 40)] == [
        "0 bytes",
        "1023 bytes",
        "1.5 KiB",
        "200 MiB",
        "5.0 GiB",
        "3,000 TiB",
    ]


def test_all_parts_count_as_weights(tmp_path: Path) -> None:
    first = check_model(write_model(tmp_path / "a.gguf"))
    assert memory_need(first * 2, ContextSettings(256)).weights == 2 * first[0].file_size
