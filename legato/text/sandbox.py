"""jinja2's sandbox, closed further: every repetition ticks, every allocation is bounded, names are on lists.

Compiled code is instrumented by `_Generator`: loops, macros and outputs tick; `~`, slices and literals go through the
budget; what is compared or hashed is measured first. Constant folding is off, since it would run at compile time.
Operators, calls, attributes, filters and tests arrive in `TemplateSandbox`, which lets known ones through only.
"""

import re
from collections.abc import Callable, Iterable
from datetime import datetime
from types import BuiltinMethodType, FunctionType, MethodType
from typing import Any, NoReturn

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame, operators
from jinja2.exceptions import SecurityError, TemplateRuntimeError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment, safe_range
from jinja2.utils import Namespace, pass_context

from legato.text.sandbox_filters import SAFE_FILTERS, SAFE_TESTS, budget_of, words
from legato.text.sandbox_limits import MAX_NEEDLE, Budget, LimitError

MAX_NODES = 20_000  # of the syntax tree; a long real template has about 3,000, and 300 statements
MAX_STATEMENTS = 3_000
MAX_NAMES = 1_000

_ATTRIBUTES: dict[type, frozenset[str]] = {
    str: words(
        "capitalize casefold count endswith find index isalnum isalpha isascii isdecimal isdigit islower isnumeric "
        "isspace istitle isupper join lower lstrip partition removeprefix removesuffix replace rfind rindex "
        "rpartition rsplit rstrip split splitlines startswith strip swapcase title upper"
    ),
    dict: frozenset({"get", "items", "keys", "values"}),
    list: frozenset({"count", "index"}),
    tuple: frozenset({"count", "index"}),
    LoopContext: words(
        "changed cycle depth depth0 first index index0 last length nextitem previtem revindex revindex0"
    ),
    **{kind: frozenset() for kind in (int, float, bool, type(None), range)},
}


class RefusedError(TemplateRuntimeError):
    """The template itself called raise_exception."""


class _Generator(CodeGenerator):
    """jinja2's code generator, with the budget built in."""

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        _tick_first(node)
        if node.test is not None:
            ticked = nodes.EnvironmentAttribute("ticked", lineno=node.lineno)
            node.test = nodes.And(ticked, node.test, lineno=node.lineno)
        super().visit_For(node, frame)

    def visit_Macro(self, node: nodes.Macro, frame: Frame) -> None:
        _tick_first(node)
        self.writeline("environment.grown(None, 64)")
        super().visit_Macro(node, frame)

    def visit_CallBlock(self, node: nodes.CallBlock, frame: Frame) -> None:
        _tick_first(node)
        self.writeline("environment.grown(None, 64)")
        super().visit_CallBlock(node, frame)

    def visit_Output(self, node: nodes.Output, frame: Frame) -> None:
        self.writeline(f"environment.budget.tick({len(node.nodes)})")
        super().visit_Output(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.budget.join('', (")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:
        self.write("(")
        self._operand(node.expr, frame)
        for op in node.ops:
            self.visit(op, frame)
        self.write(")")

    def visit_Operand(self, node: nodes.Operand, frame: Frame) -> None:
        self.write(f" {operators[node.op]} ")
        self._operand(node.expr, frame)

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        sliced = isinstance(node.arg, nodes.Slice)  # slices bypass environment.getitem
        self.write("environment.budget.made(" if sliced else "(")
        super().visit_Getitem(node, frame)
        self.write(")")

    def visit_List(self, node: nodes.List, frame: Frame) -> None:
        self.write("environment.grown(")
        super().visit_List(node, frame)
        self.write(f", {len(node.items)})")

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
        if node.ctx != "load":
            super().visit_Tuple(node, frame)
            return
        self.write("environment.grown(")
        super().visit_Tuple(node, frame)
        self.write(f", {len(node.items)})")

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        self.write("environment.grown({")
        for pair in node.items:
            self._operand(pair.key, frame)
            self.write(": ")
            self.visit(pair.value, frame)
            self.write(", ")
        self.write(f"}}, {2 * len(node.items)})")

    def _operand(self, node: nodes.Expr, frame: Frame) -> None:
        if isinstance(node, nodes.Const):
            self.visit(node, frame)
            return
        self.write("environment.budget.operand(")
        self.visit(node, frame)
        self.write(")")

    def _refuse(self, node: nodes.Stmt, frame: Frame) -> NoReturn:
        self.fail(f"{type(node).__name__.lower()} is not for chat templates", node.lineno)

    visit_Block = visit_Extends = visit_Include = visit_Import = visit_FromImport = _refuse
    visit_ScopedEvalContextModifier = visit_EvalContextModifier = _refuse  # autoescape would bring in Markup


def _tick_first(node: nodes.For | nodes.Macro | nodes.CallBlock) -> None:
    ticked = nodes.EnvironmentAttribute("ticked", lineno=node.lineno)
    node.body.insert(0, nodes.ExprStmt(ticked, lineno=node.lineno))


class _Generation(Extension):
    """`{% generation %}` marks what a model is trained on; here its body is just printed."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@pass_context
def _finalize(context: Context, value: Any) -> str:
    return value if type(value) is str else budget_of(context).text(value)


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """The environment of one chat template. `budget` is replaced before each render."""

    code_generator_class = _Generator
    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            finalize=_finalize,
            cache_size=0,
            extensions=[_Generation, "jinja2.ext.loopcontrols"],
        )
        self.filters = SAFE_FILTERS
        self.tests = SAFE_TESTS  # type: ignore[assignment]
        self.globals = dict(_FUNCTIONS)
        self.budget = Budget()

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Refuse a template whose compilation would take long; it grows with statements × names."""
        tree = super()._parse(source, name, filename)
        num_nodes = num_statements = 0
        names: set[str] = set()
        stack: list[nodes.Node] = [tree]
        while stack:
            node = stack.pop()
            num_nodes += 1
            num_statements += isinstance(node, nodes.Stmt)
            if isinstance(node, nodes.Name):
                names.add(node.name)
            stack.extend(node.iter_child_nodes())
        if num_nodes > MAX_NODES or num_statements > MAX_STATEMENTS or len(names) > MAX_NAMES:
            raise LimitError(
                f"it has {num_nodes} parts, {num_statements} statements and {len(names)} names; "
                f"allowed are {MAX_NODES}, {MAX_STATEMENTS} and {MAX_NAMES}"
            )
        return tree

    @property
    def ticked(self) -> bool:
        self.budget.tick()
        return True

    def grown(self, value: Any, num_items: int) -> Any:
        self.budget.charge(16 + 8 * num_items)
        return value

    def concat(self, pieces: Iterable[str]) -> str:
        """Join what a macro, a set block or the whole template printed; stops at the limit, not after it."""
        total, kept = 0, []
        for piece in pieces:
            total += len(piece)
            if total > self.budget.max_chars:
                self.budget.check(total)
            kept.append(piece)
        self.budget.charge(total)
        return "".join(kept)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        return self.budget.binary(operator, left, right)

    def getattr(self, obj: Any, attribute: str) -> Any:
        if attribute.startswith("_"):
            raise SecurityError(f"it reaches for the private attribute {attribute!r}")
        kind = type(obj)
        allowed = _ATTRIBUTES.get(kind)
        if allowed is not None and attribute in allowed:
            return getattr(obj, attribute)
        if kind is dict and attribute in obj:
            return obj[attribute]
        if isinstance(obj, Undefined | Namespace):
            return self._soft_getattr(obj, attribute)
        if allowed is None or hasattr(kind, attribute):
            raise SecurityError(f"it reaches for {attribute!r} of a {kind.__name__}, which is not allowed")
        return self.undefined(obj=obj, name=attribute)

    def _soft_getattr(self, obj: Any, attribute: str) -> Any:
        try:
            return getattr(obj, attribute)
        except AttributeError:
            return self.undefined(obj=obj, name=attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        self.budget.operand(argument)
        try:
            return obj[argument]
        except (TypeError, LookupError):
            if isinstance(argument, str):
                return self.getattr(obj, argument)
        return self.undefined(obj=obj, name=argument)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.budget.tick()
        self.budget.charge(8 * (len(args) + len(kwargs)))
        kind = type(obj)
        if kind is Macro or kind is LoopContext:
            return context.call(obj, *args, **kwargs)
        kwargs.pop("_loop_vars", None)
        kwargs.pop("_block_vars", None)
        if kind is BuiltinMethodType and type(obj.__self__) in _ATTRIBUTES:
            return self.budget.method(obj.__self__, obj.__name__, args, kwargs)
        if kind is MethodType and type(obj.__self__) is LoopContext:
            return obj(*map(self.budget.operand, args), **kwargs)
        if kind is FunctionType and obj in _FUNCTIONS.values():
            return obj(self, *map(self.budget.operand, args), **kwargs)
        if isinstance(obj, Undefined):
            return obj(*args, **kwargs)
        raise SecurityError(f"it calls a {kind.__name__}, which is not allowed")


# Functions of the template; each gets the environment first.


def _raise_exception(env: TemplateSandbox, message: Any = "") -> NoReturn:
    raise RefusedError(env.budget.text(message))


def _strftime_now(env: TemplateSandbox, pattern: str) -> str:
    if len(pattern) > MAX_NEEDLE or re.search(r"%[-#]?[^A-Za-z%#-]", pattern):
        raise LimitError("it formats the time with an unusual pattern")
    return datetime.now().strftime(pattern)


def _namespace(env: TemplateSandbox, *args: Any, **kwargs: Any) -> Namespace:
    return Namespace(_dict(env, *args, **kwargs))


def _dict(env: TemplateSandbox, *args: Any, **kwargs: Any) -> dict[Any, Any]:
    made: dict[Any, Any] = env.budget.made(dict(*args, **kwargs))
    env.budget.charge(64)
    return made


def _range(env: TemplateSandbox, *args: int) -> range:
    return safe_range(*args)


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "raise_exception": _raise_exception,
    "strftime_now": _strftime_now,
    "namespace": _namespace,
    "dict": _dict,
    "range": _range,
}
