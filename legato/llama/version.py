"""Which engine library this is. Apart from the rest: `importlib.metadata` would cost every start 40 ms."""

import importlib.metadata

from legato.llama.library import load_library


def library_version() -> str:
    """Version of llama-cpp-python and of the libllama inside it."""
    binding = importlib.metadata.version("llama-cpp-python")
    return f"llama-cpp-python {binding}, libllama {load_library().llama_version().decode()}"
