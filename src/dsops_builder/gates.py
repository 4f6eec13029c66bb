"""Judge one shared object of a wheel: each gate answers with what it found and what it wanted, or with nothing."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from dsops_builder.elf import Elf, unresolved
from dsops_builder.fatbin import GpuCode, asked_for
from dsops_builder.isa import Instructions
from dsops_prebuilt._manifest import Artifact
from dsops_prebuilt._variant import GpuArch

# The C and C++ runtimes, which every manylinux system has (PEP 600).
_SYSTEM = frozenset(
    {"libstdc++.so.6", "libm.so.6", "libgcc_s.so.1", "libc.so.6", "libpthread.so.0", "ld-linux-x86-64.so.2"}
)
_TORCH = frozenset({"libc10.so", "libtorch.so", "libtorch_cpu.so", "libtorch_python.so"})
_TORCH_CUDA = frozenset({"libc10_cuda.so", "libtorch_cuda.so", "libtorch_cuda_cu.so", "libtorch_cuda_cpp.so"})

_PYTHON_API = ("Py", "_Py")
# Ops are compiled with -fopenmp and not linked with it, so that they use the OpenMP runtime that torch loaded:
# libtorch_cpu.so needs it, under a name and in a folder that differ between torch releases. Where it lies beside
# libtorch_cpu.so these symbols are found like the others; this exempts them where it does not.
_OPENMP = ("GOMP_", "omp_")


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """A gate that did not hold."""

    gate: str
    file: str
    found: str
    wanted: str

    def __str__(self) -> str:
        return f"{self.file}: {self.gate}: found {self.found}; wanted {self.wanted}"


def check_identity(file: str, elf: Elf, artifact: Artifact) -> Iterator[Failure]:
    """The machine, the file name's suffix and the module's init function are those of the manifest."""
    machine = artifact.simd.machine
    if elf.machine != machine or artifact.machine != machine:
        found = f"a file for {elf.machine}, listed as {artifact.machine}"
        yield Failure(gate="machine", file=file, found=found, wanted=f"{machine}, the machine of {artifact.simd}")
    if artifact.python is None:
        return
    module = artifact.module.rpartition(".")[2]
    # What importlib accepts on this Python: sysconfig's EXT_SUFFIX (PEP 3149).
    name = f"{module}.cpython-{artifact.python.removeprefix('cp')}-{machine}-linux-gnu.so"
    if Path(file).name != name:
        yield Failure(gate="python", file=file, found=f"file name {Path(file).name}", wanted=name)
    if f"PyInit_{module}" not in elf.defined:
        yield Failure(gate="python", file=file, found="no such function", wanted=f"PyInit_{module} defined")


def check_needed(file: str, elf: Elf, artifact: Artifact) -> Iterator[Failure]:
    """DT_NEEDED has only what comes with the system, with the torch that the artifact binds to, or with its CUDA."""
    allowed = set(_SYSTEM)
    if artifact.torch is not None:
        allowed |= _TORCH
    if artifact.cuda is not None:
        major = artifact.cuda.toolkit.major
        # CUDA 11 calls its runtime libcudart.so.11.0 in every minor release; from 12 on the name ends in the major.
        allowed |= _TORCH_CUDA | {f"libcudart.so.{major}", f"libcudart.so.{major}.0"}
    for library in elf.needed:
        if library not in allowed:
            yield Failure(gate="DT_NEEDED", file=file, found=library, wanted=f"only {', '.join(sorted(allowed))}")


def check_symbols(file: str, elf: Elf, artifact: Artifact, torch_libs: Mapping[str, Path]) -> Iterator[Failure]:
    """Every undefined symbol without a version is defined by something that will be there.

    auditwheel judges symbol versions only, so a symbol of a newer libc that was linked without one passes it and
    fails at ``dlopen`` (or, bound lazily, in the middle of training).
    """
    exempt: tuple[str, ...] = () if artifact.python is None else _PYTHON_API
    if artifact.torch is None:
        missing, where = elf.unversioned, "the system's libraries"
    elif artifact.torch.minor not in torch_libs:
        found = f"no library folder of torch {artifact.torch.minor} to look in"
        yield Failure(gate="symbols", file=file, found=found, wanted="one for each torch of the wheel")
        return
    else:
        exempt += _OPENMP
        missing, where = unresolved(elf, torch_libs[artifact.torch.minor]), f"torch {artifact.torch.minor}"
    for symbol in missing:
        if not symbol.startswith(exempt):
            wanted = f"every symbol without a version defined by {where}"
            yield Failure(gate="symbols", file=file, found=f"{symbol} undefined", wanted=wanted)


def check_instructions(file: str, code: Instructions, artifact: Artifact) -> Iterator[Failure]:
    """No instruction needs more than the artifact's SIMD level, and every executable byte is an instruction."""
    for use in code.above(artifact.simd):
        yield Failure(gate="instructions", file=file, found=str(use), wanted=f"nothing above {artifact.simd}")
    if code.undecodable:
        found = f"{len(code.undecodable)} undecodable, the first at {code.undecodable[0]:#x}"
        yield Failure(gate="instructions", file=file, found=found, wanted="only instructions in executable sections")


def check_gpu_code(
    file: str, code: GpuCode, artifact: Artifact, archs: Mapping[str, tuple[GpuArch, ...]] | None
) -> Iterator[Failure]:
    """SASS and PTX are those that the manifest lists, and those that the row asked of this torch."""
    if artifact.cuda is not None:
        listed = GpuCode(sass=tuple(sorted(artifact.cuda.sass)), ptx=tuple(sorted(artifact.cuda.ptx)))
        if code != listed:
            yield Failure(gate="GPU code", file=file, found=str(code), wanted=f"{listed}, as the manifest lists")
    if archs is None:
        return
    minor = "" if artifact.torch is None else artifact.torch.minor
    asked = asked_for(archs.get(minor, ()))
    if code != asked:
        yield Failure(
            gate="GPU code", file=file, found=str(code), wanted=f"{asked}, as asked for torch {minor or None}"
        )


def check_search_paths(file: str, elf: Elf) -> Iterator[Failure]:
    """No RPATH or RUNPATH: torch has loaded what the file needs, and a path would lead to another copy."""
    if elf.search_paths:
        found = "RPATH or RUNPATH " + ":".join(elf.search_paths)
        yield Failure(gate="search path", file=file, found=found, wanted="none")


def check_build_paths(file: str, content: bytes, prefixes: Iterable[str]) -> Iterator[Failure]:
    """None of ``prefixes``, paths of the machine that built, occurs in the bytes."""
    for prefix in prefixes:
        found = re.search(rb"[\x20-\x7e]*" + re.escape(prefix.encode()) + rb"[\x20-\x7e]*", content)
        if found is not None:
            text = found[0].decode("ascii", "replace")
            yield Failure(gate="build path", file=file, found=repr(text), wanted=f"nothing with {prefix}")


def check_record_of(file: str, content_sha256: str, size: int, elf: Elf, artifact: Artifact) -> Iterator[Failure]:
    """What the manifest records of the file (sha256, size, DT_NEEDED, newest glibc) is true."""
    real = (content_sha256, size, elf.needed, (elf.newest("GLIBC") or (0, 0))[:2])
    listed = (artifact.sha256, artifact.size, artifact.needed, artifact.glibc)
    for name, is_, says in zip(("sha256", "size", "DT_NEEDED", "glibc"), real, listed, strict=True):
        if is_ != says:
            yield Failure(gate="manifest", file=file, found=f"{name} {is_}", wanted=f"{says}, as the manifest lists")
