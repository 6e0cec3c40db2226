from legato.chat.session import ChatSession, Turn
from legato.core.messages import Message
from legato.core.usage import Usage


def turn(user: str, answer: str, *, is_cut: bool = False) -> Turn:
    return Turn(user, answer, Usage(prompt_tokens=10, cached_tokens=4, completion_tokens=2), is_cut)


def test_messages_are_the_whole_conversation_with_answers_as_they_came() -> None:
    session = ChatSession("be brief")
    session.add(turn("one", " first\n"))
    session.add(turn("two", "half a", is_cut=True))
    assert session.messages("three") == (
        Message.system("be brief"),
        Message.user("one"),
        Message.assistant(" first\n"),
        Message.user("two"),
        Message.assistant("half a"),
        Message.user("three"),
    )


def test_each_turn_only_adds_to_what_was_sent_before() -> None:
    session = ChatSession()
    sent = session.messages("one")
    session.add(turn("one", "first"))
    assert session.messages("two")[: len(sent)] == sent


def test_asking_changes_nothing() -> None:
    session = ChatSession()
    session.messages("one")
    assert session.turns == () and session.messages("two") == (Message.user("two"),)


def test_a_turn_without_an_answer_is_not_kept() -> None:
    session = ChatSession()
    assert not session.add(turn("one", "", is_cut=True))
    assert session.turns == ()


def test_clear_forgets_the_turns_and_keeps_instructions_and_sums() -> None:
    session = ChatSession("be brief")
    session.add(turn("one", "first"))
    session.clear()
    assert session.messages("two") == (Message.system("be brief"), Message.user("two"))
    stats = session.stats()
    assert (stats.turns, stats.context_tokens) == (0, 0)
    assert (stats.prompt_tokens, stats.cached_tokens, stats.completion_tokens) == (10, 4, 2)


def test_stats_of_two_turns() -> None:
    session = ChatSession()
    session.add(turn("one", "first"))
    session.add(turn("two", "second"))
    stats = session.stats()
    assert (stats.turns, stats.context_tokens, stats.prompt_tokens, stats.completion_tokens) == (2, 12, 20, 4)
