"""Collect every fault of the files that a maintainer writes, and word them all alike."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from dsops_builder.errors import MatrixError

Value = TypeVar("Value")
Location = tuple[str | int, ...]
"""Where in a file: the keys and list positions from its top, ``("rows", "1_cpu", "pairings", 0)``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One fault. ``line`` counts from 1 and is None where the file as a whole is meant."""

    file: str
    line: int | None
    where: Location
    text: str

    def __str__(self) -> str:
        line = "" if self.line is None else f"{self.line}:"
        where = "" if not self.where else f" {spell(self.where)}:"
        return f"{self.file}:{line}{where} {self.text}"


@dataclass(kw_only=True, slots=True)
class Faults:
    """The faults found so far, in all files of one check. Of two at one place the first is kept: it is the cause."""

    _found: list[Fault] = field(default_factory=list)

    def add(self, fault: Fault) -> None:
        """Take one more fault."""
        if all((fault.file, fault.line, fault.where) != (old.file, old.line, old.where) for old in self._found):
            self._found.append(fault)

    def under(self, file: str, where: Location) -> bool:
        """Whether ``where`` or anything inside it has a fault already, so that what follows from it is not told."""
        return any(old.file == file and old.where[: len(where)] == where for old in self._found)

    def settle(self, value: Value | None) -> Value:
        """Return ``value`` when there is no fault; else raise one :class:`MatrixError` with a line for each.

        Files come in the order in which they were read, the faults of one by line. A None has left its fault.
        """
        if value is None or self._found:
            files = list(dict.fromkeys(fault.file for fault in self._found))
            ordered = sorted(self._found, key=lambda fault: (files.index(fault.file), fault.line or 0))
            raise MatrixError("\n".join(map(str, ordered)))
        return value


def spell(where: Location) -> str:
    """``rows.1_cpu.pairings[0].wheels["3.11"]``: keys that have a dot in them are quoted."""
    text = ""
    for part in where:
        if isinstance(part, int):
            text += f"[{part}]"
        elif "." in part:
            text += f'["{part}"]'
        else:
            text += f".{part}" if text else part
    return text


def differs(found: str, accepted: str, hint: str = "") -> str:
    """``found X, accepted Y``, the one shape of a message about a value; ``hint`` comes from :func:`suggestion`."""
    return f"found {found}, accepted {accepted}{hint}"


def nearest(word: str, words: Iterable[str]) -> str | None:
    """Of ``words`` the one that comes nearest to ``word``; None when none comes near."""
    return next(iter(difflib.get_close_matches(word, list(words), n=1)), None)


def suggestion(word: str, words: Iterable[str]) -> str:
    """``, did you mean "cpu_adam"?`` for the nearest word, or nothing when none comes near."""
    near = nearest(word, words)
    return "" if near is None else f', did you mean "{near}"?'


def listed(words: Iterable[str]) -> str:
    """Words for a message, separated by commas; ``nothing`` when there is none."""
    return ", ".join(words) or "nothing"
