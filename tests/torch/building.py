"""Build the portable libraries that these tests open, as the core wheel's are built."""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import platformdirs

from dsops_builder.compiler import CompilerHome, set_up_compiler
from dsops_builder.fetch import DebianMirror, Sdists
from dsops_builder.matrix import load_matrix
from dsops_builder.ops import load_ops
from dsops_builder.portable import PortableCompiler, build_portable
from dsops_builder.portable.build import SHIM as SHIM_NAME
from dsops_builder.portable.build import unpack_trees
from dsops_builder.process import Shell
from dsops_prebuilt._host import detect
from dsops_prebuilt._variant import Simd

ROOT = Path(__file__).parents[2]
SHIM = ROOT / "ops" / SHIM_NAME
RELEASE = "0.19.8"
LEVELS = tuple(
    level.value
    for level in (Simd.X86_64, Simd.X86_64_V3, Simd.X86_64_V4)
    if (own := detect().processor) is not None and level.runs_on(own)
)
"""The SIMD levels that this machine runs."""
MARCH = {"x86_64": "x86-64", "x86_64_v3": "x86-64-v3", "x86_64_v4": "x86-64-v4"}

Libraries = dict[tuple[str, str], Path]


def build_libraries() -> Libraries:
    """Path of the library of each op and level; what was compiled before is in the builder's cache."""
    matrix, cache_folder = load_matrix(ROOT / "build_matrix.yaml"), _cache()
    ops = {op.id: op for op in load_ops(ROOT / "ops")}
    trees = unpack_trees(Sdists({RELEASE: matrix.deepspeed[RELEASE]}, cache_folder, Shell()), cache_folder)
    portable = PortableCompiler(compiler=compiler(), shim=SHIM, cache=cache_folder, runner=Shell())
    chosen = [ops[name] for name in matrix.portable.ops]
    made = build_portable(chosen, [Simd(level) for level in LEVELS], trees, portable, os.cpu_count() or 1)
    return {(one.op.name, one.simd.value): one.path for one in made}


def compile_shared(target: Path, sources: Iterable[Path], *flags: str) -> Path:
    """A shared library out of C++ sources, with the shim's headers on the path. For what a test brings itself."""
    home = compiler()
    words = ["-shared", "-fPIC", "-O3", "-std=c++17", f"-I{SHIM}/include", *map(str, sources), *flags]
    Shell().run([str(home.gxx), *words, *home.link_flags, "-o", str(target)])
    return target


@cache
def compiler() -> CompilerHome:
    """The matrix's compiler for this machine."""
    spec = load_matrix(ROOT / "build_matrix.yaml").compiler
    mirror = DebianMirror(os.environ.get("DSOPS_DEBIAN_MIRROR"), _cache(), Shell())
    return set_up_compiler(spec, mirror, _cache(), Shell())


def _cache() -> Path:
    return Path(os.environ.get("DSOPS_CACHE_DIR") or platformdirs.user_cache_path("dsops-builder"))
