"""`legato doctor`: a child that dies is reported by name, with the command that mends it, and doctor itself lives."""

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from legato.cli.doctor import (
    Features,
    Processor,
    compare_features,
    doctor,
    examine,
    probe_command,
    read_processor,
    rebuild_command,
    render,
    run_probe,
)
from legato.models import registry

BUILT_FOR_AVX2 = "CPU : SSE3 = 1 | SSSE3 = 1 | AVX = 1 | AVX2 = 1 | F16C = 1 | FMA = 1 | BMI2 = 1 | REPACK = 1 | "
AVX2_FLAGS = frozenset(["fpu", "pni", "ssse3", "avx", "avx2", "f16c", "fma", "bmi2"])
AVX512_FLAGS = frozenset(["avx512f", "avx512cd", "avx512vl", "avx512dq", "avx512bw"])

ONE_STAGE_THEN = """
import json, os, signal, sys
print(json.dumps({"stage": "library", "begin": True}))
print(json.dumps({"stage": "library", "seconds": 0.01, "system_info": "CPU : AVX = 1 | ", "version": "made up"}))
print("noise from native code")
print(json.dumps({"stage": "model", "begin": True}), flush=True)
"""


def child(then: str) -> list[str]:
    return [sys.executable, "-c", ONE_STAGE_THEN + then]


def clone_of(folder: Path) -> Path:
    """A folder that looks like a clone of the repository."""
    (folder / "scripts").mkdir(parents=True)
    (folder / "scripts" / "install_engine.py").touch()
    return folder


@pytest.fixture
def model_path() -> Path:
    models = registry.installed_models()
    if not models:
        pytest.skip("the embedded model is not installed")
    return models[0].path


@pytest.mark.parametrize("name", ["SIGILL", "SIGSEGV", "SIGABRT", "SIGKILL"])
def test_b80_a_child_that_dies_of_a_signal_is_reported_by_name_with_the_rebuild_command(
    name: str, tmp_path: Path
) -> None:
    clone = clone_of(tmp_path / "my clone")
    report = examine("smollm2", child(f"os.kill(os.getpid(), signal.{name})"), clone)
    (problem,) = [text for text in report.problems if "try-out" in text]
    assert f"was killed by {name} at stage 'model'" in problem
    assert problem.endswith(f"make -C '{clone}' engine")
    text = render(report)
    assert "model: FAILED" in text and "Something is wrong." in text and problem in text


def test_b80_an_engine_built_for_features_that_the_processor_lacks_is_a_problem() -> None:
    features = compare_features(BUILT_FOR_AVX2, AVX2_FLAGS - {"avx2", "fma"})
    assert features.lacking == ("AVX2", "FMA") and "AVX2" in features.used


def test_features_that_are_there_but_unused_are_told_apart() -> None:
    assert compare_features(BUILT_FOR_AVX2, AVX2_FLAGS).unused == ()
    more = AVX2_FLAGS | AVX512_FLAGS | {"avx512_vnni", "amx_tile", "amx_int8"}
    assert compare_features(BUILT_FOR_AVX2, more).unused == ("AVX512", "AVX512_VNNI", "AMX_INT8")
    # AVX512 stands for five groups; four of them are not enough.
    assert compare_features(BUILT_FOR_AVX2, more - {"avx512bw"}).unused == ("AVX512_VNNI", "AMX_INT8")


def test_nothing_is_concluded_where_the_processor_or_the_library_says_nothing() -> None:
    assert compare_features(BUILT_FOR_AVX2, frozenset()) == Features(used=tuple(compare_used()))
    assert compare_features("", AVX2_FLAGS) == Features()
    assert compare_features("CPU : NEON = 1 | ", frozenset({"asimd", "fphp"})) == Features(used=("NEON",))


def compare_used() -> list[str]:
    return [item.split("=")[0].split(":")[-1].strip() for item in BUILT_FOR_AVX2.split("|")[:-1]]


def test_a_child_that_does_not_end_is_stopped_and_reported() -> None:
    probe = run_probe(child("import time; time.sleep(600)"), timeout_s=3)
    assert probe.failure == "the engine's try-out did not end within 3 s at stage 'model'"
    assert [(stage.name, stage.seconds is None) for stage in probe.stages] == [("library", False), ("model", True)]


def test_a_failure_that_the_child_understood_is_passed_on_and_blamed_on_the_model() -> None:
    told = 'print(json.dumps({"stage": "model", "error": "the file is cut"})); sys.exit(1)'
    probe = run_probe(child(told))
    assert probe.failure == "the engine's try-out failed at stage 'model': the file is cut"
    assert not probe.engine_fault
    report = examine("smollm2", child(told))
    assert report.problems[-1] == probe.failure  # a new engine would not mend the file


def test_a_child_that_fails_in_python_or_cannot_start_is_reported() -> None:
    assert "ended with status 1: ValueError: odd" in str(run_probe(child("raise ValueError('odd')")).failure)
    assert "could not be started" in str(run_probe(["/nowhere/python"]).failure)


def test_an_unknown_model_is_a_problem_and_the_library_is_tried_all_the_same() -> None:
    result = CliRunner().invoke(doctor, ["-m", "no-such-model"])
    assert result.exit_code == 1
    assert "no-such-model" in result.output and "library: " in result.output


def test_a_damaged_model_is_a_problem_and_never_reaches_the_child(tmp_path: Path) -> None:
    page = tmp_path / "page.gguf"
    page.write_text("<html>not a model</html>")
    result = CliRunner().invoke(doctor, ["-m", str(page), "--json"])
    report = json.loads(result.stdout)
    assert result.exit_code == 1 and not report["ok"]
    assert "page.gguf" in report["problems"][0]
    assert [stage["name"] for stage in report["stages"]] == ["library"]


def test_the_engine_here_passes_all_stages(model_path: Path) -> None:
    probe = run_probe(probe_command(model_path))
    assert probe.failure is None
    assert [stage.name for stage in probe.stages] == ["library", "model", "context", "prompt", "token"]
    assert all(stage.seconds is not None for stage in probe.stages)
    assert "llama" in probe.library and "= 1" in probe.system_info


def test_doctor_is_well_here(model_path: Path) -> None:
    result = CliRunner().invoke(doctor, ["--json"])
    report = json.loads(result.stdout)
    assert (result.exit_code, report["ok"], report["problems"]) == (0, True, [])
    assert str(model_path) in [model["path"] for model in report["models"]]
    assert report["features"]["lacking"] == []
    assert 0 < report["memory_available_bytes"] <= report["memory_total_bytes"]


def test_the_folder_that_doctor_runs_in_has_no_say(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json.py").write_text("raise RuntimeError('not this one')")
    monkeypatch.chdir(tmp_path)
    assert run_probe(probe_command(model_path)).failure is None


def test_an_installed_package_gets_the_pip_command_with_the_cure_where_there_is_amx(tmp_path: Path) -> None:
    plain = rebuild_command(tmp_path, Processor("x", AVX2_FLAGS, 2, 2))
    assert plain.startswith('CMAKE_ARGS="-DGGML_NATIVE=ON -DGGML_RPC=ON" ')
    assert "--no-binary llama-cpp-python llama-cpp-python==" in plain and sys.executable in plain
    cured = rebuild_command(tmp_path, Processor("x", AVX2_FLAGS | {"amx_int8"}, 2, 2))
    assert "'-DCMAKE_CXX_FLAGS=-fno-tree-dse -fno-dse'" in cured


def test_cpuinfo_is_read_on_x86_on_arm_and_where_there_is_none(tmp_path: Path) -> None:
    x86, arm = tmp_path / "x86", tmp_path / "arm"
    x86.write_text("processor\t: 0\nmodel name\t: Some CPU\nflags\t\t: pni avx\n\nprocessor\t: 1\nflags\t\t: none\n")
    arm.write_text("processor\t: 0\nFeatures\t: fp asimd\n")
    assert read_processor(x86).name == "Some CPU" and read_processor(x86).flags == {"pni", "avx"}
    assert read_processor(arm).flags == {"fp", "asimd"}
    assert read_processor(tmp_path / "none").flags == frozenset()
