"""Values and fakes of the runtime's tests: a host of plain facts, artifacts, payloads on disk, a small DeepSpeed."""

from __future__ import annotations

import base64
import hashlib
import os
import subprocess
import sys
from dataclasses import dataclass, field, replace
from importlib.machinery import ExtensionFileLoader
from importlib.util import find_spec
from pathlib import Path
from textwrap import dedent
from typing import Any

import dsops_prebuilt
from dsops_prebuilt._host import Host
from dsops_prebuilt._manifest import (
    FOLDER,
    Artifact,
    CudaBinding,
    Manifest,
    SourceDigest,
    TorchBinding,
    closure_sha256,
)
from dsops_prebuilt._select import Offer
from dsops_prebuilt._variant import CudaRelease, Gpu, GpuArch, Libc, Simd, TorchBuild

SRC = Path(__file__).parents[3] / "src"
CLOSURE = ("adam/cpu_adam.cpp", "includes/cpu_adam.h")
DIGEST = "d" * 64
VERSION = dsops_prebuilt.__version__
GLIBC = Libc("glibc", (2, 31))
TORCH = TorchBuild("2.7.1+cu126", "12.6", None, cxx11_abi=True)
DRIVER = CudaRelease(12, 8)


@dataclass(frozen=True)
class FakeHost:
    """A Linux machine with an AVX2 processor, one A100, torch 2.7.1+cu126 and DeepSpeed 0.19.8, unless said."""

    python: str | None = "cp311"
    system: str | None = "Linux"
    machine: str | None = "x86_64"
    libc: Libc | None = GLIBC
    simd: Simd | None = Simd.X86_64_V3
    torch: TorchBuild | None = TORCH
    deepspeed: str | None = "0.19.8"
    csrc: str | None = "/site/deepspeed/ops/csrc"
    driver: CudaRelease | None = DRIVER
    tegra: bool = False
    visible: tuple[Gpu, ...] | None = (Gpu("GPU-a100", 8, 0),)
    digests: dict[tuple[str, ...], str] = field(default_factory=lambda: {CLOSURE: DIGEST})
    obstacles: tuple[str, ...] = ()
    settings: dict[str, str] = field(default_factory=dict)
    native: Simd | None = None

    @property
    def processor(self) -> Simd | None:
        return self.native or self.simd

    def gpus(self) -> tuple[Gpu, ...] | None:
        return self.visible

    def closure_digest(self, closure: tuple[str, ...]) -> str | None:
        return self.digests.get(closure)

    def jit_obstacles(self, needs_cuda: bool) -> tuple[str, ...]:
        return self.obstacles if needs_cuda else tuple(phrase for phrase in self.obstacles if "CUDA" not in phrase)

    def setting(self, name: str) -> str | None:
        return self.settings.get(name)


def host_of(**facts: Any) -> Host:
    return FakeHost(**facts)


def arches(*tokens: str) -> tuple[GpuArch, ...]:
    return tuple(GpuArch.parse(token) for token in tokens)


def torch_binding(**changes: Any) -> TorchBinding:
    return replace(TorchBinding("2.7", None, cxx11_abi=True, built_with="2.7.1+cu126"), **changes)


def cuda_binding(
    toolkit: str = "12.6", sass: tuple[str, ...] = ("8.0", "9.0"), ptx: tuple[str, ...] = ()
) -> CudaBinding:
    return CudaBinding(CudaRelease.parse(toolkit), arches(*sass), arches(*ptx))


def artifact_of(**changes: Any) -> Artifact:
    """A stock cpu_adam for :class:`FakeHost`, unless said."""
    made = Artifact(
        file="cpu_adam_op.so",
        sha256="0" * 64,
        size=3,
        tier="stock",
        op="cpu_adam",
        accelerators=("cpu", "cuda"),
        module="deepspeed.ops.adam.cpu_adam_op",
        machine="x86_64",
        simd=Simd.X86_64_V3,
        glibc=(2, 17),
        python="cp311",
        torch=torch_binding(),
        cuda=None,
        sources=(SourceDigest(DIGEST, CLOSURE, ("0.19.7", "0.19.8")),),
        defines=("-D__AVX256__",),
        needed=("libtorch.so", "libc.so.6"),
    )
    return replace(made, **changes)


def fused_adam_of(**changes: Any) -> Artifact:
    """A stock fused_adam with GPU code for :class:`FakeHost`, unless said."""
    made = artifact_of(file="fused_adam_op.so", op="fused_adam", accelerators=("cuda",), cuda=cuda_binding())
    return replace(made, **changes)


def offer_of(made: Artifact | None = None, label: str = "cu126", build: int = 1, folder: str = "/p") -> Offer:
    return Offer(made or artifact_of(), label, build, folder)


def manifest_of(*artifacts: Artifact, **changes: Any) -> Manifest:
    made = Manifest("", VERSION, 1, "cpu", (("compiler", "gcc 10"),), artifacts)
    changed = replace(made, **changes)
    return changed if changed.distribution else replace(changed, distribution=f"dsops-prebuilt-{changed.label}")


def write_payload(entry: Path, manifest: Manifest, files: dict[str, bytes]) -> Path:
    """Install a payload on a path entry as pip would, and return its folder."""
    folder = entry / FOLDER / manifest.label
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    text = manifest.to_json().encode()
    (folder / "manifest.json").write_bytes(text)
    digest = base64.urlsafe_b64encode(hashlib.sha256(text).digest()).decode().rstrip("=")
    (entry / manifest.dist_info).mkdir()
    rows = f"{FOLDER}/{manifest.label}/manifest.json,sha256={digest},{len(text)}\n{manifest.dist_info}/RECORD,,\n"
    (entry / manifest.dist_info / "RECORD").write_text(rows)
    return folder


def real_extension() -> tuple[str, Path]:
    """Name and file of an extension module of this interpreter that is a file of its own and harmless to open twice."""
    for name in ("_heapq", "_bisect", "_json", "_random", "_struct"):
        spec = find_spec(name)
        if spec is not None and isinstance(spec.loader, ExtensionFileLoader) and spec.origin is not None:
            return name, Path(spec.origin)
    raise LookupError("this interpreter has every extension built in")


def here(**changes: Any) -> tuple[Artifact, bytes]:
    """An artifact that this very interpreter can open, whatever its version, with its bytes."""
    name, path = real_extension()
    content = path.read_bytes()
    facts: dict[str, Any] = {
        "file": f"{name}_op.so",
        "module": f"deepspeed.ops.adam.{name}",
        "sha256": hashlib.sha256(content).hexdigest(),
        "size": len(content),
        "python": None,
        "torch": None,
        "simd": Simd.X86_64,
        "glibc": (2, 5),
    }
    return artifact_of(**{**facts, **changes}), content


BUILDER = """
class MissingCUDAException(Exception):
    pass

class OpBuilder:
    _loaded_ops = {}

    def __init__(self, name):
        self.name = name
        self.error_log = None

    @staticmethod
    def validate_torch_version(torch_info):
        if torch_info["version"] != "2.7":
            raise RuntimeError("PyTorch version mismatch!")

    @staticmethod
    def validate_torch_op_version(torch_info):
        if torch_info["cuda_version"] != "12.6":
            raise RuntimeError("CUDA version mismatch!")

    def is_compatible(self, verbose=False):
        print("probe", self.name)
        return True

    def load(self, verbose=False):
        if self.name in __class__._loaded_ops:
            return __class__._loaded_ops[self.name]
        from deepspeed.git_version_info import installed_ops, accelerator_name, torch_info
        from deepspeed.accelerator import get_accelerator
        if installed_ops.get(self.name, False) and accelerator_name == get_accelerator()._name:
            self.validate_torch_version(torch_info)
            return "precompiled " + self.name
        return self.jit_load(verbose)

    def jit_load(self, verbose=True):
        if not self.is_compatible(verbose):
            raise RuntimeError("Unable to JIT load the %s op. %s" % (self.name, self.error_log))
        return "compiled " + self.name

class CUDAOpBuilder(OpBuilder):
    def is_compatible(self, verbose=False):
        return super().is_compatible(verbose)
"""

OPS = {
    "deepspeed/__init__.py": "__version__ = '0.19.8'\n",
    "deepspeed/accelerator.py": """
        import os
        class _Accelerator:
            _name = os.environ.get("FAKE_ACCELERATOR", "cpu")
        def get_accelerator():
            return _Accelerator
    """,
    "deepspeed/git_version_info.py": """
        import os
        installed_ops = dict.fromkeys(os.environ.get("FAKE_INSTALLED", "").split(), True)
        accelerator_name = os.environ.get("FAKE_BUILT_FOR", "")
        torch_info = {"version": os.environ.get("FAKE_TORCH_INFO", "2.7"), "cuda_version": "12.6"}
    """,
    "deepspeed/ops/__init__.py": "",
    "deepspeed/ops/op_builder/__init__.py": "",
    "deepspeed/ops/op_builder/builder.py": BUILDER,
    "deepspeed/ops/op_builder/fused_adam.py": """
        from .builder import CUDAOpBuilder
        class FusedAdamBuilder(CUDAOpBuilder):
            NAME = "fused_adam"
            def __init__(self):
                super().__init__(name=self.NAME)
    """,
    "deepspeed/ops/op_builder/spatial_inference.py": """
        from .builder import CUDAOpBuilder, MissingCUDAException
        class SpatialInferenceBuilder(CUDAOpBuilder):
            NAME = "spatial_inference"
            def __init__(self):
                super().__init__(name=self.NAME)
            def is_compatible(self, verbose=False):
                raise MissingCUDAException("CUDA_HOME does not exist")
    """,
    "deepspeed/ops/op_builder/pin_memory.py": """
        from .builder import OpBuilder
        def load_module(builder, verbose):
            return super(type(builder), builder).load(verbose=verbose)
        class PinMemoryBuilder(OpBuilder):
            NAME = "pin_memory"
            def __init__(self):
                super().__init__(name=self.NAME)
            def load(self, verbose=False):
                return load_module(self, verbose)
    """,
    "deepspeed/ops/op_builder/cpu/__init__.py": "from .all import *\n",
    "deepspeed/ops/op_builder/cpu/all.py": """
        from ..builder import OpBuilder
        class CPUOpBuilder(OpBuilder):
            pass
        class CPUAdamBuilder(CPUOpBuilder):
            NAME = "cpu_adam"
            def __init__(self):
                super().__init__(name=self.NAME)
        class FusedAdamBuilder(CPUOpBuilder):
            NAME = "fused_adam"
            def __init__(self):
                super().__init__(name=self.NAME)
        class NotImplementedBuilder(CPUOpBuilder):
            NAME = "deepspeed_not_implemented"
            def __init__(self, name=None):
                super().__init__(name=name or self.NAME)
            def load(self, verbose=True):
                raise ValueError("This op had not been implemented on CPU backend.")
    """,
    "deepspeed/ops/adam.py": """
        from deepspeed.ops.op_builder.cpu import CPUAdamBuilder
        class DeepSpeedCPUAdam:
            def __init__(self):
                self.ds_opt_adam = CPUAdamBuilder().load()
            def __del__(self):
                self.ds_opt_adam.destroy_adam(0)
    """,
    "deepspeed/ops/csrc/adam/cpu_adam.cpp": "// kernel\n",
    "deepspeed/ops/csrc/includes/cpu_adam.h": "// header\n",
    "deepspeed/env_report.py": """
        from .git_version_info import installed_ops, accelerator_name
        from .ops.op_builder.cpu import CPUAdamBuilder, FusedAdamBuilder, NotImplementedBuilder
        ALL_OPS = {b.name: b for b in (CPUAdamBuilder(), FusedAdamBuilder(), NotImplementedBuilder())}
    """,
    "torch/__init__.py": """
        from types import SimpleNamespace
        from . import version
        __version__ = "2.7.1+cpu"
        _C = SimpleNamespace(_GLIBCXX_USE_CXX11_ABI=True)
        cuda = SimpleNamespace(is_initialized=lambda: False, is_available=lambda: False)
    """,
    "torch/version.py": "cuda = None\nhip = None\n",
}


class FakeDeepSpeed:
    """A package tree shaped like DeepSpeed 0.19.8 and torch, with payloads beside it, for a process of its own."""

    def __init__(self, entry: Path) -> None:
        self.entry = entry
        for name, text in OPS.items():
            path = entry / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(dedent(text))

    @property
    def digest(self) -> str:
        return closure_sha256(self.entry / "deepspeed/ops/csrc", CLOSURE)

    def serve(self, op: str = "cpu_adam", **changes: Any) -> Artifact:
        """Install a payload with one artifact of this op that fits this interpreter and these sources."""
        source = SourceDigest(self.digest, CLOSURE, ("0.19.8",))
        made, content = here(**{"op": op, "sources": (source,), **changes})
        write_payload(self.entry, manifest_of(made), {made.file: content})
        return made

    def run(self, script: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a script in a new interpreter that starts with the ``.pth`` file's line, and lacks a compiler."""
        return self.run_bare((SRC / "dsops_prebuilt_activate.pth").read_text() + dedent(script), **environment)

    def run_bare(self, script: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """The same without activation."""
        path = self.entry / "script.py"
        path.write_text(dedent(script))
        clean = {"PATH": "", "PYTHONPATH": f"{self.entry}{os.pathsep}{SRC}", "PYTHONDONTWRITEBYTECODE": "1"}
        return subprocess.run(
            [sys.executable, str(path)], env={**clean, **environment}, capture_output=True, text=True, check=False
        )
