"""List the GPU code inside a shared object: which architectures have SASS and which have PTX."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dsops_builder.errors import CommandError, GateError
from dsops_builder.process import Runner
from dsops_prebuilt._variant import GpuArch

# "ELF file    1: fused_adam_op.1.sm_90a.cubin" (CUDA Binary Utilities, "cuobjdump", --list-elf and --list-ptx).
_ENTRY = re.compile(r"(?:ELF|PTX) file\s+\d+: .*\.sm_(?P<major>\d+)(?P<minor>\d)(?P<suffix>[af]?)\.(?:cubin|ptx)")
_ANY_ENTRY = re.compile(r"(?:ELF|PTX) file\s")


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuCode:
    """The architectures of a fat binary, each list sorted and without the ``+PTX`` mark."""

    sass: tuple[GpuArch, ...]
    ptx: tuple[GpuArch, ...]

    def __str__(self) -> str:
        return f"SASS {' '.join(map(str, self.sass)) or 'none'}, PTX {' '.join(map(str, self.ptx)) or 'none'}"


def asked_for(archs: tuple[GpuArch, ...]) -> GpuCode:
    """What an arch list asks for: SASS of every entry, PTX of those marked ``+PTX`` (TORCH_CUDA_ARCH_LIST)."""
    return GpuCode(sass=_plain(archs), ptx=_plain(tuple(arch for arch in archs if arch.ptx)))


def read_gpu_code(path: Path, cuobjdump: Path, runner: Runner) -> GpuCode:
    """What ``cuobjdump`` finds in ``path``.

    Raises :class:`GateError` when there is no GPU code, or an entry has a name that cannot be read, and
    :class:`~dsops_builder.errors.CommandError` when cuobjdump fails otherwise.
    """
    return GpuCode(
        sass=_entries("elf", path, runner, cuobjdump),
        ptx=_entries("ptx", path, runner, cuobjdump),
    )


def _entries(kind: Literal["elf", "ptx"], path: Path, runner: Runner, cuobjdump: Path) -> tuple[GpuArch, ...]:
    try:
        output = runner.run([str(cuobjdump), f"--list-{kind}", str(path)])
    except CommandError as error:
        # A file without a fat binary is an error for cuobjdump (exit code 255); here it is what was found.
        if "does not contain device code" in str(error):
            raise GateError(f"{path.name}: no GPU code in it") from error
        raise
    archs = []
    for line in output.splitlines():
        entry = _ENTRY.fullmatch(line.strip())
        if entry:
            archs.append(GpuArch(int(entry["major"]), int(entry["minor"]), entry["suffix"]))
        elif _ANY_ENTRY.match(line):
            raise GateError(f"{path.name}: cuobjdump lists {line.strip()!r}, whose architecture cannot be read")
    return _plain(tuple(archs))


def _plain(archs: tuple[GpuArch, ...]) -> tuple[GpuArch, ...]:
    return tuple(sorted({GpuArch(arch.major, arch.minor, arch.suffix) for arch in archs}))
