"""Say one line to whoever trains, once for each process."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Set

_told: Set[str] = set()


def tell_once(line: str) -> None:
    """Write ``line`` to stderr, unless it was written before or nobody can read it."""
    if line in _told or sys.stderr is None:
        return
    _told.add(line)
    with suppress(OSError, ValueError):  # a full device or a closed stream must not end a training run
        sys.stderr.write(f"dsops-prebuilt: {line}\n")  # no logger is sure to show it
