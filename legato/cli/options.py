"""Command-line options made from the declarations in `legato.core.request` and `legato.engine.config`.

Names, kinds, ranges, defaults and help texts have one home, the dataclass; here they only become flags. A bad value is
reported by the check of the dataclass, with the flag's name, before a model is opened.
"""

import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import click

from legato.core.errors import ConfigError, RequestError
from legato.core.request import GenerationOptions, Limits, SamplingParams, make_options
from legato.engine.config import EngineConfig

DEFAULT_MODEL = "smollm2"
Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

# The engine's settings that make sense for one conversation, and what they mean there.
_ENGINE_HELP = {
    "context": "tokens that prompt and answer may take together; unset = what the model and the memory allow",
    "threads": "processor threads; unset = one per physical core",
    "flash_attention": "the attention kernel; auto = where the KV type needs it",
    "kv_type": "number format of the KV cache; q8_0 and q4_0 take less memory",
    "gpu_layers": "layers to compute on a GPU, when the engine was built for one; -1 = all",
}
_COMMA_LISTS = {"samplers"}  # an order is written in one piece
_PAIR = "ID=NUMBER"
_ONLY_RUN = {"n", "logprobs"}
_ONLY_SHARED = {"priority", "cache_salt"}  # of no use to a command that has the engine to itself


class SectionOption(click.Option):
    """An option that `--help` lists under a heading of its own."""

    def __init__(self, names: list[str], *, section: str, **attrs: Any) -> None:
        super().__init__(names, **attrs)
        self.section = section


class SectionCommand(click.Command):
    """`--help` with the options in sections, in the order in which the sections first appear."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {"Options": []}
        for param in self.get_params(ctx):
            if isinstance(param, click.Option) and (record := param.get_help_record(ctx)) is not None:
                sections.setdefault(getattr(param, "section", "Options"), []).append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)


@dataclass(frozen=True, slots=True)
class CommonOptions:
    """What run and chat share: the model's name, the engine's settings, and options of the generation by name."""

    model: str
    system: str | None
    engine: Mapping[str, Any]
    generation: Mapping[str, Any]


def common_options(*, chat: bool) -> Decorator:
    """Decorator: -m, --system and all generated options. `take_common` gathers their values."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed([*_base(), *generation_options(chat=chat), *engine_options()]):
            function = option(function)
        return function

    return decorate


def take_common(values: Mapping[str, Any]) -> CommonOptions:
    """Gather and check. Raises RequestError for values that do not fit one another, ConfigError likewise."""
    generation = dict(_given(values, _generation_fields()))
    make_options(generation)
    engine = dict(_given(values, _engine_fields())) | {"slots": 1}
    EngineConfig(**engine)
    return CommonOptions(values["model"], values["system"], engine, generation)


def generation_options(*, chat: bool) -> Iterator[Decorator]:
    """One option per field of Limits and SamplingParams, and those of GenerationOptions where they apply."""
    for section, params in (("Limits", Limits), ("Sampling", SamplingParams), ("Output", GenerationOptions)):
        hints = get_type_hints(params)
        for f in fields(params):
            wanted = f.name not in _ONLY_SHARED and not (chat and f.name in _ONLY_RUN)
            if "help" in f.metadata and wanted:
                yield _option(f, hints[f.name], section, f.metadata["help"], _check_generation)


def engine_options() -> Iterator[Decorator]:
    """One option per engine setting that concerns a lone conversation."""
    hints = get_type_hints(EngineConfig)
    for f in fields(EngineConfig):
        if f.name in _ENGINE_HELP:
            yield _option(f, hints[f.name], "Engine", _ENGINE_HELP[f.name], _check_engine)


def _base() -> Iterator[Decorator]:
    yield click.option(
        "-m",
        "--model",
        default=DEFAULT_MODEL,
        envvar="LEGATO_MODEL",
        show_default=True,
        show_envvar=True,
        help="A model's name, a .gguf file, or hf:owner/repo:quant, which is fetched when it is not here.",
    )
    yield click.option(
        "--system",
        metavar="TEXT",
        callback=lambda _ctx, _param, value: None if value is None else argument_text(value, "--system"),
        help="How the model should behave.",
    )


def _option(
    f: "Field[Any]",
    hint: Any,
    section: str,
    text: str,
    check: Callable[[click.Context, click.Parameter, Any], Any],
) -> Decorator:
    text = f"{text[0].upper()}{text[1:]}{_range_note(f)}.{_default_note(f)}"
    flag = "-n" if f.name == "n" else "--" + f.name.removesuffix("_s").replace("_", "-")
    attrs: dict[str, Any] = {"help": text, "callback": check, "cls": SectionOption, "section": section}
    kind = _base_type(hint)
    if kind is bool:
        return click.option(flag, f.name, is_flag=True, **attrs)
    if get_origin(kind) is Literal:
        attrs |= {"type": click.Choice(get_args(kind))}
    elif f.name in _COMMA_LISTS:
        attrs |= {"type": click.STRING, "metavar": "NAME,NAME…"}
    elif get_origin(kind) is Mapping:
        attrs |= {"type": click.STRING, "multiple": True, "metavar": _PAIR}
    elif get_origin(kind) is tuple:
        whole = get_args(kind)[0] is int
        attrs |= {"type": click.INT if whole else click.STRING, "multiple": True, "metavar": "ID" if whole else "TEXT"}
    else:
        number = "NUMBER" if kind is float else "INTEGER"
        attrs |= {"type": kind, "metavar": "SECONDS" if f.name.endswith("_s") else number}
    return click.option(flag, f.name, **attrs)


def _base_type(hint: Any) -> Any:
    """The type without `| None`."""
    if isinstance(hint, UnionType):
        return next(kind for kind in get_args(hint) if kind is not type(None))
    return hint


def _range_note(f: "Field[Any]") -> str:
    low, high = f.metadata.get("low", -math.inf), f.metadata.get("high", math.inf)
    above = f.metadata.get("above", -math.inf)
    if high in (math.inf, 2**31 - 1, 2**32 - 2, 1e9):  # no limit that anyone meets
        return ""
    return f" (above {above:g}, to {high:g})" if above > -math.inf else f" ({low:g} to {high:g})"


def _default_note(f: "Field[Any]") -> str:
    if f.default is MISSING or f.default in (None, False, ()):
        return ""
    if isinstance(f.default, tuple):
        shown = ",".join(f.default) if f.name in _COMMA_LISTS else " ".join(repr(item) for item in f.default)
    else:
        shown = str(f.default)
    return f"  [default: {shown}]"


def _check_generation(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
    return _check(param, value, lambda name, given: make_options({name: given}))


def _check_engine(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
    return _check(param, value, lambda name, given: EngineConfig(**{name: given}))


def _check(param: click.Parameter, value: Any, make: Callable[[str, Any], object]) -> Any:
    """→ the value as the dataclass takes it; None when the option was not given. Raises BadParameter."""
    if value is None or value == () or value is False:
        return None
    name = str(param.name)
    try:
        value = _as_text(value, param)
        if name in _COMMA_LISTS:
            value = tuple(item.strip() for item in value.split(","))
        elif param.metavar == _PAIR:
            value = dict(_as_pair(item) for item in value)
        make(name, value)
    except (RequestError, ConfigError) as error:
        raise click.BadParameter(str(error), param=param) from error
    return value


def argument_text(text: str, name: str) -> str:
    """An argument read as UTF-8, whatever the locale made of it.

    Raises RequestError, naming the argument, for bytes that are no UTF-8: Python hands them over as lone surrogates.
    """
    try:
        return text if text.isascii() else os.fsencode(text).decode("utf-8")
    except UnicodeError:
        raise RequestError(f"{name} is not UTF-8 text; convert it first, for example with iconv", "prompt") from None


def _as_text(value: Any, param: click.Parameter) -> Any:
    if isinstance(value, str):
        return argument_text(value, param.opts[0])
    return tuple(_as_text(item, param) for item in value) if isinstance(value, tuple) else value


def _as_pair(text: str) -> tuple[int, float]:
    token, equals, number = text.partition("=")
    try:
        if equals:
            return int(token), float(number)
    except ValueError:
        pass
    raise RequestError(f"{text!r} must be a token id and a number, such as 42=-5 or 42=-inf")


def _given(values: Mapping[str, Any], names: frozenset[str]) -> Iterator[tuple[str, Any]]:
    return ((name, value) for name, value in values.items() if name in names and value is not None)


def _generation_fields() -> frozenset[str]:
    return frozenset(f.name for params in (Limits, SamplingParams, GenerationOptions) for f in fields(params))


def _engine_fields() -> frozenset[str]:
    return frozenset(_ENGINE_HELP)
