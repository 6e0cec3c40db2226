#!/usr/bin/env python3
"""Print the CMake flags that build the engine library for this processor.

    python3 scripts/engine_flags.py [--explain]

What a processor, its hypervisor and its operating system really allow is found by compiling and running small
programs (`engine_probes.py`), never by reading a list of names: a feature is used only where a program that uses
it, built with the switches that the engine's own build would add, ran here and gave the right result.

Standard library only; runs on a bare Python 3.11 before any environment exists. Exit status: 0, or 2 when there
is no working C++ compiler. `LEGATO_CMAKE_ARGS` (for example `-DGGML_CUDA=ON`) is appended.
"""

import argparse
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Protocol

from engine_probes import BASELINE, PROBES, REFUSED_STATUS, Probe

# GCC up to at least 12 declares that loading a tile configuration reads 8 bytes of it, and removes the stores to
# the other 56 as dead. Both passes that do so must be off.
AMX_CURE = ("-fno-tree-dse", "-fno-dse")
_CXX_FLAGS = "-DCMAKE_CXX_FLAGS="
_COMPILE_TIMEOUT_S = 60.0
_RUN_TIMEOUT_S = 10.0
_SEED = "20240229"

INSTALL_HINT = """Install one and run the command again:
  Debian, Ubuntu:  sudo apt install g++ make
  Fedora:          sudo dnf install gcc-c++ make
  Arch:            sudo pacman -S base-devel
  macOS:           xcode-select --install
Or name one that is there: CXX=/path/to/c++"""


class NoCompilerError(Exception):
    """There is no C++ compiler, or it does not produce programs that run here."""


class Outcome(Enum):
    YES = "yes"
    NOT_COMPILED = "the compiler does not know it"
    DIED = "the program died"
    WRONG = "the result was wrong"
    TIMED_OUT = "the program did not end"
    REFUSED = "the operating system does not grant it"
    NOT_TRIED = "not tried"


@dataclass(frozen=True, slots=True)
class Result:
    outcome: Outcome
    detail: str = ""

    @property
    def ok(self) -> bool:
        return self.outcome is Outcome.YES

    def __str__(self) -> str:
        if self.ok:
            return f"yes  {self.detail}".rstrip()
        return f"no   {self.outcome.value}" + (f": {self.detail}" if self.detail else "")


class Runner(Protocol):
    """Builds and runs one probe with some compiler switches."""

    def run(self, probe: Probe, flags: Sequence[str]) -> Result: ...


class CompilerRunner:
    """The real thing: one compiler, programs in a temporary folder."""

    def __init__(self, compiler: Sequence[str], folder: Path) -> None:
        self._compiler = list(compiler)
        self._folder = folder

    def run(self, probe: Probe, flags: Sequence[str]) -> Result:
        stem = Path(tempfile.mkdtemp(dir=self._folder)) / "probe"
        source = stem.with_suffix(".cpp")
        source.write_text(probe.source, encoding="utf-8")
        # -O3, because that is what the engine is built with and where compilers differ.
        command = [*self._compiler, "-std=c++17", "-O3", "-fPIC", "-w", *flags, str(source), "-o", str(stem)]
        try:
            built = _call(command, _COMPILE_TIMEOUT_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            return Result(Outcome.NOT_COMPILED, str(error))
        if built.returncode != 0:
            return Result(Outcome.NOT_COMPILED, _first_error(built.stderr))
        try:
            ran = _call([str(stem), _SEED], _RUN_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return Result(Outcome.TIMED_OUT, f"within {_RUN_TIMEOUT_S:.0f} s")
        except OSError as error:
            return Result(Outcome.DIED, str(error))
        return judge(ran.returncode, ran.stdout)


def judge(status: int, output: str) -> Result:
    """What a probe's exit status and its one line of output say. A negative status is a signal (POSIX)."""
    if status < 0:
        return Result(Outcome.DIED, _signal_name(-status))
    if status == REFUSED_STATUS:
        return Result(Outcome.REFUSED)
    match output.split():
        case ["ok", got, want] if status == 0 and got == want:
            return Result(Outcome.YES)
        case [_, got, want]:
            return Result(Outcome.WRONG, f"{got} instead of {want}")
    return Result(Outcome.WRONG, f"exit status {status}, output {output[:40]!r}")


def _call(command: Sequence[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=timeout_s,
        check=False,
    )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _first_error(stderr: str) -> str:
    lines = [line for line in stderr.splitlines() if "error" in line] or stderr.splitlines()
    return lines[0].strip()[:120] if lines else ""


@dataclass(slots=True)
class Findings:
    """What the probes said: option → result, and the compiler switches without which AMX does not work."""

    results: dict[str, Result] = field(default_factory=dict)
    cxx_flags: tuple[str, ...] = ()

    def has(self, option: str) -> bool:
        return option in self.results and self.results[option].ok


def all_flags(probe: Probe, probes: Sequence[Probe]) -> list[str]:
    """The probe's compiler switches and those of all that it requires, in the order of `probes`, each once."""
    wanted = {probe.option}
    for other in reversed(probes):
        if other.option in wanted:
            wanted.update(other.requires)
    return list(dict.fromkeys(flag for other in probes if other.option in wanted for flag in other.flags))


def find_features(runner: Runner, probes: Sequence[Probe] = PROBES, workers: int | None = None) -> Findings:
    """Run the probes, several at a time, each once all that it requires is known to be there.

    Raises NoCompilerError when not even a plain program builds and runs.
    """
    plain = runner.run(BASELINE, [])
    if not plain.ok:
        raise NoCompilerError(f"The C++ compiler does not give programs that run here ({plain}).\n{INSTALL_HINT}")
    findings = Findings()
    waiting = list(probes)
    with ThreadPoolExecutor(workers or max(2, os.cpu_count() or 1)) as pool:
        while waiting:
            for probe in waiting:
                if missing := _missing(probe, findings):
                    findings.results[probe.option] = Result(Outcome.NOT_TRIED, f"needs {', '.join(missing)}")
            waiting = [probe for probe in waiting if probe.option not in findings.results]
            ready = [probe for probe in waiting if all(map(findings.has, probe.requires))]
            attempt = partial(_try, runner, probes, findings.cxx_flags)
            for probe, (result, cure) in zip(ready, pool.map(attempt, ready), strict=True):
                findings.results[probe.option] = result
                findings.cxx_flags = findings.cxx_flags or cure
            waiting = [probe for probe in waiting if probe.option not in findings.results]
    return findings


def _missing(probe: Probe, findings: Findings) -> list[str]:
    return [option for option in probe.requires if option in findings.results and not findings.has(option)]


def _try(
    runner: Runner, probes: Sequence[Probe], cure: tuple[str, ...], probe: Probe
) -> tuple[Result, tuple[str, ...]]:
    """The probe's result, and the extra compiler switches it needed. `cure`: what an earlier probe needed."""
    flags = all_flags(probe, probes)
    result = runner.run(probe, [*flags, *cure])
    if result.ok or cure or not probe.is_amx or result.outcome not in (Outcome.DIED, Outcome.WRONG):
        return result, ()
    if runner.run(probe, [*flags, *AMX_CURE]).ok:
        return Result(Outcome.YES, f"with {' '.join(AMX_CURE)} (without: {result.outcome.value})"), AMX_CURE
    return result, ()


def cmake_flags(findings: Findings, environ: Mapping[str, str], probes: Sequence[Probe] = PROBES) -> list[str]:
    """The flags for an x86 processor with these findings."""
    flags = ["-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=OFF", "-DGGML_RPC=ON", "-DLLAVA_BUILD=OFF"]
    for probe in probes:
        if probe.option == "GGML_AMX_INT8" and findings.has(probe.option):
            flags.append("-DGGML_AMX_TILE=ON")
        if findings.has(probe.option):
            flags.append(f"-D{probe.option}=ON")
        elif probe.default_on:
            flags.append(f"-D{probe.option}=OFF")
    return add_user_flags(flags, findings.cxx_flags, environ)


def native_flags(environ: Mapping[str, str]) -> list[str]:
    """The flags where no probes exist (ARM, Apple silicon, POWER, …): the engine's build looks for itself."""
    flags = ["-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DGGML_RPC=ON", "-DLLAVA_BUILD=OFF"]
    return add_user_flags(flags, (), environ)


def add_user_flags(flags: list[str], cxx_flags: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Append `LEGATO_CMAKE_ARGS`. CMAKE_CXX_FLAGS can be given only once, so the cure, the user's flags and
    `CXXFLAGS` (which CMake ignores once CMAKE_CXX_FLAGS is given) become one."""
    extra = shlex.split(environ.get("LEGATO_CMAKE_ARGS", ""))
    given = [arg.removeprefix(_CXX_FLAGS) for arg in extra if arg.startswith(_CXX_FLAGS)]
    if cxx_flags or given:
        words = " ".join([*(given or [environ.get("CXXFLAGS", "")]), *cxx_flags]).strip()
        flags = [*flags, f"{_CXX_FLAGS}{words}"]
    return [*flags, *(arg for arg in extra if not arg.startswith(_CXX_FLAGS))]


def find_compiler(environ: Mapping[str, str]) -> list[str]:
    """The compiler that CMake would take: $CXX, else the first of the usual names. Raises NoCompilerError."""
    if named := shlex.split(environ.get("CXX", "")):
        if shutil.which(named[0]) is None:
            raise NoCompilerError(f"CXX names {named[0]!r}, which is not there.\n{INSTALL_HINT}")
        return named
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name):
            return [name]
    raise NoCompilerError(f"The engine is compiled for this processor, but there is no C++ compiler.\n{INSTALL_HINT}")


def is_probed(machine: str, system: str) -> bool:
    return machine.lower() in ("x86_64", "amd64", "i386", "i686") and system != "Windows"


def flags_here(environ: Mapping[str, str], explain: bool = False) -> list[str]:
    """The flags for this machine. Raises NoCompilerError."""
    if not is_probed(platform.machine(), platform.system()):
        if platform.system() != "Windows":
            find_compiler(environ)
        if explain:
            print(f"{platform.machine()}: no probes; the engine's build looks for itself", file=sys.stderr)
        return native_flags(environ)
    compiler = find_compiler(environ)
    with tempfile.TemporaryDirectory(prefix="legato-probe-") as folder:
        findings = find_features(CompilerRunner(compiler, Path(folder)))
    if explain:
        print(f"compiler: {shlex.join(compiler)}", file=sys.stderr)
        for probe in PROBES:
            print(f"{probe.option:<18} {findings.results[probe.option]}", file=sys.stderr)
    return cmake_flags(findings, environ)


def main() -> int:
    parser = argparse.ArgumentParser(description="Print the CMake flags that build the engine for this processor.")
    parser.add_argument("--explain", action="store_true", help="say on stderr what each probe found")
    options = parser.parse_args()
    try:
        flags = flags_here(os.environ, explain=options.explain)
    except NoCompilerError as error:
        print(error, file=sys.stderr)
        return 2
    print(shlex.join(flags))
    return 0


if __name__ == "__main__":
    sys.exit(main())
