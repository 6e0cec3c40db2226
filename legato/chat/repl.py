"""The loop of a conversation: read a line, stream an answer, read the next."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from legato.chat.interrupt import InterruptGuard
from legato.chat.session import ChatSession, Turn
from legato.chat.view import AnswerWriter, Notices, WaitNote, stats_line
from legato.core.errors import ContextLengthError, EngineError, RequestError
from legato.core.events import Finished, FinishReason, StreamEvent, TextDelta
from legato.core.messages import Message

_NOTE_AFTER_S = 1.0
HELP = """\
/help          this list
/clear         start a new conversation; the instructions stay
/system TEXT   instructions for the model from now on; without TEXT shows them, - removes them
/stats         tokens of this conversation and of this session
/quit          leave; so do /exit and Ctrl-D
Ctrl-C stops an answer. To send a line that begins with /, put a space before it."""


class Answering(Protocol):
    """A running answer: what the Python API's Stream is. `cancel` is safe in a signal handler."""

    def __iter__(self) -> Iterator[StreamEvent]: ...

    def cancel(self) -> None: ...


Ask = Callable[[tuple[Message, ...]], Answering]  # starts an answer; raises RequestError or EngineError


@dataclass(frozen=True, slots=True)
class ModelInfo:
    name: str
    context_length: int


class Repl:
    """One conversation with a person."""

    def __init__(
        self, session: ChatSession, model: ModelInfo, ask: Ask, read_line: Callable[[], str], guard: InterruptGuard
    ) -> None:
        """read_line: the next line, without its end; raises EOFError at the end of input."""
        self._session = session
        self._model = model
        self._ask = ask
        self._read_line = read_line
        self._guard = guard
        self._answer = AnswerWriter()
        self._notices = Notices()

    def run(self) -> None:
        """Until the person leaves. Raises EngineError when the engine is lost, OSError when stdout is."""
        self._notices.dim(
            f"{self._model.name}, {self._model.context_length} tokens of context. /help for help, Ctrl-D leaves."
        )
        while (line := self._next_line()) is not None:
            command = line.strip()
            if line.startswith("/"):
                if not self._obey(command):
                    return
            elif command:
                self._reply(line)

    def _next_line(self) -> str | None:
        """None at the end of input."""
        while True:
            try:
                with self._guard.prompting():
                    line = self._read_line()
                line.encode("utf-8")
            except EOFError:
                self._notices.say("")
                return None
            except KeyboardInterrupt:
                self._notices.say("")
                self._notices.dim("press Ctrl-D or type /quit to leave")
            except UnicodeError:
                self._notices.error("that line is not UTF-8 text; check the terminal's encoding")
            else:
                return line

    def _obey(self, command: str) -> bool:
        """False: leave."""
        name, _, rest = command.partition(" ")
        match name:
            case "/quit" | "/exit":
                return False
            case "/help":
                self._notices.say(HELP)
            case "/clear":
                self._session.clear()
                self._notices.dim("the conversation is forgotten")
            case "/system":
                self._set_system(rest.strip())
            case "/stats":
                self._show_stats()
            case _:
                self._notices.say(f"there is no command {name}; /help lists them")
        return True

    def _set_system(self, text: str) -> None:
        if text:
            self._session.system = None if text == "-" else text
        self._notices.dim(f"instructions: {self._session.system or 'none'}")

    def _show_stats(self) -> None:
        stats = self._session.stats()
        self._notices.say(
            f"{stats.turns} turn{'' if stats.turns == 1 else 's'}, "
            f"{stats.context_tokens} of {self._model.context_length} tokens of context used\n"
            f"session: {stats.prompt_tokens} prompt tokens, {stats.cached_tokens} of them cached; "
            f"{stats.completion_tokens} tokens generated"
        )

    def _reply(self, text: str) -> None:
        note = WaitNote("thinking …", _NOTE_AFTER_S)
        try:
            with self._guard.answering():
                stream = self._ask(self._session.messages(text))
                self._guard.attach(stream.cancel)
                self._show(text, stream, note)
        except ContextLengthError as error:
            note.clear()
            self._notices.error(
                f"the conversation has {error.num_prompt_tokens} tokens now, and the model holds "
                f"{error.context_length}; /clear starts a new one"
            )
        except EngineError:
            raise
        except RequestError as error:
            note.clear()
            self._notices.error(str(error))
        finally:
            note.clear()

    def _show(self, text: str, stream: Answering, note: WaitNote) -> None:
        """Stream an answer to the screen and keep it in the history."""
        pieces: list[str] = []
        end: Finished | None = None
        try:
            for event in stream:
                if isinstance(event, TextDelta):
                    note.clear()
                    pieces.append(event.text)
                    self._answer.write(event.text)
                elif isinstance(event, Finished):
                    end = event
        finally:
            note.clear()
            stream.cancel()
            self._answer.end()
        if end is not None:
            self._keep(text, "".join(pieces), end)

    def _keep(self, text: str, answer: str, end: Finished) -> None:
        is_cut = end.reason is FinishReason.CANCELLED
        is_kept = self._session.add(Turn(text, answer, end.usage, is_cut))
        self._notices.dim(stats_line(end.usage, end.timing, end.reason))
        if end.reason is FinishReason.LENGTH and end.usage.total_tokens >= self._model.context_length:
            self._notices.say(
                f"the context of {self._model.context_length} tokens is full, so the answer was cut; /clear empties it"
            )
        elif not is_kept:
            self._notices.dim("there was no answer, so the question is not kept")
