import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import table_docs


@pytest.mark.parametrize("name", table_docs.PAGES)
def test_the_tables_are_those_of_today(name: str) -> None:
    page = (table_docs.ROOT / name).read_text(encoding="utf-8")
    assert table_docs.PAGES[name](page) == page, "run: python scripts/table_docs.py"


def test_a_case_without_a_test_is_noticed() -> None:
    page = (table_docs.ROOT / "docs/cases.md").read_text(encoding="utf-8")
    with pytest.raises(ValueError, match="B99"):
        table_docs.filled_cases(page + "| B99 | nothing | |\n")


def test_every_option_is_in_the_page() -> None:
    page = (table_docs.ROOT / "docs/sampling.md").read_text(encoding="utf-8")
    for name in ("temperature", "dry_multiplier", "max_tokens", "stop_token_ids", "logprobs", "n"):
        assert f"| `{name}` |" in page
