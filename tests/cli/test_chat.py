"""`legato chat` with the real model: in pseudo-terminals, and in pipes. Greedy, and short."""

import re
import subprocess
import sys

import pytest

from tests.cli.conftest import COMMAND, RunLegato, SpawnLegato, environment

if sys.platform == "win32":
    pytest.skip("pseudo-terminals", allow_module_level=True)

import pexpect

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
GREEDY = ("--temperature", "0", "--threads", "2")
PROMPT = r"(?:\r\n|^|\x1b\[\?2004h)> $"
STATS = r"(ttft|no text)[^\r\n]* (\d+) tokens?[^\r\n]* prompt (\d+), (\d+) cached([^\r\n]*)\r\n"


def at_prompt(child: "pexpect.spawn[str]") -> None:
    child.expect(PROMPT)


def stats_of(child: "pexpect.spawn[str]") -> tuple[int, int, int, str]:
    """(tokens, prompt tokens, cached tokens, how it ended)"""
    child.expect(STATS)
    assert child.match is not None and not isinstance(child.match, type | str)
    return int(child.match[2]), int(child.match[3]), int(child.match[4]), child.match[5]


def ended(child: "pexpect.spawn[str]") -> int | None:
    child.expect(pexpect.EOF)
    child.wait()
    return child.exitstatus


def test_b67_a_conversation_with_ctrl_c_in_every_place(spawn: SpawnLegato) -> None:
    """One session, as loading the model is what takes the time."""
    child = spawn("chat", *GREEDY, "--ignore-eos", "--max-tokens", "2000")
    child.expect(r"smollm2, 8192 tokens of context")
    at_prompt(child)

    child.sendintr()
    child.expect("press Ctrl-D or type /quit to leave")
    at_prompt(child)

    child.sendline("Count from one to a thousand.")
    child.expect(r"thousand\.\r\n.*?\w+")  # the echo, then the first words
    child.sendintr()
    said, _, _, ending = stats_of(child)
    assert "stopped" in ending and 0 < said < 2000
    at_prompt(child)

    child.sendline("Go on.")
    child.expect(r"Go on\.\r\n.*?\w+")
    child.sendintr()
    child.sendintr()
    _, _, cached, ending = stats_of(child)
    assert "stopped" in ending and cached > said  # the partial answer is part of the conversation, and not read again
    at_prompt(child)

    child.sendline("/stats")
    child.expect(r"2 turns, \d+ of 8192 tokens of context used")
    at_prompt(child)
    child.sendeof()
    assert ended(child) == 0


def test_b67_ctrl_c_before_the_first_token(spawn: SpawnLegato) -> None:
    # Instructions that take seconds to read: "thinking" shows that they are being read.
    child = spawn("chat", *GREEDY, "--max-tokens", "4", "--context", "8192", "--system", "word " * 7500)
    at_prompt(child)
    child.sendline("Hello.")
    child.expect("thinking")
    child.sendintr()
    said, _, _, ending = stats_of(child)
    assert said == 0 and "stopped" in ending
    child.expect("the question is not kept")
    at_prompt(child)
    child.sendline("/system -")
    child.expect("instructions: none")
    at_prompt(child)
    child.sendline("Hello.")
    assert stats_of(child)[0] == 4
    at_prompt(child)
    child.sendline("/quit")
    assert ended(child) == 0


def test_turns_and_commands(spawn: SpawnLegato) -> None:
    child = spawn("chat", *GREEDY, "--max-tokens", "6", "--context", "256")
    at_prompt(child)
    child.sendline("Say hello.")
    said, first_prompt, _, _ = stats_of(child)
    at_prompt(child)
    child.sendline("Again.")
    _, second_prompt, cached, _ = stats_of(child)
    # What the first turn put into the cache is not read again: all but the last few tokens of it.
    assert first_prompt < cached < second_prompt and cached >= first_prompt + said - 2
    at_prompt(child)

    child.sendline("long " * 300)
    child.expect(r"the conversation has (\d+) tokens now, and the model holds (\d+); /clear starts a new one")
    at_prompt(child)
    child.sendline("/clear")
    child.expect("forgotten")
    at_prompt(child)
    child.sendline("Say hello.")
    assert stats_of(child)[1] == first_prompt
    at_prompt(child)
    child.sendline("/bye")
    child.expect("there is no command /bye; /help lists them")
    at_prompt(child)
    child.sendline("/exit")
    assert ended(child) == 0


def test_b70_chat_honours_no_color(spawn: SpawnLegato) -> None:
    child = spawn("chat", TERM="xterm", NO_COLOR="1")
    child.expect("/help for help")
    child.sendeof()
    child.expect(pexpect.EOF)
    assert not re.search(r"\x1b\[[0-9;]*m", str(child.before))


def test_b71_chat_with_piped_stdin_answers_it_as_one_message_and_ends(legato: RunLegato) -> None:
    text = b"Name two colours.\nOne line each.\n"
    done = legato("chat", *GREEDY, "--max-tokens", "8", stdin=text)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout == legato("run", *GREEDY, "--max-tokens", "8", stdin=text).stdout != b""


def test_b71_chat_without_any_input_says_so(legato: RunLegato) -> None:
    done = legato("chat", stdin=b"")
    assert (done.returncode, done.stdout) == (2, b"")
    assert b"there is no prompt" in done.stderr


def test_b71_chat_on_an_open_empty_pipe_does_not_wait_in_silence() -> None:
    with subprocess.Popen(
        [*COMMAND, "chat", *GREEDY, "--max-tokens", "2"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    ) as child:
        assert child.stdin is not None and child.stdout is not None and child.stderr is not None
        assert child.stderr.readline().startswith(b"waiting for text on stdin")
        child.stdin.write(b"hi")
        child.stdin.close()
        assert child.stdout.read() != b""
        assert child.wait() == 0
