"""The C ABI of a portable library (``ops/_portable``): its table of functions, a call, a failure, what was let go."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Tuple, Type

ABI = 1
FAILED = -(2**63)
"""What a call returns when it failed; :meth:`Library.failure` says whether it did."""
_KINDS: Dict[str, Type[Exception]] = {
    "R": RuntimeError, "V": ValueError, "I": IndexError, "M": MemoryError, "O": OverflowError,
}  # fmt: skip
_ROOM = 64

Call = Callable[[bytes], int]
"""Calls the entry whose handle is in the first slot, and returns its number, or :data:`FAILED`."""


@dataclass(frozen=True)
class Entry:
    """One function of the library: its name, its signature in the letters of ``table.h``, and the handle to call it."""

    name: str
    signature: str
    handle: int


class Library:
    """An opened library. Raises :class:`OSError` when it cannot be loaded, :class:`ImportError` for another ABI."""

    def __init__(self, path: str) -> None:
        self.path = path
        # The first lets other threads run during a call, the second keeps the GIL, as pybind11 does by default.
        self._free, self._held = ctypes.CDLL(path), ctypes.PyDLL(path)
        try:
            abi = self.number("dsops_abi")
        except AttributeError:
            raise ImportError(f"{path}: no library of the portable tier, as it exports no dsops_abi") from None
        if abi != ABI:
            raise ImportError(f"{path}: its C ABI is {abi}, and this loader's is {ABI}")
        for library in (self._free, self._held):
            library.dsops_call.restype = ctypes.c_int64
            library.dsops_call.argtypes = (ctypes.c_char_p,)
        self._held.dsops_released.argtypes = (ctypes.c_void_p, ctypes.c_int64)
        self._held.dsops_released.restype = ctypes.c_int64
        self._held.dsops_failure.restype = ctypes.c_char_p

    @property
    def entries(self) -> Tuple[Entry, ...]:
        """Every function of the library, in the order of the sources."""
        handle = self._held.dsops_entry
        handle.restype, handle.argtypes = ctypes.c_void_p, (ctypes.c_int64,)
        return tuple(
            Entry(self.text("dsops_name", index), self.text("dsops_signature", index), handle(index))
            for index in range(self.number("dsops_count"))
        )

    def number(self, name: str) -> int:
        """The answer of an exported function that takes nothing and returns an int64."""
        function = getattr(self._held, name)
        function.restype = ctypes.c_int64
        return int(function())

    def text(self, name: str, argument: Any) -> str:
        """The answer of an exported function that takes an int64, or a text, and returns a text."""
        function = getattr(self._held, name)
        function.restype = ctypes.c_char_p
        function.argtypes = (ctypes.c_char_p if isinstance(argument, bytes) else ctypes.c_int64,)
        return str(function(argument).decode("utf-8", "replace"))

    def caller(self, entry: Entry) -> Call:
        """What calls this entry: without the GIL, where its signature says so."""
        call: Call = (self._free if entry.signature.startswith("!") else self._held).dsops_call
        return call

    def failure(self) -> None:
        """Raise what the last call of this thread failed with, if it did fail: FAILED is a number like any other."""
        text = self._held.dsops_failure().decode("utf-8", "replace")
        if text:
            raise _KINDS[text[0]](text[1:])

    def released(self) -> List[int]:
        """Tokens of the tensors passed by value that nothing in the library holds any longer."""
        tokens: List[int] = []
        room = (ctypes.c_uint64 * _ROOM)()
        while True:
            count = self._held.dsops_released(room, _ROOM)
            tokens += room[:count]
            if count < _ROOM:
                return tokens

    def bind_openmp(self, functions: Tuple[Any, Any, Any]) -> None:
        """Hand parallel regions on to these three functions of an OpenMP runtime (``openmp.cpp``)."""
        self._held.dsops_bind_openmp(*(ctypes.cast(function, ctypes.c_void_p) for function in functions))
