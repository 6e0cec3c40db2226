"""Many requests: a closed loop (so many clients, each asks again when it has its answer) or an open one (arrivals by
a Poisson process, whatever the target makes of them)."""

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from legato.bench import ITL, STALL, TTFT
from legato.bench.errors import BenchError
from legato.bench.prompts import Prompts
from legato.bench.results import Metric, Panel, Samples, TargetResult, share_panel
from legato.bench.runner import Say
from legato.bench.stats import Goals, gaps, tokens_per_s
from legato.bench.targets import Ask, Reading, Record, Target
from legato.core.errors import LegatoError


@dataclass(frozen=True, slots=True)
class LoadBenchmark:
    """clients: of the closed loop. rate: arrivals per second of the open loop; None = closed.

    requests: in all. tokens: of each prompt; answer: of each answer.
    """

    prompts: Prompts
    goals: Goals
    clients: int = 8
    rate: float | None = None
    requests: int = 32
    tokens: int = 64
    answer: int = 128

    name = "load"
    metrics = (
        Metric("tokens_per_s", "tokens of all answers per second", "tok/s"),
        Metric("requests_per_s", "answers per second", "1/s"),
        Metric("goodput", "goodput: answers per second that met the targets", "1/s"),
        Metric("ttft", "TTFT"),
        Metric("gap", "gaps of all streams"),
        Metric("stall", "stall, by stream"),
        Metric("stream_tokens_per_s", "speed of each stream from its first text", "tok/s"),
        Metric("failed", "requests that failed, by round", ""),
    )

    @property
    def definitions(self) -> Sequence[str]:
        return (
            f"{TTFT} In the open loop it counts from when the request was due.",
            ITL,
            STALL,
            f"Goodput: answers per second with a TTFT of at most {self.goals.ttft_s * 1e3:g} ms and no gap over "
            f"{self.goals.gap_s * 1e3:g} ms.",
        )

    async def measure(self, target: Target, key: str, say: Say) -> Samples:
        asks = [Ask(self.prompts.text(f"{key}/{index}", self.tokens), self.answer) for index in range(self.requests)]
        crowd = _Crowd(target, say, len(asks))
        begin = time.perf_counter()
        if self.rate is None:
            await _closed(crowd, asks, self.clients)
        else:
            await _open(crowd, asks, arrivals(f"{self.prompts.seed}/{key}", self.rate, len(asks)))
        return self._samples(crowd, time.perf_counter() - begin)

    def panels(self, results: Sequence[TargetResult]) -> Sequence[Panel]:
        load = f"{self.clients} clients" if self.rate is None else f"{self.rate:g} requests a second"
        return [
            share_panel(f"First text, {load}", "TTFT, ms", "ttft", results),
            share_panel(f"Gaps, {load}", "gap, ms", "gap", results),
        ]

    def _samples(self, crowd: "_Crowd", elapsed_s: float) -> Samples:
        if not crowd.records:
            raise crowd.error or BenchError(f"{crowd.target.name} answered nothing; try it with curl first")
        found = Samples()
        found.add("tokens_per_s", sum(record.num_tokens for record in crowd.records) / elapsed_s)
        found.add("requests_per_s", len(crowd.records) / elapsed_s)
        found.add("goodput", sum(map(self.goals.met_by, crowd.records)) / elapsed_s)
        found.add("failed", crowd.num_failed)
        for record in crowd.records:
            between = gaps(record.piece_s)
            found.add("ttft", record.ttft_s)
            found.add("gap", *between)
            found.add("stall", max(between, default=None))
            found.add("stream_tokens_per_s", tokens_per_s(record))
        if crowd.error is not None:
            found.notes.append(f"{crowd.num_failed} of {self.requests} requests failed; the first: {crowd.error}")
        return found


class _Crowd:
    """Asks, and keeps what came of it. A failed request is counted, and the others go on."""

    def __init__(self, target: Target, say: Say, num_requests: int) -> None:
        self.target = target
        self.records: list[Record] = []
        self.num_failed = 0
        self.error: LegatoError | None = None
        self._say = say
        self._num_requests = num_requests

    async def ask(self, ask: Ask, due_s: float | None = None) -> None:
        try:
            async with Reading(self.target, ask, due_s) as reading:
                self.records.append(await reading.finish())
        except LegatoError as error:
            self.num_failed += 1
            self.error = self.error or error
        self._say(f"{len(self.records) + self.num_failed} of {self._num_requests} requests are through")


async def _closed(crowd: _Crowd, asks: Sequence[Ask], clients: int) -> None:
    waiting = iter(asks)

    async def client() -> None:
        for ask in waiting:  # shared: each request goes to the client that is free first
            await crowd.ask(ask)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(clients, len(asks))):
            group.create_task(client())


async def _open(crowd: _Crowd, asks: Sequence[Ask], due: Sequence[float]) -> None:
    begin = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for ask, after_s in zip(asks, due, strict=True):
            await asyncio.sleep(max(0.0, begin + after_s - time.perf_counter()))
            group.create_task(crowd.ask(ask, begin + after_s))


def arrivals(seed: str, rate: float, count: int) -> list[float]:
    """Seconds from the begin at which requests arrive: a Poisson process of `rate` per second, the first one at 0."""
    rng = random.Random(seed)
    times = [0.0]
    while len(times) < count:
        times.append(times[-1] + rng.expovariate(rate))
    return times[:count]
