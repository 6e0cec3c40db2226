#!/usr/bin/env python3
"""Install the engine library (llama-cpp-python), built for this processor, into the environment this runs in.

    .venv/bin/python scripts/install_engine.py [--rebuild]

The build takes minutes, so the wheel is kept and found again by what it was built from: version, CMake flags,
compiler, platform. (pip's own cache knows nothing of flags.) Standard library only.

Environment: LEGATO_CACHE (default ~/.cache/legato), LEGATO_CMAKE_ARGS (appended to the flags, for example
-DGGML_CUDA=ON), LEGATO_ENGINE_VERSION, CMAKE_BUILD_PARALLEL_LEVEL (default: all processors).
Exit status: 0 installed and working; 1 not, with the reason on stderr.
"""

import argparse
import hashlib
import importlib
import importlib.metadata
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import engine_flags

ENGINE_VERSION = "0.3.36"
_PACKAGE = "llama-cpp-python"
_PROGRESS_EVERY_S = 10.0
_PIP = (sys.executable, "-m", "pip")
_CHECK = "import llama_cpp.llama_cpp as c; c.llama_backend_init(); print(c.llama_print_system_info().decode())"
_STEPS = (re.compile(rb"\[(\d+)/(\d+)\] "), re.compile(rb"\[ *(\d+)(%)\] "))

Say = Callable[[str], None]


class InstallError(Exception):
    """The engine cannot be built or does not run; the text says what to do."""


@dataclass(frozen=True, slots=True)
class BuildInputs:
    """All that decides what the compiled library is."""

    version: str
    flags: tuple[str, ...]
    compiler: str
    platform: str

    @property
    def key(self) -> str:
        """Name of the wheel's folder: version, readable tags, and a digest of everything."""
        text = "\n".join([self.version, *self.flags, self.compiler, self.platform])
        return f"{self.version}-{self.tags}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"

    @property
    def tags(self) -> str:
        """The options that say most, for people: `avx2`, `avx512-vnni-amx`, `native-cuda`."""
        on = {m[1].lower() for flag in self.flags if (m := re.fullmatch(r"-DGGML_(\w+)=(?:ON|1|TRUE)", flag))}
        base = next((tag for tag in ("native", "avx512", "avx2", "avx", "sse42") if tag in on), "plain")
        tags = [base]
        tags += ["vnni"] if "avx512_vnni" in on else []
        tags += ["amx"] if "amx_int8" in on else []
        tags += [tag for tag in ("cuda", "hip", "metal", "vulkan", "sycl", "blas") if tag in on]
        return "-".join(tags)


def cache_root(environ: Mapping[str, str]) -> Path:
    base = environ.get("LEGATO_CACHE") or "~/.cache/legato"
    return Path(base).expanduser().absolute() / "engine"


def inputs_here(environ: Mapping[str, str]) -> BuildInputs:
    """Raises engine_flags.NoCompilerError."""
    flags = engine_flags.flags_here(environ)
    compiler = "native"
    if platform.system() != "Windows":
        command = [*engine_flags.find_compiler(environ), "--version"]
        said = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        compiler = (said.stdout.splitlines() or ["unknown"])[0]
    where = f"{sysconfig.get_platform()} {' '.join(platform.libc_ver())}".strip()
    return BuildInputs(environ.get("LEGATO_ENGINE_VERSION") or ENGINE_VERSION, tuple(flags), compiler, where)


def cached_wheel(folder: Path) -> Path | None:
    """The complete wheel in this folder, if there is one."""
    for wheel in sorted(folder.glob("*.whl")):
        if zipfile.is_zipfile(wheel):
            return wheel
    return None


class WheelBuilder:
    """Runs `pip wheel` with the flags, says how far it is, and moves the result into the cache in one step."""

    def __init__(self, say: Say, environ: Mapping[str, str], progress_every_s: float = _PROGRESS_EVERY_S) -> None:
        self._say = say
        self._environ = environ
        self._every_s = progress_every_s

    def build(self, requirement: str, flags: Sequence[str], folder: Path) -> Path:
        """requirement: what pip is to build. Returns the wheel in `folder`.

        Raises InstallError with the last lines of the log, which stays in `folder`.
        """
        folder.mkdir(parents=True, exist_ok=True)
        log = folder / "build.log"
        with tempfile.TemporaryDirectory(dir=folder, prefix=".building-") as work:
            command = [*_PIP, "wheel", "-v", "--no-deps", "--no-cache-dir", "--no-binary", _PACKAGE]
            status = self._run([*command, "-w", work, requirement], self._build_environ(flags), log)
            built = cached_wheel(Path(work))
            if status != 0 or built is None:
                raise InstallError(_build_failed(status, log))
            for old in folder.glob("*.whl"):
                old.unlink()
            return built.replace(folder / built.name)

    def _build_environ(self, flags: Sequence[str]) -> dict[str, str]:
        environ = {**self._environ, "CMAKE_ARGS": shlex.join(flags), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        environ.setdefault("CMAKE_BUILD_PARALLEL_LEVEL", str(_num_processors()))
        return environ

    def _run(self, command: Sequence[str], environ: Mapping[str, str], log: Path) -> int:
        started = time.monotonic()
        with log.open("wb") as out:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=environ,
                start_new_session=True,
            )
        try:
            while True:
                try:
                    return process.wait(timeout=self._every_s)
                except subprocess.TimeoutExpired:
                    self._say(f"  {_clock(time.monotonic() - started)}{progress(log)}")
        finally:
            _stop(process)


def progress(log: Path) -> str:
    """How far the build is, from the last `[12/345]` or `[ 12%]` of its log; "" while it says nothing."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 65536))
        tail = file.read()
    for pattern in _STEPS:
        if found := pattern.findall(tail):
            done, total = (part.decode() for part in found[-1])
            return f", {done} % done" if total == "%" else f", step {done} of {total}"
    return ""


def _stop(process: subprocess.Popen[bytes]) -> None:
    """After Ctrl-C: pip's children (cmake, compilers) must go too; they are in the group that pip leads."""
    if process.poll() is not None:
        return
    if hasattr(os, "killpg"):
        os.killpg(process.pid, signal.SIGTERM)
    else:
        process.terminate()
    process.wait()


def _num_processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60} min {int(seconds) % 60:02d} s"


def _build_failed(status: int, log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    tail = "\n".join(f"  | {line[:300]}" for line in lines[-25:])
    return (
        f"The engine could not be built (pip ended with status {status}). Last lines of {log}:\n{tail}\n"
        "Look there for the first 'error'. Usual causes: no network for the source package; a compiler without "
        "C++17; too little memory (try CMAKE_BUILD_PARALLEL_LEVEL=1); a flag in LEGATO_CMAKE_ARGS. "
        "Then run the same command again."
    )


class Environment:
    """The virtual environment that this Python belongs to."""

    def __init__(self, prefix: Path) -> None:
        self._marker = prefix / ".legato-engine"

    def holds(self, inputs: BuildInputs) -> bool:
        """Whether what is installed is what this script installed for these inputs."""
        mark = _installed_mark(inputs.key)
        return mark is not None and self._marker.exists() and self._marker.read_text() == mark

    def remember(self, inputs: BuildInputs) -> None:
        if mark := _installed_mark(inputs.key):
            self._marker.write_text(mark)

    def install(self, wheel: Path) -> None:
        """Raises InstallError with what pip said."""
        # -qq: this pip may warn about index settings that have nothing to do with us; errors still show.
        self._pip("--force-reinstall", "--no-deps", str(wheel))
        self._pip(str(wheel))

    def _pip(self, *args: str) -> None:
        environ = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        done = subprocess.run([*_PIP, "install", "-qq", *args], stdin=subprocess.DEVNULL, env=environ, check=False)
        if done.returncode != 0:
            raise InstallError("pip could not install the engine (see above); mend that and run the command again.")


def _installed_mark(key: str) -> str | None:
    """The key and a digest of the installed files' list: another wheel put there by hand is noticed."""
    try:
        record = importlib.metadata.distribution(_PACKAGE).read_text("RECORD")
    except importlib.metadata.PackageNotFoundError:
        return None
    return f"{key} {hashlib.sha256((record or '').encode()).hexdigest()[:12]}\n"


def check_runs(command: Sequence[str] = (sys.executable, "-c", _CHECK), timeout_s: float = 120.0) -> str:
    """Load the library in a child process; returns the features it reports. Raises InstallError."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        raise InstallError(f"The engine did not load within {timeout_s:.0f} s. Run: make engine") from None
    if done.returncode == 0:
        return done.stdout.strip()
    how = f"status {done.returncode}: {done.stderr.strip()[-500:]}"
    if done.returncode < 0:
        how = f"signal {signal.Signals(-done.returncode).name}"
    raise InstallError(f"The engine was installed but does not run here ({how}). Build it anew: make engine")


def ensure_engine(rebuild: bool, environ: Mapping[str, str], say: Say) -> None:
    """Raises InstallError or engine_flags.NoCompilerError."""
    inputs = inputs_here(environ)
    environment = Environment(Path(sys.prefix))
    if not rebuild and environment.holds(inputs):
        say(f"Engine: {inputs.key} is installed.")
        return
    folder = cache_root(environ) / inputs.key
    wheel = None if rebuild else cached_wheel(folder)
    if wheel is None:
        say("The engine (llama.cpp) is now compiled for this processor. This takes about five to ten minutes, once:")
        say(f"the result is kept in {folder}")
        builder = WheelBuilder(say, environ)
        wheel = builder.build(f"{_PACKAGE}=={inputs.version}", inputs.flags, folder)
    say(f"Engine: installing {inputs.key} …")
    environment.install(wheel)
    importlib.invalidate_caches()
    say(f"Engine: works. {check_runs()}")
    environment.remember(inputs)


def main() -> int:
    parser = argparse.ArgumentParser(description="Install the engine library, built for this processor.")
    parser.add_argument("--rebuild", action="store_true", help="compile it anew even if a built one is kept")
    parser.add_argument("--key", action="store_true", help="only print the name under which the wheel is kept")
    options = parser.parse_args()
    if not options.key and sys.prefix == sys.base_prefix:
        print("This installs into a virtual environment; use `make setup`, which makes one.", file=sys.stderr)
        return 1
    try:
        if options.key:
            print(inputs_here(os.environ).key)
        else:
            ensure_engine(options.rebuild, os.environ, lambda line: print(line, flush=True))
    except (InstallError, engine_flags.NoCompilerError) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
