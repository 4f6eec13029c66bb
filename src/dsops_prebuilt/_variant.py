"""The words that name what a binary is bound to: SIMD level, GPU and architecture, torch build, CUDA release, libc."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from typing import Optional, Tuple

from dsops_prebuilt._errors import UsageError, one_of


class Simd(str, Enum):
    """A SIMD level, by the x86-64 psABI's names (section 3.1.1, "Processor Architecture")."""

    X86_64 = "x86_64"
    X86_64_V3 = "x86_64_v3"
    X86_64_V4 = "x86_64_v4"
    AARCH64 = "aarch64"

    def __str__(self) -> str:
        return self.value

    @property
    def machine(self) -> str:
        """``platform.machine()`` of the processors that have this level."""
        return "aarch64" if self is Simd.AARCH64 else "x86_64"

    @property
    def rank(self) -> int:
        """Place in the order of levels of one machine; a host runs every level up to its own."""
        return list(Simd).index(self) if self.machine == "x86_64" else 0

    def runs_on(self, host: Simd) -> bool:
        """Whether code of this level runs where the highest level is ``host``."""
        return self.machine == host.machine and self.rank <= host.rank

    @classmethod
    def parse(cls, text: str) -> Simd:
        """Inverse of ``str``. Raises :class:`UsageError` for anything else."""
        try:
            return cls(text)
        except ValueError:
            raise UsageError(f"{text!r} is not a SIMD level; {one_of(text, map(str, cls))}") from None


_V3 = frozenset(["avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"])
_V4 = _V3 | frozenset(["avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"])


def simd_of(cpuinfo: str, machine: str) -> Optional[Simd]:
    """The highest level whose features every processor in the text of ``/proc/cpuinfo`` has; None where it has none.

    The kernel leaves out what it does not save for a process, so CPUID and XGETBV need not be asked
    (Documentation/arch/x86/cpuinfo.rst). Features: x86-64 psABI, table 3.1; the kernel calls LZCNT ``abm``.
    """
    if machine == "aarch64":
        return Simd.AARCH64
    lines = [line.partition(":")[2].split() for line in cpuinfo.splitlines() if line.startswith("flags")]
    if machine != "x86_64" or not lines:
        return None
    common = frozenset(lines[0]).intersection(*lines[1:])
    return Simd.X86_64_V4 if common >= _V4 else Simd.X86_64_V3 if common >= _V3 else Simd.X86_64


_ARCH = re.compile(r"(?P<major>[1-9]\d?)\.(?P<minor>\d)(?P<suffix>[af]?)(?P<ptx>\+PTX)?")


@dataclass(frozen=True, order=True)
class GpuArch:
    """One token of a GPU arch list: compute capability, feature suffix, and whether PTX comes with it.

    ``9.0`` is SASS for sm_90; ``9.0a`` architecture-specific code, ``10.0f`` family-specific code (CUDA C++
    Programming Guide, "Compute Capability" and "Feature Set Compiler Targets"); ``12.0+PTX`` is SASS and
    PTX, in the spelling of ``TORCH_CUDA_ARCH_LIST`` (torch/utils/cpp_extension.py).
    """

    major: int
    minor: int
    suffix: str = ""
    ptx: bool = False

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}{self.suffix}{'+PTX' if self.ptx else ''}"

    @property
    def number(self) -> str:
        """The digits that nvcc uses, with their suffix: ``90``, ``90a``, ``120``."""
        return f"{self.major}{self.minor}{self.suffix}"

    @classmethod
    def parse(cls, text: str) -> GpuArch:
        """Inverse of ``str``. Raises :class:`UsageError` for anything else."""
        found = _ARCH.fullmatch(text)
        if found is None:
            raise UsageError(
                f"{text!r} is not a GPU architecture; "
                "accepted: a compute capability such as 8.0, 9.0a, 10.0f or 12.0+PTX"
            )
        return cls(int(found["major"]), int(found["minor"]), found["suffix"], found["ptx"] is not None)


@dataclass(frozen=True)
class Gpu:
    """One NVIDIA GPU: the name a message calls it by (its UUID, or ``cuda:N``), and its compute capability."""

    name: str
    major: int
    minor: int

    def __str__(self) -> str:
        return f"{self.name} (compute capability {self.major}.{self.minor})"

    def runs(self, arch: GpuArch) -> bool:
        """Whether machine code (SASS) of ``arch`` runs: same major release and not a later minor one.

        ``a`` code runs on exactly its architecture, ``f`` code on its family, which is that same set (CUDA C++
        Programming Guide, "Binary Compatibility", "Feature Set Compiler Targets").
        """
        exact = arch.suffix != "a" or arch.minor == self.minor
        return arch.major == self.major and arch.minor <= self.minor and exact

    def compiles(self, arch: GpuArch) -> bool:
        """Whether a new enough driver can compile PTX of ``arch``: any earlier one, but for ``a`` and ``f`` code."""
        return self.runs(arch) if arch.suffix else (arch.major, arch.minor) <= (self.major, self.minor)


_RELEASE = re.compile(r"(?P<release>(?P<minor>\d+\.\d+)\.\d+)(?P<rest>[^+]*)(?:\+(?P<local>.+))?")
_LOCAL_OF_A_RELEASE = re.compile(r"cpu|cu\d{2,4}|rocm[\d.]+|xpu")


@dataclass(frozen=True)
class TorchBuild:
    """What a running torch says of itself.

    ``version`` is ``torch.__version__``; ``cuda`` is ``torch.version.cuda`` (``"12.6"``) or None;
    ``hip`` is ``torch.version.hip`` or None; ``cxx11_abi`` is ``torch._C._GLIBCXX_USE_CXX11_ABI``, or None when
    nobody could be asked.
    """

    version: str
    cuda: Optional[str] = None
    hip: Optional[str] = None
    cxx11_abi: Optional[bool] = None

    @property
    def minor(self) -> str:
        """``2.7`` of ``2.7.1+cu126``; the whole version when it is no version at all."""
        found = _RELEASE.fullmatch(self.version)
        return found["minor"] if found else self.version

    @property
    def is_release(self) -> bool:
        """Whether this is a build that PyTorch publishes under a release number.

        Nightly (``.dev``), alpha (``a0``), source (``+git``) and vendor builds share a number with a release and
        not its ABI, so nothing short of the exact string binds to them.
        """
        found = _RELEASE.fullmatch(self.version)
        if found is None or found["rest"]:
            return False
        return found["local"] is None or _LOCAL_OF_A_RELEASE.fullmatch(found["local"]) is not None


@dataclass(frozen=True, order=True)
class CudaRelease:
    """A CUDA release, ``11.8``: toolkit or runtime."""

    major: int
    minor: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"

    @classmethod
    def parse(cls, text: str) -> CudaRelease:
        """Read ``11.8`` or ``11.8.89``. Raises :class:`UsageError` for anything else."""
        found = re.fullmatch(r"(\d+)\.(\d+)(?:\.\d+)*", text)
        if found is None:
            raise UsageError(f"{text!r} is not a CUDA release; accepted: MAJOR.MINOR, such as 11.8")
        return cls(int(found[1]), int(found[2]))


@dataclass(frozen=True)
class Libc:
    """The C library: ``kind`` is ``glibc`` or ``musl``; ``version`` is None where it cannot be asked."""

    kind: str
    version: Optional[Tuple[int, int]] = None

    def __str__(self) -> str:
        return self.kind if self.version is None else f"{self.kind} {self.version[0]}.{self.version[1]}"
