"""The compiler's command lines of the portable tier. Its text is part of the cache's keys, so it holds nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from dsops_builder import flags
from dsops_builder.compiler import CompilerHome
from dsops_builder.model import Op
from dsops_prebuilt._variant import Simd

SHIM_SOURCES = ("library.cpp", "openmp.cpp")
"""The C ABI's own sources, in ``ops/_portable``."""
# What DeepSpeed's builders and torch.utils.cpp_extension pass (op_builder/cpu/builder.py 0.19.8, -std of torch up to
# 2.11), and what keeps everything but our own exports inside the file.
_COMPILE = (
    "-std=c++17", "-O3", "-g0", "-Wno-reorder", "-fopenmp", "-fPIC", "-fvisibility=hidden",
    "-fvisibility-inlines-hidden", "-ffunction-sections", "-fdata-sections",
)  # fmt: skip
_LINK = (
    "-shared", "-s", "-Wl,--no-undefined", "-Wl,--gc-sections", "-Wl,-O1", "-Wl,-z,now", "-Wl,-z,relro",
    "-Wl,--build-id=none",
)  # fmt: skip


def shim_flags(shim: Path, simd: Simd) -> list[str]:
    """How the C ABI's sources are compiled."""
    return [*_COMPILE, flags.march(simd), f"-I{shim / 'include'}", f"-ffile-prefix-map={shim}=."]


def op_flags(shim: Path, op: Op, simd: Simd, macro: str) -> list[str]:
    """How an op's sources are preprocessed and compiled, in DeepSpeed's csrc folder."""
    name = op.module.rpartition(".")[2]
    return [*shim_flags(shim, simd), f"-D{macro}", f"-DTORCH_EXTENSION_NAME={name}", "-Iincludes"]


def preprocess(source: str, depfile: Path, text: Path) -> list[str]:
    """Words for the text of one source. -P: where a line came from is no part of the program."""
    return ["-E", "-P", "-MD", "-MF", str(depfile), source, "-o", str(text)]


def link(compiler: CompilerHome, shim: Path, objects: Iterable[Path], target: Path) -> Sequence[str]:
    """Words for the shared library: everything hidden but the C ABI, every symbol bound when it is loaded."""
    script = f"-Wl,--version-script={shim / 'exports.map'}"
    return [*_LINK, script, *compiler.link_flags, *map(str, objects), "-o", str(target), "-lpthread"]
