"""Convert the arguments of a call as pybind11 converts them, or raise TypeError, and lay them out in slots."""

from __future__ import annotations

import operator
import re
from array import array
from dataclasses import dataclass
from functools import partial
from typing import Any, Callable, Dict, Iterable, List, Sequence, Tuple

# How a slot of 8 bytes is packed, by the letters of ops/_portable/include/dsops/table.h. Any number is a truth value.
_FORMATS: Dict[str, str] = {
    "i": "i4x", "q": "q", "Q": "Q", "B": "B7x", "?": "q", "f": "d", "d": "d", "r": "QQ", "t": "QQQ", "[": "QQ",
}  # fmt: skip
_WORDS = {"i": "int", "q": "int", "Q": "int", "B": "int", "?": "bool", "f": "float", "d": "float"}
_ARGUMENT = re.compile(r"\[+[a-zA-Z?]\]+|[a-zA-Z?]")
_RANGES = {"i": (-(2**31), 2**31), "q": (-(2**63), 2**63), "Q": (0, 2**64), "B": (0, 2**8)}


@dataclass(frozen=True)
class Signature:
    """A function's name, the letters of its arguments, one each, and the letter of what it returns."""

    name: str
    letters: Tuple[str, ...]
    answer: str

    @classmethod
    def parse(cls, name: str, text: str) -> Signature:
        """Take a signature of ``table.h`` apart: ``!i[q]t>v`` has the letters ``i``, ``[q]`` and ``t``."""
        arguments, _, answer = text.lstrip("!").partition(">")
        return cls(name, tuple(_ARGUMENT.findall(arguments)), answer)

    def __str__(self) -> str:
        return f"{self.name}({', '.join(map(_word, self.letters))})"

    @property
    def layout(self) -> str:
        """How :mod:`struct` packs a call: the handle of the entry, then the slots of each argument."""
        return "".join(["<Q", *(_FORMATS[letter[0]] for letter in self.letters)])

    def convert(self, args: Sequence[Any]) -> List[Any]:
        """The arguments with each number converted, and each sequence a list; tensors as they are.

        Raises :class:`TypeError` for another number of arguments, and for one that cannot be converted.
        """
        if len(args) != len(self.letters):
            raise TypeError(f"{self} was called with {len(args)} arguments")
        return [self._convert(*item) for item in enumerate(zip(self.letters, args), 1)]

    def _convert(self, position: int, item: Tuple[str, Any]) -> Any:
        try:
            return _converted(*item)
        except Exception as error:  # noqa: BLE001  __index__ and its like may raise anything, and pybind11 refuses then
            raise TypeError(f"{self}: argument {position}: {error}") from None

    def answered(self, number: int) -> Any:
        """What the function returns, from the number that its call gave."""
        return None if self.answer == "v" else bool(number) if self.answer == "?" else number


def slots_of(letter: str, value: Any, tensor: Callable[[str, Any], Tuple[int, ...]], held: List[Any]) -> Iterable[Any]:
    """The slots of a converted argument; ``tensor`` gives a tensor's. What they point at is put into ``held``."""
    if letter in "rt":
        return tensor(letter, value)
    if letter[0] != "[":
        return (value,)
    inner = letter[1:-1]
    items = array("d" if inner in "fd" else "q" if inner in "iqB?" else "Q")
    for item in value:
        items.extend(slots_of(inner, item, tensor, held))
    held.append(items)
    return items.buffer_info()[0], len(value)


def _word(letter: str) -> str:
    return f"list[{_word(letter[1:-1])}]" if letter[0] == "[" else _WORDS.get(letter, "Tensor")


def _converted(letter: str, value: Any) -> Any:
    if letter[0] == "[":
        if isinstance(value, (str, bytes, dict)):
            raise TypeError(f"{type(value).__name__} is no list")
        return [_converted(letter[1:-1], item) for item in value]
    return _CONVERTERS[letter](value) if letter in _CONVERTERS else value


# The three below are pybind11/cast.h, `type_caster` of the arithmetic types and of bool, with implicit conversion.
def _integer(letter: str, value: Any) -> int:
    if isinstance(value, float):
        raise TypeError("a float is no int")
    try:
        number = operator.index(value)
    except Exception:  # a tensor of one float has an __index__ that refuses, and an __int__
        if not hasattr(type(value), "__int__"):
            raise
        number = int(value)
    low, high = _RANGES[letter]
    if not low <= number < high:
        raise TypeError("the number is out of range")
    return number


def _real(value: Any) -> float:
    if not (hasattr(type(value), "__float__") or hasattr(type(value), "__index__")):
        raise TypeError(f"{type(value).__name__} is no float")
    return float(value)


def _truth(value: Any) -> bool:
    if not hasattr(type(value), "__bool__"):
        raise TypeError(f"{type(value).__name__} is no bool")
    return bool(value)


_CONVERTERS: Dict[str, Callable[[Any], Any]] = {
    **{letter: partial(_integer, letter) for letter in _RANGES},
    "f": _real,
    "d": _real,
    "?": _truth,
}
