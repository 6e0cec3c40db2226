"""`legato doctor`: what is here, what the engine makes of this machine, and what is wrong.

The engine library is tried in a child process: one that was built for another processor dies of an illegal
instruction, and that must be a line in a report, not the end of the program that reports.
"""

import importlib.metadata
import json
import os
import platform
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypeVar

import click
import psutil

from legato._version import __version__
from legato.core.errors import LegatoError
from legato.models import registry
from legato.models.memory import available_bytes, format_bytes

PROBE_TIMEOUT_S = 120.0
_LAUNCH = "import sys; sys.path.append(sys.argv[1]); from legato.cli._probe import main; sys.exit(main(sys.argv[2:]))"
T = TypeVar("T")
_WINDOWS_DEATHS = {0xC000001D: "SIGILL", 0xC0000005: "SIGSEGV", 0xC0000409: "SIGABRT"}

# libllama's name of a feature → what Linux calls it in /proc/cpuinfo.
_FEATURES: dict[str, tuple[str, ...]] = {
    "SSE3": ("pni",),
    "SSSE3": ("ssse3",),
    "AVX": ("avx",),
    "AVX2": ("avx2",),
    "F16C": ("f16c",),
    "FMA": ("fma",),
    "BMI2": ("bmi2",),
    "AVX_VNNI": ("avx_vnni",),
    "AVX512": ("avx512f", "avx512cd", "avx512vl", "avx512dq", "avx512bw"),
    "AVX512_VBMI": ("avx512vbmi",),
    "AVX512_VNNI": ("avx512_vnni",),
    "AVX512_BF16": ("avx512_bf16",),
    "AMX_INT8": ("amx_tile", "amx_int8"),
}


@dataclass(frozen=True, slots=True)
class Stage:
    """One thing that the child did. seconds: None when it did not come to its end."""

    name: str
    seconds: float | None


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """What the child said and how it ended. failure: why it did not get through, None when it did. died_of: the name
    of the signal. engine_fault: whether the engine is to blame, rather than the model file."""

    stages: tuple[Stage, ...]
    system_info: str = ""
    library: str = ""
    failure: str | None = None
    died_of: str | None = None
    engine_fault: bool = True


@dataclass(frozen=True, slots=True)
class Processor:
    """flags: the features that the system lists, in its own words; empty where it lists none."""

    name: str
    flags: frozenset[str]
    cores: int | None
    threads: int | None


@dataclass(frozen=True, slots=True)
class Features:
    """used: built in. unused: the processor has it and the engine was built without. lacking: the reverse."""

    used: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    lacking: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Model:
    name: str
    path: str
    size_bytes: int
    problem: str | None


@dataclass(slots=True)
class Report:
    """Everything that doctor prints. problems: things that do not work; warnings: things that could be better."""

    versions: dict[str, str]
    processor: str
    cores: int | None
    threads: int | None
    features: Features
    memory_total_bytes: int
    memory_available_bytes: int
    models: list[Model]
    stages: tuple[Stage, ...]
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def probe_command(model: Path | None) -> list[str]:
    """The child that tries the engine; without a model it only loads the library."""
    # -P: a random.py in the current folder must not become part of the diagnosis.
    command = [sys.executable, "-P", "-c", _LAUNCH, str(Path(__file__).parents[2])]
    return [*command, str(model)] if model else command


def run_probe(command: Sequence[str], timeout_s: float = PROBE_TIMEOUT_S) -> ProbeReport:
    """Run the child and read its stages. Does not raise: whatever happens to the child is in the report."""
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired as late:
        return _read_report(late.stdout or b"", f"did not end within {timeout_s:g} s", None)
    except OSError as error:
        return _read_report(b"", f"could not be started ({error})", None)
    if done.returncode == 0:
        return _read_report(done.stdout, None, None)
    if name := _death(done.returncode):
        return _read_report(done.stdout, f"was killed by {name}", name)
    last = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
    return _read_report(done.stdout, f"ended with status {done.returncode}: {''.join(last)}", None)


def _death(status: int) -> str | None:
    """The name of the signal that a child with this exit status died of; None when it ended by itself."""
    if status >= 0:
        return _WINDOWS_DEATHS.get(status)
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"


def _read_report(output: bytes, failure: str | None, died_of: str | None) -> ProbeReport:
    stages: list[Stage] = []
    facts: dict[str, str] = {}
    for said in map(_parse, output.decode("utf-8", "replace").splitlines()):
        if said.get("begin"):
            stages.append(Stage(str(said.get("stage")), None))
        elif isinstance(seconds := said.get("seconds"), float | int) and stages:
            stages[-1] = Stage(stages[-1].name, float(seconds))
        facts.update({key: str(value) for key, value in said.items()})
    last = stages[-1] if stages and stages[-1].seconds is None else None
    where = f" at stage {last.name!r}" if last else ""
    if failure:
        failure = f"the engine's try-out {failure}{where}"
    if "error" in facts:
        failure = f"the engine's try-out failed{where}: {facts['error']}"
    blame_model = "error" in facts and last is not None and last.name == "model"
    return ProbeReport(
        tuple(stages),
        facts.get("system_info", ""),
        facts.get("version", ""),
        failure,
        died_of,
        engine_fault=not blame_model,
    )


def _parse(line: str) -> Mapping[str, object]:
    try:
        said = json.loads(line)
    except ValueError:
        return {}  # native code may print to stdout too
    return said if isinstance(said, dict) else {}


def compare_features(system_info: str, flags: frozenset[str]) -> Features:
    """system_info: libllama's list (`AVX = 1 | …`); flags: the processor's (empty = not known)."""
    built = [
        name.split(":")[-1].strip()
        for name, _, value in (item.partition("=") for item in system_info.split("|"))
        if value.strip() == "1"
    ]
    known = {name: flags.issuperset(names) for name, names in _FEATURES.items()} if flags else {}
    x86 = "pni" in flags
    return Features(
        tuple(built),
        tuple(name for name, there in known.items() if system_info and x86 and there and name not in built),
        tuple(name for name, there in known.items() if x86 and not there and name in built),
    )


def read_processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> Processor:
    """Name and features from /proc/cpuinfo where there is one."""
    fields: dict[str, str] = {}
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            fields.setdefault(key.strip().lower(), value.strip())
    flags = frozenset((fields.get("flags") or fields.get("features") or "").split())
    name = fields.get("model name") or platform.processor() or platform.machine()
    return Processor(name, flags, psutil.cpu_count(logical=False), psutil.cpu_count())


def rebuild_command(clone: Path, processor: Processor) -> str:
    """What builds the engine anew: in a clone its make target, else pip with the flags for this processor."""
    if (clone / "scripts" / "install_engine.py").exists():
        return shlex.join(["make", "-C", str(clone), "engine"])
    flags = "-DGGML_NATIVE=ON -DGGML_RPC=ON"
    if "amx_int8" in processor.flags:
        # The cure for compilers that drop most of the AMX tile configuration: docs/engine-build.md.
        flags += " '-DCMAKE_CXX_FLAGS=-fno-tree-dse -fno-dse'"
    pip = "pip install --force-reinstall --no-deps --no-cache-dir --no-binary llama-cpp-python"
    return f'CMAKE_ARGS="{flags}" {shlex.quote(sys.executable)} -m {pip} llama-cpp-python=={_engine_version()}'


def _engine_version() -> str:
    try:
        return importlib.metadata.version("llama-cpp-python")
    except importlib.metadata.PackageNotFoundError:
        return "0.3.36"


def _explain_failure(probe: ProbeReport, rebuild: str) -> str:
    reasons = {
        "SIGILL": "it was built for another processor, or by a compiler that breaks its AMX code",
        "SIGKILL": "most likely the machine ran out of memory: close something and try again first",
        "SIGBUS": "the model file or the library was cut while in use, or the disk is full",
    }
    if not probe.engine_fault:
        return str(probe.failure)
    why = f" ({reasons[probe.died_of]})" if probe.died_of in reasons else ""
    return f"{probe.failure}{why}. To build the engine anew for this processor: {rebuild}"


def examine(model_name: str, command: Sequence[str] | None = None, clone: Path | None = None) -> Report:
    """Look at everything. command: the child to run, instead of the one that tries the engine with the model.

    clone: the folder that would hold `scripts/`, when Legato runs from a clone.
    """
    processor = read_processor()
    rebuild = rebuild_command(clone or Path(__file__).parents[2], processor)
    problems: list[str] = []
    path: Path | None = None
    try:
        checked = registry.inspect(registry.resolve(model_name))
        path = checked.model.path if checked.problem is None else None
        problems += [checked.problem] if checked.problem else []
    except LegatoError as error:
        problems.append(str(error))
    probe = run_probe(command or probe_command(path))
    if probe.failure:
        problems.append(_explain_failure(probe, rebuild))
    features = compare_features(probe.system_info, processor.flags)
    if features.lacking:
        lacking = ", ".join(features.lacking)
        problems.append(f"the engine was built for {lacking}, which this processor does not have; run: {rebuild}")
    report = Report(
        versions=_versions(probe),
        processor=processor.name,
        cores=processor.cores,
        threads=processor.threads,
        features=features,
        memory_total_bytes=int(psutil.virtual_memory().total),
        memory_available_bytes=available_bytes(),
        models=[
            Model(one.model.name, str(one.model.path), one.model.size_bytes, one.problem)
            for one in registry.installed()
        ],
        stages=probe.stages,
        problems=problems,
    )
    if features.unused:
        unused = ", ".join(features.unused)
        report.warnings.append(f"this processor has {unused}, and the engine does not use it; to rebuild: {rebuild}")
    return report


def _versions(probe: ProbeReport) -> dict[str, str]:
    return {
        "legato": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "engine": probe.library or f"llama-cpp-python {_engine_version()}",
    }


def render(report: Report) -> str:
    """The report as text, without a final newline."""
    versions, features = report.versions, report.features
    free, total = format_bytes(report.memory_available_bytes), format_bytes(report.memory_total_bytes)
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else report.threads
    rows = [
        ("Legato", f"{versions['legato']}, Python {versions['python']}, {versions['platform']}"),
        ("Engine", versions["engine"]),
        ("Processor", f"{report.processor}: {report.cores} cores, {report.threads} threads, {usable} usable"),
        ("  in use", " ".join(features.used) or "not known"),
        ("  unused", " ".join(features.unused) or "none"),
        ("Memory", f"{free} available of {total}"),
    ]
    for label, model in _labelled("Models", report.models):
        state = f"damaged: {model.problem}" if model.problem else format_bytes(model.size_bytes)
        rows.append((label, f"{model.name}, {state}, {model.path}"))
    if not report.models:
        rows.append(("Models", "none"))
    for label, stage in _labelled("Try-out", report.stages):
        rows.append((label, f"{stage.name}: " + ("FAILED" if stage.seconds is None else f"{stage.seconds:.3f} s")))
    lines = [f"{label:<11}{text}" for label, text in rows]
    lines += ["", *(f"Warning: {text}" for text in report.warnings), *(f"Problem: {text}" for text in report.problems)]
    return "\n".join([*lines, "Something is wrong." if report.problems else "Everything works."])


def _labelled(label: str, items: Sequence[T]) -> list[tuple[str, T]]:
    return [(label if index == 0 else "", item) for index, item in enumerate(items)]


@click.command()
@click.option("-m", "--model", default=registry.EMBEDDED, show_default=True, help="The model to try.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def doctor(model: str, as_json: bool) -> None:
    """Say what is here, try the engine, and say what is wrong.

    Exit status 0 when everything works, 1 when something does not.
    """
    report = examine(model)
    if as_json:
        click.echo(json.dumps({"ok": not report.problems, **asdict(report)}, indent=2, ensure_ascii=False))
    else:
        click.echo(render(report))
    sys.exit(1 if report.problems else 0)
