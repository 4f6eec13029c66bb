"""Ask the machine: the only module that reads the environment, the processor, torch, DeepSpeed's files and the GPUs."""

from __future__ import annotations

import importlib
import os
import platform
import shutil
import sys
import sysconfig
from functools import cache, cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Dict, Optional, Protocol, Tuple

from dsops_prebuilt._errors import UsageError, one_of
from dsops_prebuilt._manifest import closure_sha256
from dsops_prebuilt._variant import CudaRelease, Gpu, Libc, Simd, TorchBuild, simd_of


class Host(Protocol):
    """What may be known of the running interpreter and machine. None is "unknown", and unknown never fits.

    ``python`` is a wheel's Python tag (``cp311``, ``cp313t``); ``system`` and ``machine`` are :mod:`platform`'s words;
    ``processor`` is the highest SIMD level of the processor, ``simd`` the one that this process may use;
    ``torch`` is None when torch is not installed; ``deepspeed`` is the installed release, ``csrc`` the folder of its
    C++ sources; ``driver`` is the newest CUDA release that the NVIDIA driver serves; ``tegra`` means a Jetson.
    """

    @property
    def python(self) -> Optional[str]: ...
    @property
    def system(self) -> Optional[str]: ...
    @property
    def machine(self) -> Optional[str]: ...
    @property
    def libc(self) -> Optional[Libc]: ...
    @property
    def processor(self) -> Optional[Simd]: ...
    @property
    def simd(self) -> Optional[Simd]: ...
    @property
    def torch(self) -> Optional[TorchBuild]: ...
    @property
    def deepspeed(self) -> Optional[str]: ...
    @property
    def csrc(self) -> Optional[str]: ...
    @property
    def driver(self) -> Optional[CudaRelease]: ...
    @property
    def tegra(self) -> bool: ...

    def gpus(self) -> Optional[Tuple[Gpu, ...]]:
        """The NVIDIA GPUs that this process may use; ``()`` when there is none."""

    def closure_digest(self, closure: Tuple[str, ...]) -> Optional[str]:
        """:func:`closure_sha256` of the installed sources; None when one of the files is not there."""

    def jit_obstacles(self, needs_cuda: bool) -> Tuple[str, ...]:
        """What DeepSpeed's just-in-time build would lack here, one phrase each; empty when nothing is missing."""

    def setting(self, name: str) -> Optional[str]:
        """An environment variable; None when it is unset or empty."""


class MachineHost:
    """The real :class:`Host`: every fact is asked when first needed, then kept; no process is started.

    ``proc`` and ``nvml`` say where the kernel's files and NVIDIA's management library are.
    """

    def __init__(self, proc: str = "/proc", nvml: Any = "libnvidia-ml.so.1") -> None:
        self._proc = Path(proc)
        self._library = nvml
        self._digests: Dict[Tuple[str, ...], Optional[str]] = {}

    @cached_property
    def python(self) -> Optional[str]:
        """:pep:`425`'s tag; the ``t`` of a free-threaded build is an ABI of its own (:pep:`703`)."""
        kind = "cp" if sys.implementation.name == "cpython" else sys.implementation.name
        threads = "t" if sysconfig.get_config_var("Py_GIL_DISABLED") else ""
        return f"{kind}{sys.version_info[0]}{sys.version_info[1]}{threads}"

    @cached_property
    def system(self) -> Optional[str]:
        return platform.system() or None

    @cached_property
    def machine(self) -> Optional[str]:
        """A 32-bit interpreter on a 64-bit kernel is no ``x86_64``."""
        name = platform.machine() or None
        return name if sys.maxsize > 2**32 or name is None else f"{name} (32-bit)"

    @cached_property
    def libc(self) -> Optional[Libc]:
        """``confstr`` tells glibc's (:pep:`600`); musl has no such question, and its CPython says so in SOABI."""
        if "musl" in str(sysconfig.get_config_var("SOABI")):
            return Libc("musl")
        try:
            kind, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
            major, minor = version.split(".")[:2]
            return Libc(kind, (int(major), int(minor)))
        except (AttributeError, OSError, ValueError):
            return None

    @cached_property
    def processor(self) -> Optional[Simd]:
        try:
            text = (self._proc / "cpuinfo").read_text(encoding="utf-8", errors="replace")
        except OSError:
            text = ""
        return simd_of(text, self.machine or "")

    @property
    def simd(self) -> Optional[Simd]:
        """The processor's level, or the lower one that ``DSOPS_SIMD`` names now, so that setting it late counts too.

        Raises :class:`UsageError` for a word that is no level, and for a level that the processor has not.
        """
        found, wanted = self.processor, self.setting("DSOPS_SIMD")
        if wanted is None:
            return found
        if wanted not in map(str, Simd):
            raise UsageError(f"DSOPS_SIMD={wanted}: {one_of(wanted, map(str, Simd))}")
        if found is None or not Simd(wanted).runs_on(found):
            has = f"this processor has {found}" if found else "this processor's level is unknown"
            raise UsageError(f"DSOPS_SIMD={wanted}: {has}; unset DSOPS_SIMD or name a level that it has")
        return Simd(wanted)

    @cached_property
    def torch(self) -> Optional[TorchBuild]:
        """What torch says; it is imported if it is not yet, which happens on the command line only."""
        try:
            torch = importlib.import_module("torch")
        except Exception:  # noqa: BLE001 - a broken torch raises whatever its parts raise; to selection it is not there
            return None
        abi, hip = getattr(torch._C, "_GLIBCXX_USE_CXX11_ABI", None), getattr(torch.version, "hip", None)  # noqa: SLF001
        return TorchBuild(str(torch.__version__), torch.version.cuda, hip, abi)

    @cached_property
    def deepspeed(self) -> Optional[str]:
        metadata = importlib.import_module("importlib.metadata")
        try:
            return str(getattr(sys.modules.get("deepspeed"), "__version__", None) or metadata.version("deepspeed"))
        except metadata.PackageNotFoundError:
            return None

    @cached_property
    def csrc(self) -> Optional[str]:
        try:
            spec = find_spec("deepspeed")
        except (ImportError, ValueError):
            return None
        folder = Path(spec.origin).parent / "ops" / "csrc" if spec is not None and spec.origin else None
        return str(folder) if folder is not None and folder.is_dir() else None

    def closure_digest(self, closure: Tuple[str, ...]) -> Optional[str]:
        """See :class:`Host`; each closure is read once."""
        if closure not in self._digests:
            try:
                self._digests[closure] = None if self.csrc is None else closure_sha256(Path(self.csrc), closure)
            except OSError:
                self._digests[closure] = None
        return self._digests[closure]

    def gpus(self) -> Optional[Tuple[Gpu, ...]]:
        """From torch once this process has a CUDA context, else from NVML, which makes none.

        ``CUDA_VISIBLE_DEVICES`` narrows NVML's answer only where it names GPUs by UUID: numbers follow CUDA's own
        order (CUDA C++ Programming Guide, "CUDA Environment Variables"), so then every GPU of the box is in it.
        """
        cuda = getattr(sys.modules.get("torch"), "cuda", None)
        if cuda is not None and cuda.is_initialized() and not cuda._is_in_bad_fork():  # noqa: SLF001
            return tuple(Gpu(f"cuda:{n}", *cuda.get_device_capability(n)) for n in range(cuda.device_count()))
        found: Optional[Tuple[Gpu, ...]] = self._nvml[0]
        names = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "all").split(",")]
        if found and names[0] in ("", "-1", "NoDevFiles"):
            return ()
        if found and all(name.startswith("GPU-") for name in names):
            return tuple(gpu for gpu in found if gpu.name.startswith(tuple(names)))
        return found

    @cached_property
    def driver(self) -> Optional[CudaRelease]:
        release: Optional[CudaRelease] = self._nvml[1]
        return release

    @cached_property
    def _nvml(self) -> Any:
        return importlib.import_module("dsops_prebuilt._nvml").ask(self._library)

    @cached_property
    def tegra(self) -> bool:
        """Whether the device tree names NVIDIA's Tegra, as on every Jetson (Linux kernel, bindings/arm/tegra.yaml)."""
        tree = self._proc / "device-tree" / "compatible"
        return tree.is_file() and b"nvidia,tegra" in tree.read_bytes()

    def jit_obstacles(self, needs_cuda: bool) -> Tuple[str, ...]:
        """See :class:`Host`; looks where torch/utils/cpp_extension.py (2.13) looks."""
        compiler, include = os.environ.get("CXX") or "c++", sysconfig.get_paths()["include"]
        nvcc, home = shutil.which("nvcc"), os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
        home = home or (str(Path(nvcc).parent.parent) if nvcc else "/usr/local/cuda")
        lacks = {
            f"a C++ compiler ({compiler} is not on PATH)": shutil.which((compiler.split() or [""])[0]) is None,
            "ninja (it is not on PATH)": shutil.which("ninja") is None,
            f"Python's headers ({include}/Python.h is not there)": not Path(include, "Python.h").is_file(),
            f"the CUDA compiler ({home}/bin/nvcc is not there)": needs_cuda and not Path(home, "bin", "nvcc").is_file(),
        }
        return tuple(phrase for phrase, missing in lacks.items() if missing)

    def setting(self, name: str) -> Optional[str]:
        return os.environ.get(name) or None


@cache
def detect() -> Host:
    """The host of this process: one object for all who ask, so that nothing is asked twice."""
    return MachineHost()
