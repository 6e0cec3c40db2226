"""The history of a conversation, as values: no terminal, no engine."""

from dataclasses import dataclass

from legato.core.messages import Message
from legato.core.usage import Usage


@dataclass(frozen=True, slots=True)
class Turn:
    """One question and its answer, the answer exactly as it was generated. is_cut: it was stopped before its end."""

    user: str
    answer: str
    usage: Usage
    is_cut: bool = False


@dataclass(frozen=True, slots=True)
class SessionStats:
    """context_tokens: what the last turn took of the context, prompt and answer. The others are sums over all turns."""

    turns: int
    context_tokens: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


class ChatSession:
    """Turns, and the instructions above them. Only turns that got an answer are kept."""

    def __init__(self, system: str | None = None) -> None:
        self.system = system or None
        self._turns: list[Turn] = []
        self._closed: list[Turn] = []  # of conversations before /clear: they count, and are not sent

    @property
    def turns(self) -> tuple[Turn, ...]:
        return tuple(self._turns)

    def messages(self, text: str) -> tuple[Message, ...]:
        """The whole conversation with `text` as the next question.

        Earlier answers go as they came, so that the engine finds the tokens of the last turn in its cache.
        """
        messages = [Message.system(self.system)] if self.system else []
        for turn in self._turns:
            messages += [Message.user(turn.user), Message.assistant(turn.answer)]
        return (*messages, Message.user(text))

    def add(self, turn: Turn) -> bool:
        """Keep a turn. False, and not kept, when there is no answer: an empty one would only confuse the model."""
        if not turn.answer:
            return False
        self._turns.append(turn)
        return True

    def clear(self) -> None:
        """Forget the conversation; the instructions stay."""
        self._closed += self._turns
        self._turns.clear()

    def stats(self) -> SessionStats:
        every = [turn.usage for turn in (*self._closed, *self._turns)]
        return SessionStats(
            turns=len(self._turns),
            context_tokens=self._turns[-1].usage.total_tokens if self._turns else 0,
            prompt_tokens=sum(usage.prompt_tokens for usage in every),
            cached_tokens=sum(usage.cached_tokens for usage in every),
            completion_tokens=sum(usage.completion_tokens for usage in every),
        )
