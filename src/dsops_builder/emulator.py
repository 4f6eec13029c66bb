"""Set up qemu's user-mode emulators, which run a program on a processor that this machine does not have."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from dsops_builder.cache import cache_key, fresh_folder
from dsops_builder.errors import ToolchainError
from dsops_builder.fetch import DebianMirror
from dsops_builder.model import Package
from dsops_builder.process import Runner

MACHINES = ("x86_64", "aarch64")
_OLDEST = (7, 2)
"""The first release that emulates AVX2 (qemu's change log of 7.2, "x86")."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Emulator:
    """The emulators of :data:`MACHINES` in one folder."""

    folder: Path

    def command(self, machine: str, cpu: str, sysroot: Path | None = None) -> tuple[str, ...]:
        """What stands in front of a program of ``machine`` to run it as ``cpu`` (``qemu-MACHINE-static -cpu help``).

        ``sysroot`` has the program's loader and libraries (:class:`~dsops_builder.compiler.CompilerHome`), None for
        this machine's. An instruction that ``cpu`` lacks raises SIGILL, and the emulator itself then dies of it.
        """
        place = () if sysroot is None else ("-L", str(sysroot))
        return (str(_program(self.folder, machine)), "-cpu", cpu, *place)


def set_up_emulator(package: Package, mirror: DebianMirror, cache: Path, runner: Runner) -> Emulator:
    """Return the emulators of the matrix, unpacked into ``cache`` unless they are there.

    Raises :class:`~dsops_builder.errors.FetchError` for the package and :class:`ToolchainError` when it lacks one, or
    has one that is too old for AVX2.
    """
    home = cache / "emulator" / cache_key([package.model_dump_json()], recipe=(__file__,))
    if not home.exists():
        with fresh_folder(home) as scratch:
            mirror.unpack([package], scratch / "unpacked")
            for machine in MACHINES:
                program = _program(scratch / "unpacked/usr/bin", machine)
                _check(program, package, runner)
                program.rename(scratch / program.name)
            # The package has 60 more machines: 300 MB.
            shutil.rmtree(scratch / "unpacked")
    return Emulator(folder=home)


def _check(program: Path, package: Package, runner: Runner) -> None:
    if not program.is_file():
        raise ToolchainError(f"{package.path} has no usr/bin/{program.name}")
    printed = runner.run([str(program), "--version"])
    found = re.search(r"version (\d+)\.(\d+)", printed)
    if found is None or (int(found[1]), int(found[2])) < _OLDEST:
        said = repr(printed) if found is None else f"version {found[1]}.{found[2]}"
        raise ToolchainError(f"{package.path}: {program.name} is {said}; AVX2 needs 7.2 or newer")


def _program(folder: Path, machine: str) -> Path:
    return folder / f"qemu-{machine}-static"
