"""Take one row from its plan to verified wheels in ``dist/``: set up, compile, pack, repair, seal, verify, move."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from dsops_builder import fatbin, repair, verify, wheel
from dsops_builder.compile import StockCompiler
from dsops_builder.compiler import set_up_compiler
from dsops_builder.errors import CompileError
from dsops_builder.fetch import DebianMirror
from dsops_builder.model import Compiled, Matrix, Target, Wheel
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

    ``variables`` is the process's environment, read once by the command line; ``licenses`` go into every wheel.
    """

    dist: Path
    cache: Path
    variables: Mapping[str, str]
    licenses: tuple[Path, ...]

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
    tools = _set_up(matrix, plan, place, runner, report)
    wheels, failures = [], []
    for python in dict.fromkeys(target.python for target in plan.targets):
        started = time.monotonic()
        targets = [target for target in plan.targets if target.python == python]
        compiled, failed = _compile(targets, tools, report)
        failures += failed
        if not failed:
            wheels.append(_make_wheel(compiled, plan, tools, place, started, runner, report))
    if failures:
        report.wheels(wheels)
        raise CompileError("\n\n".join(str(failure) for failure in failures))
    return tuple(wheels)


def _set_up(matrix: Matrix, plan: Plan, place: Workplace, runner: Runner, report: Report) -> _Tools:
    mirror = place.mirror(runner)
    row = matrix.rows[plan.row]
    with report.step(f"host compiler {matrix.compiler.name}"):
        compiler = set_up_compiler(matrix.compiler, mirror, place.cache, runner)
    cuda = None
    if row.toolkit is not None:
        with report.step(f"CUDA {row.toolkit}"):
            cuda = set_up_toolkit(row.toolkit, matrix.toolkits[row.toolkit], mirror, place.cache, runner)
    factory = EnvironmentFactory(
        requirements=matrix.requirements,
        headers=matrix.python_headers,
        compiler=compiler,
        mirror=mirror,
        cache=place.cache,
        runner=runner,
    )
    pairings = {pairing.torch: pairing for pairing in row.pairings}
    environments = {}
    for torch, python in dict.fromkeys((target.torch, target.python) for target in plan.targets):
        with report.step(f"torch {torch} for Python {python}"):
            environments[torch, python] = factory.set_up(
                pairings[torch], python, plan.interpreter(python), plan.torch_origin(torch)
            )
    stock = StockCompiler(
        trees=matrix.deepspeed, compiler=compiler, cache=place.cache, jobs=os.cpu_count() or 1, runner=runner
    )
    return _Tools(stock=stock, cuda=cuda, environments=environments)


def _compile(
    targets: Iterable[Target], tools: _Tools, report: Report
) -> tuple[tuple[Compiled, ...], list[CompileError]]:
    compiled, failures = [], []
    for target in targets:
        try:
            with report.step(target.id):
                env = tools.environments[target.torch, target.python]
                compiled.append(tools.stock.compile(target, env, tools.cuda))
        except CompileError as error:
            failures.append(error)
    return tuple(compiled), failures


def _make_wheel(
    compiled: tuple[Compiled, ...],
    plan: Plan,
    tools: _Tools,
    place: Workplace,
    started: float,
    runner: Runner,
    report: Report,
) -> Wheel:
    licenses = tuple((path.name, path.read_text(encoding="utf-8")) for path in place.licenses)
    payload = wheel.Payload(version=__version__, compiled=compiled, licenses=licenses)
    cuobjdump = None if tools.cuda is None else tools.cuda.cuobjdump
    with tempfile.TemporaryDirectory() as scratch, report.step(f"wheel for {payload.target.python_tag}"):
        folder = Path(scratch)
        raw = wheel.pack(payload, folder / "raw")
        repaired = repair.repair(raw, into=folder / "repaired", runner=runner, environment=place.variables)
        sealed = wheel.seal(
            repaired, payload, folder / "sealed", gpu_code=lambda path: _gpu_code(path, cuobjdump, runner)
        )
        for line in verify.verify_wheel(sealed, _context(compiled, plan, tools, place, runner)):
            report.say(f"  verified {line}")
        final = move_into(sealed, place.dist)
    return Wheel(path=final, sha256=file_sha256(final), size=final.stat().st_size, seconds=time.monotonic() - started)


def _gpu_code(path: Path, cuobjdump: Path | None, runner: Runner) -> fatbin.GpuCode:
    if cuobjdump is None:  # wheel.seal asks for targets with a toolkit only, and those have one
        raise ValueError(path)
    return fatbin.read_gpu_code(path, cuobjdump, runner)


def _context(
    compiled: Iterable[Compiled], plan: Plan, tools: _Tools, place: Workplace, runner: Runner
) -> verify.Context:
    archs: dict[str, tuple[GpuArch, ...]] = {}
    libraries = {}
    for item in compiled:
        minor = TorchBuild(item.target.torch).minor
        libraries[minor] = tools.environments[item.target.torch, item.target.python].torch_lib
        if item.target.archs:
            archs[minor] = item.target.archs
    interpreters = {str(path.parents[1]) for _, path in plan.interpreters if path.parents[1] != Path("/usr")}
    return verify.Context(
        runner=runner,
        cuobjdump=None if tools.cuda is None else tools.cuda.cuobjdump,
        torch_libs=libraries,
        archs=archs,
        forbidden=tuple(sorted({str(place.cache), *interpreters})),
    )


def move_into(wheel_path: Path, dist: Path) -> Path:
    """Move a finished wheel into ``dist`` in one step, so that nobody sees it half there; one of that name is replaced."""
    dist.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".wheel-", dir=dist) as scratch:
        near = Path(scratch) / wheel_path.name
        shutil.copyfile(wheel_path, near)
        return near.replace(dist / wheel_path.name)
