"""Rounds, target by target in turn: what disturbs the machine for a while disturbs all targets alike."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from legato.bench.errors import BenchError
from legato.bench.prompts import Prompts
from legato.bench.results import Metric, Panel, Samples, TargetResult
from legato.bench.targets import Ask, Target, read_all

Say = Callable[[str], None]


class Benchmark(Protocol):
    """One kind of measurement. `definitions` say what its words mean."""

    @property
    def name(self) -> str: ...

    @property
    def definitions(self) -> Sequence[str]: ...

    @property
    def metrics(self) -> Sequence[Metric]: ...

    async def measure(self, target: Target, key: str, say: Say) -> Samples:
        """One round. key: names this round's prompts, so that no other round has sent them."""

    def panels(self, results: Sequence[TargetResult]) -> Sequence[Panel]: ...


@dataclass(frozen=True, slots=True)
class Plan:
    """timeout_s: for one round of one target. pause_s: rest before each, in which servers notice that clients left."""

    rounds: int
    timeout_s: float
    prompts: Prompts
    pause_s: float = 1.0


async def run_rounds(benchmark: Benchmark, targets: Sequence[Target], plan: Plan, say: Say) -> list[TargetResult]:
    """Measure. Targets take turns, and who goes first changes with every round; each is warmed up by one short answer.

    Raises BenchError and what the targets raise.
    """
    results = [TargetResult(target.name, Samples()) for target in targets]
    for place, target in enumerate(targets):
        say(f"{target.name}: warming up")
        async with limit(plan.timeout_s, target.name):
            await read_all(target, Ask(plan.prompts.question(f"warm-up/{place}"), max_tokens=8))
    for index in range(plan.rounds):
        turns = list(enumerate(targets))
        for place, target in reversed(turns) if index % 2 else turns:
            await asyncio.sleep(plan.pause_s)
            tell = prefixed(say, f"round {index + 1} of {plan.rounds}, {target.name}: ")
            async with limit(plan.timeout_s, target.name):
                results[place].samples.merge(await benchmark.measure(target, f"{index}/{place}", tell))
    return results


def prefixed(say: Say, head: str) -> Say:
    return lambda text: say(head + text)


@asynccontextmanager
async def limit(timeout_s: float, name: str) -> AsyncIterator[None]:
    """Raises BenchError when what is in the block takes longer."""
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError as error:
        raise BenchError(
            f"{name} took more than {timeout_s:g} s for one round; --timeout allows more, --tokens asks for less"
        ) from error
