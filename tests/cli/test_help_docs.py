import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from help_docs import filled, helps

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")


def test_the_page_has_the_help_of_today() -> None:
    subprocess.run([sys.executable, "scripts/help_docs.py", "--check"], cwd=ROOT, check=True)


def test_a_changed_help_is_noticed() -> None:
    # Against filled(PAGE), not PAGE: click keeps a command's help option from its first use, in whatever test that was.
    stale = PAGE.replace("--temperature NUMBER", "--warmth NUMBER")
    assert stale != PAGE and filled(stale) == filled(PAGE)


def test_a_command_without_a_block_is_noticed() -> None:
    with pytest.raises(ValueError, match="legato doctor"):
        filled(PAGE.replace("<!-- help: legato doctor -->", ""))


def test_every_command_is_there() -> None:
    names = [name for name, _ in helps()]
    assert names[0] == "legato" and {"legato run", "legato chat", "legato models pull", "legato doctor"} <= set(names)


def test_the_width_does_not_depend_on_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    before = dict(helps())
    monkeypatch.setenv("COLUMNS", "40")
    assert dict(helps()) == before
