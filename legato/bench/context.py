"""First-token latency, speed and memory of a model by its context length, flash attention off and on.

Each combination is a model opened anew, with one slot. In it, prompts of several lengths: a short one, and ones that
fill a quarter, a half, and all that the answer leaves of the context. The answers' gaps then give ITL by depth.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import psutil

from legato.bench import ITL, TTFT
from legato.bench.errors import BenchError
from legato.bench.prompts import Prompts
from legato.bench.results import Metric, Panel, Samples, Series, TargetResult
from legato.bench.runner import Say, limit, prefixed
from legato.bench.stats import gaps, percentile, tokens_per_s
from legato.bench.targets import Ask, LocalTarget, OpenModel, read_all

OpenWith = Callable[[int, str], AbstractContextManager[OpenModel]]  # context, flash attention
PromptsFor = Callable[[OpenModel], Prompts]

DEFINITIONS = (
    f"{TTFT} Short: a prompt of a few words. Full: a prompt that fills the context but for the answer.",
    ITL,
    "Memory: what the process holds (RSS) once the full prompt was read; the model file's mapped pages are in it.",
)
_SHORT_TOKENS = 16
_TEMPLATE_TOKENS = 64  # left free for what the chat template adds


@dataclass(frozen=True, slots=True)
class ContextPlan:
    """answer: tokens decoded after each prompt. timeout_s: for one model and round."""

    contexts: Sequence[int] = (1024, 2048, 4096)
    flash_attention: Sequence[str] = ("off", "on")
    answer: int = 32
    rounds: int = 1
    timeout_s: float = 600.0

    def depths(self, context: int) -> list[int]:
        """Prompt lengths in tokens, shortest first. Raises BenchError for a context with no room for a prompt."""
        full = context - self.answer - _TEMPLATE_TOKENS
        if full <= _SHORT_TOKENS:
            raise BenchError(
                f"a context of {context} has no room for a prompt beside {self.answer} tokens of answer and "
                f"{_TEMPLATE_TOKENS} of the chat template; give larger --contexts or a shorter --answer"
            )
        return sorted({_SHORT_TOKENS, *(depth for depth in (context // 4, context // 2) if depth < full), full})


def measure_context(plan: ContextPlan, open_with: OpenWith, prompts_for: PromptsFor, say: Say) -> list[TargetResult]:
    """One result per kernel. Opens and closes the models on this thread. Raises what opening and streaming raise."""
    for context in plan.contexts:
        plan.depths(context)
    results = {kernel: TargetResult(f"flash attention {kernel}", Samples()) for kernel in plan.flash_attention}
    for index in range(plan.rounds):
        for context in plan.contexts:
            for kernel in plan.flash_attention:
                tell = prefixed(
                    say, f"round {index + 1} of {plan.rounds}, context {context}, flash attention {kernel}: "
                )
                tell("opening the model")
                with open_with(context, kernel) as llm:
                    one = _OneContext(plan, LocalTarget(llm), prompts_for(llm), context)
                    found = asyncio.run(one.measure(f"{index}/{context}/{kernel}", tell))
                results[kernel].samples.merge(found)
    return list(results.values())


@dataclass(frozen=True, slots=True)
class _OneContext:
    plan: ContextPlan
    target: LocalTarget
    prompts: Prompts
    context: int

    async def measure(self, key: str, say: Say) -> Samples:
        found = Samples()
        await read_all(self.target, Ask(self.prompts.question(f"{key}/warm-up"), 4))
        depths = self.plan.depths(self.context)
        async with limit(self.plan.timeout_s, self.target.name):
            for depth in depths:
                say(f"a prompt of {depth} tokens")
                name = {depths[0]: "short", depths[-1]: "full"}.get(depth, "")
                await self._answer_at(depth, f"{key}/{depth}", name, found)
        found.add(f"memory@{self.context}", psutil.Process().memory_info().rss / 2**20)
        return found

    async def _answer_at(self, depth: int, key: str, name: str, found: Samples) -> None:
        record = await read_all(self.target, Ask(self.prompts.text(key, depth), self.plan.answer))
        if name:
            found.add(f"ttft_{name}@{self.context}", record.ttft_s)
            found.add(f"speed_{name}@{self.context}", tokens_per_s(record))
            if record.ttft_s is not None:
                found.trace(f"ttft_{name}", (self.context, record.ttft_s * 1e3))
        between = gaps(record.piece_s)
        found.add(f"gap_{name or depth}@{self.context}", *between)
        if between and record.ended and record.ended.usage:
            found.trace("gap", (record.ended.usage.prompt_tokens, percentile(between, 0.5) * 1e3))


def metrics(plan: ContextPlan) -> list[Metric]:
    rows: list[Metric] = []
    for context in plan.contexts:
        head = f"context {context}:"
        rows += [
            Metric(f"ttft_short@{context}", f"{head} TTFT, short prompt"),
            Metric(f"ttft_full@{context}", f"{head} TTFT, full prompt"),
            Metric(f"speed_short@{context}", f"{head} decode after the short prompt", "tok/s"),
            Metric(f"speed_full@{context}", f"{head} decode after the full prompt", "tok/s"),
            Metric(f"memory@{context}", f"{head} memory", "MiB"),
        ]
        for depth in plan.depths(context):
            name = {_SHORT_TOKENS: "short", plan.depths(context)[-1]: "full"}.get(depth, str(depth))
            rows.append(Metric(f"gap_{name}@{context}", f"{head} ITL after {depth} tokens"))
    return rows


def panels(results: Sequence[TargetResult]) -> Sequence[Panel]:
    def lines(key: str) -> list[Series]:
        return [Series(result.name, _medians(result.samples.traces.get(key, []))) for result in results]

    return [
        Panel("First text, full prompt", "context, tokens", "TTFT, ms", lines("ttft_full"), "line"),
        Panel("First text, short prompt", "context, tokens", "TTFT, ms", lines("ttft_short"), "line"),
        Panel("Gaps by depth", "tokens before", "median ITL, ms", lines("gap"), "line"),
    ]


def _medians(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """One point for each x, in order."""
    by_x: dict[float, list[float]] = {}
    for x, y in points:
        by_x.setdefault(x, []).append(y)
    return [(x, percentile(by_x[x], 0.5)) for x in sorted(by_x)]
