"""``python -m dsops_builder VERB``: the only module that reads the environment and the command line."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import platformdirs
from cyclopts import App, CycloptsError, Parameter

from dsops_builder.errors import BuilderError, GateError, Interrupted, ToolchainError, UsageError
from dsops_builder.facts import gather_facts
from dsops_builder.matrix import FILE_NAME, load_matrix
from dsops_builder.model import Matrix, Op
from dsops_builder.ops import load_ops
from dsops_builder.plan import Facts, Plan, Selection, everything, make_plan
from dsops_builder.process import Shell
from dsops_builder.report import Report

if TYPE_CHECKING:
    from dsops_builder import pipeline
    from dsops_builder.core import CoreBuilder

_HELP = "Build DeepSpeed's ops ahead of time: build_matrix.yaml in, verified wheels out."

RowId = Annotated[str, Parameter(help="Row of the matrix, BUILD_LABEL: 1_cu118.")]
Torch = Annotated[str | None, Parameter(help="Only this torch release of the row.")]
Python = Annotated[str | None, Parameter(help="Only this Python of the row.")]
Dist = Annotated[Path, Parameter(help="Folder of the finished wheels.")]
Cache = Annotated[
    Path | None,
    Parameter(help="Folder of downloads and toolchains. Default: $DSOPS_CACHE_DIR, else the user's cache folder."),
]
Json = Annotated[bool, Parameter(name="--json", help="One line, for strategy.matrix of GitHub Actions.")]
Anywhere = Annotated[bool, Parameter(help="Plan for a machine that has every Python and reaches every index.")]
Wheels = Annotated[Path, Parameter(help="Finished wheels of this project.")]
Cuobjdump = Annotated[Path | None, Parameter(help="NVIDIA's cuobjdump; without it GPU code is not looked into.")]
File = Annotated[Path, Parameter(name="--matrix", help="The matrix; ops/ lies beside it.")]

Ask = Callable[[Matrix, Iterable[str], Mapping[str, str]], Facts]
"""Finds out what the plans of these rows need to know of the machine; see :func:`gather_facts`."""

_DIST = Path("dist")
_FILE = Path(FILE_NAME)


def main() -> None:
    """Entry point: run the process's command line, and exit with the code of what happened.

    SIGTERM is taken like Ctrl-C: commands run in sessions of their own, and somebody has to end them.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(run(sys.argv[1:], os.environ))


def run(arguments: Sequence[str], env: Mapping[str, str], *, ask: Ask = gather_facts) -> int:
    """Run one command line and return its exit code: 0, or that of the error's class (:mod:`.errors`).

    ``ask`` finds out about the machine. An error ends in one block on stderr, without a traceback. Only a fault of the
    builder itself is raised.
    """
    report = Report.for_process(env)
    try:
        _app(_Commands(env=env, report=report, ask=ask))(list(arguments))
    except CycloptsError as error:
        return _fail(report, UsageError(f"{error}\n`python -m dsops_builder --help` lists the commands"))
    except KeyboardInterrupt:
        return _fail(report, Interrupted("interrupted; nothing half-made was left in the folder of wheels"))
    except BuilderError as error:
        return _fail(report, error)
    return 0


def _fail(report: Report, error: BuilderError) -> int:
    report.error(str(error))
    return error.exit_code


def _app(commands: _Commands) -> App:
    app = App(
        name="dsops_builder",
        help=_HELP,
        version_flags=(),
        default_parameter=Parameter(negative=()),
        result_action="return_value",
        exit_on_error=False,
        print_error=False,
        suppress_keyboard_interrupt=False,
    )
    for verb in (
        commands.build,
        commands.plan,
        commands.smoke,
        commands.core,
        commands.bench,
        commands.verify,
        commands.matrix,
    ):
        app.command(verb)
    return app


@dataclass(frozen=True, kw_only=True, slots=True)
class _Commands:
    """The commands, each a method whose signature is its command line."""

    env: Mapping[str, str]
    report: Report
    ask: Ask

    def build(
        self,
        row: RowId,
        /,
        *,
        torch: Torch = None,
        python: Python = None,
        dist: Dist = _DIST,
        cache: Cache = None,
        matrix: File = _FILE,
    ) -> None:
        """Build a row's wheels. Their paths go to stdout."""
        loaded, plan = self._chosen(matrix, Selection(row=row, torch=torch, python=python))
        from dsops_builder import pipeline  # noqa: PLC0415  the other commands need none of its libraries

        place = self._place(dist, cache, matrix)
        self.report.wheels(pipeline.build_row(loaded, plan, place, runner=self._shell(), report=self.report))

    def plan(
        self,
        row: RowId | None = None,
        /,
        *,
        torch: Torch = None,
        python: Python = None,
        as_json: Json = False,
        anywhere: Anywhere = False,
        matrix: File = _FILE,
    ) -> None:
        """Print what a build of one row, or of every row, would make, on stdout."""
        loaded, ops = self._load(matrix)
        if row is None and (torch, python) != (None, None):
            raise UsageError(f"--torch and --python need a ROW: {', '.join(loaded.rows)}")
        facts = everything(loaded) if anywhere else None
        plans = [
            self._plan(loaded, ops, Selection(row=each, torch=torch, python=python), facts)
            for each in ([row] if row is not None else loaded.rows)
        ]
        if as_json:
            self.report.data(json.dumps({"include": [plan.to_json() for plan in plans]}))
        else:
            self.report.data("\n\n".join(plan.render() for plan in plans))

    def smoke(
        self,
        row: RowId,
        /,
        *,
        torch: Torch = None,
        python: Python = None,
        dist: Dist = _DIST,
        cache: Cache = None,
        matrix: File = _FILE,
    ) -> None:
        """Install a row's wheels into a clean environment and train with them. Wheels that are not there are built.

        With ``core`` for a row, the core wheel is built, and proved in every environment that the matrix lists for it.
        """
        if row == "core":
            self._smoke_core(torch, python, dist, cache, matrix)
            return
        loaded, plan, place = self._with_wheels(Selection(row=row, torch=torch, python=python), dist, cache, matrix)
        from dsops_builder import smoke  # noqa: PLC0415  as above

        smoke.smoke_row(loaded, plan, place, runner=self._shell(), report=self.report)

    def _smoke_core(self, torch: str | None, python: str | None, dist: Path, cache: Path | None, file: Path) -> None:
        loaded, _ = self._load(file)
        cells = tuple(
            cell for cell in loaded.portable.smoke if torch in {None, cell.torch} and python in {None, cell.python}
        )
        if not cells:
            has = "; ".join(f"--python {cell.python} --torch {cell.torch}" for cell in loaded.portable.smoke)
            raise UsageError(f"the matrix has no such environment for the core wheel; it has {has}")
        from dsops_builder import core, smoke  # noqa: PLC0415  as above

        place = self._place(dist, cache, file)
        core.build_core(self._core_builder(file, place))
        smoke.smoke_core(loaded, cells, place, runner=self._shell(), report=self.report)

    def bench(
        self,
        row: RowId,
        /,
        *,
        torch: Torch = None,
        python: Python = None,
        dist: Dist = _DIST,
        cache: Cache = None,
        matrix: File = _FILE,
    ) -> None:
        """Measure what the loader costs and how fast each tier steps. Wheels that are not there are built."""
        loaded, plan, place = self._with_wheels(Selection(row=row, torch=torch, python=python), dist, cache, matrix)
        from dsops_builder import bench  # noqa: PLC0415  as above

        bench.bench(loaded, plan, place, runner=self._shell(), report=self.report)

    def core(self, *, dist: Dist = _DIST, cache: Cache = None, matrix: File = _FILE) -> None:
        """Build the wheels of the loader: alone, and with the portable tier. Their paths go to stdout."""
        from dsops_builder import core  # noqa: PLC0415  as above

        self.report.wheels(core.build_core(self._core_builder(matrix, self._place(dist, cache, matrix))))

    def verify(self, *wheels: Wheels, cuobjdump: Cuobjdump = None) -> None:
        """Check finished wheels against every gate that needs no build; all of them, whatever the first one says."""
        from dsops_builder.verify import Context, verify_wheel  # noqa: PLC0415  as above

        if not wheels:
            raise UsageError("verify needs the paths of wheels: dist/*.whl")
        failures = []
        for wheel in wheels:
            try:
                for line in verify_wheel(wheel, Context(runner=self._shell(), cuobjdump=cuobjdump)):
                    self.report.say(line)
            except GateError as error:
                failures.append(str(error))
        if failures:
            raise GateError("\n".join(failures))

    def matrix(self, *, matrix: File = _FILE) -> None:
        """Check build_matrix.yaml and ops/. The rows' ids go to stdout."""
        loaded, ops = self._load(matrix)
        facts = everything(loaded)
        plans = [make_plan(loaded, ops, Selection(row=row), facts) for row in loaded.rows]
        targets = sum(len(plan.targets) for plan in plans)
        excluded = sum(len(plan.excluded) for plan in plans)
        self.report.say(f"{matrix}: no faults; rows: {len(plans)}, targets: {targets}, excluded: {excluded}")
        self.report.data("\n".join(loaded.rows))

    def _load(self, path: Path) -> tuple[Matrix, tuple[Op, ...]]:
        return load_matrix(path), load_ops(path.parent / "ops")

    def _plan(self, matrix: Matrix, ops: tuple[Op, ...], selection: Selection, facts: Facts | None = None) -> Plan:
        # The first plan finds the words that the matrix does not have, before the machine is asked anything.
        make_plan(matrix, ops, selection, everything(matrix))
        return make_plan(matrix, ops, selection, facts or self.ask(matrix, [selection.row], self.env))

    def _chosen(self, file: Path, selection: Selection) -> tuple[Matrix, Plan]:
        """The plan of what was asked for, shown. Raises :class:`ToolchainError` when it leaves nothing to do."""
        loaded, ops = self._load(file)
        plan = self._plan(loaded, ops, selection)
        self.report.say(plan.render())
        if not plan.targets:
            reasons = [f"{cell.id}: {cell.reason}" for cell in plan.excluded]
            raise ToolchainError("\n".join([f"{plan.row}: no target is left:", *reasons]))
        return loaded, plan

    def _with_wheels(
        self, selection: Selection, dist: Path, cache: Path | None, file: Path
    ) -> tuple[Matrix, Plan, pipeline.Workplace]:
        """The plan, and a ``dist`` that has the loader of this source tree and the plan's payloads."""
        from dsops_builder import core, pipeline, smoke  # noqa: PLC0415  as above

        loaded, plan = self._chosen(file, selection)
        place = self._place(dist, cache, file)
        core.build_core(self._core_builder(file, place))
        pythons = {target.python for target in plan.targets}
        if not all(smoke.has_payload(place.dist, plan.label, each) for each in pythons):
            pipeline.build_row(loaded, plan, place, runner=self._shell(), report=self.report)
        return loaded, plan, place

    def _core_builder(self, file: Path, place: pipeline.Workplace) -> CoreBuilder:
        from dsops_builder import core  # noqa: PLC0415  as above

        matrix, ops = self._load(file)
        return core.CoreBuilder(
            root=file.absolute().parent,
            matrix=matrix,
            ops={op.id: op for op in ops},
            place=place,
            runner=self._shell(),
            report=self.report,
        )

    def _place(self, dist: Path, cache: Path | None, file: Path) -> pipeline.Workplace:
        from dsops_builder import pipeline  # noqa: PLC0415  as above

        return pipeline.Workplace(
            dist=dist,
            cache=self._cache(cache),
            variables=self.env,
            licenses=(file.absolute().parent / "LICENSE",),
        )

    def _shell(self) -> Shell:
        return Shell(echo=self.report.echo)

    def _cache(self, asked: Path | None) -> Path:
        if asked is not None:
            return asked.absolute()
        chosen = self.env.get("DSOPS_CACHE_DIR")
        return Path(chosen).absolute() if chosen else platformdirs.user_cache_path("dsops-builder")


__all__ = ["main", "run"]
