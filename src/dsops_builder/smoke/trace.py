"""Read what strace saw: every program that a run, or anything it started, executed or tried to."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import PurePosixPath

# `PID execve("/usr/bin/gcc", ["gcc", ...], ...) = 0` or `= -1 ENOENT ...`, in the form of strace -f -e trace=execve.
_EXECUTED = re.compile(r'^(?:\d+\s+)?execve(?:at)?\((?:[^,"]+, )?"(?P<program>(?:[^"\\]|\\.)*)"', re.MULTILINE)
_COMPILER = re.compile(
    r"(?:.*-)?(?:gcc|g\+\+|cc|c\+\+|clang|clang\+\+|cpp|icx|icpx)(?:-\d+)?|cc1(?:plus)?|collect2|ld(?:\..+)?|as"
    r"|ninja|nvcc|cicc|ptxas|cudafe\+\+|fatbinary|make|cmake|hipcc"
)


def executed(log: str) -> Iterator[str]:
    """The path of every program that was executed or searched for; a failed attempt counts."""
    for found in _EXECUTED.finditer(log):
        yield found["program"]


def compilers(programs: Iterable[str]) -> tuple[str, ...]:
    """Those among ``programs`` that compile, assemble, link, or drive a build; sorted, each once."""
    return tuple(sorted({program for program in programs if _COMPILER.fullmatch(PurePosixPath(program).name)}))
