"""Hostile templates: each must end in TemplateError, soon and in little memory, and in no other way."""

import time
import tracemalloc

import pytest

from legato.core.errors import TemplateError
from legato.core.messages import Message
from legato.text.sandbox_limits import BASE_CHARS, Budget
from legato.text.template import ChatTemplate

HELLO = (Message.user("hello"),)
ROOM_MB = 200  # the limits allow about 64 MB at once


def fails(source: str) -> str:
    """The text of the TemplateError that loading or rendering `source` raises."""
    with pytest.raises(TemplateError) as caught:
        ChatTemplate(source).render(HELLO)
    text = str(caught.value)
    assert "\n" not in text and len(text) < 600
    return text


def grow(step: str, start: str = "x='a'") -> str:
    """A template that applies `step` (an expression of ns.x) to ns.x 99,999 times."""
    loop = "{% for i in range(99999) %}{% set ns.x = " + step + " %}{% endfor %}"
    return "{% set ns = namespace(" + start + ") %}" + loop


DEEP = grow("(ns.x,)", "x=(1,)")
BRANCHING = grow("[ns.x, ns.x]", "x=[1]").replace("99999", "60")

REACHING = {
    "attribute": "{{ ''.__class__.__mro__ }}",
    "item": "{{ ''['__class__'] }}",
    "map": "{{ messages | map(attribute='__class__') | list }}",
    "join attribute": "{{ messages | join(attribute='__class__') }}",
    "selectattr": "{{ messages | selectattr('__class__') | list }}",
    "sort": "{{ messages | sort(attribute='__class__') }}",
    "function": "{{ raise_exception.__globals__ }}",
    "macro": "{% macro m() %}{% endmacro %}{{ m._func }}",
    "context": "{{ self._TemplateReference__context }}",
    "namespace": "{{ namespace().__init__ }}",
    "undefined": "{{ nothing.__class__ }}",
    "single underscore": "{{ messages._x }}",
    "loop": "{% for m in messages %}{{ loop._iterable }}{% endfor %}",
    "mutation": "{% set a = messages.append(1) %}",
    "dict mutation": "{% set a = messages[0].update(role='system') %}",
    "format": "{{ '{0.__class__}'.format(1) }}",
    "format, only asked for": "{{ ''.format is defined }}",
    "format_map": "{{ '{a.__class__}'.format_map({'a': 1}) }}",
    "filter attr": "{{ '' | attr('__class__') }}",
    "loader": "{% include '/etc/passwd' %}",
    "import": "{% import 'x' as x %}",
    "block": "{% block a %}{{ self.a() }}{% endblock %}",
    "markup": "{% autoescape true %}{{ '<' }}{% endautoescape %}",
    "globals": "{{ lipsum(1000000) }}",
    "printing a function": "{{ range }}",
}

GROWING = {
    "times": "{{ 'a' * 10**9 }}",
    "times, the other way": "{{ 10**9 * 'a' }}",
    "list times": "{{ [0] * 10**9 }}",
    "power": "{{ 10**10**8 }}",
    "center": "{{ 'a' | center(10**9) }}",
    "ljust": "{{ 'a'.ljust(10**9) }}",
    "zfill": "{{ 'a'.zfill(10**9) }}",
    "expandtabs": "{{ '\t'.expandtabs(10**9) }}",
    "format filter": "{{ '%1000000000d' | format(1) }}",
    "percent": "{{ '%1000000000d' % 1 }}",
    "percent star": "{{ '%*d' % (1000000000, 1) }}",
    "percent in a test": "{{ '%1000000000d' is odd }}",
    "percent in divisibleby": "{{ '%1000000000d' is divisibleby(1) }}",
    "str.format": "{{ '{:1000000000}'.format(1) }}",
    "concat": grow("ns.x ~ ns.x"),
    "plus": grow("ns.x + ns.x"),
    "list plus": grow("ns.x + ns.x", "x=[1]"),
    "set block": "{% set ns = namespace(x='a') %}{% for i in range(999) %}"
    "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}{% endfor %}",
    "macro": "{% macro m(x) %}{{ x }}{{ x }}{% endmacro %}" + grow("m(ns.x)"),
    "replace": grow("ns.x.replace('a', ns.x)", "x='aa'"),
    "replace filter": grow("ns.x | replace('a', ns.x)", "x='aa'"),
    "replace nothing": "{% set x = 'a' * 99999 %}{{ x.replace('', x) }}",
    "join": "{{ ('a' * 999999).join(['a'] * 9999) }}",
    "join filter": "{{ range(99999) | join('a' * 99999) }}",
    "join of one text": "{{ ('a' * 99999) | join('b' * 99999) }}",
    "indent": "{{ ('\n' * 99999) | indent(99999, blank=True) }}",
    "indent by a text": "{{ ('\n' * 99999) | indent('a' * 99999, blank=True) }}",
    "tojson": "{{ [[[['a'] * 999] * 999] * 999] | tojson(indent=100) }}",
    "output": "{% set x = 'a' * 99999 %}{% for i in range(99999) %}{{ x }}{% endfor %}",
    "map": "{{ ['a' * 9999] * 9999 | int }}{{ (['a' * 9999] * 9999) | map('upper') | list }}",
    "sort": "{% set x = 'a' * 99999 %}{{ ([x ~ 'b', x ~ 'c'] * 99999) | sort }}",
    "kept slices": "{% set x = 'é' * 999999 %}" + "".join(f"{{% set a{i} = x[1:] %}}" for i in range(500)),
    "kept lists": grow("[ns.x, ('a' * 99999) | list]", "x=[]"),
    "kept splits": grow("[ns.x, ('a ' * 99999).split(' ')]", "x=[]"),
    "kept literals": grow("[ns.x, [" + "0," * 9999 + "]]", "x=[]"),
    "kept arguments": "{% macro m() %}{{ varargs | length }}{% endmacro %}"
    "{% for i in range(99999) %}{{ m(*range(99999)) }}{% endfor %}",
    "round": "{{ 1.5 | round(100000000, 'ceil') }}",
    "int": "{{ ('f' * 999999) | int(base=16) }}",
    "large number": "{% set ns = namespace(x=3) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "strftime": "{{ strftime_now('%1000000000d') }}",
}

ENDLESS = {
    "range": "{% for i in range(10**9) %}{% endfor %}",
    "nested": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "filtered": "{% for a in range(99999) %}{% for b in range(99999) if false %}{% endfor %}{% endfor %}",
    "macro": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "macro tree": "{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}{{ m(50) }}",
    "call block": "{% macro m() %}{{ caller() }}{% endmacro %}{% for a in range(99999) %}"
    "{% for b in range(99999) %}{% call m() %}{% endcall %}{% endfor %}{% endfor %}",
    "recursive loop": "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "print a tree": BRANCHING + "{{ ns.x }}",
    "compare trees": BRANCHING + BRANCHING.replace("ns", "nt") + "{{ ns.x == nt.x }}",
    "test trees": BRANCHING + BRANCHING.replace("ns", "nt") + "{{ ns.x is eq(nt.x) }}",
    "tree as json": BRANCHING + "{{ ns.x | tojson }}",
    "tree in changed": "{% for i in [1] %}" + BRANCHING + "{{ loop.changed(ns.x) }}{% endfor %}",
    "namespace in itself": "{% set ns = namespace() %}{% set ns.a = ns %}{% set ns.b = ns %}{{ [ns] }}",
    "deep key": DEEP + "{{ {ns.x: 1} }}",
    "deep key of dict()": DEEP + "{{ dict([(ns.x, 1)]) }}",
    "deep key, get": DEEP + "{{ {1: 2}.get(ns.x) }}",
    "deep key, item": DEEP + "{{ {1: 2}[ns.x] }}",
    "deep key, in": DEEP + "{{ ns.x in {1: 2} }}",
    "deep key, unique": DEEP + "{{ [ns.x] | unique | list }}",
    "strip": "{{ ('a' * 500000).strip('b' * 500000 ~ 'a') }}",
    "trim": "{{ ('a' * 500000) | trim('b' * 500000 ~ 'a') }}",
    "rfind": "{{ ('a' * 999999).rfind('b' ~ 'a' * 500000) }}",
}

BROKEN = {
    "syntax": "{% for %}",
    "open": "{{ ",
    "unknown filter": "{{ 1 | nope }}",
    "unknown filter, late": "{% if 1 %}{{ 1 | nope }}{% endif %}",
    "break": "{% break %}",
    "parentheses": "{{ " + "(" * 50_000 + "1" + ")" * 50_000 + " }}",
    "sum": "{{ 1" + "+1" * 9_000 + " }}",
    "dots": "{{ a" + ".b" * 9_000 + " }}",
    "elif": "{% if 0 %}" + "{% elif 0 %}" * 2_900 + "{% endif %}",
    "nested ifs": "{% if 1 %}" * 2_000 + "{% endif %}" * 2_000,
    "nested loops": "{% for a in [1] %}" * 50 + "{% endfor %}" * 50,
    "many names": "{{ " + "~".join(f"a{i}" for i in range(5_000)) + " }}",
    "many statements": "{% if 1 %}{% endif %}" * 5_000,
    "long": "a" * 200_000,
    "large literal": "{{ " + "9" * 99_999 + " }}",
    "division": "{{ 1 / 0 }}",
    "undefined": "{{ nothing.more }}",
    "types": "{{ 1 + 'a' }}",
    "float": "{{ 10.0 ** 999 }}",
    "call": "{{ 'a'() }}",
    "arguments": "{{ raise_exception(obj=1, self=2) }}",
}


@pytest.mark.parametrize("name", REACHING)
def test_b73_a_template_that_reaches_out_is_refused(name: str) -> None:
    fails(REACHING[name])


@pytest.mark.parametrize("name", GROWING)
def test_b73_a_template_that_grows_is_stopped_before_it_has_grown(name: str) -> None:
    tracemalloc.start()
    try:
        fails(GROWING[name])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < ROOM_MB * 2**20


@pytest.mark.parametrize("name", ENDLESS)
def test_b73_a_template_that_does_not_end_is_ended(name: str) -> None:
    started = time.thread_time()
    fails(ENDLESS[name])
    assert time.thread_time() - started < 20  # about 2 s by the deadline; unbounded without it


@pytest.mark.parametrize("name", BROKEN)
def test_b73_a_broken_template_is_a_template_error(name: str) -> None:
    fails(BROKEN[name])


def test_b73_a_broken_template_fails_when_it_is_loaded_and_names_the_line() -> None:
    with pytest.raises(TemplateError, match=r"template line 3\)"):
        ChatTemplate("a\nb\n{% for %}")


def test_b73_a_failing_template_names_the_line() -> None:
    assert "(template line 3)" in fails("a\n{% for m in messages %}\n{{ 1 / 0 }}\n{% endfor %}")
    assert "(template line 2)" in fails("{% macro m() %}\n{{ ''.__class__ }}{% endmacro %}\n\n{{ m() }}")


def test_the_limits_grow_with_the_messages() -> None:
    long = "a" * (2 * BASE_CHARS)
    twice = ChatTemplate("{% for m in messages %}{{ m.content ~ m.content }}{% endfor %}")
    assert twice.render((Message.user(long),)).text == 2 * long


def test_many_messages_stay_within_the_limits() -> None:
    messages = [Message.user("hi"), Message.assistant("ho")] * 5_000
    text = ChatTemplate(None).render(messages).text
    assert text.count("<|im_end|>") == len(messages)


def test_a_failed_render_does_not_spoil_the_next() -> None:
    template = ChatTemplate(
        "{% if messages[0].content == 'bad' %}{% for a in range(99999) %}{% for b in range(99999) %}"
        "{% endfor %}{% endfor %}{% endif %}{{ messages[0].content }}"
    )
    for _ in range(2):
        with pytest.raises(TemplateError, match="too many steps"):
            template.render((Message.user("bad"),))
        assert template.render((Message.user("good"),)).text == "good"


def test_the_budget_measures_a_value_as_a_tree() -> None:
    shared = ["abc", 1]
    assert Budget().measure([shared, shared, {"k": shared}])[:2] == (10, 12)
