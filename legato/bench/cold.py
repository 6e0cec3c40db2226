"""From starting the process to the first byte of its answer."""

import os
import selectors
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass

from legato.bench.errors import BenchError
from legato.bench.results import Metric, Panel, Samples, TargetResult, rounds_panel
from legato.bench.runner import Say

DEFINITIONS = (
    "Cold start: from starting the process to the first byte on its stdout; imports, loading the model and reading the "
    "prompt included. The files may be in the system's cache already, from the second round on they are.",
)
METRICS = (Metric("first_byte", "process start to first byte"),)


@dataclass(frozen=True, slots=True)
class ColdPlan:
    """timeout_s: for one start."""

    command: Sequence[str]
    rounds: int = 5
    timeout_s: float = 120.0


def measure_cold(name: str, plan: ColdPlan, say: Say) -> TargetResult:
    """Start the command again and again. Raises BenchError when it says nothing; its last words are in the text."""
    samples = Samples()
    for index in range(plan.rounds):
        say(f"start {index + 1} of {plan.rounds}")
        samples.add("first_byte", first_byte_s(plan.command, plan.timeout_s))
    return TargetResult(name, samples)


def first_byte_s(command: Sequence[str], timeout_s: float) -> float:
    """Seconds to the first byte; then the process is ended. Raises BenchError."""
    with tempfile.TemporaryFile() as errors:
        begin = time.perf_counter()
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors)
        try:
            said = _first(process, timeout_s)
            taken_s = time.perf_counter() - begin
        finally:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
        if said is None:
            raise BenchError(f"no first byte within {timeout_s:g} s; --timeout allows more")
        if not said:
            errors.seek(0)
            words = errors.read().decode("utf-8", "replace").strip().splitlines()
            raise BenchError(f"the process ended without an answer: {words[-1] if words else 'and without a word'}")
        return taken_s


def _first(process: "subprocess.Popen[bytes]", timeout_s: float) -> bytes | None:
    """The first bytes of stdout, b"" at its end, None when the time is up."""
    assert process.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        return os.read(process.stdout.fileno(), 1) if selector.select(timeout_s) else None


def panels(results: Sequence[TargetResult]) -> Sequence[Panel]:
    return [rounds_panel("Process start to first byte", "time, ms", "first_byte", results)]
