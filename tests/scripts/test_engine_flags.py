"""The flags script: features count only when a program that uses them ran and was right."""

import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import engine_flags
from engine_flags import (
    AMX_CURE,
    CompilerRunner,
    Findings,
    NoCompilerError,
    Outcome,
    Result,
    add_user_flags,
    all_flags,
    cmake_flags,
    find_compiler,
    find_features,
    judge,
    native_flags,
)
from engine_probes import BASELINE, PROBES, Probe

SCRIPT = Path(__file__).parents[2] / "scripts" / "engine_flags.py"
YES = Result(Outcome.YES)
SIGILL = Result(Outcome.DIED, "SIGILL")

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="there is no C++ compiler"
)
needs_x86_linux = pytest.mark.skipif(
    not (Path("/proc/cpuinfo").exists() and engine_flags.is_probed(platform.machine(), "Linux")),
    reason="not an x86 processor under Linux",
)


class Machine:
    """A processor with some features; `broken_amx`: the compiler drops the tile configuration unless told not to."""

    def __init__(self, features: Sequence[str], *, broken_amx: Result | None = None, compiles: bool = True) -> None:
        self.features = frozenset(features)
        self.broken_amx = broken_amx
        self.compiles = compiles
        self.ran: list[tuple[str, tuple[str, ...]]] = []

    def run(self, probe: Probe, flags: Sequence[str]) -> Result:
        self.ran.append((probe.option, tuple(flags)))
        if probe is BASELINE:
            return YES if self.compiles else Result(Outcome.NOT_COMPILED, "cannot execute cc1plus")
        if probe.option not in self.features:
            return SIGILL
        if probe.is_amx and self.broken_amx and not set(AMX_CURE) <= set(flags):
            return self.broken_amx
        return YES


AVX2 = ("GGML_SSE42", "GGML_AVX", "GGML_AVX2", "GGML_BMI2", "GGML_FMA", "GGML_F16C")
AVX512 = (*AVX2, "GGML_AVX512", "GGML_AVX512_VBMI", "GGML_AVX512_VNNI", "GGML_AVX512_BF16")
AMX = (*AVX512, "GGML_AMX_INT8", "GGML_AMX_BF16")


def flags_of(machine: Machine, **environ: str) -> list[str]:
    return cmake_flags(find_features(machine), environ)


@pytest.fixture
def runner(tmp_path: Path) -> CompilerRunner:
    return CompilerRunner(find_compiler({}), tmp_path)


def test_an_avx2_machine_gets_exactly_these_flags_in_this_order() -> None:
    assert shlex.join(flags_of(Machine(AVX2))) == (
        "-DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=OFF -DGGML_RPC=ON -DLLAVA_BUILD=OFF -DGGML_SSE42=ON -DGGML_AVX=ON "
        "-DGGML_AVX2=ON -DGGML_BMI2=ON -DGGML_FMA=ON -DGGML_F16C=ON"
    )


def test_what_the_build_would_switch_on_by_itself_is_switched_off_where_it_does_not_run() -> None:
    flags = flags_of(Machine(["GGML_SSE42"]))
    for option in ("AVX", "AVX2", "BMI2", "FMA", "F16C"):
        assert f"-DGGML_{option}=OFF" in flags
    assert not [flag for flag in flags if "AVX512" in flag or "AMX" in flag]


def test_amx_is_on_without_the_cure_where_it_works_plain() -> None:
    machine = Machine(AMX)
    flags = flags_of(machine)
    assert {"-DGGML_AMX_TILE=ON", "-DGGML_AMX_INT8=ON", "-DGGML_AMX_BF16=ON"} <= set(flags)
    assert not [flag for flag in flags if "CXX_FLAGS" in flag]
    assert not [ran for ran in machine.ran if set(AMX_CURE) & set(ran[1])]


@pytest.mark.parametrize("broken", [SIGILL, Result(Outcome.DIED, "SIGSEGV"), Result(Outcome.WRONG, "0 instead of 9")])
def test_amx_is_on_with_the_cure_where_it_dies_or_lies_without(broken: Result) -> None:
    machine = Machine(AMX, broken_amx=broken)
    flags = flags_of(machine)
    assert "-DCMAKE_CXX_FLAGS=-fno-tree-dse -fno-dse" in flags
    assert {"-DGGML_AMX_TILE=ON", "-DGGML_AMX_INT8=ON", "-DGGML_AMX_BF16=ON"} <= set(flags)
    # What int8 needed, bf16 gets at once: it is one compiler.
    assert len([option for option, _ in machine.ran if option == "GGML_AMX_BF16"]) == 1


def test_amx_is_off_where_even_the_cure_does_not_help_or_avx512_vnni_is_missing() -> None:
    for features in (AVX512, [f for f in AMX if f != "GGML_AVX512_VNNI"]):
        flags = flags_of(Machine(features, broken_amx=SIGILL))
        assert not [flag for flag in flags if "AMX" in flag or "CXX_FLAGS" in flag]


def test_a_refusing_system_is_believed_and_no_cure_is_tried() -> None:
    machine = Machine(AMX, broken_amx=Result(Outcome.REFUSED))
    assert not [flag for flag in flags_of(machine) if "AMX" in flag]
    assert not [ran for ran in machine.ran if set(AMX_CURE) & set(ran[1])]


def test_a_probe_whose_requirements_are_missing_is_not_run() -> None:
    machine = Machine(AVX2)
    findings = find_features(machine)
    assert {option for option, _ in machine.ran} == {BASELINE.option, *AVX2, "GGML_AVX_VNNI", "GGML_AVX512"}
    assert findings.results.keys() == {probe.option for probe in PROBES}
    assert str(findings.results["GGML_AVX512_VNNI"]) == "no   not tried: needs GGML_AVX512"


def test_the_table_requires_only_what_comes_earlier_and_adds_its_switches() -> None:
    seen: set[str] = set()
    for probe in PROBES:
        assert set(probe.requires) <= seen
        seen.add(probe.option)
    by_option = {probe.option: probe for probe in PROBES}
    assert all_flags(by_option["GGML_BMI2"], PROBES) == ["-mbmi2"]
    assert set(all_flags(by_option["GGML_AMX_INT8"], PROBES)) >= {"-mavx2", "-mavx512f", "-mavx512vnni", "-mamx-int8"}


def test_no_compiler_and_a_compiler_that_does_not_work_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(NoCompilerError, match=r"(?s)no C\+\+ compiler.*apt install g\+\+"):
        find_compiler({})
    with pytest.raises(NoCompilerError, match="CXX names 'my-c"):
        find_compiler({"CXX": "my-c++ -m64"})
    with pytest.raises(NoCompilerError, match=r"(?s)cc1plus.*apt install g\+\+"):
        find_features(Machine(AVX2, compiles=False))


def test_user_flags_come_last_and_never_undo_the_cure() -> None:
    assert native_flags({"LEGATO_CMAKE_ARGS": "-DGGML_CUDA=ON '-DX=a b'"})[-2:] == ["-DGGML_CUDA=ON", "-DX=a b"]
    assert "-DGGML_NATIVE=ON" in native_flags({}) and "-DGGML_RPC=ON" in native_flags({})
    given = {"LEGATO_CMAKE_ARGS": "-DCMAKE_CXX_FLAGS=-Os"}
    assert add_user_flags([], AMX_CURE, given) == ["-DCMAKE_CXX_FLAGS=-Os -fno-tree-dse -fno-dse"]
    assert add_user_flags([], AMX_CURE, {"CXXFLAGS": "-g"}) == ["-DCMAKE_CXX_FLAGS=-g -fno-tree-dse -fno-dse"]
    assert add_user_flags([], (), {"CXXFLAGS": "-g"}) == []


def test_exit_status_and_output_are_both_needed_for_a_yes() -> None:
    assert judge(0, "ok 7 7\n") == YES
    assert judge(-4, "ok 7 7\n") == SIGILL
    assert judge(3, "").outcome is Outcome.REFUSED
    for status, output in ((1, "wrong 6 7\n"), (0, "wrong 6 7\n"), (0, "ok 6 7\n"), (1, "ok 7 7\n"), (0, "")):
        assert judge(status, output).outcome is Outcome.WRONG


@needs_compiler
@pytest.mark.parametrize(
    ("body", "outcome"),
    [
        ("static int probe() { return verdict(next_int(9), -1); }", Outcome.WRONG),
        ("static int probe() { return 0; }", Outcome.WRONG),
        ("#include <csignal>\nstatic int probe() { return raise(SIGILL); }", Outcome.DIED),
        ("static int probe() { return no_such_instruction(); }", Outcome.NOT_COMPILED),
        ("static int probe() { return 3; }", Outcome.REFUSED),
        (BASELINE.body, Outcome.YES),
    ],
)
def test_b80_the_real_runner_tells_how_a_program_failed(runner: CompilerRunner, body: str, outcome: Outcome) -> None:
    result = runner.run(Probe("GGML_X", (), body), [])
    assert result.outcome is outcome
    if outcome is Outcome.DIED:
        assert result.detail == "SIGILL"


@needs_compiler
def test_a_compiler_switch_that_does_not_exist_is_a_no(runner: CompilerRunner) -> None:
    assert runner.run(BASELINE, ["-mno-such-switch"]).outcome is Outcome.NOT_COMPILED


@needs_compiler
@needs_x86_linux
def test_b80_every_probe_agrees_with_what_the_system_lists(runner: CompilerRunner) -> None:
    flags = set(Path("/proc/cpuinfo").read_text().split("flags", 1)[1].split("\n", 1)[0].split())
    listed = {
        "GGML_SSE42": {"sse4_2"},
        "GGML_AVX": {"avx"},
        "GGML_AVX2": {"avx2"},
        "GGML_BMI2": {"bmi2"},
        "GGML_FMA": {"fma"},
        "GGML_F16C": {"f16c"},
        "GGML_AVX512": {"avx512f", "avx512cd", "avx512vl", "avx512dq", "avx512bw"},
    }
    printed = subprocess.run([sys.executable, str(SCRIPT), "--explain"], capture_output=True, text=True, check=True)
    given = shlex.split(printed.stdout)
    assert "-DGGML_RPC=ON" in given and "-DGGML_NATIVE=OFF" in given
    for option, names in listed.items():
        assert (f"-D{option}=ON" in given) == (names <= flags), option
        assert option in printed.stderr


@needs_compiler
@needs_x86_linux
@pytest.mark.parametrize("probe", PROBES, ids=lambda probe: probe.option)
def test_every_probe_compiles_or_its_switch_is_unknown(probe: Probe, tmp_path: Path) -> None:
    """A typing error in a probe would otherwise look like a processor without the feature."""
    source = tmp_path / "probe.cpp"
    source.write_text(probe.source)
    command = [*find_compiler({}), "-std=c++17", "-O1", "-w", *all_flags(probe, PROBES), "-c", str(source)]
    done = subprocess.run([*command, "-o", str(tmp_path / "o")], capture_output=True, text=True, check=False)
    unknown = "unrecognized" in done.stderr or "unknown argument" in done.stderr
    assert done.returncode == 0 or unknown, done.stderr


def test_findings_without_results_switch_everything_off() -> None:
    assert [flag for flag in cmake_flags(Findings(), {}) if flag.endswith("=ON")] == ["-DGGML_RPC=ON"]
