"""`legato models`: what models are here, getting them, looking at them, removing them."""

import json
import os
import sys
import time
from collections.abc import Sequence

import click

from legato.core.errors import ModelFileError
from legato.models.header import GGUFHeader
from legato.models.memory import (
    ContextSettings,
    available_bytes,
    format_bytes,
    largest_context,
    memory_need,
)
from legato.models.registry import (
    InstalledModel,
    ModelSource,
    inspect,
    installed,
    models_home,
    pull,
    remove,
    resolve,
)

_USUAL_CONTEXT = 4096
_PIECE_S = 0.1  # the bar is drawn at most ten times a second


@click.group()
def models() -> None:
    """List, get, inspect and remove models.

    \b
    Examples:
      legato models list
      legato models pull hf:bartowski/SmolLM2-360M-Instruct-GGUF:Q4_K_M
      legato models show smollm2
      legato models rm SmolLM2-360M-Instruct-GGUF
    """


@models.command("list")
@click.option("--json", "as_json", is_flag=True, help="Write a JSON list instead of a table.")
def list_command(as_json: bool) -> None:
    """List the models that are here.

    \b
    Examples:
      legato models list
      legato models list --json
    """
    here = installed()
    if as_json:
        click.echo(json.dumps([_summary(entry) for entry in here], indent=2))
        return
    rows = [_row(entry) for entry in here]
    if not rows:
        click.echo("no models are here; get one: legato models pull hf:owner/repo", err=True)
        return
    _table(["NAME", "SIZE", "ARCH", "QUANT", "CONTEXT"], rows)
    for entry in here:
        if entry.problem:
            click.echo(f"damaged: {entry.problem}", err=True)


@models.command("pull")
@click.argument("ref")
def pull_command(ref: str) -> None:
    """Get a model from the Hugging Face hub.

    REF is hf:owner/repo, with :QUANT or :FILE for one of several models in it. Without it: Q4_K_M, else Q4_0, else
    Q8_0, else the only one. An interrupted download goes on where it ended. HF_ENDPOINT, HF_TOKEN, HF_HOME and
    HF_HUB_OFFLINE are honoured; LEGATO_HOME says where models are kept.

    \b
    Examples:
      legato models pull hf:bartowski/SmolLM2-360M-Instruct-GGUF
      legato models pull hf:bartowski/SmolLM2-360M-Instruct-GGUF:Q8_0
    """
    bar = ProgressBar(on_terminal=sys.stderr.isatty())
    try:
        model = pull(ref, bar.update)
    finally:
        bar.close()
    click.echo(f"{model.name}  {format_bytes(model.size_bytes)}  {model.path}", err=True)
    click.echo(model.name)


@models.command("show")
@click.argument("name", default="smollm2")
@click.option("--json", "as_json", is_flag=True, help="Write JSON instead of text.")
def show_command(name: str, as_json: bool) -> None:
    """Show what a model is and how much memory it takes.

    \b
    Examples:
      legato models show smollm2
      legato models show ./model.gguf --json
    """
    entry = inspect(resolve(name))
    if entry.problem is not None:
        raise ModelFileError(entry.problem)
    facts = _summary(entry) | _details(entry.headers)
    del facts["problem"]
    if as_json:
        click.echo(json.dumps(facts, indent=2))
        return
    lines = [(key.removesuffix("_bytes").replace("_", " "), _shown(key, value)) for key, value in facts.items()]
    width = max(len(label) for label, _ in lines)
    for label, shown in lines:
        click.echo(f"{label:<{width}}  {shown}")


@models.command("rm")
@click.argument("name")
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
def rm_command(name: str, yes: bool) -> None:
    """Remove a pulled model's files, and only them.

    \b
    Examples:
      legato models rm bartowski/SmolLM2-360M-Instruct-GGUF:Q8_0
      legato models rm --yes SmolLM2-360M-Instruct-GGUF
    """
    model = resolve(name)
    if model.source is ModelSource.PULLED and not yes:
        size = format_bytes(model.size_bytes)
        click.confirm(f"remove {model.name} ({size}) from {models_home()}?", abort=True, err=True)
    size = format_bytes(model.size_bytes)
    remove(name)
    click.echo(f"removed {model.name} ({size})", err=True)


class ProgressBar:
    """Download progress on stderr: one bar on a terminal; elsewhere one line when a file begins."""

    def __init__(self, on_terminal: bool) -> None:
        self._on_terminal = on_terminal
        self._file: str | None = None
        self._began = (0.0, 0)  # (time, bytes) when the file's bar began: speed is of this run only
        self._drawn_at = 0.0

    def update(self, name: str, done: int, total: int) -> None:
        now = time.monotonic()
        if name != self._file:
            self.close()
            self._file, self._began = name, (now, done)
            if not self._on_terminal:
                click.echo(f"{name}: downloading {format_bytes(total)}", err=True)
        if self._on_terminal and (done >= total or now - self._drawn_at >= _PIECE_S):
            self._drawn_at = now
            self._draw(done, total, now)

    def close(self) -> None:
        """End the bar's line, so that what comes next begins on its own."""
        if self._file is not None and self._on_terminal:
            click.echo(err=True)
        self._file = None

    def _draw(self, done: int, total: int, now: float) -> None:
        seconds, got = now - self._began[0], done - self._began[1]
        speed = f"{format_bytes(int(got / seconds))}/s" if seconds > 0.2 else ""
        share = done / total if total else 1.0
        numbers = f" {share:4.0%} {format_bytes(done)} of {format_bytes(total)}  {speed}"
        columns = _columns() - len(numbers) - 1
        name = (self._file or "")[-max(8, columns // 2) :]
        width = max(4, columns - len(name) - 3)
        filled = int(width * share)
        line = f"{name} [{'#' * filled}{'.' * (width - filled)}]{numbers}"
        click.echo(f"\r{line[: _columns() - 1]}\x1b[K", err=True, nl=False)


def _columns() -> int:
    try:
        return max(20, os.get_terminal_size(sys.stderr.fileno()).columns or 80)  # 0: a terminal of unknown size
    except (OSError, ValueError):
        return 80


def _summary(entry: InstalledModel) -> dict[str, object]:
    """What `list` says. Sizes in bytes, context in tokens."""
    model, header = entry.model, entry.header
    return {
        "name": model.name,
        "source": str(model.source),
        "path": str(model.path),
        "files": len(model.paths),
        "size_bytes": model.size_bytes,
        "architecture": header.architecture if header else None,
        "quantization": header.quantization if header else None,
        "context_length": header.n_ctx_train if header else None,
        "problem": entry.problem,
    }


def _details(headers: Sequence[GGUFHeader]) -> dict[str, object]:
    """What `show` says besides. Memory in bytes: for one stream with an f16 KV cache."""
    model = headers[0]
    full = model.n_ctx_train or _USUAL_CONTEXT
    usual = min(_USUAL_CONTEXT, full)
    return {
        "title": model.name,
        "parameters": sum(header.num_parameters for header in headers),
        "layers": model.n_layer,
        "vocabulary": model.n_vocab,
        "chat_template": model.has_chat_template,
        "license": model.license,
        "memory_needed_bytes": {
            str(length): memory_need(headers, ContextSettings(length)).total for length in (usual, full)
        },
        "memory_available_bytes": available_bytes(),
        "largest_context": largest_context(headers, ContextSettings(usual)),
    }


def _row(entry: InstalledModel) -> list[str]:
    header = entry.header
    size = format_bytes(entry.model.size_bytes)
    if header is None:
        return [entry.model.name, size, "damaged", "-", "-"]
    return [
        entry.model.name,
        size,
        header.architecture or "-",
        header.quantization,
        str(header.n_ctx_train or "-"),
    ]


def _table(heads: list[str], rows: list[list[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    head = "  ".join(text.ljust(width) for text, width in zip(heads, widths, strict=True)).rstrip()
    # click drops the style when stdout is no terminal, but knows nothing of NO_COLOR.
    click.echo(head if os.environ.get("NO_COLOR") else click.style(head, bold=True))
    for row in rows:
        click.echo("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())


def _shown(key: str, value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, dict):
        return ", ".join(f"{format_bytes(need)} with a context of {length}" for length, need in value.items())
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return format_bytes(value) if key.endswith("_bytes") else f"{value:,}"
    return "".join(c if c.isprintable() else "?" for c in str(value))  # the file's own words, to a terminal
