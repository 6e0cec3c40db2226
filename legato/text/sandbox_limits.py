"""What a chat template may use up: ticks, characters, memory and processor time, counted per render.

A template in a model file is a program by a stranger that runs on the caller's thread, so nothing here may depend on
interrupting it. Every step that repeats ticks, every step that allocates is checked before it does so or charged
right after, and values are measured as trees before anything walks them: a list that holds itself twice, thirty
levels deep, is small in memory and endless to print, compare or hash.
"""

import operator
import re
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

from jinja2.exceptions import SecurityError, TemplateRuntimeError
from jinja2.runtime import Undefined

BASE_CHARS = 1_048_576
BASE_TICKS = 1_000_000
MAX_SECONDS = 2.0
MAX_DEPTH = 64  # nesting of lists and dicts; hashing a deep tuple overflows the C stack without an error
MAX_INT_BITS = 256
MAX_WIDTH = 999  # of one padded %-conversion, in characters
MAX_NEEDLE = 256  # searching from the right and stripping characters take time needle × text
_TICKS_PER_LOOK = 256

_SCALARS = frozenset({int, bool, float, type(None)})
_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": operator.floordiv,
    "%": operator.mod,
    "**": operator.pow,
}


class LimitError(TemplateRuntimeError):
    """The template used up one of its limits."""


class Budget:
    """The limits of one render of `input_chars` characters in `num_messages` messages.

    `max_chars` bounds the output, each string in between, and each value seen as a tree. Time is this thread's
    processor time, so a busy machine does not fail a good template.
    """

    __slots__ = ("_bytes_left", "_deadline", "_ticks_left", "_until_look", "max_chars")

    def __init__(self, input_chars: int = 0, num_messages: int = 0) -> None:
        self.max_chars = BASE_CHARS + 4 * input_chars
        self._bytes_left = 16 * self.max_chars
        self._ticks_left = BASE_TICKS + 200 * num_messages
        self._until_look = _TICKS_PER_LOOK
        self._deadline = time.thread_time() + MAX_SECONDS

    def tick(self, count: int = 1) -> None:
        self._ticks_left -= count
        self._until_look -= count
        if self._until_look < 0:
            self._look()

    def charge(self, size: int) -> None:
        """About `size` bytes were allocated (characters count as one)."""
        self._bytes_left -= size
        self._until_look -= 1 + (size >> 8)
        if self._until_look < 0 or self._bytes_left < 0:
            self._look()

    def check(self, size: int) -> None:
        """A text or list of `size` characters or items is about to be made; it is charged too."""
        if size > self.max_chars:
            raise LimitError(f"it makes a text or list larger than {self.max_chars} characters")
        self.charge(size)

    def _look(self) -> None:
        self._until_look = _TICKS_PER_LOOK
        if self._ticks_left < 0:
            raise LimitError("it takes too many steps")
        if self._bytes_left < 0:
            raise LimitError("it builds too much text in all")
        if time.thread_time() > self._deadline:
            raise LimitError(f"it takes longer than {MAX_SECONDS:g} s")

    def measure(self, value: Any, *, printable: bool = False) -> tuple[int, int, int]:
        """(characters, nodes, depth) of `value` as a tree; LimitError past `max_chars`, a quarter of it in nodes.

        printable: SecurityError for anything inside that is not plain data.
        """
        chars = nodes = deepest = 0
        stack = [(value, 0)]
        while stack:
            item, depth = stack.pop()
            nodes += 1
            kind = type(item)
            deepest = max(deepest, depth)
            if kind is str:
                chars += len(item)
            elif kind is list or kind is tuple or kind is dict:
                inner = list(chain(item.keys(), item.values())) if kind is dict else item
                nodes_to_come = nodes + len(stack) + len(inner)
                if depth >= MAX_DEPTH or nodes_to_come > self.max_chars // 4:
                    raise LimitError("it builds a value that is nested too deep or too large")
                stack.extend((child, depth + 1) for child in inner)
            elif printable and kind not in _SCALARS and kind is not range and not isinstance(item, Undefined):
                raise SecurityError(f"a value of type {kind.__name__} cannot be printed")
            if chars + nodes > self.max_chars:
                raise LimitError("it builds a value that is nested too deep or too large")
            if not nodes & 63:
                self.tick()
        self.tick(1 + (chars >> 12))
        return chars, nodes, deepest

    def operand(self, value: Any) -> Any:
        """`value`, once it is known to be small enough to compare, hash or walk."""
        kind = type(value)
        if kind is str:
            self.tick(1 + (len(value) >> 12))
        elif kind in (list, tuple, dict):
            self.measure(value)
        return value

    def made(self, value: Any) -> Any:
        """`value`, charged: a text by its characters, a list by its items."""
        kind = type(value)
        if kind is str:
            self.check(len(value))
        elif kind is list or kind is tuple or kind is dict:
            self.check(len(value))
            self.charge(16 + 8 * len(value))
        return value

    def text(self, value: Any) -> str:
        """`value` as the template prints it."""
        if type(value) is str:
            return value
        if type(value) not in _SCALARS:
            self.measure(value, printable=True)
        text = str(value)
        self.check(len(text))
        return text

    def join(self, separator: str, values: Iterable[Any]) -> str:
        texts = [self.text(value) for value in values]
        self.check(sum(map(len, texts)) + len(separator) * max(0, len(texts) - 1))
        return separator.join(texts)

    def replace(self, text: str, old: str, new: str, count: int = -1) -> str:
        hits = text.count(old)
        if count >= 0:
            hits = min(hits, count)
        self.check(len(text) + hits * max(0, len(new) - len(old)))
        return text.replace(old, new, count)

    def binary(self, symbol: str, left: Any, right: Any) -> Any:
        """`left symbol right`, refused when the result could be too large."""
        kinds = (type(left), type(right))
        if kinds == (str, str) and symbol == "+":
            self.check(len(left) + len(right))
            return left + right
        self.tick()
        if kinds[0] in (int, bool, float) and kinds[1] in (int, bool, float):
            return self._number(symbol, left, right)
        if kinds[0] is str and symbol == "%":
            return self.percent(left, right)
        if symbol == "*" and int in kinds and {str, list, tuple} & set(kinds):
            times, sequence = (left, right) if kinds[0] is int else (right, left)
            self.check(len(sequence) * max(0, times))
            return self.made(left * right)
        if symbol == "+" and kinds in ((list, list), (tuple, tuple)):
            return self.made(left + right)
        if isinstance(left, Undefined) or isinstance(right, Undefined):
            return _OPERATORS[symbol](left, right)
        raise TypeError(f"cannot compute {kinds[0].__name__} {symbol} {kinds[1].__name__}")

    def _number(self, symbol: str, left: Any, right: Any) -> Any:
        for number in (left, right):
            if isinstance(number, int) and number.bit_length() > MAX_INT_BITS:
                raise LimitError("it computes with a number that is too large")
        if symbol == "**" and isinstance(left, int) and left.bit_length() * abs(right) > MAX_INT_BITS:
            raise LimitError("it computes a power that is too large")
        return _OPERATORS[symbol](left, right)

    def percent(self, pattern: str, values: Any) -> str:
        """`pattern % values`, with bounded widths."""
        if "*" in pattern or any(len(digits) > 3 for digits in re.findall(r"\d+", pattern)):
            raise LimitError(f"it pads a text to more than {MAX_WIDTH} characters")
        size = sum(self.measure(values, printable=True)[:2])
        self.check(len(pattern) + pattern.count("%") * (MAX_WIDTH + size))
        return str(pattern % values)

    def method(self, owner: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Call `owner.name(…)` of a str, list, tuple or dict; the name is on the list of safe ones already."""
        for value in (owner, *args, *kwargs.values()):
            self.operand(value)
        if name == "join" and len(args) == 1:
            items = list(args[0])
            if any(type(item) is not str for item in items):
                raise TypeError("join needs a list of texts")
            return self.join(owner, items)
        if name == "replace":
            return self.replace(owner, *args, **kwargs)
        if name in _SLOW_WITH_LONG_ARGUMENT and any(
            type(value) is str and len(value) > MAX_NEEDLE for value in (*args, *kwargs.values())
        ):
            raise LimitError(f"it calls {name} with a text of more than {MAX_NEEDLE} characters")
        result = getattr(owner, name)(*args, **kwargs)
        return self.made(list(result) if name in _VIEWS else result)


_SLOW_WITH_LONG_ARGUMENT = frozenset({"strip", "lstrip", "rstrip", "rfind", "rindex", "rsplit", "rpartition"})
_VIEWS = frozenset({"keys", "values", "items"})
