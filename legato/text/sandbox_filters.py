"""The filters and tests that a chat template may use: jinja2's own where their work is bounded, else written here."""

import json
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import Any, Protocol

from jinja2.filters import FILTERS, make_attrgetter
from jinja2.runtime import Context
from jinja2.tests import TESTS
from jinja2.utils import pass_context, pass_environment

from legato.text.sandbox_limits import MAX_NEEDLE, Budget, LimitError

_JINJA_TESTS: dict[str, Callable[..., Any]] = dict(TESTS)  # type: ignore[arg-type]


class _HasBudget(Protocol):
    """The sandbox environment, as far as a filter sees it."""

    budget: Budget


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


def budget_of(context: Context) -> Budget:
    budget: Budget = context.environment.budget  # type: ignore[attr-defined]
    return budget


def _guarded(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter or test of jinja2's own, its arguments measured before, its result listed and charged after."""
    mark = getattr(function, "jinja_pass_arg", None)

    @wraps(function)
    def guarded(context: Context, *args: Any, **kwargs: Any) -> Any:
        budget = budget_of(context)
        for value in (*args, *kwargs.values()):
            budget.operand(value)
        if mark is not None:
            passed = {"context": context, "environment": context.environment, "eval_context": context.eval_ctx}
            args = (passed[mark.name], *args)
        result = function(*args, **kwargs)
        return budget.made(list(result) if isinstance(result, Iterator) else result)

    return pass_context(guarded)


def _on_text(function: Callable[[str], Any]) -> Callable[..., Any]:
    @pass_environment
    def on_text(env: _HasBudget, value: Any) -> Any:
        return env.budget.made(function(env.budget.text(value)))

    return on_text


@pass_environment
def _trim(env: _HasBudget, value: Any, chars: str | None = None) -> Any:
    return env.budget.method(env.budget.text(value), "strip", (chars,), {})


@pass_environment
def _replace(env: _HasBudget, value: Any, old: Any, new: Any, count: int | None = None) -> str:
    text, old, new = map(env.budget.text, (value, old, new))
    return env.budget.replace(text, old, new, -1 if count is None else count)


@pass_environment
def _join(env: _HasBudget, value: Any, d: Any = "", attribute: str | int | None = None) -> str:
    items = env.budget.made(list(env.budget.operand(value)))
    if attribute is not None:
        getter = make_attrgetter(env, attribute)  # type: ignore[arg-type]
        items = list(map(getter, items))
    return env.budget.join(env.budget.text(d), items)


@pass_environment
def _indent(env: _HasBudget, value: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> Any:
    text = env.budget.text(value)
    by = len(width) if isinstance(width, str) else width
    env.budget.check(len(text) + (len(env.budget.made(text.splitlines())) + 2) * max(0, by))
    return env.budget.made(FILTERS["indent"](text, width, first, blank))


@pass_environment
def _format(env: _HasBudget, value: Any, *args: Any, **kwargs: Any) -> str:
    return env.budget.percent(env.budget.text(value), kwargs or args)


@pass_environment
def _string(env: _HasBudget, value: Any) -> str:
    return env.budget.text(value)


@pass_environment
def _int(env: _HasBudget, value: Any, default: int = 0, base: int = 10) -> Any:
    if isinstance(value, str) and len(value) > 64:
        raise LimitError("it reads a number that is too long")
    return FILTERS["int"](value, default, base)


def _round(value: float, precision: int = 0, method: str = "common") -> Any:
    if not 0 <= precision <= 20:
        raise LimitError("it rounds to more than 20 digits")
    return FILTERS["round"](value, precision, method)


@pass_environment
def _tojson(
    env: _HasBudget,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Sequence[str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as text, for a prompt: letters stay letters, nothing is escaped for HTML."""
    if ensure_ascii:
        raise LimitError("it asks tojson for ensure_ascii, which would hide what is message text")
    chars, num_nodes, depth = env.budget.measure(value, printable=True)
    width = 0 if indent is None else min(max(0, indent), MAX_NEEDLE)
    longest = sum(len(mark) for mark in separators or ())
    env.budget.check(chars + num_nodes * (8 + longest + width * depth))
    return str(
        env.budget.made(
            json.dumps(
                value,
                ensure_ascii=False,
                indent=None if indent is None else width,
                separators=None if separators is None else (separators[0], separators[1]),
                sort_keys=sort_keys,
            )
        )
    )


SAFE_FILTERS: dict[str, Callable[..., Any]] = {
    **{name: FILTERS[name] for name in ("abs", "count", "d", "default", "first", "last", "length")},
    **{
        name: _guarded(FILTERS[name])
        for name in words(
            "dictsort float items list map max min reject rejectattr reverse select selectattr sort unique"
        )
    },
    **{name: _on_text(getattr(str, name)) for name in ("capitalize", "lower", "upper")},
    "title": _on_text(FILTERS["title"]),
    "format": _format,
    "indent": _indent,
    "int": _int,
    "join": _join,
    "replace": _replace,
    "round": _round,
    "safe": _string,
    "string": _string,
    "tojson": _tojson,
    "trim": _trim,
}


def _divisible(value: float, by: float) -> bool:
    if not isinstance(value, int | float) or not isinstance(by, int | float):
        raise TypeError("odd, even and divisibleby are for numbers")
    return value % by == 0


SAFE_TESTS: dict[str, Callable[..., Any]] = {
    **{
        name: _JINJA_TESTS[name]
        for name in words(
            "boolean callable defined false filter float integer iterable mapping none number sameas sequence "
            "string test true undefined"
        )
    },
    **{
        name: _guarded(_JINJA_TESTS[name])
        for name in words("!= < <= == > >= eq equalto ge greaterthan gt in le lessthan lt ne")
    },
    "lower": _on_text(str.islower),
    "upper": _on_text(str.isupper),
    "divisibleby": _divisible,
    "even": lambda value: _divisible(value, 2),
    "odd": lambda value: not _divisible(value, 2),
}
