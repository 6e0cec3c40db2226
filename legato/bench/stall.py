"""What a running stream feels when somebody else's long prompt arrives, and what the newcomer pays for it."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from legato.bench import ITL, STALL, TTFT
from legato.bench.errors import BenchError
from legato.bench.prompts import Prompts
from legato.bench.results import Metric, Panel, Samples, Series, TargetResult, rounds_panel
from legato.bench.runner import Say
from legato.bench.stats import gaps, gaps_between
from legato.bench.targets import Ask, Reading, Record, Target, read_all

_NEWCOMER_TOKENS = 8  # of its answer: enough to know that it began
_TEMPLATE_TOKENS = 64  # a chat template's own, which may come from a cache


@dataclass(frozen=True, slots=True)
class StallBenchmark:
    """tokens: of the newcomer's prompt. answer: of the running stream, which must outlast the newcomer's prefill.

    settle_s: how long the stream runs alone first.
    """

    prompts: Prompts
    tokens: int = 3000
    answer: int = 2048
    settle_s: float = 1.0

    name = "stall"
    definitions = (
        TTFT,
        ITL,
        f"{STALL} Here: of the running stream, from the newcomer's arrival to its first text.",
    )
    metrics = (
        Metric("gap", "running stream's gaps while the prompt is read"),
        Metric("stall", "largest of them, by round"),
        Metric("gap_before", "running stream's gaps before"),
        Metric("newcomer_ttft", "newcomer's TTFT"),
        Metric("alone_ttft", "TTFT of such a prompt alone"),
        Metric("slowdown", "newcomer's TTFT ÷ alone, by round", "×"),
        Metric("prompt_tokens", "newcomer's prompt, as the target counts it", "tokens"),
    )

    async def measure(self, target: Target, key: str, say: Say) -> Samples:
        say(f"a prompt of {self.tokens} tokens, alone")
        alone = await read_all(target, self._newcomer(f"{key}/alone"))
        say("a stream begins")
        async with Reading(target, Ask(self.prompts.story(f"{key}/running"), self.answer)) as running:
            await running.until(lambda record: bool(record.piece_s))
            await asyncio.sleep(self.settle_s)
            say(f"a prompt of {self.tokens} tokens arrives")
            arrival = time.perf_counter()
            newcomer = await read_all(target, self._newcomer(f"{key}/newcomer"))
            first = newcomer.piece_s[0]
            went_on = await running.until(lambda record: bool(record.piece_s) and record.piece_s[-1] > first)
        if not went_on:
            raise BenchError(
                f"{target.name}: the running stream ended, after {running.record.num_tokens} tokens, before "
                "the newcomer's first text; a larger --answer (--context must hold it) keeps it running for longer"
            )
        return _samples(running.record, newcomer, alone, arrival)

    def panels(self, results: Sequence[TargetResult]) -> Sequence[Panel]:
        dots = [Series(result.name, result.samples.traces.get("gap", [])) for result in results]
        return [
            Panel(
                f"A running stream while a prompt of {self.tokens} tokens arrives",
                "time since the arrival, s",
                "gap, ms",
                dots,
                is_log=True,
            ),
            rounds_panel("The newcomer", "TTFT, ms", "newcomer_ttft", results),
        ]

    def _newcomer(self, key: str) -> Ask:
        return Ask(self.prompts.text(key, self.tokens), _NEWCOMER_TOKENS)


def _samples(running: Record, newcomer: Record, alone: Record, arrival: float) -> Samples:
    found = Samples()
    meanwhile = gaps_between(running.piece_s, arrival, newcomer.piece_s[0])
    found.add("gap", *(gap for _, gap in meanwhile))
    found.add("stall", max((gap for _, gap in meanwhile), default=None))
    found.add("gap_before", *gaps([at for at in running.piece_s if at <= arrival]))
    found.add("newcomer_ttft", newcomer.ttft_s)
    found.add("alone_ttft", alone.ttft_s)
    if newcomer.ttft_s and alone.ttft_s:
        found.add("slowdown", newcomer.ttft_s / alone.ttft_s)
    usage = newcomer.ended.usage if newcomer.ended else None
    found.add("prompt_tokens", usage.prompt_tokens if usage else None)
    if usage and usage.cached_tokens > max(_TEMPLATE_TOKENS, usage.prompt_tokens // 4):
        found.notes.append(
            f"{usage.cached_tokens} tokens of the newcomer's prompt came from a cache; take another --seed"
        )
    end_to_end = gaps_between(running.piece_s, running.piece_s[0], newcomer.piece_s[0])
    found.trace("gap", *((at - arrival, gap * 1e3) for at, gap in end_to_end))
    return found
