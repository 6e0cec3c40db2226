"""The rules for stdin, on real pipes."""

import os
import subprocess
import sys

import click
import pytest

from legato.cli.main import main
from legato.cli.run import join_prompt
from legato.cli.stdin import decode_text
from legato.core.errors import RequestError
from tests.cli.conftest import PATIENCE_S, environment

# A program that reads stdin by the rules and prints what it got.
READ = """
import sys
from legato.cli import stdin
stdin.NOTICE_S = 0.05
stdin.EMPTY_PIPE_S = float(sys.argv[3])
wanted = {"auto": None, "yes": True, "no": False}[sys.argv[2]]
print(repr(stdin.read_stdin(has_prompt=sys.argv[1] == "prompt", wanted=wanted)))
"""


def reader(prompt: str, wanted: str = "auto", limit_s: float = 0.2) -> list[str]:
    return [sys.executable, "-c", READ, prompt, wanted, str(limit_s)]


def read(args: list[str], stdin: int, text: bytes | None = None) -> tuple[str, str]:
    with subprocess.Popen(
        args, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()
    ) as child:
        # Without text the pipe stays open until the child has ended by itself.
        if text is None:
            child.wait(PATIENCE_S)
        out, err = child.communicate(text, PATIENCE_S)
    return out.decode().strip(), err.decode()


@pytest.mark.parametrize("prompt", ["prompt", "none"])
@pytest.mark.parametrize("text", [b"", b"doc", "é\n日本".encode(), b"x" * 300_000])
def test_a_pipe_with_text_is_read_to_its_end(prompt: str, text: bytes) -> None:
    out, err = read(reader(prompt), subprocess.PIPE, text)
    assert out == repr(text.decode())
    assert err == "" or err.startswith("waiting")


def test_b71_an_open_empty_pipe_does_not_hang_a_prompt_and_is_spoken_of() -> None:
    out, err = read(reader("prompt"), subprocess.PIPE)
    assert out == "''"
    assert "waiting up to 0.2 s for text on stdin" in err and "< /dev/null" in err
    assert "warning: nothing came on stdin for 0.2 s; answering the prompt alone" in err


def test_no_stdin_does_not_wait() -> None:
    assert read(reader("prompt", "no", 3600), subprocess.PIPE) == ("''", "")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux tells who holds a pipe")
def test_b71_a_slow_program_of_a_pipeline_is_waited_for_beyond_the_limit() -> None:
    """The writer waits until the reader has said that it waits, and then for longer than its limit."""
    read_end, write_end = os.pipe()
    go_read, go_write = os.pipe()
    writer = subprocess.Popen(
        [sys.executable, "-c", "import os, sys; sys.stdin.read(); os.write(1, b'doc')"],
        stdin=go_read,
        stdout=write_end,
    )
    os.close(write_end)
    os.close(go_read)
    child = subprocess.Popen(
        reader("prompt", limit_s=0), stdin=read_end, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()
    )
    os.close(read_end)
    with writer, child:
        assert child.stderr is not None and child.stdout is not None
        assert child.stderr.readline().startswith(b"waiting for text on stdin")
        os.close(go_write)
        assert child.stdout.read().strip() == b"'doc'"


def test_without_a_prompt_the_wait_has_no_limit_and_is_not_silent() -> None:
    child = subprocess.Popen(
        reader("none", limit_s=0),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    )
    with child:
        assert child.stdin is not None and child.stdout is not None and child.stderr is not None
        assert child.stderr.readline().startswith(b"waiting for text on stdin")
        child.stdin.write(b"hi")
        child.stdin.close()
        assert child.stdout.read().strip() == b"'hi'"


def test_a_pipe_that_says_something_and_stays_open_is_spoken_of() -> None:
    child = subprocess.Popen(
        reader("prompt"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()
    )
    with child:
        assert child.stdin is not None and child.stdout is not None and child.stderr is not None
        child.stdin.write(b"part")
        child.stdin.flush()
        lines = iter(child.stderr.readline, b"")
        assert any(line.startswith((b"waiting for the end of stdin", b"waiting up to")) for line in lines)
        child.stdin.close()
        assert child.stdout.read().strip() == b"'part'"


def test_closed_stdin_is_no_text() -> None:
    command = " ".join(["exec", *(f"'{word}'" for word in reader("prompt")), "<&-"])
    done = subprocess.run(["sh", "-c", command], capture_output=True, check=True, env=environment())
    assert done.stdout.strip() == b"''"


def test_text_that_is_not_utf8_is_refused_with_its_place() -> None:
    with pytest.raises(RequestError, match=r"stdin is not UTF-8 text .byte 0xff at offset 3.; convert it"):
        decode_text(b"abc\xff", "stdin")
    assert decode_text(b"\xef\xbb\xbfabc", "stdin") == "abc"


@pytest.mark.parametrize(
    ("prompt", "piped", "joined"),
    [
        ("sum up", "", "sum up"),
        ("sum up", "doc\n", "sum up\n\ndoc"),
        ("sum up", "doc\r\n", "sum up\n\ndoc"),
        ("sum up", "two\n\n", "sum up\n\ntwo\n"),
        (None, "doc", "doc"),
        ("", "doc", "doc"),
        ("sum up", " \n", "sum up"),
    ],
)
def test_b71_prompt_first_then_an_empty_line_then_stdin(prompt: str | None, piped: str, joined: str) -> None:
    assert join_prompt(prompt, piped) == joined


def test_raw_text_keeps_its_last_line_end() -> None:
    assert join_prompt(None, "once\n", is_raw=True) == "once\n"


@pytest.mark.parametrize(("prompt", "piped"), [(None, ""), ("", ""), (" ", "\n")])
def test_neither_is_a_wrong_use(prompt: str | None, piped: str) -> None:
    with pytest.raises(click.UsageError, match='give one, as in: legato run "Why'):
        join_prompt(prompt, piped)


def test_bytes_that_are_no_text_in_an_argument(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--no-stdin", "-m", "no-such-model", os.fsdecode(b"caf\xe9")]) == 2
    assert "PROMPT is not UTF-8 text" in capsys.readouterr().err
