"""One real row for all integration tests: compiled, packed, installed into a clean environment, once a session."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import platformdirs
import pytest

from dsops_builder.compiler import set_up_compiler
from dsops_builder.core import build_core
from dsops_builder.facts import gather_facts
from dsops_builder.matrix import load_matrix
from dsops_builder.model import Matrix, Wheel
from dsops_builder.ops import load_ops
from dsops_builder.pipeline import Workplace, build_row
from dsops_builder.plan import Plan, Selection, make_plan
from dsops_builder.process import Shell
from dsops_builder.report import Report
from dsops_builder.smoke.environment import CleanEnvironment, Environments

ROOT = Path(__file__).parents[2]
ROW = "1_cpu"
# Downloads and what is unpacked from them. Compiled objects are not shared: every test session really compiles.
_SHARED = ("debian", "sdist", "torch", "compiler", "env", "python-headers", "tracer")


@dataclass(frozen=True)
class Built:
    """A row that has been built: its plan, where its wheels lie, and the wheels."""

    matrix: Matrix
    plan: Plan
    place: Workplace
    payload: Wheel
    core: Wheel


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
def cc(cache: Path) -> Path:
    """The C compiler of the matrix: what these tests compile needs no other on the machine."""
    matrix, variables = load_matrix(ROOT / "build_matrix.yaml"), dict(os.environ)
    place = Workplace(dist=cache / "dist", cache=cache, variables=variables, licenses=())
    return set_up_compiler(matrix.compiler, place.mirror(Shell()), cache, Shell()).gcc


@pytest.fixture(scope="session")
def built(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The row ``1_cpu``, compiled from DeepSpeed's sources, and the loader's wheel."""
    matrix, ops = load_matrix(ROOT / "build_matrix.yaml"), load_ops(ROOT / "ops")
    plan = make_plan(matrix, ops, Selection(row=ROW), gather_facts(matrix, [ROW], os.environ))
    place = Workplace(
        dist=tmp_path_factory.mktemp("dist"),
        cache=cache,
        variables=dict(os.environ),
        licenses=(ROOT / "LICENSE",),
    )
    report = Report.for_process(os.environ)
    (payload,) = build_row(matrix, plan, place, runner=Shell(), report=report)
    (core,) = build_core(ROOT, place, runner=Shell(), report=report)
    return Built(matrix=matrix, plan=plan, place=place, payload=payload, core=core)


@pytest.fixture(scope="session")
def plan(built: Built) -> Plan:
    """What was built."""
    return built.plan


@pytest.fixture(scope="session")
def environment(built: Built, tmp_path_factory: pytest.TempPathFactory) -> CleanEnvironment:
    """The wheels, torch and DeepSpeed in a virtual environment, on a PATH without a program."""
    environments = Environments(matrix=built.matrix, plan=built.plan, place=built.place, runner=Shell())
    target = built.plan.targets[0]
    return environments.create(tmp_path_factory.mktemp("clean"), target.torch, target.python, target.deepspeed)
