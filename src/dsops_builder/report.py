"""Tell people what happens: the only module that writes to the terminal. stderr is for people, stdout is data."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.status import Status
from rich.table import Table

from dsops_builder.model import Wheel

_LOG_WIDTH = 240
"""Columns where there is no terminal: a row of the final table stays on one line of a log."""


class Report:
    """The narration of one run. ``step`` is what the pipeline uses; everything else is called by the command line.

    ``github`` folds steps as GitHub Actions shows them and lets commands' output through; ``step_summary`` is the file
    that Actions renders under a run.
    """

    def __init__(
        self,
        *,
        stdout: TextIO,
        stderr: TextIO,
        color: bool | None = None,
        github: bool = False,
        step_summary: Path | None = None,
    ) -> None:
        self._stdout = stdout
        self._console = Console(
            file=stderr,
            # None lets rich look whether it writes to a terminal.
            force_terminal=color,
            color_system="auto" if color is not False else None,
            width=None if stderr.isatty() else _LOG_WIDTH,
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
        self._github = github
        self._step_summary = step_summary
        self._depth = 0
        self._status: Status | None = None

    @classmethod
    def for_process(cls, env: Mapping[str, str]) -> Report:
        """A report on this process's streams. ``NO_COLOR``, ``FORCE_COLOR`` and GitHub's variables are obeyed."""
        color = False if env.get("NO_COLOR") else True if env.get("FORCE_COLOR") else None
        summary = env.get("GITHUB_STEP_SUMMARY")
        return cls(
            stdout=sys.stdout,
            stderr=sys.stderr,
            color=color,
            github=env.get("GITHUB_ACTIONS") == "true",
            step_summary=Path(summary) if summary else None,
        )

    def data(self, text: str) -> None:
        """Write one line, or several, to stdout."""
        self._stdout.write(f"{text}\n")
        self._stdout.flush()

    def say(self, text: str) -> None:
        """Tell people something."""
        self._console.print(text)

    def echo(self, line: str) -> None:
        """Take one line of a command's output: kept in Actions' fold, a passing line on a terminal, else not shown."""
        if self._github:
            self._console.print(line)
        elif self._status is not None:
            self._status.update(f"{line.strip()[: self._console.width - 4]}")

    @contextmanager
    def step(self, title: str) -> Iterator[None]:
        """Announce a step, and its seconds when it is over. Steps may be nested; only outer ones are folded."""
        started = time.monotonic()
        indent = "  " * self._depth
        folded = self._github and self._depth == 0
        self._console.print(f"::group::{title}" if folded else f"{indent}{title} ...", style=None if folded else "bold")
        self._depth += 1
        outcome = "failed after"
        try:
            with self._live():
                yield
            outcome = "done in"
        finally:
            self._depth -= 1
            if folded:
                self._console.print("::endgroup::")
            self._console.print(f"{indent}{title}: {outcome} {seconds(time.monotonic() - started)}")

    def wheels(self, wheels: Sequence[Wheel]) -> None:
        """The final table: file, size, seconds and sha256 of each wheel; on stdout their paths, one a line."""
        table = Table(box=None, pad_edge=False)
        for heading in ("file", "size", "time", "sha256"):
            table.add_column(heading, overflow="fold", justify="right" if heading in {"size", "time"} else "left")
        for wheel in wheels:
            table.add_row(wheel.path.name, size(wheel.size), seconds(wheel.seconds), wheel.sha256)
        self._console.print(table, soft_wrap=False)
        if self._step_summary is not None:
            rows = [f"| {w.path.name} | {size(w.size)} | {seconds(w.seconds)} | `{w.sha256}` |" for w in wheels]
            text = "\n".join(["| file | size | time | sha256 |", "|---|--:|--:|---|", *rows, ""])
            with self._step_summary.open("a", encoding="utf-8") as stream:
                stream.write(text)
        for wheel in wheels:
            self.data(str(wheel.path))

    def error(self, message: str) -> None:
        """End a failed run: one block that begins with ``error:``, its further lines indented below it."""
        first, *rest = message.splitlines() or ["no message"]
        self._console.print(f"error: {first}", style="bold red")
        for line in rest:
            self._console.print(f"  {line}" if line else "")

    @contextmanager
    def _live(self) -> Iterator[None]:
        """A passing line with the command's output, on a terminal and for the outermost step only."""
        if self._depth != 1 or self._github or not self._console.is_terminal:
            yield
            return
        self._status = self._console.status("")
        with self._status:
            try:
                yield
            finally:
                self._status = None


def seconds(value: float) -> str:
    """``0.4 s``, ``12.3 s``, ``2 min 05 s``."""
    if value < 60:  # noqa: PLR2004  seconds of a minute
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    return f"{minutes} min {rest:02d} s"


def size(count: int) -> str:
    """Bytes in decimal units, as package indexes show them: ``812 B``, ``246 kB``, ``9.7 MB``."""
    if count < 1_000:  # noqa: PLR2004  bytes of a kilobyte
        return f"{count} B"
    return f"{count / 1_000:.0f} kB" if count < 1_000_000 else f"{count / 1_000_000:.1f} MB"  # noqa: PLR2004  bytes


__all__ = ["Report", "seconds", "size"]
