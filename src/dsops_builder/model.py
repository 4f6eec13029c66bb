"""The frozen values that travel down the pipeline: Matrix -> Plan -> Compiled -> Wheel."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, PlainSerializer
from pydantic_core import PydanticCustomError

from dsops_prebuilt._errors import UsageError as WordError
from dsops_prebuilt._variant import GpuArch, Simd


def _not_accepted(accepted: str, words: tuple[str, ...] = ()) -> PydanticCustomError:
    """The fault of a value that is none of those ``accepted``; shape.py adds what was found and the nearest word."""
    return PydanticCustomError("accepted", "accepted {accepted}", {"accepted": accepted, "words": words})


def _word(pattern: str, accepted: str) -> AfterValidator:
    compiled = re.compile(pattern)

    def check(value: str) -> str:
        if compiled.fullmatch(value) is None:
            raise _not_accepted(accepted)
        return value

    return AfterValidator(check)


def _arch(value: object) -> GpuArch:
    if isinstance(value, GpuArch):
        return value
    try:
        return GpuArch.parse(value if isinstance(value, str) else "")
    except WordError:
        raise _not_accepted('a compute capability such as "8.0", "9.0a", "10.0f" or "12.0+PTX"') from None


def _simd(value: object) -> Simd:
    try:
        return Simd.parse(str(value))
    except WordError:
        raise _not_accepted(", ".join(Simd), tuple(Simd)) from None


def _sorted(archs: tuple[GpuArch, ...]) -> tuple[GpuArch, ...]:
    return tuple(sorted(archs))


def _filled(items: tuple[Item, ...]) -> tuple[Item, ...]:
    # pydantic's own min_length also speaks up when the only item is faulty.
    if not items:
        raise _not_accepted("a list with something in it")
    return items


Item = TypeVar("Item")
Filled = Annotated[tuple[Item, ...], AfterValidator(_filled)]
Text = Annotated[str, _word(r"(?s).*\S.*", "a text")]
Sha256 = Annotated[str, _word(r"[0-9a-f]{64}", "a sha256 of 64 lower-case hexadecimal digits")]
RowId = Annotated[str, _word(r"[1-9]\d*_(cpu|cu\d{3})", "BUILD_LABEL, such as 1_cpu or 1_cu118")]
Release = Annotated[str, _word(r"\d+\.\d+\.\d+", 'a release of three numbers, such as "2.7.1"')]
MajorMinor = Annotated[str, _word(r"\d+\.\d+", 'two numbers, such as "11.8"')]
Python = Annotated[str, _word(r"3\.\d+", 'a Python of two numbers, such as "3.11"')]
PoolPath = Annotated[str, _word(r"pool/\S+/[^/\s_]+_[^/\s_]+_[^/\s_]+\.deb", "pool/.../NAME_VERSION_ARCH.deb")]
Pin = Annotated[str, _word(r"[A-Za-z0-9._-]+==[^=\s*]+", "NAME==VERSION")]
OpName = Annotated[str, _word(r"[a-z][a-z0-9_]*", "an op's NAME, such as cpu_adam")]
Accelerator = Literal["cpu", "cuda"]
BuildVariable = Annotated[str, _word(r"DS_BUILD_[A-Z0-9_]+", "DS_BUILD_NAME, the builder's BUILD_VAR")]
SourceName = Annotated[str, _word(r"([a-z0-9_]+/)+[a-z0-9_]+\.cpp", "a source below csrc, such as adam/cpu_adam.cpp")]
ModuleName = Annotated[str, _word(r"[a-z_]\w*(\.\w+)+", "a dotted module name, such as deepspeed.ops.adam.cpu_adam_op")]
Arch = Annotated[GpuArch, BeforeValidator(_arch), PlainSerializer(str)]
Level = Annotated[Simd, BeforeValidator(_simd)]


class Frozen(BaseModel):
    """A part of the matrix: immutable, no unknown keys, no silent conversion."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, arbitrary_types_allowed=True)


class Package(Frozen):
    """A Debian package, by its path below a mirror and the sha256 of the file."""

    path: PoolPath
    sha256: Sha256

    @property
    def name(self) -> str:
        """``g++-10`` of ``pool/main/g/gcc-10/g++-10_10.2.1-6_amd64.deb``."""
        return Path(self.path).name.split("_")[0]


class HostCompiler(Frozen):
    """A C++ compiler with the old glibc that it compiles against, and the ceilings that link stubs enforce.

    It runs on x86-64 and compiles for ``machine``. ``sysroot`` packages are unpacked into one tree; ``libraries`` are
    the shared libraries that the compiler itself needs to run, kept apart because the sysroot's glibc must not reach a
    running program.
    """

    machine: Literal["x86_64", "aarch64"] = "x86_64"
    name: Text
    version: Release
    glibc: MajorMinor
    glibcxx: Release
    cxxabi: Release
    sysroot: tuple[Package, ...]
    libraries: tuple[Package, ...]


def _by_machine(compilers: dict[str, HostCompiler]) -> dict[str, HostCompiler]:
    if any(compiler.machine != machine for machine, compiler in compilers.items()):
        raise _not_accepted("compilers whose machine is their key")
    return compilers


def _native(compiler: HostCompiler) -> HostCompiler:
    if compiler.machine != "x86_64":
        raise _not_accepted("a compiler for x86_64; others are for cross_compilers")
    return compiler


class Toolkit(Frozen):
    """A CUDA toolkit: who provides it and what must come out (``nvcc`` of ``release``)."""

    provider: Literal["debian"]
    release: Release
    packages: tuple[Package, ...]


class SourceTree(Frozen):
    """One DeepSpeed release, by the sha256 of its sdist."""

    sdist_sha256: Sha256


class Pairing(Frozen):
    """One torch release on a row: its C++11 ABI, its Pythons, its GPU arch list, and the wheels whose hash is known.

    ``wheels`` maps a Python to the sha256 of the torch wheels accepted for it, whatever index serves them.
    """

    torch: Release
    cxx11_abi: Literal[0, 1]
    pythons: Filled[Python]
    archs: Annotated[tuple[Arch, ...], AfterValidator(_sorted)] = ()
    wheels: dict[Python, tuple[Sha256, ...]] = {}


class Exclude(Frozen):
    """A cell that is not built, and why. Keys that are None match everything."""

    torch: Release | None = None
    python: Python | None = None
    op: str | None = None
    reason: Text


class Row(Frozen):
    """One payload: ``BUILD_LABEL`` is its id, and what it holds is the product of the rest."""

    toolkit: str | None = None
    ops: Filled[str]
    deepspeed: Filled[str]
    simd: tuple[Level, ...] = ()
    pairings: Filled[Pairing]
    excludes: tuple[Exclude, ...] = ()


class Environment(Frozen):
    """One environment in which the portable tier is proved to train: what a user could have installed."""

    python: Python
    torch: Release
    deepspeed: Release


class Portable(Frozen):
    """The portable tier: its ops, and its SIMD levels. It is made from every release under ``deepspeed``.

    ``smoke`` are the environments of ``nox -s smoke-core``.
    """

    ops: Filled[str]
    simd: Filled[Level]
    smoke: Filled[Environment]


class Matrix(Frozen):
    """The whole of ``build_matrix.yaml``."""

    schema_version: Literal[1]
    deepspeed: dict[Release, SourceTree]
    compiler: Annotated[HostCompiler, AfterValidator(_native)]
    cross_compilers: Annotated[dict[Literal["aarch64"], HostCompiler], AfterValidator(_by_machine)] = {}
    emulator: Package
    toolkits: dict[MajorMinor, Toolkit]
    python_headers: dict[Python, Package]
    tracer: tuple[Package, ...]
    requirements: tuple[Pin, ...]
    portable: Portable
    rows: dict[RowId, Row]


@dataclass(frozen=True, kw_only=True, slots=True)
class Op:
    """One op's descriptor, from ``ops/<id>/op.yaml``.

    ``id`` is the name of the folder, by which the matrix calls the op: ``name``, the builder's ``NAME``, or, where
    accelerators have different kernels of one name, that and the accelerator (``fused_adam_cpu``). ``kernel`` is where
    the code runs: ``host`` (SIMD levels apply, no CUDA) or ``cuda``. ``accelerators`` are the DeepSpeed accelerators
    whose builder of this name is this kernel. ``module`` is the extension's dotted name. ``portable`` has the
    sources below csrc, in the builder's order, for an op of the portable tier.
    """

    id: str
    name: str
    kernel: Literal["host", "cuda"]
    accelerators: tuple[str, ...]
    build_variable: str
    module: str
    portable: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """One cell: an op of a DeepSpeed release for one torch, one Python and one SIMD level (or one arch list)."""

    row: str
    build: int
    label: str
    op: Op
    deepspeed: str
    torch: str
    cxx11_abi: bool
    python: str
    simd: Simd
    toolkit: str | None
    archs: tuple[GpuArch, ...]

    @property
    def id(self) -> str:
        """Every number has a separator: ``1_cu118/torch2.7.1/cp311/cpu_adam/ds0.19.8/x86_64_v3``."""
        return "/".join(
            (self.row, f"torch{self.torch}", self.python_tag, self.op.id, f"ds{self.deepspeed}", self.simd.value)
        )

    @property
    def python_tag(self) -> str:
        """``cp311`` of ``3.11``."""
        return "cp" + self.python.replace(".", "")

    @property
    def accelerator(self) -> str:
        """``DS_ACCELERATOR`` of the build: what DeepSpeed would detect on a host of this label."""
        return "cpu" if self.label == "cpu" else "cuda"


@dataclass(frozen=True, kw_only=True, slots=True)
class Excluded:
    """A cell that is not built, and the reason that the plan prints."""

    id: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchOrigin:
    """Where a pairing's torch headers come from. ``index`` is None for the machine's default index."""

    requirement: str
    index: str | None
    note: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Compiled:
    """One shared object, stripped, and what its compilation read and used.

    ``closure`` names DeepSpeed's files below ``csrc`` (sources in order, then headers sorted), ``closure_sha256`` is
    their digest; ``defines`` are DeepSpeed's macros that are not of the machine; ``provenance`` goes into the manifest.
    """

    target: Target
    path: Path
    closure: tuple[str, ...]
    closure_sha256: str
    defines: tuple[str, ...]
    torch_built_with: str
    provenance: tuple[tuple[str, str], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Wheel:
    """A finished wheel in ``dist/``."""

    path: Path
    sha256: str
    size: int
    seconds: float


_ROW_ID = re.compile(r"(?P<build>[1-9]\d*)_(?P<label>[a-z0-9]+)")


def split_row_id(row_id: str) -> tuple[int, str]:
    """``(1, "cu118")`` of ``1_cu118``; the id has already been validated by :class:`Matrix`."""
    found = _ROW_ID.fullmatch(row_id)
    if found is None:
        raise ValueError(row_id)
    return int(found["build"]), found["label"]


__all__ = [
    "Compiled",
    "Environment",
    "Exclude",
    "Excluded",
    "Frozen",
    "HostCompiler",
    "Matrix",
    "Op",
    "Package",
    "Pairing",
    "Portable",
    "Row",
    "SourceTree",
    "Target",
    "Toolkit",
    "TorchOrigin",
    "Wheel",
    "split_row_id",
]
