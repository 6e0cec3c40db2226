from collections.abc import Iterator

import pytest

import legato
from tests.bench.openai_server import OpenAIServer, serving


@pytest.fixture(scope="session")
def llm() -> Iterator[legato.LLM]:
    with legato.open("smollm2", slots=2, context=256, threads=1) as opened:
        yield opened


@pytest.fixture
def server() -> Iterator[OpenAIServer]:
    with serving() as running:
        yield running
