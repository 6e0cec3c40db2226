"""Options that the commands of `legato bench` share."""

import math
from collections.abc import Callable
from typing import Any

import click

from legato.cli.options import DEFAULT_MODEL, SectionOption

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


class Number(click.ParamType):  # type: ignore[type-arg, unused-ignore]  # generic since click 8.5
    """A finite number above 0. Its range is not shown in `--help`, only in the error."""

    name = "number"

    def __init__(self, high: float = 1e9) -> None:
        self._range = click.FloatRange(min=0, max=high, min_open=True)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(self._range.convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number; give one above 0", param, ctx)
        return number


class Whole(click.ParamType):  # type: ignore[type-arg, unused-ignore]  # generic since click 8.5
    """A whole number in a range that is not shown in `--help`, only in the error."""

    name = "integer"

    def __init__(self, low: int, high: int | None = None) -> None:
        self._range = click.IntRange(low, high)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        return int(self._range.convert(value, param, ctx))


def options(section: str, *specs: tuple[str, dict[str, Any]]) -> Decorator:
    """specs: a flag ("-m/--model" gives both) and what click.option takes."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for flag, attrs in reversed(specs):
            function = click.option(*flag.split("/"), cls=SectionOption, section=section, **attrs)(function)
        return function

    return decorate


def count(high: int = 1_000_000, **attrs: Any) -> dict[str, Any]:
    return {"type": Whole(1, high), "metavar": "N", "show_default": True, **attrs}


def text(words: str, metavar: str) -> dict[str, Any]:
    return {"metavar": metavar, "help": words}


LOCAL_MODEL = text(f"As for `legato run`.  [env var: LEGATO_MODEL; default: {DEFAULT_MODEL}]", "TEXT")
MODEL = text(
    f"In process: as for `legato run` (LEGATO_MODEL, else {DEFAULT_MODEL}). With --url: its name there.", "TEXT"
)
OUTPUT = options(
    "Output",
    ("--json", text("Write everything, single values included, to FILE; `-` = stdout, without the table.", "FILE|-")),
    ("--plot", text("Draw a picture.", "FILE.png")),
)
TARGETS = options(
    "What is measured",
    ("-m/--model", MODEL),
    ("--url", text("A server that speaks the OpenAI protocol, instead of the model in this process.", "URL")),
    ("--api-key", text("For --url; LEGATO_BENCH_API_KEY does the same.", "TEXT") | {"envvar": "LEGATO_BENCH_API_KEY"}),
    ("--vs", text("A second server: rounds alternate, and ratios are shown.", "URL")),
    ("--vs-model", text("The model's name at --vs; unset = the first one it lists.", "TEXT")),
    ("--vs-api-key", text("For --vs.", "TEXT")),
    ("--completions", {"is_flag": True, "help": "Plain completions: no chat template, /v1/completions at servers."}),
    ("--strict", {"is_flag": True, "help": "Send servers only what OpenAI has: no ignore_eos; answers may end early."}),
)
SETTINGS = options(
    "Engine, in process",
    ("--slots", count(256, help="Generations at once.  [default: what the benchmark needs, at least 4]")),
    ("--context", count(2**31 - 1, help="Tokens per slot.  [default: what the benchmark needs]")),
    ("--threads", count(1024, help="Processor threads.  [default: one per physical core]")),
    ("--flash-attention", {"type": click.Choice(["auto", "on", "off"]), "help": "The attention kernel."}),
    ("--itl-target-ms", {"type": Number(), "metavar": "MS", "help": "The engine's limit of a running stream's gaps."}),
)


def rounds(default: int, timeout_s: float = 300.0, *, has_pause: bool = True) -> Decorator:
    pause = (
        "--pause",
        {
            "type": click.FloatRange(0, 3600),
            "metavar": "SECONDS",
            "default": 1.0,
            "show_default": True,
            "help": "Rest before each round, in which servers notice that clients left.",
        },
    )
    return options(
        "Measurement",
        ("--rounds", count(1000, default=default, help="How often.")),
        ("--seed", {"type": Whole(0), "metavar": "N", "help": "Same seed, same prompts.  [default: random]"}),
        ("--timeout", {"type": Number(), "metavar": "SECONDS", "default": timeout_s, "help": "Limit of one round.",
                       "show_default": True}),
        *([pause] if has_pause else []),
    )  # fmt: skip


def lengths(tokens: int, answer: int, prompt: str) -> Decorator:
    return options(
        "Measurement",
        ("--tokens", count(default=tokens, help=f"Length of {prompt}.")),
        ("--answer", count(default=answer, help="Most tokens of an answer.")),
    )


def epilog(*lines: str) -> str:
    return "\b\nExamples:\n" + "\n".join(f"  legato bench {line}" for line in lines)
