"""The command as a person or a script runs it: a process of its own."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import IO, Any

import pexpect
import pytest

COMMAND = [sys.executable, "-m", "legato"]
PATIENCE_S = 120  # an upper bound for a crowded machine, not a measurement

RunLegato = Callable[..., "subprocess.CompletedProcess[bytes]"]
SpawnLegato = Callable[..., "pexpect.spawn[str]"]


def environment(**changes: str) -> dict[str, str]:
    """This process's, without what would change the output. Values of changes are added."""
    unwanted = ("NO_COLOR", "TERM", "LEGATO_MODEL", "LEGATO_DEBUG", "PYTHONWARNINGS")
    return {key: value for key, value in os.environ.items() if key not in unwanted} | {"TERM": "dumb"} | changes


@pytest.fixture
def legato() -> RunLegato:
    """Run to the end: `legato("run", "hi", stdin=b"…")`. Without stdin it is /dev/null."""

    def call(
        *args: str, stdin: bytes | None = None, stdout: IO[Any] | int = subprocess.PIPE, **env: str
    ) -> "subprocess.CompletedProcess[bytes]":
        source: dict[str, Any] = {"stdin": subprocess.DEVNULL} if stdin is None else {"input": stdin}
        return subprocess.run(
            [*COMMAND, *args],
            stdout=stdout,
            stderr=subprocess.PIPE,
            env=environment(**env),
            timeout=PATIENCE_S,
            check=False,
            **source,
        )

    return call


@pytest.fixture
def spawn() -> Iterator[SpawnLegato]:
    """Run in a pseudo-terminal."""
    children: list[pexpect.spawn[str]] = []

    def start(*args: str, **env: str) -> "pexpect.spawn[str]":
        child = pexpect.spawn(
            COMMAND[0], [*COMMAND[1:], *args], env=environment(**env), encoding="utf-8", timeout=PATIENCE_S
        )
        child.delaybeforesend = None
        children.append(child)
        return child

    yield start
    for child in children:
        child.close(force=True)
