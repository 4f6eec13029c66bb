"""One real row for all integration tests: compiled, packed, installed into a clean environment, once a session."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs
import pytest

from dsops_builder.compiler import CompilerHome, set_up_compiler
from dsops_builder.core import CoreBuilder, build_core
from dsops_builder.facts import gather_facts
from dsops_builder.matrix import load_matrix
from dsops_builder.model import Matrix, Target, Wheel
from dsops_builder.ops import load_ops
from dsops_builder.pipeline import Workplace, build_row
from dsops_builder.plan import Plan, Selection, make_plan
from dsops_builder.process import Shell
from dsops_builder.report import Report
from dsops_builder.smoke.environment import CleanEnvironment, Environments, find_core, of_row
from dsops_builder.torchenv import EnvironmentFactory, TorchEnv

ROOT = Path(__file__).parents[2]
ROW = "1_cpu"
# Downloads and what is unpacked from them. Compiled objects are not shared: every test session really compiles.
_SHARED = (
    "debian", "sdist", "torch", "compiler", "env", "python-headers", "tracer", "csrc", "expanded", "portable", "emulator",
)  # fmt: skip


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache whose downloads are the user's and whose compiled objects are nobody's."""
    shared = Path(os.environ.get("DSOPS_CACHE_DIR") or platformdirs.user_cache_path("dsops-builder"))
    folder = tmp_path_factory.mktemp("cache")
    for name in _SHARED:
        (shared / name).mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(shared / name)
    return folder


@pytest.fixture(scope="session")
def place(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    """Where the row is built."""
    dist = tmp_path_factory.mktemp("dist")
    return Workplace(dist=dist, cache=cache, variables=dict(os.environ), licenses=(ROOT / "LICENSE",))


@pytest.fixture(scope="session")
def matrix() -> Matrix:
    """The real build_matrix.yaml."""
    return load_matrix(ROOT / "build_matrix.yaml")


@pytest.fixture(scope="session")
def plan(matrix: Matrix) -> Plan:
    """The plan of the row ``1_cpu`` on this machine."""
    return make_plan(matrix, load_ops(ROOT / "ops"), Selection(row=ROW), gather_facts(matrix, [ROW], os.environ))


@pytest.fixture(scope="session")
def target(plan: Plan) -> Target:
    """The row's first target."""
    return plan.targets[0]


@pytest.fixture(scope="session")
def compiler(matrix: Matrix, place: Workplace) -> CompilerHome:
    """The matrix's compiler: what these tests compile needs no other on the machine."""
    return set_up_compiler(matrix.compiler, place.mirror(Shell()), place.cache, Shell())


@pytest.fixture(scope="session")
def cc(compiler: CompilerHome) -> Path:
    """Its C driver."""
    return compiler.gcc


@pytest.fixture(scope="session")
def torch_env(matrix: Matrix, plan: Plan, place: Workplace, compiler: CompilerHome, target: Target) -> TorchEnv:
    """The environment that the row's targets are compiled in."""
    factory = EnvironmentFactory(
        requirements=matrix.requirements,
        headers=matrix.python_headers,
        compiler=compiler,
        mirror=place.mirror(Shell()),
        cache=place.cache,
        runner=Shell(),
    )
    pairing, origin = matrix.rows[ROW].pairings[0], plan.torch_origin(target.torch)
    return factory.set_up(pairing, target.python, plan.interpreter(target.python), origin)


@pytest.fixture(scope="session")
def core_wheels(matrix: Matrix, place: Workplace) -> tuple[Wheel, ...]:
    """The wheels of the loader: alone, and with the portable tier of each machine, made of every DeepSpeed release."""
    builder = CoreBuilder(
        root=ROOT,
        matrix=matrix,
        ops={op.id: op for op in load_ops(ROOT / "ops")},
        place=place,
        runner=Shell(),
        report=Report.for_process(os.environ),
    )
    return build_core(builder)


@pytest.fixture(scope="session")
def payload(matrix: Matrix, plan: Plan, place: Workplace) -> Wheel:
    """The payload of the row ``1_cpu``, compiled from DeepSpeed's sources."""
    (built,) = build_row(matrix, plan, place, runner=Shell(), report=Report.for_process(os.environ))
    return built


@pytest.fixture(scope="session")
def built(payload: Wheel, core_wheels: tuple[Wheel, ...], place: Workplace) -> tuple[Wheel, Wheel]:
    """The payload, and the core wheel of this machine."""
    core = find_core(place.dist)
    return payload, next(wheel for wheel in core_wheels if wheel.path == core)


@pytest.fixture(scope="session")
def environment(  # noqa: PLR0917  fixtures
    built: tuple[Wheel, Wheel],
    matrix: Matrix,
    plan: Plan,
    place: Workplace,
    target: Target,
    tmp_path_factory: pytest.TempPathFactory,
) -> CleanEnvironment:
    """The wheels, torch and DeepSpeed in a virtual environment, on a PATH without a compiler."""
    assert [wheel.path.parent for wheel in built] == [place.dist, place.dist]
    what = of_row(plan, place.dist, target.torch, target.python, target.deepspeed)
    return Environments(matrix=matrix, place=place, runner=Shell()).create(tmp_path_factory.mktemp("clean"), what)
