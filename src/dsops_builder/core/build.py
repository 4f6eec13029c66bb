"""Build the wheels of ``dsops-prebuilt``: compile the portable tier, pack, repair, seal, verify, and move into dist."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dsops_builder import repair, verify
from dsops_builder.compiler import CompilerHome, set_up_compiler
from dsops_builder.core import platform_wheel
from dsops_builder.core.loader import build_loader
from dsops_builder.core.platform_wheel import Contents
from dsops_builder.fetch import Sdists
from dsops_builder.model import Matrix, Op, Wheel
from dsops_builder.pipeline import Workplace, move_into
from dsops_builder.portable import PortableArtifact, PortableCompiler, build_portable
from dsops_builder.portable.build import SHIM, unpack_trees
from dsops_builder.process import Runner
from dsops_builder.report import Report
from dsops_prebuilt._manifest import file_sha256


@dataclass(frozen=True, kw_only=True, slots=True)
class CoreBuilder:
    """Builds from the project at ``root``; ``ops`` are those that the matrix was checked against, by id."""

    root: Path
    matrix: Matrix
    ops: Mapping[str, Op]
    place: Workplace
    runner: Runner
    report: Report

    def loader(self) -> Wheel:
        """The loader alone, ``py3-none-any``."""
        started = time.monotonic()
        with tempfile.TemporaryDirectory() as scratch, self.report.step("wheel of the loader"):
            built = build_loader(self.root, Path(scratch), self.place, self.runner)
            self._verified(built)
            return _finished(move_into(built, self.place.dist), started)

    def portable(self, machine: str, loader: Path) -> Wheel:
        """The loader with the portable tier of one machine. ``loader`` is the wheel of the loader alone."""
        started = time.monotonic()
        compiler = self._compiler(machine)
        sdists = Sdists(self.matrix.deepspeed, self.place.cache, self.runner)
        artifacts = self._artifacts(machine, compiler, sdists)
        contents = Contents(
            loader=loader,
            artifacts=artifacts,
            license_text=sdists.license_text(next(reversed(self.matrix.deepspeed))),
            provenance=(("host_compiler", compiler.description),),
        )
        with tempfile.TemporaryDirectory() as scratch, self.report.step(f"wheel for {machine}"):
            folder = Path(scratch)
            raw = platform_wheel.pack(contents, folder / "raw")
            variables = self.place.variables
            repaired = repair.repair(raw, into=folder / "repaired", runner=self.runner, environment=variables)
            sealed = platform_wheel.seal(repaired, contents, folder / "sealed")
            self._verified(sealed)
            return _finished(move_into(sealed, self.place.dist), started)

    def _compiler(self, machine: str) -> CompilerHome:
        with self.report.step(f"compiler for {machine}"):
            mirror, matrix = self.place.mirror(self.runner), self.matrix
            own = [matrix.compiler, *matrix.cross_compilers.values()]
            spec = next(compiler for compiler in own if compiler.machine == machine)
            return set_up_compiler(spec, mirror, self.place.cache, self.runner)

    def _artifacts(self, machine: str, compiler: CompilerHome, sdists: Sdists) -> tuple[PortableArtifact, ...]:
        levels = tuple(level for level in self.matrix.portable.simd if level.machine == machine)
        releases = f"{len(sdists.trees)} DeepSpeed releases"
        with self.report.step(f"sources of {releases}"):
            trees = unpack_trees(sdists, self.place.cache)
        portable = PortableCompiler(
            compiler=compiler, shim=self.root / "ops" / SHIM, cache=self.place.cache, runner=self.runner
        )
        ops = [self.ops[name] for name in self.matrix.portable.ops]
        with self.report.step(f"portable {', '.join(self.matrix.portable.ops)} for {', '.join(levels)}"):
            return build_portable(ops, levels, trees, portable, os.cpu_count() or 1)

    def _verified(self, wheel: Path) -> None:
        context = verify.Context(runner=self.runner, forbidden=(str(self.place.cache), str(self.root)))
        for line in verify.verify_wheel(wheel, context):
            self.report.say(f"  verified {line}")


def build_core(builder: CoreBuilder) -> tuple[Wheel, ...]:
    """Every wheel of ``dsops-prebuilt``, the loader alone first. Raises the errors of every stage."""
    loader = builder.loader()
    machines = dict.fromkeys(level.machine for level in builder.matrix.portable.simd)
    return (loader, *(builder.portable(machine, loader.path) for machine in machines))


def _finished(path: Path, started: float) -> Wheel:
    seconds = time.monotonic() - started
    return Wheel(path=path, sha256=file_sha256(path), size=path.stat().st_size, seconds=seconds)
