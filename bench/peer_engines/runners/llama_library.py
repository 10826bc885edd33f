"""llama.cpp's library, opened where the npm package @node-llama-cpp/linux-x64 has it.

Its C functions are declared by the Python package llama-cpp-py-sync, whose own library knows no
processor beyond AVX2, and needs a newer libc than many machines have.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llama_cpp_py_sync._cffi_bindings import get_ffi


def open_library(folder: str) -> tuple[Any, Any]:
    """Return cffi and the library, with the backend for this processor, and silent."""
    ffi = get_ffi()
    ffi.cdef("void ggml_backend_load_all_from_path(const char * dir_path);")
    (ggml,) = Path(folder).glob("libggml.v*.so")
    (llama,) = Path(folder).glob("libllama.v*.so")
    backends, library = ffi.dlopen(str(ggml)), ffi.dlopen(str(llama))
    silent = ffi.callback("void(enum ggml_log_level, const char *, void *)", lambda *_: None)
    library.llama_log_set(silent, ffi.NULL)
    backends.ggml_backend_load_all_from_path(folder.encode())
    library.llama_backend_init()
    _KEPT.append((backends, silent))
    return ffi, library


# What is no longer referred to is closed.
_KEPT: list[Any] = []
