"""Set up the environment that an op is compiled in: an interpreter, torch, and what DeepSpeed's setup.py imports."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dsops_builder import stubs
from dsops_builder.cache import cache_key, fresh_folder
from dsops_builder.compiler import CompilerHome
from dsops_builder.errors import ToolchainError
from dsops_builder.fetch import DebianMirror, fetch_torch
from dsops_builder.model import Package, Pairing, TorchOrigin
from dsops_builder.process import Runner
from dsops_builder.stubs import StubSymbol, Wants, wants, write_stub
from dsops_builder.venv import make_venv

# What torch's libraries take from the system, not from CUDA's wheels.
_SYSTEM = (
    "ld-linux",
    *(f"lib{name}." for name in ["c", "m", "dl", "pthread", "rt", "util", "gcc_s", "stdc++", "gomp"]),
)
# cudaErrorNoDevice (CUDA Runtime API, "Data types used by CUDA Runtime"): the true answer of a machine without a GPU.
_NO_DEVICE = 100
_ASK_PYTHON = "import sysconfig; print(sysconfig.get_path('include'))"
_ASK_TORCH = "import torch; print(torch.__version__, int(torch._C._GLIBCXX_USE_CXX11_ABI), torch.__file__)"


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchEnv:
    """An environment ready to compile in. ``variables`` make its Python import torch and find ``Python.h``."""

    key: str
    python: Path
    torch_lib: Path
    torch_version: str
    variables: tuple[tuple[str, str], ...]
    description: str


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvironmentFactory:
    """Makes one :class:`TorchEnv` for each interpreter and torch wheel, kept in ``cache/env``."""

    requirements: tuple[str, ...]
    headers: dict[str, Package]
    compiler: CompilerHome
    mirror: DebianMirror
    cache: Path
    runner: Runner

    def set_up(self, pairing: Pairing, python_release: str, interpreter: Path, origin: TorchOrigin) -> TorchEnv:
        """Return the environment of a pairing.

        Raises :class:`~dsops_builder.errors.FetchError` for a download, :class:`ToolchainError` when the interpreter
        has no headers anywhere, or when torch's C++11 ABI is not the pairing's.
        """
        accepted = pairing.wheels.get(python_release, ())
        wheel = fetch_torch(origin, interpreter, accepted, self.cache, self.runner)
        inputs = (str(interpreter), wheel.sha256, *self.requirements, self.compiler.key)
        key = cache_key(inputs, recipe=(__file__, stubs.__file__))
        home = self.cache / "env" / f"torch{pairing.torch}-cp{python_release.replace('.', '')}-{key}"
        if not home.exists():
            self._create(home, interpreter, wheel.path)
        variables = self._variables(home, python_release, interpreter)
        python = home / "venv/bin/python"
        printed = self.runner.run([str(python), "-c", _ASK_TORCH], env=dict(variables))
        version, abi, file = printed.splitlines()[-1].split(" ", 2)
        if int(abi) != pairing.cxx11_abi:
            raise ToolchainError(
                f"torch {version} has C++11 ABI {abi}, and the pairing torch {pairing.torch} of build_matrix.yaml has "
                f"{pairing.cxx11_abi}; its headers cannot stand in"
            )
        return TorchEnv(
            key=key,
            python=python,
            torch_lib=Path(file).parent / "lib",
            torch_version=version,
            variables=variables,
            description=f"torch {version} ({wheel.path.name}, sha256 {wheel.sha256}): {origin.note}",
        )

    def _create(self, home: Path, interpreter: Path, wheel: Path) -> None:
        with fresh_folder(home) as scratch:
            python = make_venv(scratch / "venv", interpreter, self.runner)
            pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--quiet", "install", "--no-deps"]
            self.runner.run([*pip, *self.requirements, str(wheel)])
            libraries = sorted(scratch.glob("venv/lib/python*/site-packages/torch/lib/*.so*"))
            self._write_cuda_stubs(libraries, scratch / "stubs")

    def _write_cuda_stubs(self, libraries: list[Path], folder: Path) -> None:
        """Write a stub for each library that torch needs and ``--no-deps`` left out, so that ``import torch`` works.

        They stand in for gigabytes of CUDA wheels: torch is imported here, and only its headers are used.
        """
        folder.mkdir()
        asked = [wants(library) for library in libraries]
        names = {library.name for library in libraries}
        for soname, symbols in missing_symbols(asked, names).items():
            write_stub(folder / soname, symbols, self.compiler.gcc, self.runner, answer=_NO_DEVICE)

    def _variables(self, home: Path, python_release: str, interpreter: Path) -> tuple[tuple[str, str], ...]:
        variables = {
            "LD_LIBRARY_PATH": str(home / "stubs"),
            "PATH": f"{home}/venv/bin:{self.compiler.gcc.parent}:/usr/bin:/bin",
        }
        include = Path(self.runner.run([str(interpreter), "-c", _ASK_PYTHON]).strip())
        if not (include / "Python.h").exists() or include.is_relative_to("/usr/include"):
            # Debian splits pyconfig.h off to /usr/include/ARCH, where a compiler with a sysroot does not look.
            tree = self._unpack_headers(python_release, interpreter)
            variables["CPLUS_INCLUDE_PATH"] = f"{tree}/usr/include/python{python_release}:{tree}/usr/include"
        return tuple(sorted(variables.items()))

    def _unpack_headers(self, python_release: str, interpreter: Path) -> Path:
        package = self.headers.get(python_release)
        if package is None:
            raise ToolchainError(
                f"{interpreter} has no Python.h and build_matrix.yaml has no headers for {python_release}: "
                "install an interpreter with its headers (pyenv, uv), or add the package under python_headers"
            )
        tree = self.cache / "python-headers" / package.sha256[:16]
        if not tree.exists():
            with fresh_folder(tree) as scratch:
                self.mirror.unpack([package], scratch)
        return tree


def missing_symbols(asked: list[Wants], present: set[str]) -> dict[str, list[StubSymbol]]:
    """For each library that is needed and not in ``present``, the symbols that it must define.

    A symbol without a version may stand in any of them, because the loader looks through all; the first gets those.
    """
    needed = {name for want in asked for name in want.needed}
    missing = sorted(name for name in needed - present if not name.startswith(_SYSTEM))
    if not missing:
        return {}
    defined = frozenset().union(*(want.defined for want in asked))
    result: dict[str, set[StubSymbol]] = {name: set() for name in missing}
    for want in asked:
        for library, symbol in want.versioned:
            if library in result:
                result[library].add(symbol)
    plain = frozenset().union(*(want.plain for want in asked)) - defined
    placed = {symbol.name for symbols in result.values() for symbol in symbols}
    result[missing[0]] |= {StubSymbol(name=name) for name in plain - placed if not name.startswith(("Py", "_Py"))}
    return {name: sorted(symbols) for name, symbols in result.items()}
