"""Loading libllama through llama-cpp-python's ctypes mirror of llama.h."""

import importlib
import importlib.machinery
import importlib.util
import sys
import types
from collections import deque
from functools import cache
from typing import Any

from legato.core.errors import EngineLibraryError

_WARN = 3  # ggml_log_level: 1 debug, 2 info, 3 warn, 4 error, 5 continuation
_log: deque[str] = deque(maxlen=20)
_log_callback: Any = None  # must stay referenced: libllama calls it for as long as the process lives


@cache
def load_library() -> Any:
    """The `llama_cpp.llama_cpp` module, its backend initialised and its log captured.

    Raises EngineLibraryError when the package or its shared library is missing or cannot be loaded.
    """
    global _log_callback
    try:
        lib = _import_binding()
    except (ImportError, OSError, RuntimeError, AttributeError) as exc:
        raise EngineLibraryError(
            f"the engine library cannot be loaded ({exc}); run `legato doctor` to see why and how to rebuild it"
        ) from exc
    _log_callback = lib.llama_log_callback(_on_log)
    lib.llama_log_set(_log_callback, None)
    lib.llama_backend_init()
    return lib


def _import_binding() -> types.ModuleType:
    """Import the mirror without running `llama_cpp/__init__.py`.

    That file also imports the high-level API, which costs 0.2 s and is not used here. The bare parent package is taken
    out of sys.modules again, so that a program that imports `llama_cpp` itself gets the whole of it.
    """
    name = "llama_cpp.llama_cpp"
    if "llama_cpp" in sys.modules:
        return importlib.import_module(name)
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None or spec.submodule_search_locations is None:
        raise ImportError("the package llama-cpp-python is not installed")
    parent = types.ModuleType("llama_cpp")
    parent.__path__ = list(spec.submodule_search_locations)
    sys.modules["llama_cpp"] = parent
    try:
        return importlib.import_module(name)
    finally:
        del sys.modules["llama_cpp"]


def _on_log(level: int, text: bytes, _user_data: object) -> None:
    if level in (_WARN, _WARN + 1):
        _log.append(text.decode("utf-8", "replace").strip())


def recent_log() -> str:
    """The last warnings and errors of libllama, joined: the reason behind a failed call."""
    return "; ".join(line for line in _log if line)


def clear_log() -> None:
    _log.clear()


def system_info() -> str:
    """The features that the library was built with and this processor runs, as libllama lists them."""
    return str(load_library().llama_print_system_info().decode())
