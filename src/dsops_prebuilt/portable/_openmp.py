"""Find the OpenMP runtime that torch uses, and have a portable library use that one, so that there is one pool."""

from __future__ import annotations

import ctypes
import os
from typing import Optional

from dsops_prebuilt.portable._library import Library

_TORCH = b"libtorch_cpu.so"


def bind_openmp(library: Library) -> Optional[str]:
    """Bind the library to torch's OpenMP runtime and return its path; None, and one thread, where torch has none.

    Which one that is stands in libtorch_cpu.so itself, as the dynamic loader resolved it: a preloaded libgomp where
    there is one, else the one that torch brought under a hashed name, and never the one that scikit-learn loaded first.
    """
    path = library.text("dsops_openmp_of", _TORCH)
    if not path:
        return None
    try:
        runtime = ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        functions = runtime.GOMP_parallel, runtime.omp_get_num_threads, runtime.omp_get_thread_num
    except (OSError, AttributeError):  # linked into torch itself, out of everybody's reach
        return None
    library.bind_openmp(functions)
    return path
