"""What every `legato bench` command does around its measurement: check, open, run, show."""

import asyncio
import importlib
import json
import os
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import click

from legato.bench.cancel import FlagProbe, IdleProbe, ProcessProbe
from legato.bench.errors import BenchError
from legato.bench.progress import Progress
from legato.bench.prompts import Prompts
from legato.bench.results import Outcome, TargetResult
from legato.bench.runner import Benchmark, Plan, Say, run_rounds
from legato.bench.targets import LocalTarget, Target
from legato.cli.opening import open_model
from legato.cli.options import DEFAULT_MODEL, CommonOptions
from legato.engine.config import EngineConfig

if TYPE_CHECKING:
    from legato.api import LLM
    from legato.bench.remote import Endpoint

Values = Mapping[str, Any]
Make = Callable[[Prompts, Mapping[str, IdleProbe]], Benchmark]  # the probes by the name of the target
Emit = Callable[[Outcome], None]

TEMPLATE_TOKENS = 256  # for what a chat template and a short question add to a prompt
_LEAST_SLOTS = 4
_CELLS = 256
_EXTRA = {"httpx", "matplotlib", "rich"}
_ENGINE = ("slots", "context", "threads", "flash_attention", "itl_target_ms")
_UNSHOWN = {"api_key", "vs_api_key", "json", "plot"}


def run(values: Values, context: int, slots: int, make: Make) -> None:
    """Measure the targets that were asked for, and show what came out.

    context, slots: what the benchmark needs in process, where the user does not say. Raises UsageError, and what
    opening and measuring raise.
    """
    engine = _engine(values, context, slots)
    endpoints = _endpoints(values)
    seed = seed_of(values)
    with session(values, needs_http=bool(endpoints)) as emit, ExitStack() as stack:
        probes = _process_probes(values)
        llm = None
        if not values["url"]:
            llm = stack.enter_context(open_model(CommonOptions(local_model(values), None, engine, {})))
        say = stack.enter_context(progress())
        plan = Plan(values["rounds"], values["timeout"], prompts_of(seed, llm), values["pause"])
        local = [] if llm is None else [LocalTarget(llm, is_raw=values["completions"])]
        if llm is not None:
            probes[local[0].name] = FlagProbe(_idle_flag(llm))
        benchmark = make(plan.prompts, probes)
        results = asyncio.run(_measure(benchmark, local, endpoints, plan, say))
        settings = _settings(values, seed, {} if llm is None else engine)
        emit(
            Outcome(
                benchmark.name,
                benchmark.definitions,
                settings,
                benchmark.metrics,
                results,
                benchmark.panels(results),
            )
        )


async def _measure(
    benchmark: Benchmark, local: Sequence[Target], endpoints: "Sequence[Endpoint]", plan: Plan, say: Say
) -> list[TargetResult]:
    targets = list(local)
    async with AsyncExitStack() as stack:
        for endpoint in endpoints:
            target = importlib.import_module("legato.bench.remote").UrlTarget(endpoint)
            stack.push_async_callback(target.close)
            targets.append(target)
        return await run_rounds(benchmark, targets, plan, say)


@contextmanager
def session(values: Values, *, needs_http: bool = False) -> Iterator[Emit]:
    """Check, before anything is measured, that it can be shown; → what shows it.

    Raises UsageError for places that cannot be written to, BenchError when a package is missing.
    """
    as_json = values["json"]
    plot = _writable(values["plot"], "--plot")
    file = None if as_json in (None, "-") else _writable(as_json, "--json")
    report = _extra("legato.bench.report")
    draw = _extra("legato.bench.plot").save_plot if plot else None
    if needs_http:
        _extra("legato.bench.remote")

    def emit(outcome: Outcome) -> None:
        text = json.dumps(report.json_value(outcome), indent=1) + "\n"
        if as_json == "-":
            click.echo(text, nl=False)
        else:
            report.print_table(outcome, sys.stdout)
        if file is not None:
            file.write_text(text, encoding="utf-8")
        if draw is not None:
            draw(outcome, plot)

    yield emit


@contextmanager
def progress() -> Iterator[Say]:
    shown = Progress(sys.stderr)
    try:
        yield shown.say
    finally:
        shown.clear()


def local_model(values: Values) -> str:
    return values["model"] or os.environ.get("LEGATO_MODEL") or DEFAULT_MODEL


def seed_of(values: Values) -> int:
    """A random seed where none was given: the prompts of an earlier run may still be in a server's cache."""
    given: int | None = values["seed"]
    return secrets.randbelow(2**32) if given is None else given


def prompts_of(seed: int, llm: Any) -> Prompts:
    """llm: whose tokenizer measures the prompts; None = words are counted."""
    return Prompts(seed, None if llm is None else lambda text: len(llm.tokenize(text)))


def _extra(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if name not in _EXTRA:
            raise
        raise BenchError(f"this needs {name}, which is not installed; run: pip install 'legato[bench]'") from error


def _engine(values: Values, context: int, slots: int) -> dict[str, Any]:
    """Settings of the model in this process. Raises UsageError, ConfigError."""
    given = {name: values[name] for name in _ENGINE if values[name] is not None}
    if values["url"] and given:
        flag = "--" + next(iter(given)).replace("_", "-")
        raise click.UsageError(f"{flag} is for the model in this process; with --url set it at the server", _context())
    needed = {"context": -(-context // _CELLS) * _CELLS, "slots": max(slots, _LEAST_SLOTS)}
    engine = needed | given
    EngineConfig(**engine)
    return engine


def _endpoints(values: Values) -> "list[Endpoint]":
    """The servers, checked. Raises UsageError."""
    given = [(flag, values[flag.removeprefix("--")]) for flag in ("--url", "--vs") if values[flag.removeprefix("--")]]
    for flag, url in given:
        _check_url(url, flag)
    if len(given) == 2 and given[0][1].rstrip("/") == given[1][1].rstrip("/"):
        raise click.UsageError("--url and --vs are the same server; name another one", _context())
    if not given:
        return []
    endpoint = _extra("legato.bench.remote").Endpoint
    names = {"--url": (values["model"], values["api_key"]), "--vs": (values["vs_model"], values["vs_api_key"])}
    return [endpoint(url, *names[flag], values["completions"], values["strict"]) for flag, url in given]


def _check_url(url: str, flag: str) -> None:
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        good = False
    if not good or not url.isprintable():
        raise click.BadParameter(
            f"{url!r} is no URL of a server; write it like http://127.0.0.1:8080", _context(), param_hint=flag
        )


def _process_probes(values: Values) -> dict[str, IdleProbe]:
    pairs = [(values[url], values.get(pid)) for url, pid in (("url", "pid"), ("vs", "vs_pid"))]
    return {url.rstrip("/"): ProcessProbe(pid) for url, pid in pairs if url and pid}


def _idle_flag(llm: "LLM") -> Callable[[], bool]:
    provider = llm._provider
    return lambda: provider.is_idle


def _settings(values: Values, seed: int, engine: Values) -> dict[str, Any]:
    plain = {name: value for name, value in values.items() if name not in {*_UNSHOWN, *_ENGINE}}
    return plain | {"seed": seed, "engine": dict(engine)}


def _writable(name: str | None, flag: str) -> Path | None:
    """Raises BadParameter for a place where no file can be written."""
    if name is None:
        return None
    path = Path(name)
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise click.BadParameter(
            f"{name} cannot be written; name a file in a folder that is there", _context(), param_hint=flag
        )
    return path


def _context() -> click.Context | None:
    return click.get_current_context(silent=True)
