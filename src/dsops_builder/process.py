"""Run commands: the only module of the project that starts processes."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from dsops_builder.errors import CommandError

_TAIL = 60


class Runner(Protocol):
    """What the pipeline needs of a machine that runs commands."""

    def run(
        self,
        command: Sequence[str],
        *,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        log: Path | None = None,
    ) -> str:
        """Run ``command`` to its end and return what it printed (stdout and stderr together).

        ``env`` is the whole environment, None for this process's own; ``log`` gets every line as it comes.
        Raises :class:`CommandError` when the exit code is not 0 or the program is not there.
        """
        ...


class Shell:
    """The real runner. ``echo`` is called with each line of output, for a live view."""

    def __init__(self, echo: Callable[[str], None] | None = None) -> None:
        self._echo = echo

    def run(
        self,
        command: Sequence[str],
        *,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        log: Path | None = None,
    ) -> str:
        """See :class:`Runner`."""
        try:
            process = subprocess.Popen(  # noqa: S603  commands come from the matrix and this package, never from a shell
                list(command),
                cwd=cwd,
                env=None if env is None else dict(env),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,
            )
        except OSError as error:
            raise CommandError(f"{command[0]}: cannot be started: {error}") from error
        lines = self._drain(process, log)
        if process.returncode != 0:
            message = _describe(command, process.returncode, lines, cwd, log)
            raise CommandError(message, process.returncode, "".join(lines))
        return "".join(lines)

    def _drain(self, process: subprocess.Popen[str], log: Path | None) -> list[str]:
        lines: list[str] = []
        sink = None if log is None else log.open("w", encoding="utf-8", buffering=1)
        try:
            assert process.stdout is not None  # noqa: S101  stdout=PIPE above
            with process.stdout:
                for line in process.stdout:
                    lines.append(line)
                    if sink is not None:
                        sink.write(line)
                    if self._echo is not None:
                        self._echo(line.rstrip("\n"))
            process.wait()
        except BaseException:
            _stop(process)
            raise
        finally:
            if sink is not None:
                sink.close()
        return lines


def _stop(process: subprocess.Popen[str]) -> None:
    """End the command and everything it started (a compiler behind ninja behind Python), then reap it."""
    try:
        os.killpg(process.pid, signal.SIGTERM)
    except ProcessLookupError:
        return
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _describe(command: Sequence[str], code: int, lines: Sequence[str], cwd: Path | None, log: Path | None) -> str:
    tail = "".join(deque(lines, maxlen=_TAIL)).rstrip()
    where = f" (in {cwd})" if cwd is not None else ""
    more = f"\nThe whole output: {log}" if log is not None else ""
    return f"exit code {code} from{where}:\n  {shlex.join(command)}\n{tail}{more}"
