"""`legato bench`: first-token and inter-token latency, stalls and load, of Legato and of servers, side by side."""

import sys
from typing import TYPE_CHECKING, Any

import click

from legato.bench import cold as cold_start
from legato.bench import context as by_context
from legato.bench.cancel import CancelBenchmark, Phase
from legato.bench.load import LoadBenchmark
from legato.bench.prefix import PrefixBenchmark
from legato.bench.results import Outcome
from legato.bench.stall import StallBenchmark
from legato.bench.stats import Goals
from legato.cli.bench_options import (
    LOCAL_MODEL,
    OUTPUT,
    SETTINGS,
    TARGETS,
    Number,
    count,
    epilog,
    lengths,
    options,
    rounds,
)
from legato.cli.bench_session import TEMPLATE_TOKENS, local_model, progress, prompts_of, run, seed_of, session
from legato.cli.opening import open_model
from legato.cli.options import CommonOptions, SectionCommand

if TYPE_CHECKING:
    from legato.api import LLM


@click.group(
    epilog=epilog("stall", "stall --vs http://127.0.0.1:8080 --plot stall.png", "load --clients 8 --json load.json")
)
def bench() -> None:
    """Measure streaming: of Legato in this process, or of any server that speaks the OpenAI protocol.

    TTFT is the time from sending a request to its first text; ITL, or a gap, the time between two pieces of text of one
    stream; a stall the largest gap. Progress goes to stderr, the table to stdout. Use a quiet machine.
    """


@bench.command(cls=SectionCommand, epilog=epilog("stall", "stall --tokens 6000 --itl-target-ms 250",
               "stall --vs http://127.0.0.1:8080 --rounds 5 --plot stall.png"))  # fmt: skip
@lengths(3000, 2048, "the newcomer's prompt")
@rounds(3)
@TARGETS
@SETTINGS
@OUTPUT
def stall(**values: Any) -> None:
    """One stream runs, and after a second a long prompt arrives that nobody has sent before.

    Shown: the running stream's gaps (ITL) from the arrival to the newcomer's first text, the largest of them (stall),
    the newcomer's TTFT, and the TTFT of such a prompt alone. TTFT counts to the first text.
    """
    context = max(values["tokens"], values["answer"]) + TEMPLATE_TOKENS
    run(values, context, 4, lambda p, _: StallBenchmark(p, values["tokens"], values["answer"]))


@bench.command(cls=SectionCommand, epilog=epilog("prefix", "prefix --requests 8 --vs http://127.0.0.1:8080"))
@options("Measurement", ("--requests", count(256, default=4, help="Requests at once.")))
@lengths(2600, 8, "the system prompt they share")
@rounds(3)
@TARGETS
@SETTINGS
@OUTPUT
def prefix(**values: Any) -> None:
    """Several requests at once share one long system prompt: first a new one (cold), then the same again (warm).

    Shown: the TTFT (to the first text) of all and the worst of each round, and how much came from a cache.
    """
    context = values["tokens"] + values["answer"] + TEMPLATE_TOKENS
    sizes = (values["requests"], values["tokens"], values["answer"])
    run(values, context, values["requests"], lambda p, _: PrefixBenchmark(p, *sizes))


@bench.command(cls=SectionCommand, epilog=epilog("load --clients 8", "load --rate 2 --requests 60",
               "load --clients 8 --vs http://127.0.0.1:8080 --rounds 3 --plot load.png"))  # fmt: skip
@options(
    "Measurement",
    ("--clients", count(4096, help="Closed loop: each client asks again when it has its answer.  [default: 8]",
                         show_default=False)),
    ("--rate", {"type": Number(1e6), "metavar": "R", "help": "Open loop: R requests a second, at random times."}),
    ("--requests", count(default=32, help="In all.")),
    ("--ttft-target", {"type": Number(), "metavar": "MS", "default": 1000.0, "show_default": True,
                       "help": "Goodput counts answers whose TTFT is at most this."}),
    ("--itl-target", {"type": Number(), "metavar": "MS", "default": 200.0, "show_default": True,
                      "help": "Goodput counts answers without a gap over this."}),
)  # fmt: skip
@lengths(64, 128, "each prompt")
@rounds(1)
@TARGETS
@SETTINGS
@OUTPUT
def load(**values: Any) -> None:
    """Many requests: a closed loop of clients, or an open one of arrivals by a Poisson process.

    Shown: tokens per second, TTFT (to the first text; in the open loop from when the request was due), the gaps of all
    streams (ITL), the largest of each (stall), and goodput: answers per second that met both targets.
    """
    if values["clients"] and values["rate"]:
        raise click.UsageError(
            "--clients makes a closed loop and --rate an open one; give one of them", click.get_current_context()
        )
    clients = values["clients"] or 8
    goals = Goals(values["ttft_target"] / 1e3, values["itl_target"] / 1e3)
    sizes = (clients, values["rate"], values["requests"], values["tokens"], values["answer"])
    context = values["tokens"] + values["answer"] + TEMPLATE_TOKENS
    run(values, context, min(clients, 256), lambda p, _: LoadBenchmark(p, goals, *sizes))


@bench.command(cls=SectionCommand, epilog=epilog("cancel", "cancel --url http://127.0.0.1:8080 --pid 4711",
               "cancel --vs http://127.0.0.1:8080 --vs-pid 4711"))  # fmt: skip
@options(
    "Measurement",
    ("--phase", {"type": click.Choice(["prefill", "decode", "both"]), "default": "both", "show_default": True,
                 "help": "When the client leaves: before the first text, or during the answer."}),
    ("--after", {"type": Number(3600), "metavar": "SECONDS", "default": 0.5, "show_default": True,
                 "help": "Leave the prefill this long after sending."}),
    ("--pid", count(2**31 - 1, help="The process of --url, to see when it is idle.")),
    ("--vs-pid", count(2**31 - 1, help="The process of --vs.")),
)  # fmt: skip
@lengths(3000, 512, "the prompt that is left in prefill")
@rounds(3)
@TARGETS
@SETTINGS
@OUTPUT
def cancel(**values: Any) -> None:
    """A client leaves before the first text of its answer, or in the middle of it: until the processor is idle.

    In process the engine says when it serves nobody. Of a server the CPU time of its process tells it: --pid.
    """
    phases: tuple[Phase, ...] = ("prefill", "decode") if values["phase"] == "both" else (values["phase"],)
    for url, pid in (("url", "pid"), ("vs", "vs_pid")):
        if values[url] and not values[pid]:
            flag = pid.replace("_", "-")
            raise click.UsageError(
                f"it cannot be seen from outside whether {values[url]} is idle; give its process by --{flag}",
                click.get_current_context(),
            )
    sizes = (values["tokens"], values["answer"], values["after"], phases)
    context = values["tokens"] + values["answer"] + TEMPLATE_TOKENS
    run(values, context, 4, lambda p, probes: CancelBenchmark(p, probes, *sizes))


@bench.command(cls=SectionCommand, epilog=epilog("cold", "cold --rounds 20 --json cold.json"))
@options("Measurement", ("--rounds", count(1000, default=5, help="How often.")),
          ("--timeout", {"type": Number(), "metavar": "SECONDS", "default": 120.0, "help": "Limit of one start.",
                         "show_default": True}))  # fmt: skip
@options("What is measured", ("-m/--model", LOCAL_MODEL))
@OUTPUT
def cold(**values: Any) -> None:
    """From starting `legato run hi` to the first byte of its answer, imports and loading included."""
    model = local_model(values)
    command = [sys.executable, "-m", "legato", "run", "--no-stdin", "--max-tokens", "8", "-m", model, "hi"]
    plan = cold_start.ColdPlan(command, values["rounds"], values["timeout"])
    with session(values) as emit, progress() as say:
        results = [cold_start.measure_cold(f"legato run ({model})", plan, say)]
        settings = {"model": model, "rounds": plan.rounds, "command": command[1:]}
        emit(Outcome("cold", cold_start.DEFINITIONS, settings, cold_start.METRICS, results, cold_start.panels(results)))


def __contexts(_ctx: click.Context, param: click.Parameter, value: str) -> tuple[int, ...]:
    try:
        lengths = tuple(sorted({int(part) for part in value.split(",")}))
    except ValueError:
        raise click.BadParameter("give whole numbers with commas between, as in 1024,2048", param=param) from None
    if not all(64 <= length <= 2**24 for length in lengths):
        raise click.BadParameter(f"a context is from 64 to {2**24} tokens", param=param)
    return lengths


@bench.command(
    "context", cls=SectionCommand, epilog=epilog("context", "context --contexts 512,8192 --plot context.png")
)
@options(
    "Measurement",
    ("--contexts", {"default": "1024,2048,4096", "show_default": True, "metavar": "N,N…", "callback": __contexts,
                    "help": "Context lengths in tokens; each is a model opened anew, with one slot."}),
    ("--flash-attention", {"type": click.Choice(["off", "on", "both"]), "default": "both", "show_default": True,
                           "help": "The attention kernel."}),
    ("--answer", count(default=32, help="Tokens of each answer.")),
)  # fmt: skip
@rounds(1, 600.0, has_pause=False)
@options("What is measured", ("-m/--model", LOCAL_MODEL))
@options("Engine, in process", ("--threads", count(1024, help="Processor threads.")))
@OUTPUT
def context_(**values: Any) -> None:
    """TTFT, speed and memory by context length, flash attention off and on, and ITL by depth. In process only.

    TTFT (to the first text) of a short prompt and of one that fills the context; the gaps after prompts of several
    lengths show how a token's cost grows with what came before it.
    """
    kernels = ("off", "on") if values["flash_attention"] == "both" else (values["flash_attention"],)
    plan = by_context.ContextPlan(values["contexts"], kernels, values["answer"], values["rounds"], values["timeout"])
    seed = seed_of(values)
    model = local_model(values)

    def open_with(context: int, kernel: str) -> "LLM":
        given = {"context": context, "flash_attention": kernel, "slots": 1, "threads": values["threads"]}
        return open_model(CommonOptions(model, None, given, {}))

    with session(values) as emit, progress() as say:
        metrics = by_context.metrics(plan)
        results = by_context.measure_context(plan, open_with, lambda llm: prompts_of(seed, llm), say)
        settings = {
            "model": model,
            "seed": seed,
            "contexts": plan.contexts,
            "answer": plan.answer,
            "threads": values["threads"],
            "rounds": plan.rounds,
        }
        panels = by_context.panels(results)
        emit(Outcome("context", by_context.DEFINITIONS, settings, metrics, results, panels))
