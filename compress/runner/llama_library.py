"""llama.cpp's library in this process: loaded once, its log kept quiet, and one thread that computes."""

from __future__ import annotations

import ctypes
import functools
import re
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from compress.errors import InputError

INSTALL = (
    'CXXFLAGS="-fno-tree-dse -fno-dse" CMAKE_ARGS="-DLLAVA_BUILD=OFF" CMAKE_BUILD_PARALLEL_LEVEL=2 '
    "pip install llama-cpp-python==0.3.36"
)
"""The plain build of gcc 12 crashes at the first prefill on a CPU with AMX; these flags avoid it."""

_LOG_ERROR, _LOG_CONTINUE = 4, 5
_LOG_WARN = 2
_KEPT_LINES = 8
_CACHE_LINE = re.compile(r"KV buffer size = +([\d.]+) MiB")


class Log:
    """llama.cpp's log, silenced; the last warnings and errors are kept for messages.

    The callback belongs to the whole process, so the one instance lives as long as the process does.
    """

    def __init__(self, library: Any) -> None:
        self.lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self.cache_mib: list[float] = []
        """Size of each buffer of a key/value cache that llama.cpp said it has made."""
        self._level = 0
        # The C library keeps the pointer only: without this reference the callback would be freed under it.
        self._callback = library.llama_log_callback(self._receive)
        library.llama_log_set(self._callback, ctypes.c_void_p(0))

    def _receive(self, level: int, text: bytes, _user_data: object) -> None:
        level = self._level if level == _LOG_CONTINUE else level
        self._level = level
        line = text.decode(errors="replace").strip()
        if level in (_LOG_WARN, _LOG_ERROR) or "error" in line:
            self.lines.append(line)
        if (found := _CACHE_LINE.search(line)) is not None:
            self.cache_mib.append(float(found[1]))

    def take(self) -> str:
        """The kept lines, newest last, and forget them."""
        text = "; ".join(line for line in self.lines if line)
        self.lines.clear()
        return text or "it says nothing more"


@functools.cache
def thread() -> ThreadPoolExecutor:
    """The thread in which llama.cpp computes, and nothing else does.

    On CPUs with AMX it sets a thread's tiles up once; torch, in the same thread, puts them back after each product of
    bfloat16 matrices, and llama.cpp's next one would be an illegal instruction (tried).
    """
    return ThreadPoolExecutor(1, thread_name_prefix="llama.cpp")


@functools.cache
def library() -> tuple[Any, Log]:
    """llama_cpp's C functions and the process-wide log; InputError with the install command if it is not installed."""
    try:
        from llama_cpp import llama_cpp as found
    except ImportError as error:
        raise InputError(f"llama-cpp-python cannot be imported ({error})", where="llama.cpp", fix=INSTALL) from error
    log = Log(found)
    found.llama_backend_init()
    return found, log
