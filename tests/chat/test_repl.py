"""The loop with an engine that is a script, and with real signals."""

import signal
from collections.abc import Callable, Iterator

import pytest

from legato.chat.interrupt import InterruptGuard
from legato.chat.repl import ModelInfo, Repl
from legato.chat.session import ChatSession
from legato.core.errors import ContextLengthError, EngineError
from legato.core.events import Finished, FinishReason, Started, StreamEvent, TextDelta
from legato.core.messages import Message
from legato.core.usage import Timing, Usage


def press_ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


class ScriptedAnswer:
    """Says its pieces until it is cancelled; a callable among them is run in its place, between two pieces."""

    def __init__(self, *pieces: str | Callable[[], None], prompt_tokens: int = 10) -> None:
        self._pieces = pieces
        self._prompt_tokens = prompt_tokens
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True

    def __iter__(self) -> Iterator[StreamEvent]:
        yield Started("1", "scripted", 0)
        said = 0
        reason = FinishReason.STOP
        for piece in self._pieces:
            if self.is_cancelled:
                reason = FinishReason.CANCELLED
                break
            if isinstance(piece, str):
                said += 1
                yield TextDelta(piece)
            else:
                piece()
        else:
            if self.is_cancelled:
                reason = FinishReason.CANCELLED
        usage = Usage(self._prompt_tokens, 0, said)
        yield Finished(reason, usage, Timing(0.0, 0.1, 0.01, 0.01, 0.2, 0.3, said))


class Conversation:
    """A Repl with typed lines and scripted answers. `asked` are the messages of each question."""

    def __init__(
        self,
        lines: list[str | Callable[[], None]],
        answers: list[ScriptedAnswer | Exception],
        while_asking: Callable[[], None] = lambda: None,
    ) -> None:
        self.session = ChatSession()
        self.asked: list[tuple[Message, ...]] = []
        self._lines = iter(lines)
        self._answers = iter(answers)
        self._while_asking = while_asking

    def run(self) -> None:
        with InterruptGuard() as guard:
            Repl(self.session, ModelInfo("scripted", 100), self._ask, self._read, guard).run()

    def _ask(self, messages: tuple[Message, ...]) -> ScriptedAnswer:
        self.asked.append(messages)
        self._while_asking()
        answer = next(self._answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _read(self) -> str:
        line = next(self._lines, None)
        if line is None:
            raise EOFError
        if callable(line):
            line()
            raise AssertionError("Ctrl-C at the prompt must end the reading of the line")
        return line


@pytest.fixture(autouse=True)
def sigint_is_given_back() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    yield
    assert signal.getsignal(signal.SIGINT) is before


def test_answers_go_to_stdout_and_everything_else_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    talk = Conversation(["hi", " ", "/quit", "never"], [ScriptedAnswer("Hel", "lo")])
    talk.run()
    out, err = capsys.readouterr()
    assert out == "Hello"
    assert "scripted, 100 tokens of context. /help for help" in err and "2 tokens" in err
    assert talk.asked == [(Message.user("hi"),)]


def test_history_is_sent_as_it_came() -> None:
    talk = Conversation(["one", "two"], [ScriptedAnswer(" a", "b\n"), ScriptedAnswer("c")])
    talk.run()
    assert talk.asked[1] == (Message.user("one"), Message.assistant(" ab\n"), Message.user("two"))


def test_b67_ctrl_c_in_mid_answer_keeps_the_partial_text_and_the_session(capsys: pytest.CaptureFixture[str]) -> None:
    talk = Conversation(["one", "two"], [ScriptedAnswer("a", press_ctrl_c, "b", "c"), ScriptedAnswer("d")])
    talk.run()
    assert [(turn.answer, turn.is_cut) for turn in talk.session.turns] == [("a", True), ("d", False)]
    assert talk.asked[1] == (Message.user("one"), Message.assistant("a"), Message.user("two"))
    assert "stopped" in capsys.readouterr().err


def test_b67_ctrl_c_before_the_first_token_keeps_nothing_of_the_turn(capsys: pytest.CaptureFixture[str]) -> None:
    talk = Conversation(["one", "two"], [ScriptedAnswer(press_ctrl_c, "a"), ScriptedAnswer("b")])
    talk.run()
    assert talk.asked[1] == (Message.user("two"),)
    assert "there was no answer, so the question is not kept" in capsys.readouterr().err


def test_b67_ctrl_c_while_the_request_is_being_made_counts() -> None:
    answer = ScriptedAnswer("a", "b")
    talk = Conversation(["one"], [answer], while_asking=press_ctrl_c)
    talk.run()
    assert answer.is_cancelled and talk.session.turns == ()


def test_b67_ctrl_c_many_times_is_as_once() -> None:
    storm: list[str | Callable[[], None]] = ["a", *[press_ctrl_c] * 5, "b"]
    talk = Conversation(["one", "two"], [ScriptedAnswer(*storm), ScriptedAnswer("c")])
    talk.run()
    assert [turn.answer for turn in talk.session.turns] == ["a", "c"]


def test_b67_ctrl_c_at_the_prompt_says_how_to_leave_and_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    talk = Conversation([press_ctrl_c, press_ctrl_c, "one"], [ScriptedAnswer("a")])
    talk.run()
    assert capsys.readouterr().err.count("press Ctrl-D or type /quit to leave") == 2
    assert len(talk.session.turns) == 1


def test_b67_ctrl_c_between_answer_and_prompt_is_harmless() -> None:
    with InterruptGuard() as guard:
        press_ctrl_c()
        with guard.answering():
            assert not guard.was_hit


def test_a_guard_that_has_raised_does_not_raise_again() -> None:
    """The second one comes while the first is still on its way out of the prompt."""
    with InterruptGuard() as guard, guard.prompting():
        with pytest.raises(KeyboardInterrupt):
            press_ctrl_c()
        press_ctrl_c()


def test_a_conversation_that_does_not_fit_says_both_numbers_and_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    talk = Conversation(
        ["one", "two", "/clear", "three"], [ScriptedAnswer("a"), ContextLengthError(120, 100), ScriptedAnswer("b")]
    )
    talk.run()
    err = capsys.readouterr().err
    assert "has 120 tokens now, and the model holds 100; /clear starts a new one" in err
    assert talk.asked[2] == (Message.user("three"),)


def test_an_answer_cut_by_the_context_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    class Cut(ScriptedAnswer):
        def __iter__(self) -> Iterator[StreamEvent]:
            yield TextDelta("a")
            yield Finished(FinishReason.LENGTH, Usage(90, 0, 10), Timing(0.0, 0.1, None, None, 0.2, 0.3, 10))

    Conversation(["one"], [Cut()]).run()
    assert "the context of 100 tokens is full" in capsys.readouterr().err


def test_a_lost_engine_ends_the_session() -> None:
    with pytest.raises(EngineError, match="gone"):
        Conversation(["one", "two"], [EngineError("gone")]).run()


def test_commands(capsys: pytest.CaptureFixture[str]) -> None:
    lines: list[str | Callable[[], None]] = ["/help", "/system be brief", "one", "/stats", "/system", "/system -"]
    talk = Conversation([*lines, "two", "/nonsense x", " /etc is what?", "/exit"], [ScriptedAnswer("a")] * 3)
    talk.run()
    err = capsys.readouterr().err
    assert "/clear         start a new conversation" in err
    assert "1 turn, 11 of 100 tokens of context used" in err
    assert err.count("instructions: be brief") == 2 and "instructions: none" in err
    assert "there is no command /nonsense; /help lists them" in err
    assert talk.asked[0] == (Message.system("be brief"), Message.user("one"))
    assert talk.asked[1][0] == Message.user("one")
    assert talk.asked[2][-1] == Message.user(" /etc is what?")
