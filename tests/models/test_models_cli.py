import json
import os
import pty
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from legato.cli.models import ProgressBar, models
from legato.core.errors import ModelFileError, UnknownModelError
from tests.models.loopback_hub import LoopbackHub, running_hub
from tests.models.model_files import write_model

REPO = "tiny-lab/Tiny-GGUF"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LEGATO_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    return tmp_path / "home"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[LoopbackHub]:
    with running_hub() as running:
        monkeypatch.setenv("HF_ENDPOINT", running.endpoint)
        running.files[REPO] = {"tiny-Q8_0.gguf": write_model(tmp_path / "t.gguf").read_bytes()}
        yield running


def run(*args: str, answer: str | None = None) -> Result:
    return CliRunner().invoke(models, list(args), input=answer)


def test_pull_list_show_and_remove(hub: LoopbackHub, home: Path) -> None:
    pulled = run("pull", f"hf:{REPO}:Q8_0")
    assert (pulled.exit_code, pulled.stdout) == (0, f"{REPO}:Q8_0\n")
    assert "tiny-Q8_0.gguf: downloading" in pulled.stderr and "\x1b" not in pulled.stderr + pulled.stdout

    table = run("list")
    assert table.stderr == "" and "\x1b" not in table.stdout
    head, embedded, tiny = table.stdout.splitlines()
    assert head.split() == ["NAME", "SIZE", "ARCH", "QUANT", "CONTEXT"]
    assert embedded.split() == ["smollm2", "93.8", "MiB", "llama", "Q4_1", "8192"]
    assert tiny.startswith(f"{REPO}:Q8_0") and tiny.split()[-3:] == ["llama", "F32", "2048"]
    names = [entry["name"] for entry in json.loads(run("list", "--json").stdout)]
    assert names == ["smollm2", f"{REPO}:Q8_0"]

    shown = run("show", "Tiny-GGUF").stdout
    facts = dict(re.split(r"  +", line, maxsplit=1) for line in shown.splitlines())
    assert facts["architecture"] == "llama" and facts["license"] == "mit" and facts["chat template"] == "yes"
    assert facts["parameters"] == f"{64 * 64 * 2 + 64:,}"
    assert "with a context of 2048" in facts["memory needed"]

    refused = run("rm", "Tiny-GGUF", answer="n\n")
    assert refused.exit_code == 1 and refused.stdout == "" and "remove tiny-lab/Tiny-GGUF:Q8_0" in refused.stderr
    assert len(run("list").stdout.splitlines()) == 3
    removed = run("rm", "--yes", "Tiny-GGUF")
    assert (removed.exit_code, removed.stdout) == (0, "") and "removed" in removed.stderr
    assert len(run("list").stdout.splitlines()) == 2


def test_show_as_json() -> None:
    facts = json.loads(run("show", "smollm2", "--json").stdout)
    assert facts["context_length"] == 8192 and facts["quantization"] == "Q4_1" and facts["chat_template"] is True
    assert facts["parameters"] == 134_515_008
    assert facts["memory_needed_bytes"]["8192"] > facts["memory_needed_bytes"]["4096"] > facts["size_bytes"]


def test_errors_pass_through_to_the_one_handler(tmp_path: Path) -> None:
    assert isinstance(run("show", "nothing").exception, UnknownModelError)
    (tmp_path / "bad.gguf").write_bytes(b"<html>")
    failed = run("show", str(tmp_path / "bad.gguf"))
    assert isinstance(failed.exception, ModelFileError) and failed.stdout == ""


def test_damaged_models_are_listed_as_such(home: Path) -> None:
    folder = home / "models/lab/T"
    folder.mkdir(parents=True)
    (folder / "T-Q8_0.gguf").write_bytes(b"GGUF")
    listed = run("list")
    assert re.search(r"lab/T:Q8_0 +4 bytes +damaged", listed.stdout)
    assert "truncated" in listed.stderr


def test_words_from_a_file_cannot_drive_the_terminal(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", license="\x1b]0;owned\x07\nmit")
    assert not {"\x1b", "\x07"} & set(run("show", str(path)).stdout)


@pytest.mark.parametrize("command", [[], ["list"], ["pull"], ["show"], ["rm"]])
def test_help_has_examples(command: list[str]) -> None:
    assert "Examples:\n    legato models" in run(*command, "--help").output


def test_progress_without_a_terminal_is_one_line_per_file(capfd: pytest.CaptureFixture[str]) -> None:
    bar = ProgressBar(on_terminal=False)
    for name in ("a.gguf", "b.gguf"):
        for done in range(0, 1001, 100):
            bar.update(name, done << 20, 1000 << 20)
    bar.close()
    captured = capfd.readouterr()
    assert captured.err == "a.gguf: downloading 1000 MiB\nb.gguf: downloading 1000 MiB\n"
    assert captured.out == ""


def test_progress_on_a_terminal_is_one_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    parent, child = pty.openpty()
    pieces: list[bytes] = []

    def collect() -> None:
        while True:
            try:
                piece = os.read(parent, 4096)
            except OSError:  # the other end is closed
                return
            if not piece:
                return
            pieces.append(piece)

    reader = threading.Thread(target=collect)
    reader.start()
    with os.fdopen(child, "w") as terminal:
        monkeypatch.setattr("sys.stderr", terminal)
        bar = ProgressBar(on_terminal=True)
        bar.update("a.gguf", 0, 4 << 20)
        bar.update("a.gguf", 4 << 20, 4 << 20)
        bar.close()
        terminal.flush()
        monkeypatch.undo()
    reader.join(10)
    os.close(parent)
    drawn = b"".join(pieces).decode()
    assert "100% 4.0 MiB of 4.0 MiB" in drawn
    assert drawn.count("\n") == 1 and drawn.count("\r") >= 2
