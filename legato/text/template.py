"""Chat templates: a conversation in, the prompt's text out, and the record of which text came from messages.

A template is a program out of a model file; `legato.text.sandbox` bounds what it can reach and use up.

Turn forgery: a message may contain the text of a control token (`<|im_end|>`), and that text must not end the turn.
Before rendering, a guard character that occurs nowhere else is put inside every such occurrence in the messages;
after rendering the guards are taken out again and their places kept. An occurrence that spans such a place is text.
"""

import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, pairwise
from threading import Lock
from types import TracebackType

from jinja2.exceptions import TemplateSyntaxError

from legato.core.errors import TemplateError
from legato.core.messages import Message
from legato.text.sandbox import RefusedError, TemplateSandbox
from legato.text.sandbox_limits import Budget

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
MAX_SOURCE_CHARS = 131_072
MAX_CONTROL_CHARS = 256  # longer control tokens, and those of one character, stay plain text
_MAX_ERROR_CHARS = 300
_HINT = "; fix the model's chat template or use another model file"


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """The prompt's text. `guards`: rising offsets in characters; a control token's text that spans one
    (start < offset < end) came from a message, at least in part, and is plain text."""

    text: str
    guards: tuple[int, ...] = ()


class ChatTemplate:
    """A compiled chat template; threads may share it.

    source: jinja2 text; None or blank means that the model has none, and ChatML is used (`is_default`).
    control_tokens: the texts of the vocabulary's control tokens, the same that `split_control` gets later.
    Raises TemplateError when the source is too long or does not compile.
    """

    def __init__(
        self,
        source: str | None,
        *,
        bos_token: str = "",
        eos_token: str = "",
        control_tokens: Sequence[str] = (),
    ) -> None:
        self.is_default = source is None or not source.strip()
        self.source = CHATML if source is None or self.is_default else source
        self._specials = {"bos_token": bos_token, "eos_token": eos_token}
        self._control = _control_texts(tuple(control_tokens))
        self._lock = Lock()  # the environment holds the budget of the render that runs
        if len(self.source) > MAX_SOURCE_CHARS:
            raise TemplateError(
                f"the chat template has {len(self.source)} characters, more than {MAX_SOURCE_CHARS}{_HINT}"
            )
        self._env = TemplateSandbox()
        try:
            self._template = self._env.from_string(self.source)
            return
        except Exception as exc:  # a hostile source makes jinja2 and the compiler raise nearly anything
            error = _load_error(exc)
        raise error

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> RenderedPrompt:
        """The prompt of `messages`; with `add_generation_prompt` it ends where the assistant's answer begins.

        Raises TemplateError when the template refuses the messages, fails, or goes past a limit.
        """
        texts = [message.text for message in messages]
        places = [self._control.places(text) for text in texts]
        guard = self._pick_guard(texts) if any(places) else None
        if guard is not None:
            texts = [_insert(text, at, guard) for text, at in zip(texts, places, strict=True)]
        variables: dict[str, object] = {
            "messages": [
                {"role": message.role.value, "content": text} for message, text in zip(messages, texts, strict=True)
            ],
            "add_generation_prompt": add_generation_prompt,
            "tools": None,
            "documents": None,
            **self._specials,
        }
        rendered = self._run(variables, Budget(sum(map(len, texts)), len(texts)))
        return RenderedPrompt(rendered) if guard is None else _take_out(rendered, guard)

    def _run(self, variables: dict[str, object], budget: Budget) -> str:
        with self._lock:
            self._env.budget = budget
            try:
                context = self._template.new_context(variables)
                return self._env.concat(self._template.root_render_func(context))
            except Exception as exc:  # the template is a stranger's program and can raise anything
                error = _render_error(exc)
        # Raised out here so that the error does not keep the template's variables alive.
        raise error

    def _pick_guard(self, texts: Sequence[str]) -> str:
        taken = [self.source, *self._specials.values(), *self._control.texts, *texts]
        for guard in _guard_candidates():
            if not any(guard in text for text in taken):
                return guard
        raise TemplateError("messages use every character there is; send shorter ones", field="messages")


def split_control(prompt: RenderedPrompt, control_tokens: Mapping[str, int]) -> list[str | int]:
    """Partition a prompt into plain text and control token ids: leftmost first, the longest at each place.

    Occurrences that span a guard stay text. Texts joined with the tokens' own texts are the prompt again.
    """
    pattern = _control_texts(tuple(control_tokens)).whole
    if pattern is None:
        return [prompt.text] if prompt.text else []
    pieces: list[str | int] = []
    start = 0
    text = prompt.text
    for begin, end in pairwise((0, *prompt.guards, len(text))):
        for match in pattern.finditer(text, begin, end):
            if match.start() > start:
                pieces.append(text[start : match.start()])
            pieces.append(control_tokens[match.group()])
            start = match.end()
    if start < len(text):
        pieces.append(text[start:])
    return pieces


class _ControlTexts:
    """What is to be found of some control tokens in a text."""

    def __init__(self, tokens: Iterable[str]) -> None:
        self.texts = sorted({token for token in tokens if 2 <= len(token) <= MAX_CONTROL_CHARS})
        self._reversed = sorted(token[::-1] for token in self.texts)
        self._first_chars = {token[0] for token in self.texts}
        self._last_chars = {token[-1] for token in self.texts}
        self._longest = max(map(len, self.texts), default=0)
        self._joined = "\0".join(self.texts)
        self.whole: re.Pattern[str] | None = None  # one token, the longest first
        self._starts: re.Pattern[str] | None = None  # the first character of one, so that overlaps are found
        if self.texts:
            self.whole = re.compile(_any_of(self.texts))
            rests: dict[str, list[str]] = {}
            for token in self.texts:
                rests.setdefault(token[0], []).append(token[1:])
            self._starts = re.compile(
                "|".join(f"{re.escape(first)}(?={_any_of(rest)})" for first, rest in rests.items())
            )

    def places(self, text: str) -> list[int]:
        """Where guards belong in a message's text, rising offsets.

        Also where the text only begins, ends or fills a token that the template's own text could complete, with or
        without the white space around it that templates strip.
        """
        if self._starts is None:
            return []
        found = {match.end() for match in self._starts.finditer(text)}
        first, last = len(text) - len(text.lstrip()), len(text.rstrip())
        for end in {last, len(text)}:
            for at in range(max(0, end - self._longest + 1), end):
                if text[at] in self._first_chars and _begins_one(self.texts, text[at:end]):
                    found.add(at + 1)
        for begin in {0, first}:
            for at in range(begin, min(len(text), begin + self._longest - 1)):
                if text[at] in self._last_chars and _begins_one(self._reversed, text[begin : at + 1][::-1]):
                    found.add(at)
        for begin, end in {(0, len(text)), (first, last)}:
            if 0 < end - begin < self._longest and text[begin:end] in self._joined:
                found.add(begin)
        return sorted(found)


@lru_cache(maxsize=16)
def _control_texts(tokens: tuple[str, ...]) -> _ControlTexts:
    return _ControlTexts(tokens)


def _begins_one(sorted_tokens: list[str], piece: str) -> bool:
    at = bisect_left(sorted_tokens, piece)
    return at < len(sorted_tokens) and sorted_tokens[at].startswith(piece)


def _any_of(texts: Iterable[str]) -> str:
    return "(?:" + "|".join(map(re.escape, sorted(texts, key=len, reverse=True))) + ")"


def _guard_candidates() -> Iterator[str]:
    """Rare symbols first: they have no case, are no white space, and Python prints them unescaped."""
    return map(chr, chain(range(0xA490, 0xA4C7), range(0x4DC0, 0x4E00), range(0x2800, 0x2900), range(0xE000, 0xF900)))


def _insert(text: str, places: Sequence[int], guard: str) -> str:
    return guard.join(text[begin:end] for begin, end in pairwise((0, *places, len(text))))


def _take_out(rendered: str, guard: str) -> RenderedPrompt:
    pieces = rendered.split(guard)
    guards: list[int] = []
    offset = 0
    for piece in pieces[:-1]:
        offset += len(piece)
        if not guards or guards[-1] != offset:
            guards.append(offset)
    return RenderedPrompt("".join(pieces), tuple(guards))


def _load_error(exc: Exception) -> TemplateError:
    line = exc.lineno if isinstance(exc, TemplateSyntaxError) else None
    return TemplateError(f"the chat template cannot be loaded: {_describe(exc)}{_at(line)}{_HINT}")


def _render_error(exc: Exception) -> TemplateError:
    where = _at(_template_line(exc.__traceback__))
    if isinstance(exc, RefusedError):
        return TemplateError(
            f"the chat template refuses these messages: {_describe(exc)}{where}; change messages to suit the model",
            field="messages",
        )
    return TemplateError(f"the chat template failed: {_describe(exc)}{where}{_HINT}")


def _describe(exc: Exception) -> str:
    """One line, without the template's or a message's long texts."""
    text = exc.msg if isinstance(exc, SyntaxError) else str(exc)  # its line is one of the compiled code
    text = " ".join(text[: 4 * _MAX_ERROR_CHARS].split()) or type(exc).__name__
    return text if len(text) <= _MAX_ERROR_CHARS else text[:_MAX_ERROR_CHARS] + "…"


def _at(line: int | None) -> str:
    return "" if line is None else f" (template line {line})"


def _template_line(traceback: TracebackType | None) -> int | None:
    """The innermost line of the template that the traceback passes."""
    line = None
    while traceback is not None:
        template = traceback.tb_frame.f_globals.get("__jinja_template__")
        if template is not None:
            line = template.get_corresponding_lineno(traceback.tb_lineno)
        traceback = traceback.tb_next
    return line
