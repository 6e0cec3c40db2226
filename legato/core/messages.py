"""A conversation, as values."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from legato.core.errors import RequestError


class Role(StrEnum):
    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"


@dataclass(frozen=True, slots=True)
class TextPart:
    text: str


Part = TextPart  # a closed union; other kinds join it here


@dataclass(frozen=True, slots=True)
class Message:
    """One turn. `parts` are in reading order."""

    role: Role
    parts: tuple[Part, ...]

    @property
    def text(self) -> str:
        """All text of the turn, joined."""
        return "".join(part.text for part in self.parts)

    @classmethod
    def system(cls, text: str) -> "Message":
        return cls(Role.SYSTEM, (TextPart(text),))

    @classmethod
    def user(cls, text: str) -> "Message":
        return cls(Role.USER, (TextPart(text),))

    @classmethod
    def assistant(cls, text: str) -> "Message":
        return cls(Role.ASSISTANT, (TextPart(text),))


MessageLike = Message | Mapping[str, object]
Conversation = str | Iterable[MessageLike]


def as_messages(conversation: Conversation) -> tuple[Message, ...]:
    """A string is one user turn; mappings are `{"role": …, "content": …}`.

    Raises RequestError, naming the place (`messages[2].role`), when something else comes.
    """
    if isinstance(conversation, str):
        return (Message.user(conversation),)
    if isinstance(conversation, Message | Mapping) or not isinstance(conversation, Iterable):
        raise RequestError("messages must be a string or a list of messages", field="messages")
    messages = tuple(_as_message(item, f"messages[{i}]") for i, item in enumerate(conversation))
    if not messages:
        raise RequestError("messages is empty; send at least one", field="messages")
    return messages


def _as_message(item: object, where: str) -> Message:
    if isinstance(item, Message):
        return item
    if not isinstance(item, Mapping):
        raise RequestError(f"{where} must be a message or a mapping with role and content", field=where)
    if unknown := sorted(str(key) for key in item.keys() - {"role", "content"}):
        raise RequestError(f"{where} has unknown fields: {', '.join(unknown)}", field=f"{where}.{unknown[0]}")
    try:
        role = Role(str(item.get("role")))
    except ValueError:
        known = ", ".join(Role)
        raise RequestError(
            f"{where}.role is {item.get('role')!r}; it must be one of: {known}", field=f"{where}.role"
        ) from None
    content = item.get("content")
    if not isinstance(content, str):
        raise RequestError(f"{where}.content must be a string", field=f"{where}.content")
    return Message(role, (TextPart(content),))
