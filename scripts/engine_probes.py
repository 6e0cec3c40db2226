"""Small C++ programs, one per processor feature that the engine library can be built for.

Each program fills its input from a number given on the command line, computes one thing with the instruction in
question and the same thing in plain C++, prints `ok` or `wrong` with both results, and exits 0 or 1. Exit status
3 means that the operating system does not grant the feature. Nothing here can be folded at compile time: the
data come from the command line.
"""

from dataclasses import dataclass

REFUSED_STATUS = 3

_PRELUDE = r"""
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

static uint32_t state;

static int next_int(int limit) {
    state = state * 1664525u + 1013904223u;
    return static_cast<int>((state >> 8) % static_cast<uint32_t>(limit));
}

static int verdict(long long got, long long want) {
    std::printf("%s %lld %lld\n", got == want ? "ok" : "wrong", got, want);
    return got == want ? 0 : 1;
}

static int probe();

int main(int argc, char** argv) {
    if (argc < 2) return 2;
    state = static_cast<uint32_t>(std::strtoul(argv[1], nullptr, 10));
    return probe();
}
"""

# A dot product of 64 small whole numbers: exact in float, so that both sides must be equal to the last bit.
_FLOAT_DOT = r"""
static int probe() {
    float a[64], b[64], lanes[8];
    long long got = 0, want = 0;
    for (int i = 0; i < 64; i++) {
        a[i] = static_cast<float>(next_int(100));
        b[i] = static_cast<float>(next_int(100));
        want += static_cast<long long>(a[i]) * static_cast<long long>(b[i]);
    }
    __m256 sum = _mm256_setzero_ps();
    for (int i = 0; i < 64; i += 8) {
        __m256 x = _mm256_loadu_ps(a + i), y = _mm256_loadu_ps(b + i);
        sum = STEP;
    }
    _mm256_storeu_ps(lanes, sum);
    for (float lane : lanes) got += static_cast<long long>(lane);
    return verdict(got, want);
}
"""

# A dot product of bytes in groups of four, as the dpbusd instructions compute it.
_BYTE_DOT = r"""
static int probe() {
    uint8_t a[64];
    int8_t b[64];
    int32_t lanes[16] = {0};
    long long got = 0, want = 0;
    for (int i = 0; i < 64; i++) {
        a[i] = static_cast<uint8_t>(next_int(256));
        b[i] = static_cast<int8_t>(next_int(256) - 128);
        want += a[i] * b[i];
    }
    DOT
    for (int32_t lane : lanes) got += lane;
    return verdict(got, want);
}
"""

_SSE42 = r"""
static int probe() {
    uint32_t got = 0, want = 0;
    for (int i = 0; i < 64; i++) {
        uint32_t word = static_cast<uint32_t>(next_int(1 << 24));
        got = _mm_crc32_u32(got, word);
        want ^= word;
        for (int bit = 0; bit < 32; bit++) want = (want >> 1) ^ (0x82F63B78u & (0u - (want & 1u)));
    }
    return verdict(got, want);
}
"""

_AVX2 = r"""
static int probe() {
    int32_t a[64], lanes[8];
    long long got = 0, want = 0;
    for (int i = 0; i < 64; i++) {
        a[i] = next_int(2000) - 1000;
        want += a[i] * a[i] + (a[i] < 0 ? -a[i] : a[i]);
    }
    __m256i sum = _mm256_setzero_si256();
    for (int i = 0; i < 64; i += 8) {
        __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(a + i));
        sum = _mm256_add_epi32(sum, _mm256_add_epi32(_mm256_mullo_epi32(x, x), _mm256_abs_epi32(x)));
    }
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(lanes), sum);
    for (int32_t lane : lanes) got += lane;
    return verdict(got, want);
}
"""

_BMI2 = r"""
static int probe() {
    long long got = 0, want = 0;
    for (int i = 0; i < 32; i++) {
        uint32_t bits = static_cast<uint32_t>(next_int(1 << 24)), mask = static_cast<uint32_t>(next_int(1 << 24));
        got += _pdep_u32(bits, mask);
        for (int to = 0, from = 0; to < 32; to++)
            if (mask >> to & 1u) want += static_cast<long long>(bits >> from++ & 1u) << to;
    }
    return verdict(got, want);
}
"""

# One instruction of each of the five groups that GGML_AVX512 switches on together.
_AVX512 = r"""
static int probe() {
    int32_t a[16], lanes[16];
    int64_t wide[8], narrow[4];
    int8_t bytes[64];
    long long got = 0, want = 0;
    for (int32_t& x : a) x = next_int(10000) + 1;
    __m512i x = _mm512_loadu_si512(a);
    _mm512_storeu_si512(lanes, _mm512_mullo_epi32(x, x));                                          // F
    for (int i = 0; i < 16; i++) got += lanes[i], want += a[i] * a[i];
    _mm512_storeu_si512(lanes, _mm512_lzcnt_epi32(x));                                             // CD
    for (int i = 0; i < 16; i++) got += lanes[i], want += __builtin_clz(static_cast<unsigned>(a[i]));
    __m512i long_x = _mm512_cvtepi32_epi64(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(a)));
    _mm512_storeu_si512(wide, _mm512_mullo_epi64(long_x, long_x));                                 // DQ
    for (int i = 0; i < 8; i++) got += wide[i], want += static_cast<long long>(a[i]) * a[i];
    __m256i minus = _mm256_sub_epi64(_mm256_setzero_si256(), _mm512_castsi512_si256(long_x));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(narrow), _mm256_abs_epi64(minus));              // VL
    for (int i = 0; i < 4; i++) got += narrow[i], want += a[i];
    _mm512_storeu_si512(bytes, _mm512_abs_epi8(_mm512_sub_epi8(_mm512_setzero_si512(), x)));       // BW
    for (int i = 0; i < 64; i++) {
        int8_t byte = static_cast<int8_t>(-reinterpret_cast<const int8_t*>(a)[i]);
        got += bytes[i], want += static_cast<int8_t>(byte < 0 ? -byte : byte);
    }
    return verdict(got, want);
}
"""

_AVX512_VBMI = r"""
static int probe() {
    uint8_t table[64], index[64], out[64];
    long long got = 0, want = 0;
    for (int i = 0; i < 64; i++) {
        table[i] = static_cast<uint8_t>(next_int(256));
        index[i] = static_cast<uint8_t>(next_int(64));
    }
    _mm512_storeu_si512(out, _mm512_permutexvar_epi8(_mm512_loadu_si512(index), _mm512_loadu_si512(table)));
    for (int i = 0; i < 64; i++) got = got * 3 % 1000003 + out[i], want = want * 3 % 1000003 + table[index[i]];
    return verdict(got, want);
}
"""

_AVX512_BF16 = r"""
static int probe() {
    float a[32], b[32], lanes[16];
    long long got = 0, want = 0;
    for (int i = 0; i < 32; i++) {
        a[i] = static_cast<float>(next_int(128));
        b[i] = static_cast<float>(next_int(128));
        want += static_cast<long long>(a[i]) * static_cast<long long>(b[i]);
    }
    __m512bh x = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(a + 16), _mm512_loadu_ps(a));
    __m512bh y = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(b + 16), _mm512_loadu_ps(b));
    _mm512_storeu_ps(lanes, _mm512_dpbf16_ps(_mm512_setzero_ps(), x, y));
    for (float lane : lanes) got += static_cast<long long>(lane);
    return verdict(got, want);
}
"""

# The tile configuration is a local struct that only _tile_loadconfig reads, as in the engine: compilers that believe
# that 8 of its 64 bytes are read drop the stores to the rest. The function must not be inlined: a tile store after it
# in the same body tells the compiler that memory is read, and hides the fault. The stack is filled with ones first,
# so that a program broken this way cannot pass by luck.
_AMX_SETUP = r"""
#include <sys/syscall.h>
#include <unistd.h>

struct TileShape {
    uint8_t palette = 0, start_row = 0, reserved[14] = {0};
    uint16_t row_bytes[16] = {0};
    uint8_t rows[16] = {0};
};

static bool permitted() {
#if defined(__linux__)
    return syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* XTILEDATA */) == 0;
#else
    return false;
#endif
}

__attribute__((noinline)) static void dirty_stack() {
    volatile uint8_t waste[16384];
    for (int i = 0; i < 16384; i++) waste[i] = 0xFF;
}

__attribute__((noinline)) static void shape_tiles() {
    static thread_local bool done = false;
    if (done) return;
    alignas(64) TileShape shape = {};
    shape.palette = 1;
    shape.start_row = 0;
    shape.rows[0] = 8;   shape.row_bytes[0] = 64;
    shape.rows[2] = 16;  shape.row_bytes[2] = 32;
    shape.rows[4] = 16;  shape.row_bytes[4] = 64;
    _tile_loadconfig(&shape);
    done = true;
}

static int probe() {
    if (!permitted()) return 3;
    dirty_stack();
    return multiply();
}
"""

_AMX_INT8 = r"""
static int multiply() {
    alignas(64) int8_t a[16][32];
    alignas(64) int8_t b[8][64];  // b[k / 4][4 * n + k % 4]
    alignas(64) int32_t c[16][16];
    long long got = 0, want = 0;
    for (auto& row : a) for (int8_t& x : row) x = static_cast<int8_t>(next_int(256) - 128);
    for (auto& row : b) for (int8_t& x : row) x = static_cast<int8_t>(next_int(256) - 128);
    shape_tiles();
    _tile_zero(4);
    _tile_loadd(2, a, 32);
    _tile_loadd(0, b, 64);
    _tile_dpbssd(4, 2, 0);
    _tile_stored(4, c, 64);
    for (int m = 0; m < 16; m++)
        for (int n = 0; n < 16; n++) {
            int sum = 0;
            for (int k = 0; k < 32; k++) sum += a[m][k] * b[k / 4][4 * n + k % 4];
            want += static_cast<long long>(sum) * (16 * m + n + 1);
            got += static_cast<long long>(c[m][n]) * (16 * m + n + 1);
        }
    return verdict(got, want);
}
"""

_AMX_BF16 = r"""
static uint16_t bf16(int value) {
    float wide = static_cast<float>(value);
    uint32_t bits;
    std::memcpy(&bits, &wide, 4);
    return static_cast<uint16_t>(bits >> 16);
}

static int multiply() {
    int whole_a[16][16], whole_b[16][16];
    alignas(64) uint16_t a[16][16];
    alignas(64) uint16_t b[8][32];  // b[k / 2][2 * n + k % 2]
    alignas(64) float c[16][16];
    long long got = 0, want = 0;
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < 16; j++) {
            a[i][j] = bf16(whole_a[i][j] = next_int(128));
            b[i / 2][2 * j + i % 2] = bf16(whole_b[i][j] = next_int(128));
        }
    shape_tiles();
    _tile_zero(4);
    _tile_loadd(2, a, 32);
    _tile_loadd(0, b, 64);
    _tile_dpbf16ps(4, 2, 0);
    _tile_stored(4, c, 64);
    for (int m = 0; m < 16; m++)
        for (int n = 0; n < 16; n++) {
            int sum = 0;
            for (int k = 0; k < 16; k++) sum += whole_a[m][k] * whole_b[k][n];
            want += static_cast<long long>(sum) * (16 * m + n + 1);
            got += static_cast<long long>(c[m][n]) * (16 * m + n + 1);
        }
    return verdict(got, want);
}
"""


@dataclass(frozen=True, slots=True)
class Probe:
    """One processor feature: `option` is the CMake switch, `flags` the compiler switches the engine's build adds
    for it, `requires` the options without which it is of no use. `default_on` marks the options that the engine
    switches on by itself, so that their absence must be said too."""

    option: str
    flags: tuple[str, ...]
    body: str
    requires: tuple[str, ...] = ()
    default_on: bool = False

    @property
    def source(self) -> str:
        return _PRELUDE + self.body

    @property
    def is_amx(self) -> bool:
        return self.option.startswith("GGML_AMX")


def _amx(multiply: str) -> str:
    return "static int multiply();\n" + _AMX_SETUP + multiply


_VNNI_256 = r"""
    for (int i = 0; i < 64; i += 32) {
        __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(a + i));
        __m256i y = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(b + i));
        __m256i dot = _mm256_dpbusd_avx_epi32(_mm256_setzero_si256(), x, y);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(lanes + i / 4), dot);
    }"""
_VNNI_512 = (
    "_mm512_storeu_si512(lanes, _mm512_dpbusd_epi32(_mm512_setzero_si512(),"
    " _mm512_loadu_si512(a), _mm512_loadu_si512(b)));"
)

BASELINE = Probe(
    "(plain C++)",
    (),
    "static int probe() { int x = next_int(1000); volatile int y = x; return verdict(y + y, 2 * x); }",
)

PROBES = (
    Probe("GGML_SSE42", ("-msse4.2",), _SSE42, default_on=True),
    Probe(
        "GGML_AVX",
        ("-mavx",),
        _FLOAT_DOT.replace("STEP", "_mm256_add_ps(sum, _mm256_mul_ps(x, y))"),
        ("GGML_SSE42",),
        default_on=True,
    ),
    Probe("GGML_AVX2", ("-mavx2",), _AVX2, ("GGML_AVX",), default_on=True),
    Probe("GGML_BMI2", ("-mbmi2",), _BMI2, default_on=True),
    Probe(
        "GGML_FMA",
        ("-mfma",),
        _FLOAT_DOT.replace("STEP", "_mm256_fmadd_ps(x, y, sum)"),
        ("GGML_AVX",),
        default_on=True,
    ),
    Probe(
        "GGML_F16C",
        ("-mf16c",),
        _FLOAT_DOT.replace("STEP", "_mm256_add_ps(sum, _mm256_mul_ps(_mm256_cvtph_ps(_mm256_cvtps_ph(x, 0)), y))"),
        ("GGML_AVX",),
        default_on=True,
    ),
    Probe("GGML_AVX_VNNI", ("-mavxvnni",), _BYTE_DOT.replace("DOT", _VNNI_256), ("GGML_AVX2",)),
    Probe(
        "GGML_AVX512",
        ("-mavx512f", "-mavx512cd", "-mavx512vl", "-mavx512dq", "-mavx512bw"),
        _AVX512,
        ("GGML_AVX2", "GGML_FMA", "GGML_F16C"),
    ),
    Probe("GGML_AVX512_VBMI", ("-mavx512vbmi",), _AVX512_VBMI, ("GGML_AVX512",)),
    Probe("GGML_AVX512_VNNI", ("-mavx512vnni",), _BYTE_DOT.replace("DOT", _VNNI_512), ("GGML_AVX512",)),
    Probe("GGML_AVX512_BF16", ("-mavx512bf16",), _AVX512_BF16, ("GGML_AVX512",)),
    # The engine's AMX code is compiled only together with AVX-512 VNNI.
    Probe("GGML_AMX_INT8", ("-mamx-tile", "-mamx-int8"), _amx(_AMX_INT8), ("GGML_AVX512", "GGML_AVX512_VNNI")),
    Probe("GGML_AMX_BF16", ("-mamx-bf16",), _amx(_AMX_BF16), ("GGML_AMX_INT8", "GGML_AVX512_BF16")),
)
