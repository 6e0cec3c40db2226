"""Several requests at once with one long system prompt: does it get read once, or by each of them?"""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from legato.bench import TTFT
from legato.bench.errors import BenchError
from legato.bench.prompts import Prompts
from legato.bench.results import Metric, Panel, Samples, Series, TargetResult
from legato.bench.runner import Say
from legato.bench.targets import Ask, Reading, Record, Target


@dataclass(frozen=True, slots=True)
class PrefixBenchmark:
    """requests: at once, with different questions. tokens: of the system prompt they share. answer: tokens of each."""

    prompts: Prompts
    requests: int = 4
    tokens: int = 2600
    answer: int = 8

    name = "prefix"
    definitions = (
        TTFT,
        "Cold: nobody has sent this system prompt before. Warm: the same number of requests, with new questions, once "
        "the cold ones have ended.",
    )
    metrics = (
        Metric("cold_worst", "cold: worst TTFT, by round"),
        Metric("cold_ttft", "cold: TTFT of all"),
        Metric("cold_cached", "cold: prompt tokens from a cache", "tokens"),
        Metric("warm_worst", "warm: worst TTFT, by round"),
        Metric("warm_ttft", "warm: TTFT of all"),
        Metric("warm_cached", "warm: prompt tokens from a cache", "tokens"),
        Metric("prompt_tokens", "prompt, as the target counts it", "tokens"),
    )

    async def measure(self, target: Target, key: str, say: Say) -> Samples:
        system = self.prompts.text(f"{key}/system", self.tokens)
        found = Samples()
        for state in ("cold", "warm"):
            say(f"{self.requests} requests with one {state} prefix of {self.tokens} tokens")
            asks = [
                Ask(self.prompts.question(f"{key}/{state}/{index}"), self.answer, system)
                for index in range(self.requests)
            ]
            _note(found, state, await _all_at_once(target, asks))
        return found

    def panels(self, results: Sequence[TargetResult]) -> Sequence[Panel]:
        return [
            Panel(
                f"{self.requests} requests, one {state} prefix of {self.tokens} tokens",
                "request, by its first text",
                "TTFT, ms",
                [Series(result.name, result.samples.traces.get(state, [])) for result in results],
                counts=True,
            )
            for state in ("cold", "warm")
        ]


async def _all_at_once(target: Target, asks: Sequence[Ask]) -> list[Record]:
    async with AsyncExitStack() as stack:
        readings = [await stack.enter_async_context(Reading(target, ask)) for ask in asks]
        records = list(await asyncio.gather(*(reading.finish() for reading in readings)))
    if not all(record.piece_s for record in records):
        raise BenchError(f"{target.name} answered without any text; more --answer tokens may help")
    return records


def _note(found: Samples, state: str, records: Sequence[Record]) -> None:
    waits = sorted(record.ttft_s for record in records if record.ttft_s is not None)
    found.add(f"{state}_ttft", *waits)
    found.add(f"{state}_worst", waits[-1])
    found.trace(state, *((place, wait * 1e3) for place, wait in enumerate(waits, 1)))
    for record in records:
        if record.ended and (usage := record.ended.usage):
            found.add(f"{state}_cached", usage.cached_tokens)
            found.add("prompt_tokens", usage.prompt_tokens)
