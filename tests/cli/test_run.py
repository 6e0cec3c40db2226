"""`legato run` with the real model, as processes. Greedy, and short."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import COMMAND, PATIENCE_S, RunLegato, SpawnLegato, environment

GREEDY = ("--temperature", "0", "--max-tokens", "8", "--threads", "2")
ASK = ("run", *GREEDY, "Say hello.")


@pytest.fixture(scope="module")
def answer() -> bytes:
    """What ASK answers, by way of a pipe."""
    done = subprocess.run([*COMMAND, *ASK], capture_output=True, stdin=subprocess.DEVNULL, env=environment())
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout and not done.stdout.endswith(b"\n")
    return done.stdout


def test_b70_a_file_holds_the_answers_bytes_only(legato: RunLegato, answer: bytes, tmp_path: Path) -> None:
    path = tmp_path / "answer.txt"
    with path.open("wb") as file:
        done = legato(*ASK, stdout=file, TERM="xterm-256color")
    assert (done.returncode, done.stderr) == (0, b"")
    assert path.read_bytes() == answer


def test_b70_head_ends_it_quietly() -> None:
    child = subprocess.Popen(
        [*COMMAND, "run", "--temperature", "0", "--ignore-eos", "--max-tokens", "5000", "Say hello."],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    )
    with child:
        assert child.stdout is not None and child.stderr is not None
        assert len(os.read(child.stdout.fileno(), 5)) > 0
        child.stdout.close()
        assert child.stderr.read() == b""
        assert child.wait(PATIENCE_S) == 141


def test_b70_on_a_terminal_the_last_line_is_ended_and_plain_terminals_get_no_escapes(
    spawn: SpawnLegato, answer: bytes
) -> None:
    child = spawn(*ASK, "--stats", TERM="dumb")
    shown = child.read()
    assert "\x1b" not in shown
    lines = [line for line in shown.splitlines() if not line.startswith(("loading", "reading"))]
    assert lines[:-1] == answer.decode().splitlines()
    assert "tok/s" in lines[-1] and "cut by a limit" in lines[-1]


@pytest.mark.parametrize(("no_colour", "coloured"), [("1", False), ("", True)])
def test_b70_no_color(spawn: SpawnLegato, no_colour: str, coloured: bool) -> None:
    shown = spawn(*ASK, "--stats", TERM="xterm-256color", NO_COLOR=no_colour).read()
    assert bool(re.search(r"\x1b\[[0-9;]*m", shown)) is coloured


def test_b71_prompt_and_stdin_are_both_used(legato: RunLegato) -> None:
    # Raw text goes to the model as it is, so equal token counts and answers mean equal prompts.
    both = legato("run", "--json", *GREEDY, "sum up", stdin=b"a document\n")
    alone = legato("run", "--json", *GREEDY, "sum up\n\na document")
    assert (both.returncode, both.stderr) == (0, b"")
    first, second = json.loads(both.stdout), json.loads(alone.stdout)
    assert first["usage"] == second["usage"] and first["text"] == second["text"]


def test_b71_neither_prompt_nor_stdin_says_what_to_type(legato: RunLegato) -> None:
    done = legato("run")
    assert (done.returncode, done.stdout) == (2, b"")
    assert b'legato run "Why is the sky blue?"' in done.stderr


def test_b71_on_a_terminal_without_a_prompt_it_does_not_wait(spawn: SpawnLegato) -> None:
    child = spawn("run")
    child.expect("there is no prompt")
    child.expect_exact("--help")
    child.wait()
    assert child.exitstatus == 2


def test_b71_an_open_empty_pipe_does_not_hang(answer: bytes) -> None:
    with subprocess.Popen(
        [*COMMAND, *ASK], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()
    ) as child:
        assert child.stdout is not None and child.stderr is not None
        assert child.stdout.read() == answer
        assert b"waiting up to" in child.stderr.read()
        assert child.wait(PATIENCE_S) == 0


def test_b59_temperature_0_is_the_likeliest_token_whatever_the_seed(legato: RunLegato, answer: bytes) -> None:
    assert legato(*ASK, "--top-k", "40", "--seed", "1").stdout == answer


def test_json(legato: RunLegato, answer: bytes) -> None:
    done = legato(*ASK, "--json", "--logprobs", "2", "--seed", "7")
    value = json.loads(done.stdout)
    assert done.stdout.endswith(b"}\n") and done.stdout.count(b"\n") == 1
    assert value["text"].encode() == answer
    assert (value["model"], value["seed"], value["finish_reason"]) == ("smollm2", 7, "length")
    assert value["usage"]["completion_tokens"] == len(value["logprobs"]) == 8
    assert value["usage"]["total_tokens"] == value["usage"]["prompt_tokens"] + 8
    assert value["timing"]["ttft_s"] > 0
    assert b"".join(bytes(entry["bytes"]) for entry in value["logprobs"]) == answer
    assert all(len(entry["top"]) == 2 for entry in value["logprobs"])


def test_json_of_several_answers(legato: RunLegato) -> None:
    done = legato("run", "--json", "-n", "2", "--seed", "3", "--max-tokens", "4", "Name a cat.")
    value = json.loads(done.stdout)
    assert len(value["choices"]) == 2
    assert all(choice["usage"]["completion_tokens"] == 4 for choice in value["choices"])


def test_raw_continues_the_text(legato: RunLegato) -> None:
    done = legato("run", "--raw", "--json", *GREEDY, "The capital of France is")
    value = json.loads(done.stdout)
    assert value["usage"]["prompt_tokens"] < 10  # a template would add some thirty
    assert "Paris" in value["text"]


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_ctrl_c_keeps_what_was_printed_and_ends_with_130(answer: bytes) -> None:
    child = subprocess.Popen(
        [*COMMAND, "run", "--temperature", "0", "--ignore-eos", "--max-tokens", "5000", "Say hello."],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    )
    with child:
        assert child.stdout is not None and child.stderr is not None
        first = os.read(child.stdout.fileno(), 100)
        child.send_signal(signal.SIGINT)
        everything = first + child.stdout.read()
        assert child.wait(PATIENCE_S) == 130
        assert child.stderr.read() == b""
    shared = min(len(everything), len(answer))
    assert everything[:shared] == answer[:shared]


def test_an_unknown_model_ends_with_2(legato: RunLegato) -> None:
    done = legato("run", "-m", "smolm2", "hi")
    assert (done.returncode, done.stdout) == (2, b"")
    assert b"smollm2" in done.stderr and done.stderr.count(b"\n") == 1


def test_a_file_that_is_no_model_ends_with_1(legato: RunLegato, tmp_path: Path) -> None:
    path = tmp_path / "page.gguf"
    path.write_text("<!DOCTYPE html>" * 100)
    done = legato("run", "-m", str(path), "hi")
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr.startswith(b"error: ") and b"Traceback" not in done.stderr


def test_a_prompt_that_does_not_fit_says_both_numbers(legato: RunLegato) -> None:
    done = legato("run", "--context", "64", "word " * 200)
    assert (done.returncode, done.stdout) == (2, b"")
    assert re.search(rb"the prompt has 2\d\d tokens, but a stream of this model holds \d+", done.stderr)


def test_a_full_context_is_not_passed_over_in_silence(legato: RunLegato) -> None:
    done = legato("run", "--context", "64", "--temperature", "0", "--ignore-eos", "Count.")
    assert done.returncode == 0 and done.stdout
    assert re.search(rb"the context of \d+ tokens is full; --context takes more", done.stderr)


def test_a_full_disk_is_an_error(legato: RunLegato) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    with Path("/dev/full").open("wb") as full:
        done = legato(*ASK, stdout=full)
    assert (done.returncode, done.stderr) == (1, b"error: No space left on device\n")


def test_the_locale_does_not_change_the_bytes(legato: RunLegato) -> None:
    done = legato(
        *("run", "--raw", "--temperature", "0", "--max-tokens", "6", "--threads", "2", "é è ê é è ê é"),
        LC_ALL="C",
        PYTHONUTF8="0",
        PYTHONCOERCECLOCALE="0",
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert "è" in done.stdout.decode("utf-8")


def test_help_in_a_locale_with_few_letters(legato: RunLegato) -> None:
    done = legato("run", "--help", LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"--logit-bias" in done.stdout
