"""Pack Python values into the slots of a call, refusing what pybind11 would refuse, as TypeError."""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from struct import Struct
from struct import error as StructError  # noqa: N812 - struct's exception is not named like one
from typing import Any, Dict, List, Sequence, Tuple

from dsops_prebuilt.portable._library import Entry

# By the letters of ops/_portable/include/dsops/table.h; a number lies in the low end of its slot of 8 bytes.
_FORMATS: Dict[str, str] = {
    "i": "i4x", "q": "q", "Q": "Q", "B": "B7x", "?": "?7x", "f": "d", "d": "d", "r": "QqQ", "t": "QqQ", "[": "QQ",
}  # fmt: skip
_WORDS = {"i": "int", "q": "int", "Q": "int", "B": "int", "?": "bool", "f": "float", "d": "float"}
_ARGUMENT = re.compile(r"\[+[a-zA-Z?]\]+|[a-zA-Z?]")


@dataclass(frozen=True)
class Signature:
    """A function's name, the letters of its arguments, one each, and the letter of what it returns."""

    name: str
    letters: Tuple[str, ...]
    answer: str

    @classmethod
    def of(cls, entry: Entry) -> Signature:
        """Take a signature of ``table.h`` apart: ``!i[q]t>v`` has the letters ``i``, ``[q]`` and ``t``."""
        arguments, _, answer = entry.signature.lstrip("!").partition(">")
        return cls(entry.name, tuple(_ARGUMENT.findall(arguments)), answer)

    def __str__(self) -> str:
        return f"{self.name}({', '.join(map(_word, self.letters))})"

    @property
    def formats(self) -> Tuple[Struct, ...]:
        """How each argument's slots are packed."""
        return tuple(Struct("<" + _FORMATS[letter[0]]) for letter in self.letters)

    def pack(self, format_: Struct, *values: Any) -> bytes:
        """The slots of numbers. Raises :class:`TypeError` for a value of another kind, or out of the type's range."""
        try:
            return format_.pack(*values)
        except (StructError, OverflowError, TypeError, ValueError) as error:
            raise TypeError(f"{self}: {error}") from None

    def count(self, args: Sequence[Any]) -> None:
        """Raise :class:`TypeError` for another number of arguments."""
        if len(args) != len(self.letters):
            raise TypeError(f"{self} was called with {len(args)} arguments")

    def sequence(self, value: Any) -> Sequence[Any]:
        """``value``, if it is what pybind11 takes for a vector."""
        if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
            raise TypeError(f"{self}: a list was expected, not {type(value).__name__}")
        return value


def _word(letter: str) -> str:
    return f"list[{_word(letter[1:-1])}]" if letter[0] == "[" else _WORDS.get(letter, "Tensor")


def in_memory(slots: bytes, held: List[Any]) -> int:
    """The address of a copy of ``slots``, which stays as long as what was put into ``held``."""
    buffer = ctypes.create_string_buffer(slots, len(slots) or 1)
    held.append(buffer)
    return ctypes.addressof(buffer)


def answered(letter: str, number: int) -> Any:
    """What a function returns, from the number that its call gave."""
    return None if letter == "v" else bool(number) if letter == "?" else number
