"""Record a real `legato chat` in a pseudo-terminal and write it as docs/chat.svg.

python scripts/record_chat.py
"""

import io
import re
import sys
from pathlib import Path

import pexpect
from rich.console import Console
from rich.text import Text

QUESTIONS = ("Why do cats purr?", "Give me a name for a cat that purrs all day.")
ARGS = ["chat", "--temperature", "0", "--max-tokens", "80"]
COLUMNS, ROWS = 92, 40
TARGET = Path(__file__).parents[1] / "docs" / "chat.svg"


def main() -> None:
    command = str(Path(sys.executable).with_name("legato"))
    terminal = pexpect.spawn(command, ARGS, dimensions=(ROWS, COLUMNS), encoding="utf-8", timeout=120)
    log = terminal.logfile_read = io.StringIO()
    for question in QUESTIONS:
        terminal.expect("> ")
        terminal.sendline(question)
        terminal.expect("tok/s")
    terminal.expect("> ")
    terminal.sendeof()
    terminal.expect(pexpect.EOF)
    # Modes such as bracketed paste say nothing about what is seen.
    seen = re.sub(r"\x1b\[\?[0-9;]*[hl]", "", log.getvalue()).replace("\r\n", "\n")
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(Text(f"$ legato {' '.join(ARGS)}", style="bold"))
    console.print(Text.from_ansi(seen.rstrip()))
    svg = console.export_svg(title="legato chat")
    svg = re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL)  # a page of ours loads nothing from elsewhere
    TARGET.write_text(svg, encoding="utf-8")
    print(f"wrote {TARGET.name}")


if __name__ == "__main__":
    main()
