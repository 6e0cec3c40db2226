"""A model without a chat template is spoken of, and answers all the same."""

import subprocess
import sys
from pathlib import Path

import pytest

from legato.models.registry import resolve


@pytest.fixture(scope="module")
def without_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model with the template's key renamed."""
    raw = resolve("smollm2").path.read_bytes()
    assert raw.count(b"tokenizer.chat_template") == 1
    path = tmp_path_factory.mktemp("models") / "bare.gguf"
    path.write_bytes(raw.replace(b"tokenizer.chat_template", b"tokenizer.nochat_templ8"))
    return path


@pytest.mark.parametrize(
    ("args", "is_said"),
    [(["run", "hi"], True), (["run", "--raw", "hi"], False), (["chat"], True)],
    ids=["run", "run --raw", "chat"],
)
def test_a_missing_template_is_said_on_stderr(without_template: Path, args: list[str], is_said: bool) -> None:
    command = [sys.executable, "-m", "legato", *args, "-m", str(without_template), "--max-tokens", "2"]
    stdin = "hi" if args == ["chat"] else ""
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert ("no chat template" in done.stderr) is is_said
    assert done.stdout
