"""Take one row from its plan to verified wheels in ``dist/``: set up, compile, pack, repair, seal, verify, move."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version

from dsops_builder import fatbin, repair, verify, wheel
from dsops_builder.compile import StockCompiler
from dsops_builder.compiler import set_up_compiler
from dsops_builder.errors import CompileError, UsageError
from dsops_builder.fetch import DebianMirror, Sdists
from dsops_builder.model import Compiled, Matrix, Wheel
from dsops_builder.plan import Plan
from dsops_builder.process import Runner
from dsops_builder.report import Report
from dsops_builder.toolkit import CudaHome, set_up_toolkit
from dsops_builder.torchenv import EnvironmentFactory, TorchEnv
from dsops_prebuilt import __version__
from dsops_prebuilt._manifest import file_sha256
from dsops_prebuilt._variant import GpuArch, TorchBuild


@dataclass(frozen=True, kw_only=True, slots=True)
class Workplace:
    """Where a build happens: ``dist`` gets finished wheels only, ``cache`` everything that is pure.

    Both are made here, so that a place that cannot be written is said before the work and not after it: making one
    raises :class:`UsageError`. ``variables`` is the process's environment, read once by the command line; ``licenses``
    go into every wheel.
    """

    dist: Path
    cache: Path
    variables: Mapping[str, str]
    licenses: tuple[Path, ...]

    def __post_init__(self) -> None:
        for name, folder in (("--dist", self.dist), ("--cache, or DSOPS_CACHE_DIR,", self.cache)):
            try:
                folder.mkdir(parents=True, exist_ok=True)
                writable = os.access(folder, os.W_OK)
            except OSError as error:
                raise UsageError(f"{name} is {folder}: {error.strerror}; name a folder that can be written") from error
            if not writable:
                raise UsageError(f"{name} is {folder}: not writable; name a folder that can be written")
        if any(character.isspace() for character in str(self.cache)):
            raise UsageError(
                f"--cache, or DSOPS_CACHE_DIR, is {str(self.cache)!r}: compilers are told this path in lists that are "
                "split at spaces; name a folder without any"
            )

    def mirror(self, runner: Runner) -> DebianMirror:
        """The Debian mirror that the environment names, or this machine's own."""
        return DebianMirror(self.variables.get("DSOPS_DEBIAN_MIRROR"), self.cache, runner)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Tools:
    stock: StockCompiler
    cuda: CudaHome | None
    environments: Mapping[tuple[str, str], TorchEnv]


def build_row(matrix: Matrix, plan: Plan, place: Workplace, *, runner: Runner, report: Report) -> tuple[Wheel, ...]:
    """Build the plan's targets and return one finished wheel for each Python.

    A target that fails does not stop the others: all failures are in one :class:`CompileError` at the end, and a wheel
    that would lack one of its targets is not made. Raises the errors of every stage; ``dist`` is touched only by moving
    a verified wheel into it.
    """
    started = time.monotonic()
    builder = _RowBuilder(matrix=matrix, plan=plan, place=place, runner=runner, report=report)
    tools = builder.set_up()
    report.say(f"an op takes minutes to compile; what the compilers print goes to {place.cache / 'log'}")
    wheels: list[Wheel] = []
    failures: list[CompileError] = []
    for python in dict.fromkeys(target.python for target in plan.targets):
        compiled, failed = builder.compile(python, tools)
        failures += failed
        if not failed:
            path = builder.make_wheel(compiled, tools)
            seconds = time.monotonic() - started
            wheels.append(Wheel(path=path, sha256=file_sha256(path), size=path.stat().st_size, seconds=seconds))
        started = time.monotonic()
    if failures:
        report.wheels(wheels)
        raise CompileError("\n\n".join(str(failure) for failure in failures))
    return tuple(wheels)


@dataclass(frozen=True, kw_only=True, slots=True)
class _RowBuilder:
    """The stages of one row, in the order in which :func:`build_row` calls them."""

    matrix: Matrix
    plan: Plan
    place: Workplace
    runner: Runner
    report: Report

    def set_up(self) -> _Tools:
        cache, runner, mirror = self.place.cache, self.runner, self.place.mirror(self.runner)
        row = self.matrix.rows[self.plan.row]
        with self.report.step(f"host compiler {self.matrix.compiler.name}"):
            compiler = set_up_compiler(self.matrix.compiler, mirror, cache, runner)
        cuda = None
        if row.toolkit is not None:
            with self.report.step(f"CUDA {row.toolkit}"):
                cuda = set_up_toolkit(row.toolkit, self.matrix.toolkits[row.toolkit], mirror, cache, runner)
        factory = EnvironmentFactory(
            requirements=self.matrix.requirements,
            headers=self.matrix.python_headers,
            compiler=compiler,
            mirror=mirror,
            cache=cache,
            runner=runner,
        )
        pairings = {pairing.torch: pairing for pairing in row.pairings}
        environments = {}
        for torch, python in dict.fromkeys((target.torch, target.python) for target in self.plan.targets):
            with self.report.step(f"torch {torch} for Python {python}"):
                environments[torch, python] = factory.set_up(
                    pairings[torch], python, self.plan.interpreter(python), self.plan.torch_origin(torch)
                )
        sdists = Sdists(self.matrix.deepspeed, cache, runner)
        stock = StockCompiler(sdists=sdists, compiler=compiler, cache=cache, jobs=os.cpu_count() or 1, runner=runner)
        return _Tools(stock=stock, cuda=cuda, environments=environments)

    def compile(self, python: str, tools: _Tools) -> tuple[tuple[Compiled, ...], list[CompileError]]:
        compiled, failures = [], []
        for target in self.plan.targets:
            if target.python != python:
                continue
            try:
                with self.report.step(target.id):
                    env = tools.environments[target.torch, target.python]
                    compiled.append(tools.stock.compile(target, env, tools.cuda))
            except CompileError as error:
                failures.append(error)
        return tuple(compiled), failures

    def make_wheel(self, compiled: tuple[Compiled, ...], tools: _Tools) -> Path:
        payload = wheel.Payload(version=__version__, compiled=compiled, licenses=self._licenses(compiled, tools))
        with tempfile.TemporaryDirectory() as scratch, self.report.step(f"wheel for {payload.target.python_tag}"):
            folder = Path(scratch)
            raw = wheel.pack(payload, folder / "raw")
            variables = self.place.variables
            repaired = repair.repair(raw, into=folder / "repaired", runner=self.runner, environment=variables)
            sealed = wheel.seal(repaired, payload, folder / "sealed", gpu_code=lambda path: self._gpu_code(path, tools))
            for line in verify.verify_wheel(sealed, self._context(compiled, tools)):
                self.report.say(f"  verified {line}")
            return move_into(sealed, self.place.dist)

    def _licenses(self, compiled: Iterable[Compiled], tools: _Tools) -> tuple[tuple[str, str], ...]:
        """The project's licence, and DeepSpeed's: the binaries are made of its sources."""
        ours = [(path.name, path.read_text(encoding="utf-8")) for path in self.place.licenses]
        newest = max((item.target.deepspeed for item in compiled), key=Version)
        return (*ours, ("LICENSE.deepspeed", tools.stock.sdists.license_text(newest)))

    def _gpu_code(self, path: Path, tools: _Tools) -> fatbin.GpuCode:
        if tools.cuda is None:  # wheel.seal asks for targets with a toolkit only, and those have one
            raise ValueError(path)
        return fatbin.read_gpu_code(path, tools.cuda.cuobjdump, self.runner)

    def _context(self, compiled: Iterable[Compiled], tools: _Tools) -> verify.Context:
        archs: dict[str, tuple[GpuArch, ...]] = {}
        libraries = {}
        for item in compiled:
            minor = TorchBuild(item.target.torch).minor
            libraries[minor] = tools.environments[item.target.torch, item.target.python].torch_lib
            if item.target.archs:
                archs[minor] = item.target.archs
        interpreters = {path.parents[1] for _, path in self.plan.interpreters} - {Path("/usr")}
        return verify.Context(
            runner=self.runner,
            cuobjdump=None if tools.cuda is None else tools.cuda.cuobjdump,
            torch_libs=libraries,
            archs=archs,
            forbidden=tuple(sorted(str(path) for path in {self.place.cache, *interpreters})),
        )


def move_into(wheel_path: Path, dist: Path) -> Path:
    """Move a finished wheel into ``dist`` in one step: nobody sees it half there."""
    dist.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".wheel-", dir=dist) as scratch:
        near = Path(scratch) / wheel_path.name
        shutil.copyfile(wheel_path, near)
        return near.replace(dist / wheel_path.name)
