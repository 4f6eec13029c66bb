"""Find the OpenMP runtime that torch uses, and have a portable library use that one, so that there is one pool."""

from __future__ import annotations

import ctypes
import os
from typing import Any, Optional, Tuple

from dsops_prebuilt.portable._library import Library

_TORCH = "libtorch_cpu.so"
_NAMES = ("GOMP_parallel", "omp_get_num_threads", "omp_get_thread_num")


class _Where(ctypes.Structure):
    """``Dl_info`` of dladdr(3)."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("at", ctypes.c_void_p),
    )


def bind_openmp(library: Library) -> Optional[str]:
    """Bind the library to torch's OpenMP runtime and return its path; None, and one thread, where torch has none.

    Which one that is stands in libtorch_cpu.so itself, as the dynamic loader resolved it: a preloaded libgomp where
    there is one, else the one that torch brought under a hashed name, and never the one that scikit-learn loaded first.
    """
    path = library.text("dsops_openmp_of", _TORCH.encode())
    if not path:
        return None
    # What is not resolved yet is resolved as the loader would: in the global scope, then in the library's own.
    scopes = (None, path) if path.endswith(f"/{_TORCH}") else (path,)
    for scope in scopes:
        functions = _functions(scope)
        if functions is not None:
            library.bind_openmp(functions)
            return _file_of(functions[0]) or path
    return None


def _functions(scope: Optional[str]) -> Optional[Tuple[Any, Any, Any]]:
    """The three functions as a loaded file, or the whole process for None, has them."""
    try:
        runtime = ctypes.CDLL(scope, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        parallel, count, number = (getattr(runtime, name) for name in _NAMES)
    except (OSError, AttributeError):  # linked into torch itself, out of everybody's reach
        return None
    return parallel, count, number


def _file_of(function: Any) -> Optional[str]:
    where = _Where()
    dladdr = ctypes.CDLL(None).dladdr
    dladdr.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    found = dladdr(ctypes.cast(function, ctypes.c_void_p), ctypes.byref(where))
    return os.fsdecode(where.file) if found and where.file else None
