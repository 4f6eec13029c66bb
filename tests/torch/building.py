"""Build the portable libraries that these tests open, with the compiler that the matrix pins."""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Iterable
from functools import cache
from pathlib import Path

SHIM = Path(__file__).parents[2] / "ops" / "_portable"
LEVELS = {"x86_64": ("x86-64", "__SCALAR__"), "x86_64_v3": ("x86-64-v3", "__AVX256__")}
RELEASE = "0.19.8"
SOURCES = {
    "cpu_adam": ("adam/cpu_adam.cpp", "adam/cpu_adam_impl.cpp"),
    "cpu_adagrad": ("adagrad/cpu_adagrad.cpp",),
    "cpu_lion": ("lion/cpu_lion.cpp", "lion/cpu_lion_impl.cpp"),
    "fused_adam": ("cpu/adam/fused_adam.cpp", "adam/cpu_adam_impl.cpp"),
    "fused_lion": ("cpu/lion/fused_lion.cpp", "lion/cpu_lion_impl.cpp"),
}
_FLAGS = (
    "-std=c++17",
    "-O3",
    "-Wno-reorder",
    "-fopenmp",
    "-fPIC",
    "-fvisibility=hidden",
    "-fvisibility-inlines-hidden",
)

Libraries = dict[tuple[str, str], Path]


def build_libraries() -> Libraries:
    """Every op for every level, kept in the builder's cache by what they are made of."""
    return {(op, level): _built(op, level) for op in SOURCES for level in LEVELS}


def compile_shared(target: Path, sources: Iterable[Path], *flags: str) -> Path:
    """A shared library out of C++ sources, with the shim's headers on the path. For what a test brings itself."""
    folder = compiler()
    names = [str(source) for source in sources]
    command = [f"{folder}/bin/g++", "-shared", "-fPIC", "-O3", "-std=c++17", f"-I{SHIM}/include", *names, *flags]
    subprocess.run([*command, f"-L{folder}/stubs", "-o", str(target)], check=True)
    return target


@cache
def compiler() -> Path:
    """The home of the newest compiler for this machine in the builder's cache."""
    homes = sorted((_cache() / "compiler").iterdir(), key=lambda home: home.stat().st_mtime, reverse=True)
    for home in homes:
        command = [f"{home}/bin/g++", "-dumpmachine"]
        if subprocess.run(command, capture_output=True, text=True, check=True).stdout.startswith("x86_64"):
            return home
    raise FileNotFoundError("no compiler for x86_64 in the cache; `nox -s core` sets it up")


def _cache() -> Path:
    given = os.environ.get("DSOPS_CACHE_DIR")
    return Path(given) if given else Path.home() / ".cache" / "dsops-builder"


def _built(op: str, level: str) -> Path:
    (csrc,) = (_cache() / "csrc").glob(f"{RELEASE}-*")
    march, macro = LEVELS[level]
    inputs = [*sorted(SHIM.rglob("*.*")), *(csrc / name for name in SOURCES[op]), Path(__file__)]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in inputs)).hexdigest()[:16]
    target = _cache() / "tests" / f"{op}-{level}-{digest}" / f"{op}_op.so"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        flags = [*_FLAGS, f"-march={march}", f"-D{macro}", f"-DTORCH_EXTENSION_NAME={op}_op", f"-I{csrc}/includes"]
        objects = []
        for path in [*(csrc / name for name in SOURCES[op]), SHIM / "library.cpp", SHIM / "openmp.cpp"]:
            objects.append(target.with_name(path.stem + ".o"))
            command = [f"{compiler()}/bin/g++", "-c", *flags, f"-I{SHIM}/include", str(path), "-o", str(objects[-1])]
            subprocess.run(command, check=True)
        link = ["-Wl,--as-needed", f"-Wl,--version-script={SHIM}/exports.map", "-Wl,-z,now", "-lpthread"]
        whole = target.with_suffix(".tmp")
        command = [
            f"{compiler()}/bin/g++",
            "-shared",
            f"-L{compiler()}/stubs",
            *map(str, objects),
            *link,
            "-o",
            str(whole),
        ]
        subprocess.run(command, check=True)
        whole.rename(target)
    return target
