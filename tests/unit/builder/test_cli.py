from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from zipfile import ZipFile

import pytest

from dsops_builder import cli
from dsops_builder import core as real_core
from dsops_builder import pipeline as real_pipeline
from dsops_builder import smoke as real_smoke
from dsops_builder.core import CoreBuilder
from dsops_builder.errors import CompileError
from dsops_builder.model import Environment, Matrix, Wheel
from dsops_builder.pipeline import Workplace
from dsops_builder.plan import Facts, Plan, everything
from dsops_builder.process import Runner
from dsops_builder.report import Report

ROOT = Path(__file__).parents[3]
SMALL = str(ROOT / "tests/data/small/build_matrix.yaml")


def everywhere(matrix: Matrix, _rows: Iterable[str], _env: Mapping[str, str]) -> Facts:
    return everything(matrix)


def nothing(_matrix: Matrix, _rows: Iterable[str], _env: Mapping[str, str]) -> Facts:
    return Facts(indexes={}, interpreters={})


def never(_matrix: Matrix, _rows: Iterable[str], _env: Mapping[str, str]) -> Facts:
    raise AssertionError("the machine was asked")


def run(*arguments: str, ask: cli.Ask = everywhere, env: Mapping[str, str] | None = None) -> int:
    return cli.run(arguments, env or {}, ask=ask)


@dataclass
class Pipeline:
    """In place of ``pipeline``, ``core`` and ``smoke``: remembers what it got; answers with a wheel or an error."""

    error: BaseException | None = None
    built: bool = True
    cores: list[CoreBuilder] = field(default_factory=list)
    cells: list[Environment] = field(default_factory=list)
    plans: list[Plan] = field(default_factory=list)
    places: list[Workplace] = field(default_factory=list)

    def build_row(
        self, _matrix: Matrix, plan: Plan, place: Workplace, *, runner: Runner, report: Report
    ) -> tuple[Wheel, ...]:
        self.smoke_row(_matrix, plan, place, runner=runner, report=report)
        return (Wheel(path=place.dist / "a.whl", sha256="ab" * 32, size=1, seconds=1.0),)

    def build_core(self, builder: CoreBuilder) -> tuple[Wheel, ...]:
        self.cores.append(builder)
        names = ("none-any", "none-manylinux_2_24_x86_64")
        return tuple(
            Wheel(path=builder.place.dist / f"core-{name}.whl", sha256="cd" * 32, size=1, seconds=1.0) for name in names
        )

    def smoke_core(
        self, _matrix: Matrix, cells: tuple[Environment, ...], place: Workplace, *, runner: Runner, report: Report
    ) -> None:
        del runner, report
        self.places.append(place)
        self.cells += cells

    def has_payload(self, _dist: Path, _label: str, _python: str) -> bool:
        return self.built

    def smoke_row(self, _matrix: Matrix, plan: Plan, place: Workplace, *, runner: Runner, report: Report) -> None:
        del runner
        self.plans.append(plan)
        self.places.append(place)
        with report.step("compile"):
            if self.error is not None:
                raise self.error


@pytest.fixture
def pipeline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Pipeline:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    fake = Pipeline()
    monkeypatch.setattr(real_pipeline, "build_row", fake.build_row)
    monkeypatch.setattr(real_core, "build_core", fake.build_core)
    monkeypatch.setattr(real_smoke, "smoke_row", fake.smoke_row)
    monkeypatch.setattr(real_smoke, "smoke_core", fake.smoke_core)
    monkeypatch.setattr(real_smoke, "has_payload", fake.has_payload)
    return fake


def test_plan_goes_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("plan", "1_cu118", "--torch", "2.7.1", "--python", "3.11", "--matrix", SMALL) == 0

    captured = capsys.readouterr()
    assert captured.out.startswith("1_cu118: build 1 of the cu118 payload, 3 targets\n")
    assert captured.err == ""


def test_plan_of_every_row_as_json_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("plan", "--json", "--matrix", SMALL) == 0

    captured = capsys.readouterr()
    assert captured.out.count("\n") == 1
    assert [row["id"] for row in json.loads(captured.out)["include"]] == ["1_cpu", "1_cu118"]
    assert captured.err == ""


def test_plan_anywhere_asks_nothing_of_the_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("plan", "--anywhere", "--matrix", SMALL, ask=never) == 0
    assert "torch==2.7.1+cu118 from https://download.pytorch.org/whl/cu118" in capsys.readouterr().out


def test_plan_tells_what_the_machine_does_not_have(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("plan", "1_cpu", "--matrix", SMALL, ask=nothing) == 0
    assert "no Python 3.11 on this machine" in capsys.readouterr().out


USAGE = {
    "no such command": (
        ("pln",),
        'Unknown command "pln". Did you mean "plan"? Available commands: build, plan, smoke, core, bench, verify, matrix.\n'
        "  `python -m dsops_builder --help` lists the commands",
    ),
    "no such option": (
        ("plan", "--pithon", "3.11"),
        "Unknown option: --pithon. Did you mean --python?\n  `python -m dsops_builder --help` lists the commands",
    ),
    "no row": (
        ("build",),
        'Command "build" parameter ROW requires an argument.\n  `python -m dsops_builder --help` lists the commands',
    ),
    "unknown row to build": (
        ("build", "1_cu119", "--matrix", SMALL),
        'build_matrix.yaml has no row 1_cu119; it has 1_cpu, 1_cu118, did you mean "1_cu118"?',
    ),
    "unknown row to smoke": (
        ("smoke", "1_cu119", "--matrix", SMALL),
        'build_matrix.yaml has no row 1_cu119; it has 1_cpu, 1_cu118, did you mean "1_cu118"?',
    ),
    "unknown torch": (
        ("build", "1_cpu", "--torch", "2.12.0", "--matrix", SMALL),
        '1_cpu has no torch 2.12.0; it has 2.13.0, did you mean "2.13.0"?',
    ),
    "torch without a row": (
        ("plan", "--torch", "2.7.1", "--matrix", SMALL),
        "--torch and --python need a ROW: 1_cpu, 1_cu118",
    ),
    "unknown environment for the core wheel": (
        ("smoke", "core", "--python", "3.12", "--matrix", SMALL),
        "the matrix has no such environment for the core wheel; it has --python 3.11 --torch 2.13.0",
    ),
    "no wheel": (("verify",), "verify needs the paths of wheels: dist/*.whl"),
}


@pytest.mark.parametrize(("arguments", "message"), USAGE.values(), ids=USAGE)
def test_usage_error_is_2_before_the_machine_is_asked(
    arguments: tuple[str, ...], message: str, pipeline: Pipeline, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments, ask=never) == 2

    captured = capsys.readouterr()
    assert captured.err == f"error: {message}\n"
    assert captured.out == ""
    assert pipeline.plans == []


def test_faults_of_the_matrix_are_3_and_all_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "build_matrix.yaml"
    file.write_text("rows: 1\nx: 2\n")

    assert run("matrix", "--matrix", str(file)) == 3
    captured = capsys.readouterr()
    assert captured.err.startswith(f"error: {file}:1: schema_version: is missing")
    assert f'  {file}:2: x: found the unknown key "x"' in captured.err
    assert f"  {tmp_path}/ops: cannot be read: No such file or directory\n" in captured.err
    assert captured.out == ""


def test_matrix_tells_that_there_is_no_fault_and_lists_the_rows(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("matrix", "--matrix", SMALL, ask=never) == 0

    captured = capsys.readouterr()
    assert captured.out == "1_cpu\n1_cu118\n"
    assert captured.err == f"{SMALL}: no faults; rows: 2, targets: 13, excluded: 1\n"


def test_build_narrates_on_stderr_and_prints_paths_on_stdout(
    pipeline: Pipeline, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("build", "1_cu118", "--torch", "2.7.1", "--python", "3.11", "--matrix", SMALL)
    assert run(*arguments, "--dist", str(tmp_path / "out"), "--cache", str(tmp_path / "cache")) == 0

    captured = capsys.readouterr()
    assert captured.out == f"{tmp_path}/out/a.whl\n"
    assert captured.err.startswith("1_cu118: build 1 of the cu118 payload, 3 targets\n")
    assert captured.err.index("targets") < captured.err.index("compile ...") < captured.err.index("ab" * 32)
    assert [(place.dist, place.cache) for place in pipeline.places] == [(tmp_path / "out", tmp_path / "cache")]
    assert {(one.torch, one.python) for one in pipeline.plans[0].targets} == {("2.7.1", "3.11")}


def test_smoke_gets_the_plan_of_what_was_asked_for(pipeline: Pipeline, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("smoke", "1_cu118", "--torch", "2.7.1", "--python", "3.12", "--matrix", SMALL) == 0

    assert [{(one.torch, one.python) for one in plan.targets} for plan in pipeline.plans] == [{("2.7.1", "3.12")}]
    assert [builder.root for builder in pipeline.cores] == [Path(SMALL).parent]
    assert capsys.readouterr().out == ""


def test_smoke_builds_a_payload_that_is_not_there(pipeline: Pipeline, capsys: pytest.CaptureFixture[str]) -> None:
    pipeline.built = False
    assert run("smoke", "1_cu118", "--torch", "2.7.1", "--python", "3.12", "--matrix", SMALL) == 0

    built, smoked = pipeline.plans
    assert built == smoked
    assert capsys.readouterr().out == ""


def test_core_builds_from_the_matrix_and_its_ops(pipeline: Pipeline, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("core", "--matrix", SMALL, "--dist", "out") == 0

    (builder,) = pipeline.cores
    assert builder.root == Path(SMALL).parent
    assert builder.matrix.portable.ops == ("cpu_adam",)
    assert {name: op.id for name, op in builder.ops.items()} == {"cpu_adam": "cpu_adam", "fused_adam": "fused_adam"}
    assert capsys.readouterr().out == "out/core-none-any.whl\nout/core-none-manylinux_2_24_x86_64.whl\n"


def test_smoke_core_builds_the_wheel_and_takes_the_environments_of_the_matrix(
    pipeline: Pipeline, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("smoke", "core", "--python", "3.11", "--matrix", SMALL) == 0

    assert [builder.root for builder in pipeline.cores] == [Path(SMALL).parent]
    assert pipeline.cells == [Environment(python="3.11", torch="2.13.0", deepspeed="0.19.8")]
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("verb", ["build", "smoke"])
def test_nothing_to_do_is_6_and_says_why(verb: str, pipeline: Pipeline, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(verb, "1_cpu", "--matrix", SMALL, ask=nothing) == 6

    assert capsys.readouterr().err.endswith(
        "error: 1_cpu: no target is left:\n"
        "  1_cpu/torch2.13.0/cp311: no Python 3.11 on this machine; "
        "`pyenv install 3.11` or `uv python install 3.11` provides it\n"
    )
    assert pipeline.plans == []


@pytest.mark.parametrize(
    ("env", "cache"),
    [
        ({"DSOPS_CACHE_DIR": "big/../cache"}, "big/../cache"),
        ({"DSOPS_CACHE_DIR": "cache"}, "cache"),
        ({"DSOPS_CACHE_DIR": ""}, "xdg/dsops-builder"),
        ({}, "xdg/dsops-builder"),
    ],
    ids=["a path", "relative", "empty", "user's"],
)
def test_cache_folder(pipeline: Pipeline, env: dict[str, str], cache: str) -> None:
    Path("big").mkdir()
    run("build", "1_cpu", "--matrix", SMALL, env=env)

    assert [(place.dist, place.cache, place.variables) for place in pipeline.places] == [
        (Path("dist"), Path.cwd() / cache, env)
    ]
    assert [place.licenses for place in pipeline.places] == [(Path(SMALL).parent / "LICENSE",)]


def test_error_of_the_pipeline_is_its_code_and_one_block(
    pipeline: Pipeline, capsys: pytest.CaptureFixture[str]
) -> None:
    pipeline.error = CompileError("cpu_adam: no\nx.cpp:1: error: y")

    assert run("build", "1_cpu", "--matrix", SMALL) == 7
    captured = capsys.readouterr()
    assert captured.err.endswith("compile: failed after 0.0 s\nerror: cpu_adam: no\n  x.cpp:1: error: y\n")
    assert "Traceback" not in captured.err
    assert captured.out == ""


def test_interrupt_is_130_with_a_sentence(pipeline: Pipeline, capsys: pytest.CaptureFixture[str]) -> None:
    pipeline.error = KeyboardInterrupt()

    assert run("build", "1_cpu", "--matrix", SMALL) == 130
    assert capsys.readouterr().err.endswith("error: interrupted; nothing half-made was left in the folder of wheels\n")


def test_fault_of_the_builder_itself_is_not_hidden(pipeline: Pipeline) -> None:
    pipeline.error = ZeroDivisionError("bug")

    with pytest.raises(ZeroDivisionError, match="bug"):
        run("build", "1_cpu", "--matrix", SMALL)


def test_verify_goes_through_all_wheels_and_is_8(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a.whl", "b.whl"):
        (tmp_path / name).write_bytes(b"")

    assert run("verify", str(tmp_path / "a.whl"), str(tmp_path / "b.whl")) == 8
    told = capsys.readouterr().err
    assert told.count("error: ") == 1
    assert "a.whl" in told
    assert "b.whl" in told


def test_verify_looks_at_the_wheels_behind_one_that_does_not_unpack(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = (tmp_path / f"{name}-1-py3-none-any.whl" for name in "ab")
    for path in (first, second):
        with ZipFile(path, "w") as archive:
            archive.writestr("a.py", "")
    content = bytearray(first.read_bytes())
    content[content.index(b"PK\3\4") + 6] = content[content.index(b"PK\1\2") + 8] = 1  # encrypted
    first.write_bytes(content)

    assert run("verify", str(first), str(second)) == 8
    told = capsys.readouterr().err
    assert f"{first.name}: not a readable wheel: " in told
    assert f"{second.name}: " in told
    assert "a.py: archive: found " in told


def test_help_is_data(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0

    captured = capsys.readouterr()
    assert "matrix" in captured.out
    assert captured.err == ""


def test_module_runs_and_returns_the_code() -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-m", "dsops_builder", "plan", "1_cu119", "--matrix", SMALL]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: build_matrix.yaml has no row 1_cu119")


def test_facts_of_the_whole_row_are_asked_for_once() -> None:
    asked: list[tuple[str, ...]] = []

    def ask(matrix: Matrix, rows: Iterable[str], env: Mapping[str, str]) -> Facts:
        asked.append((*rows, env["HOME"]))
        return replace(everything(matrix))

    assert run("plan", "1_cpu", "--matrix", SMALL, ask=ask, env={"HOME": "/home/me"}) == 0
    assert asked == [("1_cpu", "/home/me")]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--dist", "file"), "error: --dist is file: File exists; name a folder that can be written\n"),
        (("--cache", "file/x"), "file/x: Not a directory; name a folder that can be written\n"),
        (("--cache", "/proc/x"), "error: --cache, or DSOPS_CACHE_DIR, is /proc/x: No such file or directory; name"),
        (("--cache", "a b"), "a b': compilers are told this path in lists that are split at spaces; name a folder"),
    ],
    ids=["dist is a file", "cache below a file", "cache that cannot be made", "cache with a space"],
)
def test_a_place_that_cannot_be_used_is_said_before_the_work(
    options: tuple[str, str], message: str, pipeline: Pipeline, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("file").touch()
    assert run("build", "1_cpu", "--matrix", SMALL, *options) == 2

    assert message in capsys.readouterr().err
    assert pipeline.plans == []
