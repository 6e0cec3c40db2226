"""Fill the generated tables of docs/sampling.md (options, from their declarations) and docs/cases.md (tests, by name).

python scripts/table_docs.py           rewrite the pages
python scripts/table_docs.py --check   exit with 1 when a page is not what it would write
"""

import math
import re
import sys
from collections.abc import Callable
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

from legato.core.request import GenerationOptions, Limits, SamplingParams

ROOT = Path(__file__).parents[1]


def option_table(declared: type) -> str:
    """Name, default, range and meaning of every option of a dataclass in legato.core.request."""
    rows = ["| name | default | values | meaning |", "|---|---|---|---|"]
    rows += [_option_row(f) for f in fields(declared) if "help" in f.metadata]
    return "\n".join(rows)


def _option_row(option: Field[Any]) -> str:
    made = option.default
    if option.default_factory is not MISSING:
        made = option.default_factory()
    default = "unset" if made is None else "none" if made in ((), {}) else f"`{_plain(made)}`"
    return f"| `{option.name}` | {default} | {_range(option)} | {option.metadata['help']} |"


def _plain(value: object) -> str:
    return " ".join(repr(item) for item in value) if isinstance(value, tuple) else str(value)


def _range(option: Field[Any]) -> str:
    low, high, above = (option.metadata[key] for key in ("low", "high", "above"))
    if math.inf in (high, -low) and above == -math.inf:
        return ""
    least = f"above {above:g}" if above > -math.inf else f"{low:g}"
    most = "" if high >= 2**31 - 1 else f" to {high:g}"
    return f"from {least}" if not most and above == -math.inf else f"{least}{most}"


def case_tests() -> dict[str, list[str]]:
    """Case id (B01) → its tests, as file::name."""
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for name in re.findall(r"^(?:async )?def (test_b\d\d_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE):
            found.setdefault(name[5:8].upper(), []).append(f"{path.relative_to(ROOT / 'tests')}::{name}")
    return found


def filled_sampling(page: str) -> str:
    for name, declared in (("sampling", SamplingParams), ("limits", Limits), ("request", GenerationOptions)):
        page = _replace_block(page, name, option_table(declared))
    return page


def filled_cases(page: str) -> str:
    """Each row `| B01 | what | … |` gets its tests. Raises ValueError when a case has no row or a row has no test."""
    tests = case_tests()
    rows = re.findall(r"^\| (B\d\d) \|", page, re.MULTILINE)
    if sorted(rows) != sorted(tests):
        raise ValueError(
            f"rows without a test: {sorted(set(rows) - set(tests))}; without a row: {sorted(set(tests) - set(rows))}"
        )

    def fill(match: re.Match[str]) -> str:
        names = "<br>".join(f"`{name}`" for name in tests[match["id"]])
        return f"| {match['id']} | {match['what']} | {names} |"

    return re.sub(r"^\| (?P<id>B\d\d) \| (?P<what>[^|]*?) \|.*$", fill, page, flags=re.MULTILINE)


def _replace_block(page: str, name: str, text: str) -> str:
    begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
    before, _, rest = page.partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise ValueError(f"the page has no block {name}")
    return f"{before}{begin}{text}\n{end}{after}"


PAGES: dict[str, Callable[[str], str]] = {"docs/sampling.md": filled_sampling, "docs/cases.md": filled_cases}


def main(args: list[str]) -> int:
    stale = 0
    for name, fill in PAGES.items():
        old = (ROOT / name).read_text(encoding="utf-8")
        new = fill(old)
        if args == ["--check"]:
            if new != old:
                print(f"{name} is not up to date; run: python scripts/table_docs.py", file=sys.stderr)
            stale += new != old
        else:
            (ROOT / name).write_text(new, encoding="utf-8")
    return int(stale > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
