"""What the house keeps: one module for each way out, layers in one direction, exit codes that mean one thing."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsops_builder import errors

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "src/dsops_builder"
# These run in another interpreter, as programs of their own.
PROGRAMS = {"stock.driver", "smoke.train", "smoke.optimizers", "bench.kernels"}
MODULES = {
    name: path
    for path in sorted(PACKAGE.rglob("*.py"))
    if (name := ".".join(path.relative_to(PACKAGE).with_suffix("").parts)) not in PROGRAMS
}
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in MODULES.items()}

ORDER = (
    "root_files",
    "errors",
    "model",
    "faults",
    "yamlfile",
    "shape",
    "archs",
    "ops",
    "references",
    "matrix",
    "plan",
    "process",
    "cache",
    "venv",
    "facts",
    "report",
    "elf",
    "stubs",
    "fetch",
    "compiler",
    "emulator",
    "toolkit",
    "torchenv",
    "flags",
    "stock",
    "compile",
    "portable",
    "isa",
    "fatbin",
    "gates",
    "wheel",
    "repair",
    "verify",
    "index",
    "pipeline",
    "smoke",
    "core",
    "bench",
    "cli",
    "__main__",
)
"""A module, or a folder of modules, imports only what stands before it."""


def imported(tree: ast.Module) -> Iterator[str]:
    """Full names of what a module imports, wherever in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def dotted(tree: ast.Module) -> set[str]:
    """``os.environ`` and its like: attributes of names, as they are written."""
    return {
        f"{node.value.id}.{node.attr}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    }


def test_a_module_that_is_new_has_a_place_in_the_order() -> None:
    assert {name.partition(".")[0] for name in MODULES} - {"__init__"} <= set(ORDER)
    assert len(set(ORDER)) == len(ORDER)


@pytest.mark.parametrize("name", sorted(set(MODULES) - {"__init__"}))
def test_imports_go_one_way(name: str) -> None:
    layer = name.partition(".")[0]
    own = {part.split(".", 2)[1] for part in imported(TREES[name]) if part.startswith("dsops_builder.")} & set(ORDER)

    assert {other for other in own - {layer} if ORDER.index(other) > ORDER.index(layer)} == set()


def test_the_loader_never_imports_the_builder() -> None:
    for path in (ROOT / "src").glob("dsops_prebuilt*/**/*.py"):
        names = imported(ast.parse(path.read_text(encoding="utf-8")))
        assert not [name for name in names if name.startswith("dsops_builder")], path


def test_only_process_starts_processes() -> None:
    starters = {"subprocess", "os.system", "os.popen", "pty", "multiprocessing"}
    users = {
        name
        for name, tree in TREES.items()
        if starters & ({part.split(".")[0] for part in imported(tree)} | dotted(tree))
        or any(word.startswith(("os.exec", "os.spawn", "os.posix_spawn", "os.fork")) for word in dotted(tree))
    }

    assert users == {"process"}


def test_only_report_writes_to_the_terminal() -> None:
    for name, tree in TREES.items():
        calls = {
            node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        }
        libraries = {part.split(".")[0] for part in imported(tree)} & {"rich", "logging", "tqdm"}
        writes = dotted(tree) & {"sys.stdout"}
        assert name == "report" or not (libraries or writes or "print" in calls), name


def test_only_cli_reads_the_environment_and_the_command_line() -> None:
    words = {"os.environ", "os.getenv", "os.environb", "sys.argv"}
    imports = {"os.environ", "os.getenv", "sys.argv"}
    readers = {name for name, tree in TREES.items() if words & dotted(tree) or imports & set(imported(tree))}

    assert readers == {"cli"}


def exceptions() -> list[type[Exception]]:
    return [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)]


def test_errors_have_one_root() -> None:
    assert [error for error in exceptions() if not issubclass(error, errors.BuilderError)] == []


def test_exit_codes_are_unique_and_free_of_the_shells() -> None:
    codes = {error: error.exit_code for error in exceptions() if issubclass(error, errors.BuilderError)}

    assert len(set(codes.values())) == len(codes)
    assert codes.pop(errors.Interrupted) == 130
    assert [error for error, code in codes.items() if not 0 < code < 126] == []


def test_raised_errors_are_the_builders_own() -> None:
    for name, tree in TREES.items():
        raised = {
            node.exc.func.id
            for node in ast.walk(tree)
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and isinstance(node.exc.func, ast.Name)
        }
        assert not raised & {"RuntimeError", "Exception", "SystemExit", "OSError"}, name


@pytest.mark.parametrize("name", sorted(MODULES))
def test_modules_and_functions_stay_short(name: str) -> None:
    assert len(MODULES[name].read_text(encoding="utf-8").splitlines()) <= 350
    long = [
        node.name
        for node in ast.walk(TREES[name])
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or node.lineno) - node.lineno >= 50
    ]
    assert long == []


def test_modules_have_a_docstring() -> None:
    assert [name for name, tree in TREES.items() if not ast.get_docstring(tree)] == []
