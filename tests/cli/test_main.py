import importlib
import subprocess
import sys
from typing import Any

import click
import pytest

from legato._version import __version__
from legato.cli import errors
from legato.cli.main import COMMANDS, main
from legato.core.errors import (
    ConfigError,
    ContextLengthError,
    DownloadError,
    EngineError,
    ModelFileError,
    RequestError,
    TemplateError,
    UnknownModelError,
)


def test_help_imports_no_command_and_nothing_heavy() -> None:
    script = (
        "import sys; from legato.cli.main import main; status = main(['--help']); "
        "heavy = {'numpy', 'jinja2', 'llama_cpp', 'huggingface_hub', 'psutil', 'legato.api', 'legato.cli.run'}; "
        "print('LOADED', sorted(heavy & sys.modules.keys()), status)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "LOADED [] 0"
    assert all(name in done.stdout for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_of_the_table_is_there_and_its_help_has_examples(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    module, _, attribute = COMMANDS[name][0].partition(":")
    assert isinstance(getattr(importlib.import_module(module), attribute), click.Command)
    assert main([name, "--help"]) == 0
    assert f"Usage: legato {name}" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["run", "chat"])
def test_help_has_examples(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    main([name, "-h"])
    assert f"Examples:\n    legato {name}" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"legato {__version__}\n"


def test_without_arguments_it_shows_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "Commands:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["rnu"], "there is no command 'rnu'; did you mean `run`?"),
        (["serve-tea"], "the commands are: run, chat, models, doctor"),
        (["--colour"], "No such option"),
        (["run", "--temprature", "1", "hi"], "--temperature"),
        (["run", "one", "two"], "unexpected extra argument"),
        (["models"], "Commands:"),
    ],
)
def test_wrong_use_ends_with_2_and_says_what_to_do(
    args: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(args) == errors.WRONG_USE
    out, err = capsys.readouterr()
    assert (out, "Traceback" in err) == ("", False)
    assert said in err and "--help" in err


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RequestError("x"), 2),
        (ContextLengthError(9, 8), 2),
        (UnknownModelError("x"), 2),
        (ConfigError("x"), 2),
        (click.UsageError("x"), 2),
        (TemplateError("x"), 1),
        (ModelFileError("x"), 1),
        (DownloadError("x"), 1),
        (EngineError("x"), 1),
        (OSError(28, "No space left on device"), 1),
        (ZeroDivisionError("x"), 1),
    ],
)
def test_exit_statuses(error: Exception, status: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert errors.report(error) == status
    assert capsys.readouterr().err.startswith("error: ")


def test_interrupted_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert errors.report(KeyboardInterrupt()) == errors.INTERRUPTED == 130
    assert capsys.readouterr().err == ""


def test_a_question_answered_with_no_is_not_an_interrupt(capsys: pytest.CaptureFixture[str]) -> None:
    def abort_after(cause: type[BaseException] | None) -> int:
        try:
            try:
                if cause:
                    raise cause
            except BaseException:
                raise click.Abort from None
            raise click.Abort
        except click.Abort as error:
            return errors.report(error)

    assert abort_after(KeyboardInterrupt) == 130
    assert abort_after(None) == 1
    assert capsys.readouterr().err == "not done\n"


def test_an_unexpected_error_is_one_line_that_says_how_to_see_more(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def report() -> tuple[int, str]:
        try:
            raise ZeroDivisionError("nothing to divide by")
        except ZeroDivisionError as error:
            return errors.report(error), capsys.readouterr().err

    monkeypatch.delenv("LEGATO_DEBUG", raising=False)
    status, said = report()
    assert status == 1 and said.count("\n") == 1 and "LEGATO_DEBUG=1" in said and "ZeroDivisionError" in said
    monkeypatch.setenv("LEGATO_DEBUG", "1")
    assert "Traceback" in report()[1]


def test_python_m_legato_is_the_command(legato: Any) -> None:
    done = legato("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"legato {__version__}\n".encode(), b"")
