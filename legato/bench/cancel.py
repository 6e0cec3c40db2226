"""A client leaves: how long does the processor go on working for nobody?"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import psutil

from legato.bench.errors import BenchError
from legato.bench.prompts import Prompts
from legato.bench.results import Metric, Panel, Samples, TargetResult, rounds_panel
from legato.bench.runner import Say
from legato.bench.targets import Ask, Reading, Target

Phase = Literal["prefill", "decode"]

_FLAG_STEP_S = 0.001
_CPU_STEP_S = 0.01  # what the system's counters resolve
_CPU_WINDOW_S = 0.1
_CPU_IDLE_SHARE = 0.2  # of one core: two ticks of the counter in a window
_PIECES_BEFORE_LEAVING = 8


class IdleProbe(Protocol):
    async def seconds_until_idle(self, left_s: float) -> float:
        """left_s: when the client left (perf_counter). Waits until the target is idle."""


@dataclass(frozen=True, slots=True)
class FlagProbe:
    """An engine of this process, which knows whether it serves anybody."""

    is_idle: Callable[[], bool]

    async def seconds_until_idle(self, left_s: float) -> float:
        while not self.is_idle():  # noqa: ASYNC110 - another thread's flag; there is no event to wait for
            await asyncio.sleep(_FLAG_STEP_S)
        return time.perf_counter() - left_s


class IdleWatch:
    """Finds the first window in which a process used at most `share` of one core."""

    def __init__(self, window_s: float = _CPU_WINDOW_S, share: float = _CPU_IDLE_SHARE) -> None:
        self._window_s = window_s
        self._share = share
        self._samples: deque[tuple[float, float]] = deque()

    def push(self, at_s: float, used_s: float) -> float | None:
        """used_s: CPU seconds so far. → when the idle window began; None: not idle yet."""
        self._samples.append((at_s, used_s))
        while self._samples[0][0] + self._window_s <= at_s:
            begin_s, used_then = self._samples.popleft()
            if used_s - used_then <= self._share * (at_s - begin_s):
                return begin_s
        return None


class ProcessProbe:
    """A server's process and its children, by the CPU time they use; to about 10 ms."""

    def __init__(self, pid: int) -> None:
        """Raises BenchError when there is no such process."""
        try:
            parent = psutil.Process(pid)
            self._processes = [parent, *parent.children(recursive=True)]
        except psutil.Error as error:
            raise BenchError(
                f"the process {pid} cannot be looked at ({error}); give the server's id as --pid"
            ) from error

    async def seconds_until_idle(self, left_s: float) -> float:
        watch = IdleWatch()
        while (idle_s := watch.push(time.perf_counter(), self._used_s())) is None:  # noqa: ASYNC110 - another process
            await asyncio.sleep(_CPU_STEP_S)
        return max(0.0, idle_s - left_s)

    def _used_s(self) -> float:
        try:
            times = [process.cpu_times() for process in self._processes]
        except psutil.Error as error:
            raise BenchError(f"the server's process has gone ({error}); see its log") from error
        return sum(one.user + one.system for one in times)


@dataclass(frozen=True, slots=True)
class CancelBenchmark:
    """tokens: of the prompt in whose prefill the client leaves, after_s after sending it. answer: of the other one.

    probes: by place of the target, in the order in which they are measured.
    """

    prompts: Prompts
    probes: Mapping[str, IdleProbe]
    tokens: int = 3000
    answer: int = 512
    after_s: float = 0.5
    phases: Sequence[Phase] = ("prefill", "decode")

    name = "cancel"
    definitions = (
        "Until idle: from when the client leaves until the engine serves nobody (in process: its own flag), or "
        f"until the server's process uses at most {_CPU_IDLE_SHARE:.0%} of one core for {_CPU_WINDOW_S * 1e3:g} ms "
        "(by --pid).",
        "Prefill: the client leaves before the first text. Decode: it leaves after "
        f"{_PIECES_BEFORE_LEAVING} pieces of text.",
    )
    metrics = (
        Metric("prefill", "until idle, left in prefill"),
        Metric("decode", "until idle, left in decode"),
    )

    async def measure(self, target: Target, key: str, say: Say) -> Samples:
        found = Samples()
        probe = self.probes[target.name]
        for phase in self.phases:
            say(f"leaving in {phase}")
            found.merge(await (self._prefill if phase == "prefill" else self._decode)(target, key, probe))
        return found

    def panels(self, results: Sequence[TargetResult]) -> Sequence[Panel]:
        return [rounds_panel(f"Left in {phase}", "until idle, ms", phase, results) for phase in self.phases]

    async def _prefill(self, target: Target, key: str, probe: IdleProbe) -> Samples:
        found = Samples()
        async with Reading(target, Ask(self.prompts.text(f"{key}/prefill", self.tokens), self.answer)) as reading:
            try:
                await asyncio.wait_for(reading.until(lambda record: bool(record.piece_s)), self.after_s)
            except TimeoutError:
                found.add("prefill", await _leave(reading, probe))
            else:
                found.notes.append(
                    f"{target.name} had read the prompt within {self.after_s:g} s, before the client left; more "
                    "--tokens or a shorter --after leave in prefill"
                )
        await probe.seconds_until_idle(time.perf_counter())
        return found

    async def _decode(self, target: Target, key: str, probe: IdleProbe) -> Samples:
        found = Samples()
        async with Reading(target, Ask(self.prompts.story(f"{key}/decode"), self.answer)) as reading:
            await reading.until(lambda record: len(record.piece_s) >= _PIECES_BEFORE_LEAVING)
            if reading.record.end_s is None:
                found.add("decode", await _leave(reading, probe))
            else:
                found.notes.append(f"{target.name} ended its answer before the client left; --answer makes it longer")
        return found


async def _leave(reading: Reading, probe: IdleProbe) -> float:
    left_s = time.perf_counter()
    await reading.leave()
    return await probe.seconds_until_idle(left_s)
