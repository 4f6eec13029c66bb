"""Set up a CUDA_HOME: a provider lays the toolkit out, one check says whether it is what the matrix states."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from dsops_builder.cache import cache_key, fresh_folder
from dsops_builder.errors import ToolchainError
from dsops_builder.fetch import DebianMirror
from dsops_builder.model import Toolkit
from dsops_builder.process import Runner

_LIB = "usr/lib/x86_64-linux-gnu"
_PROGRAMS = (
    "cudafe++", "fatbinary", "ptxas", "nvlink", "bin2c", "cuobjdump", "nvdisasm", "__nvcc_device_query",
)  # fmt: skip
# Headers that the ops, or torch's ATen/cuda headers behind them, include.
_HEADERS = (
    "cuda.h", "cuda_runtime.h", "cuda_fp16.h", "cuda_bf16.h", "cublas_v2.h", "cublasLt.h", "cusparse.h",
    "cusolverDn.h", "curand_kernel.h", "thrust/complex.h", "cub/cub.cuh", "cuda/std/type_traits", "crt/host_config.h",
)  # fmt: skip
# The layout that nvcc expects of a CUDA_HOME, in the words of the nvcc.profile that NVIDIA's installer writes.
_PROFILE = """\
TOP              = $(_HERE_)/..
NVVMIR_LIBRARY_DIR = $(TOP)/nvvm/libdevice
LD_LIBRARY_PATH += $(TOP)/lib:
PATH            += $(TOP)/nvvm/bin:$(_HERE_):
INCLUDES        +=  "-I$(TOP)/include" $(_SPACE_)
LIBRARIES       =+ $(_SPACE_) "-L$(TOP)/lib64/stubs" "-L$(TOP)/lib64"
CUDAFE_FLAGS    +=
PTXAS_FLAGS     +=
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class CudaHome:
    """A CUDA_HOME that has been checked. ``key`` names what decides the output of its nvcc."""

    key: str
    path: Path
    release: str
    cuobjdump: Path
    description: str


class Provider(Protocol):
    """A source of toolkits: lays one out as a CUDA_HOME (bin, nvvm, include, lib64) in an empty folder."""

    def lay_out(self, toolkit: Toolkit, folder: Path) -> None:
        """Raises :class:`~dsops_builder.errors.FetchError` or CommandError."""
        ...


class Debian:
    """Debian's packages of the toolkit, unpacked and put into NVIDIA's layout; its own scatters over /usr."""

    def __init__(self, mirror: DebianMirror, runner: Runner) -> None:
        self._mirror = mirror
        self._runner = runner

    def lay_out(self, toolkit: Toolkit, folder: Path) -> None:
        """See :class:`Provider`."""
        tree = folder / "unpacked"
        tree.mkdir()
        for package in toolkit.packages:
            if package.name == "nvidia-cuda-dev":
                self._unpack_development(self._mirror.fetch(package), tree)
            else:
                self._mirror.unpack([package], tree)
        for place in ("bin", "nvvm/bin", "lib64"):
            (folder / place).mkdir(parents=True)
        private = tree / "usr/lib/nvidia-cuda-toolkit"
        (private / "bin/nvcc").rename(folder / "bin/nvcc")
        (private / "bin/crt").rename(folder / "bin/crt")
        (private / "bin/cicc").rename(folder / "nvvm/bin/cicc")
        (private / "libdevice").rename(folder / "nvvm/libdevice")
        for program in _PROGRAMS:
            (tree / "usr/bin" / program).rename(folder / "bin" / program)
        (tree / "usr/include").rename(folder / "include")
        for library in sorted((tree / _LIB).glob("libcuda*")):
            library.rename(folder / "lib64" / library.name)
        (tree / _LIB / "stubs").rename(folder / "lib64/stubs")
        (folder / "lib").symlink_to("lib64")
        (folder / "bin/nvcc.profile").write_text(_PROFILE, encoding="ascii")
        shutil.rmtree(tree)

    def _unpack_development(self, package: Path, tree: Path) -> None:
        """Unpack headers, link stubs and cudart only: the rest is 2.5 GB of static libraries."""
        wanted = ["./usr/include", f"./{_LIB}/stubs/*", f"./{_LIB}/libcudart*", f"./{_LIB}/libcudadevrt.a"]
        script = 'set -o pipefail; dpkg-deb --fsys-tarfile "$1" | tar -x -C "$2" --wildcards "${@:3}"'
        self._runner.run(["bash", "-c", script, "unpack", str(package), str(tree), *wanted])


def set_up_toolkit(release: str, toolkit: Toolkit, mirror: DebianMirror, cache: Path, runner: Runner) -> CudaHome:
    """Return the CUDA_HOME of ``release``, laid out in ``cache`` unless it is there.

    Raises :class:`~dsops_builder.errors.FetchError` for a package and :class:`ToolchainError` when nvcc does not run,
    is of another version, or a header that the ops include is not there.
    """
    providers: dict[str, Provider] = {"debian": Debian(mirror, runner)}
    key = cache_key([toolkit.model_dump_json()], recipe=(__file__,))
    home = cache / "cuda" / f"{release}-{key}"
    if not home.exists():
        with fresh_folder(home) as scratch:
            providers[toolkit.provider].lay_out(toolkit, scratch)
            check_cuda_home(scratch, toolkit.release, runner)
    return CudaHome(
        key=key,
        path=home,
        release=release,
        cuobjdump=home / "bin/cuobjdump",
        description=f"CUDA {toolkit.release} from the {toolkit.provider} provider",
    )


def check_cuda_home(home: Path, release: str, runner: Runner) -> None:
    """Raise :class:`ToolchainError` unless nvcc runs, is of ``release``, and has the headers that the ops include."""
    printed = runner.run([str(home / "bin/nvcc"), "--version"])
    said = re.search(r"\bV(\d+\.\d+\.\d+)", printed)
    found = repr(printed) if said is None else said[1]
    if found != release:
        raise ToolchainError(f"{home}/bin/nvcc is {found}, and the matrix states {release}")
    missing = [header for header in _HEADERS if not (home / "include" / header).exists()]
    if missing:
        raise ToolchainError(f"{home}/include lacks {', '.join(missing)}; the toolkit's package list is not complete")
