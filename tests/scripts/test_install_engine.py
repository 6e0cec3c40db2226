"""The engine's wheel: built once, found again by what it was built from, and a failure that can be read."""

import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from install_engine import (
    BuildInputs,
    InstallError,
    WheelBuilder,
    cache_root,
    cached_wheel,
    check_runs,
    progress,
)

INPUTS = BuildInputs("1.2.3", ("-DGGML_AVX2=ON", "-DGGML_AVX=ON"), "g++ 12.2", "linux-x86_64 glibc 2.36")

# A build backend of a page, with no requirements: pip runs it as it runs the real one, without a network.
BACKEND = """
import os, shlex, sys, time, zipfile

def build_wheel(folder, config_settings=None, metadata_directory=None):
    for number in range(1, 4):
        print(f"[{number}/3] Building", flush=True)
    BEHAVE
    name = "llama_cpp_python-1.2.3-py3-none-any.whl"
    info = "llama_cpp_python-1.2.3.dist-info"
    with zipfile.ZipFile(os.path.join(folder, name), "w") as wheel:
        wheel.writestr("built_with.txt", os.environ["CMAKE_ARGS"] + "|" + os.environ["CMAKE_BUILD_PARALLEL_LEVEL"])
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\\nName: llama-cpp-python\\nVersion: 1.2.3\\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr(f"{info}/RECORD", "")
    return name
"""
PROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
[project]
name = "llama-cpp-python"
version = "1.2.3"
"""


def source_package(folder: Path, behave: str = "pass") -> str:
    """A source package named llama-cpp-python; `behave` runs in the middle of its build. Returns pip's word for it."""
    folder.mkdir()
    (folder / "backend.py").write_text(BACKEND.replace("BEHAVE", behave))
    (folder / "pyproject.toml").write_text(PROJECT)
    return str(folder)


def builder(said: list[str], every_s: float = 60.0, **environ: str) -> WheelBuilder:
    return WheelBuilder(said.append, {**os.environ, **environ}, every_s)


def test_the_key_is_readable_and_changes_with_everything_that_decides_the_library() -> None:
    assert INPUTS.key.startswith("1.2.3-avx2-")
    assert INPUTS.key == dataclasses.replace(INPUTS).key
    others = [
        dataclasses.replace(INPUTS, version="1.2.4"),
        dataclasses.replace(INPUTS, flags=(*INPUTS.flags, "-DGGML_CUDA=ON")),
        dataclasses.replace(INPUTS, flags=(*INPUTS.flags, "-DCMAKE_CXX_FLAGS=-fno-tree-dse -fno-dse")),
        dataclasses.replace(INPUTS, compiler="g++ 13.1"),
        dataclasses.replace(INPUTS, platform="linux-x86_64 glibc 2.40"),
    ]
    assert len({INPUTS.key, *(other.key for other in others)}) == 1 + len(others)


def test_tags_name_the_best_of_the_processor_and_the_accelerator() -> None:
    flags = ("-DGGML_AVX2=ON", "-DGGML_AVX512=ON", "-DGGML_AVX512_VNNI=ON", "-DGGML_AMX_INT8=ON", "-DGGML_CUDA=ON")
    assert dataclasses.replace(INPUTS, flags=flags).tags == "avx512-vnni-amx-cuda"
    assert dataclasses.replace(INPUTS, flags=("-DGGML_NATIVE=ON",)).tags == "native"
    assert dataclasses.replace(INPUTS, flags=("-DGGML_NATIVE=OFF",)).tags == "plain"


def test_the_cache_can_be_moved(tmp_path: Path) -> None:
    assert cache_root({"LEGATO_CACHE": str(tmp_path)}) == tmp_path / "engine"
    assert cache_root({}) == Path.home() / ".cache" / "legato" / "engine"


def test_a_build_gets_flags_and_processors_and_its_wheel_is_found_again(tmp_path: Path) -> None:
    folder = tmp_path / "cache" / INPUTS.key
    source = source_package(tmp_path / "source")
    flags = ["-DGGML_AVX2=ON", "-DCMAKE_CXX_FLAGS=-a -b"]
    wheel = builder([], CMAKE_BUILD_PARALLEL_LEVEL="7").build(source, flags, folder)
    with zipfile.ZipFile(wheel) as archive:
        assert archive.read("built_with.txt").decode() == "-DGGML_AVX2=ON '-DCMAKE_CXX_FLAGS=-a -b'|7"
    assert cached_wheel(folder) == wheel
    assert sorted(path.name for path in folder.iterdir()) == ["build.log", wheel.name]


def test_a_rebuild_takes_the_place_of_the_old_wheel(tmp_path: Path) -> None:
    source = source_package(tmp_path / "source")
    old = tmp_path / "cache" / "llama_cpp_python-0.0.1-py3-none-any.whl"
    old.parent.mkdir()
    old.write_bytes(b"")
    wheel = builder([]).build(source, [], old.parent)
    assert not old.exists() and cached_wheel(old.parent) == wheel


def test_a_failed_build_shows_the_end_of_its_log_and_leaves_no_wheel(tmp_path: Path) -> None:
    source = source_package(tmp_path / "source", "sys.exit('fatal error: no such header')")
    folder = tmp_path / "cache"
    with pytest.raises(InstallError) as failure:
        builder([]).build(source, [], folder)
    text = str(failure.value)
    assert "fatal error: no such header" in text and str(folder / "build.log") in text
    assert "run the same command again" in text
    assert cached_wheel(folder) is None
    assert [path.name for path in folder.iterdir()] == ["build.log"]


def test_a_slow_build_says_how_far_it_is(tmp_path: Path) -> None:
    """The build goes on only after it was heard of, so the test needs no fixed pause."""
    heard = tmp_path / "heard"
    wait = f"\n    while not os.path.exists({str(heard)!r}): time.sleep(0.02)\n"
    source = source_package(tmp_path / "source", wait)
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        if "step 3 of 3" in line:
            heard.touch()

    WheelBuilder(say, os.environ, progress_every_s=0.1).build(source, [], tmp_path / "cache")
    assert said[-1].startswith("  0 min ")


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX process groups")
def test_an_interrupted_build_ends_its_children_and_leaves_no_wheel(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    stay = f"\n    open({str(pid_file)!r}, 'w').write(str(os.getpid())); time.sleep(600)\n"
    source = source_package(tmp_path / "source", stay)

    def interrupt(_line: str) -> None:
        if pid_file.exists() and pid_file.read_text():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        WheelBuilder(interrupt, os.environ, progress_every_s=0.1).build(source, [], tmp_path / "cache")
    assert cached_wheel(tmp_path / "cache") is None
    assert ended(int(pid_file.read_text()))


def ended(pid: int, within_s: float = 20.0) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        if "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text():
            return True
        threading.Event().wait(0.05)
    return False


def test_a_cut_wheel_in_the_cache_is_not_used(tmp_path: Path) -> None:
    wheel = tmp_path / "llama_cpp_python-1.2.3-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("file", "x" * 1000)
    assert cached_wheel(tmp_path) == wheel
    wheel.write_bytes(wheel.read_bytes()[:600])
    assert cached_wheel(tmp_path) is None
    assert cached_wheel(tmp_path / "none") is None


def test_progress_is_read_from_ninja_and_from_make(tmp_path: Path) -> None:
    log = tmp_path / "log"
    for text, expected in (
        ("starting\n", ""),
        ("[1/345] cc\n[12/345] cc\n", ", step 12 of 345"),
        ("[  3%] Building\n[ 47%] Building\n", ", 47 % done"),
    ):
        log.write_text(text)
        assert progress(log) == expected


def test_b80_an_installed_engine_that_dies_is_reported_with_its_signal() -> None:
    die = [sys.executable, "-c", f"import os; os.kill(os.getpid(), {int(signal.SIGILL)})"]
    with pytest.raises(InstallError, match=r"signal SIGILL.*make engine"):
        check_runs(die)
    with pytest.raises(InstallError, match=r"status 1.*make engine"):
        check_runs([sys.executable, "-c", "raise SystemExit(1)"])
    with pytest.raises(InstallError, match="did not load within 1 s"):
        check_runs([sys.executable, "-c", "import time; time.sleep(600)"], timeout_s=1.0)


def test_the_engine_that_is_installed_here_loads() -> None:
    assert "= 1" in check_runs()


def test_outside_an_environment_nothing_is_installed() -> None:
    script = Path(__file__).parents[2] / "scripts" / "install_engine.py"
    outside = getattr(sys, "_base_executable", sys.executable)
    done = subprocess.run([outside, str(script)], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    assert done.returncode == 1 and "make setup" in done.stderr
