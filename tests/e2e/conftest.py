"""One open model for all tests of this folder: the embedded one, real weights."""

from collections.abc import Iterator

import pytest

import legato


@pytest.fixture(scope="session")
def llm() -> Iterator[legato.LLM]:
    with legato.open("smollm2", slots=16, context=768) as opened:
        yield opened
